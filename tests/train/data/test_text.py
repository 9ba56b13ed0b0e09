"""Windows of text: every pass uses each once over all ranks, in an order that depends on seed and epoch alone."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oktopk.errors import SettingError
from oktopk.train.data.errors import DataError
from oktopk.train.data.text import FILES, Windows, files_of, make_text, read_text, standard_library

CONTENT = torch.arange(1000, dtype=torch.int64).remainder(251).to(torch.uint8)


def windows(rank=0, size=1, **settings):
    return Windows(CONTENT, rank=rank, world_size=size, **{"context": 10, "samples": 40, "batch_size": 4, **settings})


@given(size=st.integers(1, 4), batch=st.integers(1, 5), samples=st.integers(20, 250), context=st.integers(1, 40))
def test_a_pass_uses_each_window_once_over_all_ranks_and_every_byte_that_is_read_exists(size, batch, samples, context):
    ranks = [windows(rank, size, batch_size=batch, samples=samples, context=context) for rank in range(size)]
    per_pass, steps = ranks[0].windows, samples // (size * batch)
    seen = {}
    for epoch in range(3):
        places = torch.stack([torch.stack(each.starts(epoch)) for each in ranks], dim=1)  # steps, ranks, batch
        assert places.shape == (steps, size, batch)
        assert int(places.max()) + context < len(CONTENT)
        numbers = epoch * samples + torch.arange(places.numel())
        for number, start in zip(numbers.tolist(), places.flatten().tolist(), strict=True):
            seen.setdefault(number // per_pass, []).append(start)
    for starts in seen.values():
        assert len(set(starts)) == len(starts)
        assert len({start % context for start in starts}) == 1  # they do not overlap


def test_an_epoch_goes_on_amid_it_and_is_another_with_another_seed():
    whole = [batch.texts for batch in windows(1, 2).epoch(1)]
    rest = [batch.texts for batch in windows(1, 2).epoch(1, 3)]
    assert len(whole) == 5
    assert all(map(torch.equal, rest, whole[3:]))
    for other in (windows(0, 2).epoch(1), windows(1, 2).epoch(0), windows(1, 2, seed=1).epoch(1)):
        assert not all(torch.equal(ours, batch.texts) for ours, batch in zip(whole, other, strict=True))


@given(size=st.integers(1, 5), batch=st.integers(1, 7), samples=st.integers(5, 200))
def test_an_evaluation_has_each_window_once_over_all_ranks(size, batch, samples):
    ranks = [windows(rank, size, batch_size=batch, samples=samples, evaluation=True) for rank in range(size)]
    starts = sorted(torch.cat([torch.cat(each.starts(0)) for each in ranks]).tolist())
    assert len(set(starts)) == len(starts) == ranks[0].samples == min(samples, 99)
    assert all(sum(batch.utterances for batch in each.epoch(0)) for each in ranks)


@pytest.mark.parametrize("settings", [{"batch_size": 50}, {"samples": 3}, {"context": 900}])
def test_too_little_text_is_refused(settings):
    with pytest.raises(SettingError, match="smaller batch size, fewer workers or more text"):
        windows(0, 2, **settings)


def test_files_are_shuffled_alike_wherever_they_lie_and_split_between_files(tmp_path):
    made = []
    for name in ("one", "two"):
        folder = tmp_path / name
        (folder / "deep").mkdir(parents=True)
        for i in range(40):
            (folder / ("deep" if i % 2 else ".") / f"{i}.txt").write_text(f"<{i}>" * 30)
        (folder / "program").write_bytes(b"\x7fELF\0")
        sizes = make_text(files_of([folder]), tmp_path / f"{name}-out")
        made.append(tuple(map(bytes, map(torch.Tensor.numpy, read_text(tmp_path / f"{name}-out")))))
        assert sizes == tuple(map(len, made[-1]))
    assert made[0] == made[1]
    train, val = made[0]
    assert train.endswith(b">")
    assert val.startswith(b"<")
    assert b"ELF" not in train + val
    assert 0 < len(val) < 0.1 * len(train)


def test_one_file_is_split_and_faults_are_named(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"x" * 1000)
    assert make_text([tmp_path / "a.txt"], tmp_path) == (970, 30)
    with pytest.raises(DataError, match="--force replaces it"):
        make_text([tmp_path / "a.txt"], tmp_path)
    assert make_text([tmp_path / "a.txt"], tmp_path, force=True) == (970, 30)
    with pytest.raises(DataError, match="no such file or folder"):
        files_of([tmp_path / "gone"])
    with pytest.raises(DataError, match="none of the 0 files is a text"):
        make_text([], tmp_path / "empty")
    (tmp_path / FILES[1]).unlink()
    with pytest.raises(DataError, match="oktopk data text"):
        read_text(tmp_path)


@pytest.mark.slow
def test_the_default_is_python_itself():
    names = {path.name for path in standard_library()}
    assert {"argparse.py", "decoder.py"} <= names

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch

from oktopk.errors import SettingError
from oktopk.train.data import loader
from oktopk.train.data.features import Augmentation, spectrogram
from oktopk.train.data.labels import decode
from oktopk.train.data.loader import Batch, Batches
from oktopk.train.data.manifest import Utterance

WORDS = ["ONE", "TWO", "THREE", "FOUR", "FIVE", "SIX", "SEVEN", "EIGHT", "NINE", "TEN"]
varied = pytest.mark.parametrize("augmentation", [None, Augmentation()])


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> list[Utterance]:
    """23 recordings of 0.1 to 0.54 s, in no order of length."""
    folder = tmp_path_factory.mktemp("corpus")
    random = np.random.default_rng(0)
    utterances = []
    for i in range(23):
        count = 1600 + 320 * (i * 7 % 23)
        soundfile.write(folder / f"{i}.wav", random.integers(-3000, 3000, count).astype(np.int16), 16_000)
        utterances.append(Utterance(folder / f"{i}.wav", f"{WORDS[i % 10]} {WORDS[i // 10]}", count / 16_000))
    return utterances


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that were read from now on."""
    seen: list[Path] = []
    read = loader.read_pcm
    monkeypatch.setattr(loader, "read_pcm", lambda path: (seen.append(path), read(path))[1])
    return seen


def same(left: list[Batch], right: list[Batch]) -> bool:
    names = ("inputs", "frames", "targets", "target_lengths")
    return len(left) == len(right) and all(
        a.indices == b.indices and all(torch.equal(getattr(a, name), getattr(b, name)) for name in names)
        for a, b in zip(left, right, strict=True)
    )


def of_ranks(corpus: list[Utterance], batch_size: int, world_size: int, **more: Any) -> list[Batches]:
    ranks = range(world_size)
    return [Batches(corpus, batch_size=batch_size, rank=rank, world_size=world_size, **more) for rank in ranks]


def test_a_batch_holds_its_utterances_and_moves_to_a_device(corpus: list[Utterance]) -> None:
    batch = next(Batches(corpus, batch_size=4, evaluation=True).epoch(0))
    assert batch.inputs.shape == (4, 1, 161, batch.frames.max())
    texts = [decode(row.tolist()) for row in batch.targets.split(batch.target_lengths.tolist())]
    assert texts == [corpus[index].text for index in batch.indices]
    assert batch.targets.dtype == batch.frames.dtype == batch.target_lengths.dtype == torch.int64
    for row, frames, index in zip(batch.inputs[:, 0], batch.frames.tolist(), batch.indices, strict=True):
        samples, _ = soundfile.read(corpus[index].wav, dtype="float32")
        assert torch.equal(row[:, :frames], spectrogram(torch.from_numpy(samples)))
        assert not row[:, frames:].any()
    moved = batch.to("meta")
    assert (moved.inputs.device.type, moved.targets.device.type) == ("meta", "meta")
    assert (moved.frames.device.type, moved.target_lengths.device.type) == ("cpu", "cpu")


@pytest.mark.parametrize(("batch_size", "world_size"), [(1, 1), (4, 1), (3, 2), (2, 5), (23, 1), (1, 23)])
def test_training_shares_are_disjoint_and_drop_less_than_a_step(
    corpus: list[Utterance], batch_size: int, world_size: int
) -> None:
    ranks = of_ranks(corpus, batch_size, world_size)
    shares = [rank.plan(epoch=3) for rank in ranks]
    used = [index for share in shares for step in share for index in step]
    assert len(used) == len(set(used)) > 23 - batch_size * world_size
    assert {len(share) for share in shares} == {len(rank) for rank in ranks}
    assert {len(step) for share in shares for step in share} == {batch_size}


@pytest.mark.parametrize(("batch_size", "world_size"), [(1, 1), (4, 1), (3, 2), (2, 5), (50, 3), (1, 23)])
def test_evaluation_counts_every_utterance_once(corpus: list[Utterance], batch_size: int, world_size: int) -> None:
    used = []
    for rank in of_ranks(corpus, batch_size, world_size, evaluation=True):
        share = rank.plan(epoch=0)
        lengths = [corpus[index].duration_s for step in share for index in step]
        assert lengths == sorted(lengths)
        assert len(rank) == len(share) > 0
        used += [index for step in share for index in step]
    assert sorted(used) == list(range(23))


def test_a_step_holds_neighbours_in_length_on_all_ranks(tmp_path: Path) -> None:
    many = [Utterance(tmp_path / "none.wav", "A", 1 + i * 37 % 400 / 100) for i in range(400)]
    for steps in zip(*(rank.plan(1) for rank in of_ranks(many, 4, 2)), strict=True):
        lengths = [many[index].duration_s for step in steps for index in step]
        assert max(lengths) / min(lengths) < 1.1 / 0.9 * 1.1  # the blur, and a tenth for the gaps between durations


def test_members_order_and_leftovers_change_with_seed_and_epoch(corpus: list[Utterance]) -> None:
    def plan(seed: int, epoch: int) -> str:
        return str([rank.plan(epoch) for rank in of_ranks(corpus, 2, 2, seed=seed)])

    assert plan(1, 4) == plan(1, 4)
    assert len({plan(seed, epoch) for seed in range(3) for epoch in range(3)}) == 9
    with_leftovers = Batches(corpus, batch_size=10)
    used = [{index for step in with_leftovers.plan(epoch) for index in step} for epoch in range(8)]
    assert all(len(each) == 20 for each in used)
    assert set.union(*used) == set(range(23))
    whole = Batches(corpus[:20], batch_size=4)  # nothing is left over that could make the difference
    plans = [whole.plan(epoch) for epoch in range(6)]
    longest = [[max(corpus[i].duration_s for i in step) for step in steps] for steps in plans]
    assert any(each != sorted(each) for each in longest)
    assert len({frozenset(step) for steps in plans for step in steps}) > 2 * len(whole)


def test_no_rank_has_the_longer_half_every_time(corpus: list[Utterance]) -> None:
    for steps in zip(*(rank.plan(0) for rank in of_ranks(corpus[:20], 5, 2)), strict=True):
        first, second = ([corpus[index].duration_s for index in step] for step in steps)
        assert max(first) > min(second)


@varied
def test_resuming_gives_the_rest_of_the_epoch(
    corpus: list[Utterance], augmentation: Augmentation | None, reads: list[Path]
) -> None:
    def fresh() -> Batches:
        return Batches(corpus, batch_size=3, rank=1, world_size=2, seed=5, augmentation=augmentation)

    used = fresh()
    list(used.epoch(0))  # earlier epochs must not matter
    whole = list(used.epoch(1))
    for start in range(len(whole) + 1):
        reads.clear()
        assert same(list(fresh().epoch(1, start)), whole[start:])
        assert len(reads) == 3 * (len(whole) - start), "nothing is read for the steps before"


def test_a_variation_does_not_depend_on_rank_or_place(corpus: list[Utterance]) -> None:
    def inputs(batch_size: int, world_size: int, epoch: int, seed: int = 0) -> dict[int, torch.Tensor]:
        found = {}
        for rank in of_ranks(corpus, batch_size, world_size, seed=seed, augmentation=Augmentation()):
            for batch in rank.epoch(epoch):
                rows = zip(batch.indices, batch.inputs[:, 0], batch.frames.tolist(), strict=True)
                found |= {index: row[:, :frames] for index, row, frames in rows}
        return found

    alone = inputs(1, 1, 0)
    assert all(torch.equal(alone[index], row) for index, row in inputs(3, 2, 0).items())
    for other in (inputs(1, 1, 1), inputs(1, 1, 0, seed=1)):
        assert not any(torch.equal(alone[index], row) for index, row in other.items())


def test_no_variation_is_too_short_for_its_text(corpus: list[Utterance]) -> None:
    source = min(corpus, key=lambda utterance: utterance.duration_s)  # 1600 samples, 11 frames, 6 of the output

    def batch(text: str) -> Batch:
        fast = Augmentation(speed=(1.5, 1.5))
        return next(Batches([Utterance(source.wav, text, 0.1)], batch_size=1, augmentation=fast).epoch(0))

    frames = [batch(text).frames.item() for text in ("SIXTHS", "EELS", "A")]
    assert frames == [11, 9, 1 + round(1600 / 1.5) // 160]
    empty = batch("")
    assert (empty.target_lengths.tolist(), empty.targets.shape, empty.targets.dtype) == ([0], (0,), torch.int64)


@varied
def test_the_disk_is_read_once_and_the_cache_is_bounded_and_changes_nothing(
    corpus: list[Utterance], augmentation: Augmentation | None, reads: list[Path]
) -> None:
    def epochs(cache_bytes: int) -> tuple[list[Batch], list[Path]]:
        """Two epochs, and the files that are read in the second."""
        made = Batches(corpus, batch_size=1, augmentation=augmentation, cache_bytes=cache_bytes)
        reads.clear()
        first = list(made.epoch(0))
        assert sorted(reads) == sorted(utterance.wav for utterance in corpus)
        return first + list(made.epoch(1)), reads[len(corpus) :]

    large, again = epochs(1 << 30)
    assert again == []
    small, again = epochs(40_000)  # some of the recordings, less than all
    assert same(small, large)
    samples = [round(16_000 * utterance.duration_s) for utterance in corpus if utterance.wav not in again]
    assert 0 < sum(4 * 161 * (1 + n // 160) if augmentation is None else 2 * n for n in samples) <= 40_000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 8, "world_size": 3}, "8 utterances on each of 3 workers, 24 in all, and there are 23"),
        ({"batch_size": 8, "world_size": 24, "evaluation": True}, "23 utterances to evaluate for 24 workers"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"batch_size": 1, "rank": 2, "world_size": 2}, "rank must be at least 0 and at most 1, not 2"),
        ({"batch_size": 1, "seed": -1}, "seed must be at least 0"),
        ({"batch_size": 1, "evaluation": True, "augmentation": Augmentation()}, "leave the augmentation out"),
    ],
)
def test_refuses_settings_and_steps_that_cannot_be(
    corpus: list[Utterance], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(SettingError, match=message):
        Batches(corpus, **options)
    with pytest.raises(SettingError, match="start_step must be at least 0 and at most 5, not 6"):
        Batches(corpus, batch_size=4).epoch(0, start_step=6)

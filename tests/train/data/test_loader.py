from functools import partial
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from hypothesis import given
from hypothesis import strategies as st

from oktopk.errors import SettingError
from oktopk.train.data import loader
from oktopk.train.data.features import Augmentation, spectrogram
from oktopk.train.data.labels import decode
from oktopk.train.data.loader import Batches
from oktopk.train.data.manifest import Utterance

varied = pytest.mark.parametrize("augmentation", [None, Augmentation()])


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """23 recordings of 0.1 to 0.54 s, in no order of length."""
    folder, random, utterances = tmp_path_factory.mktemp("corpus"), np.random.default_rng(0), []
    for i in range(23):
        count = 1600 + 320 * (i * 7 % 23)
        soundfile.write(folder / f"{i}.wav", random.integers(-3000, 3000, count).astype(np.int16), 16_000)
        utterances.append(Utterance(folder / f"{i}.wav", chr(ord("A") + i) * (1 + i % 4), count / 16_000))
    return utterances


@pytest.fixture
def reads(monkeypatch):
    """The files that were read from now on."""
    seen = []
    read = loader.read_pcm
    monkeypatch.setattr(loader, "read_pcm", lambda path: (seen.append(path), read(path))[1])
    return seen


def content(batches):
    return [[each.tolist() for each in (b.inputs, b.frames, b.targets, b.target_lengths)] for b in batches]


def of_ranks(corpus, batch_size, world_size, **more):
    ranks = range(world_size)
    return [Batches(corpus, batch_size=batch_size, rank=rank, world_size=world_size, **more) for rank in ranks]


def test_a_batch_holds_its_utterances_and_moves_to_a_device(corpus):
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
    tensors = (moved.inputs, moved.targets, moved.frames, moved.target_lengths)
    assert [tensor.device.type for tensor in tensors] == ["meta", "meta", "cpu", "cpu"]


@given(st.integers(1, 23), st.integers(1, 23), st.integers(0, 9))
def test_ranks_share_an_epoch(batch_size, world_size, epoch):
    """Training drops less than a step; an evaluation counts every utterance once, in the order of length."""
    corpus = [Utterance(Path(), "A", 1 + i * 7 % 23) for i in range(23)]
    for evaluation in (True,) if batch_size * world_size > 23 else (False, True):
        ranks = of_ranks(corpus, batch_size, world_size, evaluation=evaluation)
        shares = [rank.plan(epoch) for rank in ranks]
        used = [index for share in shares for step in share for index in step]
        assert len(used) == len(set(used)) > 23 - (1 if evaluation else batch_size * world_size)
        assert [len(share) for share in shares] == [len(rank) for rank in ranks]
        if evaluation:
            lengths = [[corpus[index].duration_s for step in share for index in step] for share in shares]
            assert lengths == [sorted(each) for each in lengths]
        else:
            assert {len(step) for share in shares for step in share} == {batch_size}
            assert len({len(share) for share in shares}) == 1


def test_a_step_holds_neighbours_in_length_on_all_ranks(tmp_path):
    many = [Utterance(tmp_path / "none.wav", "A", 1 + i * 37 % 400 / 100) for i in range(400)]
    overlaps = []
    for steps in zip(*(rank.plan(1) for rank in of_ranks(many, 4, 2)), strict=True):
        first, second = ([many[index].duration_s for index in step] for step in steps)
        assert max(first + second) / min(first + second) < 1.345  # the blur, 1.1 / 0.9, and a tenth for the gaps
        overlaps.append(max(first) > min(second))
    assert sum(overlaps) > 0.9 * len(overlaps), "no rank has the longer half every time"


def test_members_order_and_leftovers_change_with_seed_and_epoch(corpus):
    def plan(seed, epoch):
        return str([rank.plan(epoch) for rank in of_ranks(corpus, 2, 2, seed=seed)])

    assert plan(1, 4) == plan(1, 4)
    assert len({plan(seed, epoch) for seed in range(3) for epoch in range(3)}) == 9
    with_leftovers = Batches(corpus, batch_size=10)
    used = [{index for step in with_leftovers.plan(epoch) for index in step} for epoch in range(8)]
    assert set.union(*used) == set(range(23))
    whole = Batches(corpus[:20], batch_size=4)  # nothing is left over that could make the difference
    plans = [whole.plan(epoch) for epoch in range(6)]
    longest = [[max(corpus[i].duration_s for i in step) for step in steps] for steps in plans]
    assert any(each != sorted(each) for each in longest)
    assert len({frozenset(step) for steps in plans for step in steps}) > 2 * len(whole)


@varied
def test_resuming_gives_the_rest_of_the_epoch(corpus, augmentation, reads):
    fresh = partial(Batches, corpus, batch_size=3, rank=1, world_size=2, seed=5, augmentation=augmentation)
    used = fresh()
    list(used.epoch(0))  # earlier epochs must not matter
    whole = content(used.epoch(1))
    for start in range(len(whole) + 1):
        reads.clear()
        assert content(fresh().epoch(1, start)) == whole[start:]
        assert len(reads) == 3 * (len(whole) - start), "nothing is read for the steps before"
    with pytest.raises(SettingError, match="start_step must be at least 0 and at most 3, not 4"):
        fresh().epoch(1, start_step=4)


def test_a_variation_does_not_depend_on_rank_or_place(corpus):
    def inputs(batch_size, world_size, epoch, seed=0):
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


@varied
def test_the_disk_is_read_once_and_the_cache_is_bounded_and_changes_nothing(corpus, augmentation, reads, monkeypatch):
    def epochs(cache_bytes):
        """Two epochs, and the files that are read in the second."""
        monkeypatch.setattr(loader, "CACHE_BYTES", cache_bytes)
        made = Batches(corpus, batch_size=1, augmentation=augmentation)
        reads.clear()
        first = content(made.epoch(0))
        assert sorted(reads) == sorted(utterance.wav for utterance in corpus)
        return first + content(made.epoch(1)), reads[len(corpus) :]

    large, again = epochs(1 << 30)
    assert again == []
    small, again = epochs(40_000)  # some of the recordings, less than all
    assert small == large
    samples = [round(16_000 * utterance.duration_s) for utterance in corpus if utterance.wav not in again]
    assert 0 < sum(4 * 161 * (1 + n // 160) if augmentation is None else 2 * n for n in samples) <= 40_000

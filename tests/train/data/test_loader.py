from __future__ import annotations

import wave
from pathlib import Path

import numpy as np
import pytest
import torch

from oktopk.errors import SettingError
from oktopk.train.data import loader
from oktopk.train.data.features import Augmentation, spectrogram
from oktopk.train.data.labels import decode, encode
from oktopk.train.data.loader import Batch, Batches
from oktopk.train.data.manifest import Utterance

WORDS = ["ONE", "TWO", "THREE", "FOUR", "FIVE", "SIX", "SEVEN", "EIGHT", "NINE", "TEN"]


def write_wav(path: Path, samples: np.ndarray) -> None:
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, 16_000, 0, "NONE", ""))
        file.writeframes(samples.astype("<i2").tobytes())


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> list[Utterance]:
    """23 recordings of 0.1 to 0.54 s, in no order of length."""
    folder = tmp_path_factory.mktemp("corpus")
    random = np.random.default_rng(0)
    utterances = []
    for i in range(23):
        count = 1600 + 320 * (i * 7 % 23)
        write_wav(folder / f"{i}.wav", random.integers(-3000, 3000, count))
        utterances.append(Utterance(folder / f"{i}.wav", f"{WORDS[i % 10]} {WORDS[i // 10]}", count / 16_000))
    return utterances


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that were read from now on."""
    seen: list[Path] = []
    read = loader.read_pcm
    monkeypatch.setattr(loader, "read_pcm", lambda path: (seen.append(path), read(path))[1])
    return seen


def same(a: Batch, b: Batch) -> bool:
    names = ("inputs", "frames", "targets", "target_lengths")
    return a.indices == b.indices and all(torch.equal(getattr(a, name), getattr(b, name)) for name in names)


def all_same(left: list[Batch], right: list[Batch]) -> bool:
    return len(left) == len(right) and all(same(a, b) for a, b in zip(left, right, strict=True))


def plans(
    corpus: list[Utterance], batch_size: int, world_size: int, epoch: int, **more: object
) -> list[list[list[int]]]:
    ranks = range(world_size)
    return [
        Batches(corpus, batch_size=batch_size, rank=rank, world_size=world_size, **more).plan(epoch)  # type: ignore[arg-type]
        for rank in ranks
    ]


def test_a_batch_holds_its_utterances(corpus: list[Utterance]) -> None:
    batch = next(Batches(corpus, batch_size=4, evaluation=True).epoch(0))
    assert batch.inputs.shape == (4, 1, 161, batch.frames.max())
    texts = [decode(row.tolist()) for row in batch.targets.split(batch.target_lengths.tolist())]
    assert texts == [corpus[index].text for index in batch.indices]
    assert batch.targets.dtype == batch.frames.dtype == batch.target_lengths.dtype == torch.int64
    for row, frames, index in zip(batch.inputs[:, 0], batch.frames.tolist(), batch.indices, strict=True):
        with wave.open(str(corpus[index].wav)) as file:
            samples = np.frombuffer(file.readframes(file.getnframes()), "<i2")
        expected = spectrogram(torch.from_numpy(samples.astype(np.float32) / 32768))
        assert torch.equal(row[:, :frames], expected)
        assert not row[:, frames:].any()


@pytest.mark.parametrize(("batch_size", "world_size"), [(1, 1), (4, 1), (3, 2), (2, 5), (23, 1), (1, 23)])
def test_training_shares_are_disjoint_and_drop_less_than_a_step(
    corpus: list[Utterance], batch_size: int, world_size: int
) -> None:
    shares = plans(corpus, batch_size, world_size, epoch=3)
    used = [index for share in shares for step in share for index in step]
    assert len(used) == len(set(used)) > 23 - batch_size * world_size
    assert {len(share) for share in shares} == {len(Batches(corpus, batch_size=batch_size, world_size=world_size))}
    assert {len(step) for share in shares for step in share} == {batch_size}


@pytest.mark.parametrize(("batch_size", "world_size"), [(1, 1), (4, 1), (3, 2), (2, 5), (50, 3), (1, 23)])
def test_evaluation_counts_every_utterance_once(corpus: list[Utterance], batch_size: int, world_size: int) -> None:
    shares = plans(corpus, batch_size, world_size, epoch=0, evaluation=True)
    assert sorted(index for share in shares for step in share for index in step) == list(range(23))
    for rank, share in enumerate(shares):
        lengths = [corpus[index].duration_s for step in share for index in step]
        assert lengths == sorted(lengths)
        ours = Batches(corpus, batch_size=batch_size, rank=rank, world_size=world_size, evaluation=True)
        assert len(ours) == len(share) > 0


def test_what_fills_no_step_changes_from_epoch_to_epoch(corpus: list[Utterance]) -> None:
    batches = Batches(corpus, batch_size=10)
    used = [{index for step in batches.plan(epoch) for index in step} for epoch in range(8)]
    assert all(len(each) == 20 for each in used)
    assert set.union(*used) == set(range(23))


def test_a_step_holds_neighbours_in_length_on_all_ranks(tmp_path: Path) -> None:
    many = [Utterance(tmp_path / "none.wav", "A", 1 + i * 37 % 400 / 100) for i in range(400)]
    for steps in zip(*plans(many, 4, 2, epoch=1), strict=True):
        lengths = [many[index].duration_s for step in steps for index in step]
        assert max(lengths) / min(lengths) < 1.1 / 0.9 * 1.1  # the blur, and a tenth for the gaps between durations


def test_the_order_is_a_function_of_seed_and_epoch(corpus: list[Utterance]) -> None:
    def plan(seed: int, epoch: int) -> list[list[list[int]]]:
        return plans(corpus, 2, 2, epoch, seed=seed)

    assert plan(1, 4) == plan(1, 4)
    assert len({str(plan(seed, epoch)) for seed in range(3) for epoch in range(3)}) == 9


def test_members_and_order_of_the_steps_change(corpus: list[Utterance]) -> None:
    batches = Batches(corpus[:20], batch_size=4)  # nothing is left over that could make the difference
    longest = [[max(corpus[i].duration_s for i in step) for step in batches.plan(epoch)] for epoch in range(6)]
    assert any(each != sorted(each) for each in longest)
    members = {frozenset(step) for epoch in range(6) for step in batches.plan(epoch)}
    assert len(members) > 2 * len(batches)


def test_no_rank_has_the_longer_half_every_time(corpus: list[Utterance]) -> None:
    for first, second in zip(*plans(corpus[:20], 5, 2, epoch=0), strict=True):
        lengths = [[corpus[index].duration_s for index in step] for step in (first, second)]
        assert max(lengths[0]) > min(lengths[1])


@pytest.mark.parametrize("augmentation", [None, Augmentation()])
def test_two_loaders_agree(corpus: list[Utterance], augmentation: Augmentation | None) -> None:
    first, second = (Batches(corpus, batch_size=4, seed=5, augmentation=augmentation) for _ in range(2))
    list(first.epoch(0))  # what was read before must not matter
    assert all_same(list(first.epoch(2)), list(second.epoch(2)))


@pytest.mark.parametrize("augmentation", [None, Augmentation()])
def test_resuming_gives_the_rest_of_the_epoch(
    corpus: list[Utterance], augmentation: Augmentation | None, reads: list[Path]
) -> None:
    options = {"batch_size": 3, "rank": 1, "world_size": 2, "augmentation": augmentation}
    whole = list(Batches(corpus, **options).epoch(1))  # type: ignore[arg-type]
    for start in range(len(whole) + 1):
        reads.clear()
        assert all_same(list(Batches(corpus, **options).epoch(1, start)), whole[start:])  # type: ignore[arg-type]
        assert len(reads) == 3 * (len(whole) - start), "nothing is read for the steps before"


def test_a_variation_does_not_depend_on_rank_or_place(corpus: list[Utterance]) -> None:
    def inputs(batch_size: int, world_size: int, epoch: int, seed: int = 0) -> dict[int, torch.Tensor]:
        found = {}
        for rank in range(world_size):
            batches = Batches(
                corpus,
                batch_size=batch_size,
                rank=rank,
                world_size=world_size,
                seed=seed,
                augmentation=Augmentation(),
            )
            for batch in batches.epoch(epoch):
                rows = zip(batch.indices, batch.inputs[:, 0], batch.frames.tolist(), strict=True)
                found |= {index: row[:, :frames] for index, row, frames in rows}
        return found

    alone = inputs(1, 1, 0)
    assert all(torch.equal(alone[index], row) for index, row in inputs(3, 2, 0).items())
    for other in (inputs(1, 1, 1), inputs(1, 1, 0, seed=1)):
        assert not any(torch.equal(alone[index], row) for index, row in other.items())


def test_no_variation_is_too_short_for_its_text(corpus: list[Utterance]) -> None:
    source = min(corpus, key=lambda utterance: utterance.duration_s)  # 1600 samples, 11 frames, 6 of the output
    fast = Augmentation(speed=(1.5, 1.5))
    frames = [
        next(Batches([Utterance(source.wav, text, 0.1)], batch_size=1, augmentation=fast).epoch(0)).frames.item()
        for text in ("SIXTHS", "EELS", "A")
    ]
    assert frames == [11, 9, 1 + round(1600 / 1.5) // 160]


@pytest.mark.parametrize("augmentation", [None, Augmentation()])
def test_the_disk_is_read_once(corpus: list[Utterance], augmentation: Augmentation | None, reads: list[Path]) -> None:
    batches = Batches(corpus, batch_size=1, augmentation=augmentation)
    for epoch in range(3):
        list(batches.epoch(epoch))
    assert sorted(reads) == sorted(utterance.wav for utterance in corpus)


@pytest.mark.parametrize("augmentation", [None, Augmentation()])
def test_the_cache_is_bounded_and_changes_nothing(
    corpus: list[Utterance], augmentation: Augmentation | None, reads: list[Path]
) -> None:
    room = 40_000  # some of the recordings, less than all
    small, large = (
        Batches(corpus, batch_size=1, augmentation=augmentation, cache_bytes=size) for size in (room, 1 << 30)
    )
    assert all_same(list(small.epoch(0)), list(large.epoch(0)))
    kept = small._cache._tensors
    assert 0 < sum(each.nbytes for each in kept.values()) <= room
    reads.clear()
    assert all_same(list(small.epoch(1)), list(large.epoch(1)))
    assert 0 < len(reads) == 23 - len(kept)


def test_to_moves_what_the_device_computes_with(corpus: list[Utterance]) -> None:
    batch = next(Batches(corpus, batch_size=2).epoch(0)).to("meta")
    assert (batch.inputs.device.type, batch.targets.device.type) == ("meta", "meta")
    assert (batch.frames.device.type, batch.target_lengths.device.type) == ("cpu", "cpu")


def test_an_empty_text_has_no_targets(corpus: list[Utterance]) -> None:
    nothing = Utterance(corpus[0].wav, "", corpus[0].duration_s)
    batch = next(Batches([nothing], batch_size=1).epoch(0))
    assert batch.target_lengths.tolist() == [0]
    assert batch.targets.shape == (len(encode("")),)
    assert batch.targets.dtype == torch.int64


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
def test_refuses_what_cannot_be(corpus: list[Utterance], options: dict[str, int], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        Batches(corpus, **options)  # type: ignore[arg-type]


def test_refuses_a_step_beyond_the_epoch_at_once(corpus: list[Utterance]) -> None:
    with pytest.raises(SettingError, match="start_step must be at least 0 and at most 5, not 6"):
        Batches(corpus, batch_size=4).epoch(0, start_step=6)

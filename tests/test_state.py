"""Save, load, continue equals never having stopped, bit for bit; and a dict that does not fit changes nothing."""

import io
from typing import Any

import pytest
import torch

from oktopk import MismatchError, OkTopk, OkTopkPaper, Reducer, StateError, TopkA
from tests.cases import DTYPES, NAMES, Case, Step, algorithms, take_step, trace
from tests.harness import on_threads
from tests.laws import same_bits, same_run

STEPS = 8


def through_a_file(saved: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def _case(name: str) -> Case:
    """Return a run in which a step uses the thresholds and cuts of the one before, which is why they are saved."""
    algorithm = algorithms(0.1, rethreshold_every=4, repartition_every=4)[name]
    return Case(algorithm, size=3, numel=1000, kind="heavy tails", dtype=DTYPES[NAMES.index(name) % 4], steps=STEPS)


@pytest.mark.parametrize("name", NAMES)
def test_save_load_continue_equals_never_having_stopped(name: str) -> None:
    """The reducer that saved, a used one and a fresh one go on alike; writing over one's tensors changes no other."""
    case, at = _case(name), (1, 6, 0)[NAMES.index(name) % 3]

    def job(comm: Any) -> list[list[Step]]:
        saver, used, fresh = reducers = [case.reducer(comm) for _ in range(3)]
        steps = [take_step(saver, case, step) for step in range(at)]
        for step in range(50, 53 if at else 50):  # a used reducer refuses a state from before the first step
            take_step(used, case, step)
        saved = saver.state_dict()
        assert (saved["step"], (saved["state"] or saved)["step"]) == (at, at)
        kept = through_a_file(saved)
        _scribble_over(saved)
        used.load_state_dict(kept)
        fresh.load_state_dict(kept)
        _scribble_over(kept)
        if at:
            saver.residual.fill_(7.0)
            with pytest.raises(MismatchError, match=r"1000.*1001"):  # the length that was loaded
                fresh.all_reduce(torch.ones(1001, dtype=case.dtype))
        return [steps + [take_step(each, case, step) for step in range(at, STEPS)] for each in reducers]

    calm = on_threads(3, trace, case)
    for resumed in zip(*on_threads(3, job), strict=True):
        same_run(resumed, calm)
        assert [step.record.step for step in resumed[0]] == list(range(STEPS))
        assert [step.record.threshold for step in resumed[1]] == [step.record.threshold for step in calm[1]]


def _scribble_over(saved: Any) -> None:
    for thing in saved.values():
        if isinstance(thing, dict):
            _scribble_over(thing)
        elif isinstance(thing, torch.Tensor):
            thing.fill_(3)


def _saved(algorithm: Any = None, size: int = 2, rank: int = 0, numel: int = 40) -> dict[str, Any]:
    case = Case(algorithm or OkTopk(density=0.1), size, numel)

    def job(comm: Any) -> dict[str, Any]:
        reducer = case.reducer(comm)
        take_step(reducer, case, 0)
        return reducer.state_dict()

    return on_threads(size, job)[rank]


def test_a_dict_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    case, fits = Case(OkTopk(density=0.1), 2, 40), _saved()
    wrong: list[tuple[Any, str]] = [
        *((_saved(cls(density=0.1)), f"{cls.__name__}.*OkTopk") for cls in (TopkA, OkTopkPaper)),
        ({**fits, "version": 99}, "version.*99"),
        (_saved(rank=1), "rank 1.*rank is 0"),
        (_saved(size=3), "size 3.*size is 2"),
        (_saved(numel=41), "41 elements.*40"),
        (["a list"], "state dict"),
        ({}, "state dict"),
        *(({k: v for k, v in fits.items() if k != key}, key) for key in ("version", "residual", "step", "state")),
        ({**fits, "state": {"momentum": 3}}, "state"),
    ]

    def job(comm: Any) -> list[Step]:
        reducer, steps = case.reducer(comm), []
        for step in range(case.steps):
            for each, says in wrong if (comm.rank, step) == (0, 2) else ():
                with pytest.raises(StateError, match=says):
                    reducer.load_state_dict(each)
            steps.append(take_step(reducer, case, step))
        return steps

    same_run(on_threads(2, job), on_threads(2, trace, case))


@pytest.mark.parametrize(("before", "segments"), [("scaled", (200, 100)), ("magnitude", (100, 200))])
def test_the_ranking_and_segments_asked_for_are_used_after_loading(before: str, segments: Any, capsys: Any) -> None:
    """Loading goes on as a new reducer does that holds this residual: nothing of the saved algorithm is left."""

    def job(comm: Any) -> tuple[list[Any], list[Any]]:
        rng = torch.Generator().manual_seed(comm.rank)
        grads = [torch.randn(300, generator=rng) * torch.linspace(0.1, 10, 300) for _ in range(6)]
        first = Reducer(OkTopk(density=0.1, ranking=before), comm, segments=(200, 100))
        for grad in grads[:3]:
            first.all_reduce(grad)
        loaded, fresh = (Reducer(OkTopk(density=0.1), comm, segments=segments) for _ in range(2))
        loaded.load_state_dict(through_a_file(first.state_dict()))
        owed = [first.residual + grads[3], *grads[4:]]
        return [loaded.all_reduce(grad) for grad in grads[3:]], [fresh.all_reduce(grad) for grad in owed]

    for ours, theirs in on_threads(2, job):
        assert all(same_bits(a, b) for a, b in zip(ours, theirs, strict=True))
    assert capsys.readouterr().err.count("starts anew") == 1


def test_ranks_that_loaded_different_steps_are_told() -> None:
    """Each dict fits its rank; together they do not."""

    def job(comm: Any) -> None:
        reducer, dicts = Reducer(OkTopk(density=0.1), comm), []
        for _ in range(3):
            reducer.all_reduce(torch.ones(30))
            dicts.append(reducer.state_dict())
        other = Reducer(OkTopk(density=0.1), comm)
        other.load_state_dict(dicts[comm.rank])
        with pytest.raises(MismatchError, match="the step: rank 0 has 1, rank 1 has 2"):
            other.all_reduce(torch.ones(30))

    on_threads(3, job)

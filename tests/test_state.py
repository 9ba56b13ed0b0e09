"""Save, load, continue equals never having stopped, bit for bit; and a dict that does not fit changes nothing."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch

from oktopk import Dense, GTopk, MismatchError, OkTopk, Reducer, StateError, TopkA, run_local
from tests.cases import COVER, DTYPES, NAMES, Case, Step, algorithms, take_step, trace
from tests.harness import on_threads
from tests.laws import same_bits, same_run

STEPS = 8


def through_a_file(saved: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def stopped(comm: Any, case: Case, at: int) -> list[Step]:
    """Return the steps of a case that is saved after `at` of them and goes on in a fresh reducer."""
    first = case.reducer(comm)
    steps = [take_step(first, case, step) for step in range(at)]
    second = case.reducer(comm)
    second.load_state_dict(through_a_file(first.state_dict()))
    return steps + [take_step(second, case, step) for step in range(at, case.steps)]


def _case(name: str, size: int = 3) -> Case:
    """Return a run in which a step uses the thresholds and cuts of the one before, which is why they are saved."""
    algorithm = algorithms(0.1, rethreshold_every=4, repartition_every=4)[name]
    return Case(algorithm, size, numel=1000, kind="heavy tails", dtype=DTYPES[NAMES.index(name) % 4], steps=STEPS)


@pytest.mark.parametrize("name", NAMES)
def test_save_load_continue_equals_never_having_stopped(name: str) -> None:
    case, at = _case(name), (1, 6, 0)[NAMES.index(name) % 3]
    resumed, calm = on_threads(3, stopped, case, at), on_threads(3, trace, case)
    same_run(resumed, calm)
    assert [step.record.step for step in resumed[0]] == list(range(STEPS))
    assert [step.record.threshold for step in resumed[1]] == [step.record.threshold for step in calm[1]]


@pytest.mark.processes
@pytest.mark.parametrize("name", ["oktopk-paper-scaled-fp32"])
def test_save_load_continue_on_processes(processes: Any, name: str) -> None:
    case = _case(name)
    same_run(processes.run(3, stopped, case, 4), on_threads(3, trace, case))


@pytest.mark.parametrize("name", COVER)
def test_a_saved_state_is_all_of_it_and_shares_no_memory(name: str) -> None:
    """A used reducer that loads it goes on from there; what is written over either of them is not in the other."""
    case = _case(name)

    def job(comm: Any) -> tuple[list[Step], list[Step]]:
        reducer, used = case.reducer(comm), case.reducer(comm)
        steps = [take_step(reducer, case, step) for step in range(3)]
        for step in range(50, 53):
            take_step(used, case, step)
        saved = reducer.state_dict()
        kept = through_a_file(saved)
        _scribble_over(saved)
        reducer.residual.fill_(7.0)
        used.load_state_dict(kept)
        _scribble_over(kept)
        with pytest.raises(MismatchError, match=r"1000.*1001"):  # the length that was loaded
            used.all_reduce(torch.ones(1001, dtype=case.dtype))
        more = [[take_step(each, case, step) for step in range(3, STEPS)] for each in (reducer, used)]
        return steps + more[0], steps + more[1]

    saver, loader = zip(*on_threads(3, job), strict=True)
    calm = on_threads(3, trace, case)
    same_run(saver, calm)
    same_run(loader, calm)


def _scribble_over(saved: Any) -> None:
    for thing in saved.values():
        if isinstance(thing, dict):
            _scribble_over(thing)
        elif isinstance(thing, torch.Tensor):
            thing.fill_(3)


# ---- dicts that do not fit


def _saved(size: int = 2, rank: int = 0, numel: int = 40, algorithm: Any = None) -> dict[str, Any]:
    def job(comm: Any) -> dict[str, Any]:
        reducer = Reducer(algorithm or OkTopk(density=0.1), comm)
        reducer.all_reduce(torch.arange(1.0, numel + 1))
        return reducer.state_dict()

    return run_local(size, job)[rank]


def _without(saved: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in saved.items() if key != name}


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "algorithm": (lambda: _saved(algorithm=TopkA(density=0.1)), "TopkA.*OkTopk"),
    "algorithm of one family": (lambda: _saved(algorithm=GTopk(density=0.1)), "GTopk.*OkTopk"),
    "dense": (lambda: _saved(algorithm=Dense()), "Dense.*OkTopk"),
    "version": (lambda: {**_saved(), "version": 99}, "version.*99"),
    "no version": (lambda: _without(_saved(), "version"), "version"),
    "rank": (lambda: _saved(rank=1), "rank 1.*rank is 0"),
    "size": (lambda: _saved(size=3), "size 3.*size is 2"),
    "numel": (lambda: _saved(numel=41), "41 elements.*40"),
    "something else": (lambda: ["a list"], "state dict"),
    "empty": (lambda: {}, "state dict"),
    "no residual": (lambda: _without(_saved(), "residual"), "residual"),
    "no step": (lambda: _without(_saved(), "step"), "step"),
    "no state": (lambda: _without(_saved(), "state"), "state"),
    "other state": (lambda: {**_saved(), "state": {"momentum": 3}}, "state"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_dict_that_does_not_fit_is_refused_and_changes_nothing(what: str) -> None:
    make, says = REFUSED[what]
    wrong = make()

    def job(comm: Any, disturbed: bool) -> list[Any]:
        reducer, means = Reducer(OkTopk(density=0.1), comm), []
        for step in range(3):
            means.append(reducer.all_reduce(torch.arange(1.0 + step + comm.rank, 41 + step + comm.rank)))
            if disturbed and comm.rank == 0 and step == 1:
                before = reducer.residual
                with pytest.raises(StateError, match=says):
                    reducer.load_state_dict(wrong)
                assert same_bits(before, reducer.residual)
        return means

    disturbed, calm = on_threads(2, job, True), on_threads(2, job, False)
    assert all(same_bits(a, b) for a, b in zip(disturbed[0], calm[0], strict=True))


@pytest.mark.parametrize(
    "asked",
    [{"ranking": "magnitude"}, {"segments": (100, 200)}],
    ids=lambda asked: next(iter(asked)),
)
def test_the_ranking_and_segments_asked_for_are_those_used_after_loading(
    asked: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """Loading goes on as a new reducer does that holds this residual: nothing of the saved algorithm is left."""
    segments = asked.get("segments", (200, 100))
    algorithm = OkTopk(density=0.1, **{key: value for key, value in asked.items() if key != "segments"})

    def job(comm: Any) -> tuple[list[Any], list[Any]]:
        rng = torch.Generator().manual_seed(comm.rank)
        grads = [torch.randn(300, generator=rng) * torch.linspace(0.1, 10, 300) for _ in range(6)]
        before = OkTopk(density=0.1, ranking="scaled" if "ranking" in asked else "magnitude")
        first = Reducer(before, comm, segments=(200, 100))
        for grad in grads[:3]:
            first.all_reduce(grad)
        loaded, fresh = (Reducer(algorithm, comm, segments=segments) for _ in range(2))
        loaded.load_state_dict(through_a_file(first.state_dict()))
        owed = [first.residual + grads[3], *grads[4:]]
        return [loaded.all_reduce(grad) for grad in grads[3:]], [fresh.all_reduce(grad) for grad in owed]

    for ours, theirs in on_threads(2, job):
        assert all(same_bits(a, b) for a, b in zip(ours, theirs, strict=True))
    assert capsys.readouterr().err.count("starts anew") == 1


def test_ranks_that_loaded_different_steps_are_told() -> None:
    """Each dict fits its rank; together they do not."""

    def job(comm: Any) -> None:
        reducer = Reducer(OkTopk(density=0.1), comm)
        dicts = []
        for _ in range(3):
            reducer.all_reduce(torch.ones(30))
            dicts.append(reducer.state_dict())
        other = Reducer(OkTopk(density=0.1), comm)
        other.load_state_dict(dicts[comm.rank])
        with pytest.raises(MismatchError, match="rank 0 has 1, rank 1 has 2, rank 2 has 3"):
            other.all_reduce(torch.ones(30))

    on_threads(3, job)

"""Bad input: a clear error, on every rank, before any gradient travels; nothing lost, and the reducer goes on."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from oktopk import (
    ALGORITHMS,
    Dense,
    GaussianK,
    GTopk,
    InputError,
    MalformedError,
    MismatchError,
    NonFiniteError,
    OkTopk,
    OktopkError,
    OkTopkPaper,
    PeerError,
    Reducer,
    SettingError,
    TopkA,
    TopkDSA,
    make_algorithm,
    run_local,
)
from tests.cases import COVER, Case, Step, algorithms, oktopk, take_step, trace
from tests.harness import on_threads
from tests.laws import predicted, same_bits, same_run

SIZE, NUMEL = 3, 60
CULPRIT = 1
ON_PROCESSES = ("dense", "oktopk-bounded-scaled-fp32")
Run = Callable[..., list[Any]]


def case_of(name: str, **more: Any) -> Case:
    return Case(algorithms(0.1, rethreshold_every=2, repartition_every=2)[name], SIZE, NUMEL, **more)


# ---- settings


@pytest.mark.parametrize("cls", [TopkA, TopkDSA, GTopk, GaussianK, OkTopk])
def test_a_density_or_wire_that_cannot_be(cls: Any) -> None:
    for density in (0, -1, 1.5, math.nan, math.inf, "x", None, (0.1,)):
        with pytest.raises(SettingError, match="density must be above 0 and at most 1"):
            cls(density=density)
    with pytest.raises(SettingError, match=r"unknown wire 'bf61'.*Did you mean 'bf16'"):
        cls(wire="bf61")


@pytest.mark.parametrize(
    ("name", "hint"),
    [("oktop", "oktopk"), ("OkTopk", "oktopk"), ("topk-a", "topka"), ("Dens", "dense"), ("gausiank", "gaussiank")],
)
def test_an_unknown_algorithm(name: str, hint: str) -> None:
    with pytest.raises(SettingError, match=f"Did you mean '{hint}'"):
        make_algorithm(name)
    with pytest.raises(SettingError, match=f"Did you mean '{hint}'"):
        run_local(1, lambda comm: Reducer(name, comm))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"ranking": "scale"}, "unknown ranking.*Did you mean 'scaled'"),
        ({"slack": 0.5}, "slack must be at least 1"),
        ({"slack": math.nan}, "slack must be at least 1"),
        ({"rescale_every": 0}, "rescale_every must be at least 1"),
        ({"wire": "atuo"}, "unknown wire.*Did you mean .auto."),
        ({"densty": 0.1}, "setting of oktopk 'densty'.*Did you mean 'density'"),
    ],
)
def test_other_settings_that_cannot_be(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(SettingError, match=says):
        make_algorithm("oktopk", **settings)


@pytest.mark.parametrize("settings", [{"cap": 0}, {"rethreshold_every": 0}, {"repartition_every": -3}], ids=str)
def test_settings_of_the_paper_that_cannot_be(settings: dict[str, Any]) -> None:
    with pytest.raises(SettingError, match=f"{next(iter(settings))} must be at least 1"):
        make_algorithm("oktopk_paper", **settings)
    with pytest.raises(SettingError, match="setting of oktopk "):
        make_algorithm("oktopk", **settings)


def test_more_that_cannot_be_set() -> None:
    with pytest.raises(SettingError, match=", ".join(sorted(ALGORITHMS))) as caught:
        make_algorithm("zzz")
    assert "Did you mean" not in str(caught.value)
    with pytest.raises(SettingError, match="dense has no settings"):
        make_algorithm("dense", density=0.1)
    with pytest.raises(SettingError, match=r"on_nonfinite 'skp'.*Did you mean 'skip'"):
        run_local(1, lambda comm: Reducer("dense", comm, on_nonfinite="skp"))
    sizes: list[Any] = [0, -1, "two"]
    for size in sizes:
        with pytest.raises(SettingError, match="number of ranks must be at least 1"):
            run_local(size, id)


def test_every_error_is_of_one_family() -> None:
    for error in (SettingError, InputError, NonFiniteError, MismatchError, MalformedError):
        assert issubclass(error, OktopkError)
        assert issubclass(error, ValueError)
    assert issubclass(NonFiniteError, InputError)
    assert issubclass(PeerError, RuntimeError)


# ---- tensors


BAD_TENSORS: dict[str, tuple[Callable[[], Any], Any, str]] = {
    "longer": (lambda: torch.ones(NUMEL + 1), MismatchError, str(NUMEL + 1)),
    "shorter": (lambda: torch.ones(NUMEL - 7), MismatchError, str(NUMEL - 7)),
    "empty": (lambda: torch.ones(0), MismatchError, "0"),
    "float64": (lambda: torch.ones(NUMEL, dtype=torch.float64), (InputError, MismatchError), "dtype"),
    "int64": (lambda: torch.ones(NUMEL, dtype=torch.int64), InputError, "rank"),
    "bool": (lambda: torch.ones(NUMEL, dtype=torch.bool), InputError, "rank"),
    "complex": (lambda: torch.ones(NUMEL, dtype=torch.complex64), InputError, "rank"),
}
NEVER_A_GRADIENT = ("int64", "bool", "complex")  # the others are, on all ranks at the first step


def interrupted(comm: Any, name: str) -> list[Step]:
    """Return the steps of a run in which every bad tensor comes before two of them, on one rank and on all.

    Each is refused on every rank and leaves no trace.
    """
    case = case_of(name)
    reducer, steps = case.reducer(comm), []
    for step in range(case.steps):
        for what, (make, kind, says) in BAD_TENSORS.items() if step in (0, 2) else ():
            for everywhere in (False, True) if step or what in NEVER_A_GRADIENT else (False,):
                grad = make() if everywhere or comm.rank == CULPRIT else case.gradient(comm.rank, 99)
                before = reducer.residual
                with pytest.raises(kind, match=says) as caught:
                    reducer.all_reduce(grad)
                assert everywhere or f"rank {CULPRIT}" in str(caught.value)
                assert before is None or same_bits(before, reducer.residual)
        steps.append(take_step(reducer, case, step))
    return steps


@pytest.mark.parametrize("name", COVER)
def test_bad_tensors_are_refused_and_leave_no_trace(name: str) -> None:
    same_run(on_threads(SIZE, interrupted, name), on_threads(SIZE, trace, case_of(name)))


@pytest.mark.processes
@pytest.mark.parametrize("name", ON_PROCESSES)
def test_bad_tensors_and_skipped_steps_on_processes(processes: Any, name: str) -> None:
    calm = on_threads(SIZE, trace, case_of(name))
    same_run(processes.run(SIZE, interrupted, name), calm)
    same_run(processes.run(SIZE, skipping, name, 2), calm)


@pytest.mark.parametrize("thing", [[1.0, 2.0], None, 3.0, "grad"], ids=repr)
def test_something_that_is_no_tensor(thing: Any) -> None:
    with pytest.raises((InputError, TypeError), match="tensor"):
        on_threads(2, lambda comm: Reducer(OkTopk(density=0.1), comm).all_reduce(thing))


# ---- out


WRONG_OUT: dict[str, Callable[[], Any]] = {
    "shape": lambda: torch.empty(NUMEL + 1),
    "dtype": lambda: torch.empty(NUMEL, dtype=torch.float64),
    "stride": lambda: torch.empty(2 * NUMEL)[::2],
    "kind": lambda: [0.0] * NUMEL,
}


@pytest.mark.parametrize("what", WRONG_OUT)
@pytest.mark.parametrize("everywhere", [False, True], ids=["one rank", "all ranks"])
def test_a_wrong_out_is_refused_before_anything_is_delivered(what: str, everywhere: bool) -> None:
    """The rank with the wrong `out` says so; no rank has then let go of what the others did not get."""
    case = Case(OkTopk(density=0.1), SIZE, NUMEL)
    residuals: list[Any] = [None] * SIZE

    def job(comm: Any) -> None:
        reducer = case.reducer(comm)
        reducer.all_reduce(case.gradient(comm.rank, 0))
        before = reducer.residual
        try:
            out = WRONG_OUT[what]() if everywhere or comm.rank == CULPRIT else None
            reducer.all_reduce(case.gradient(comm.rank, 1), out=out)
        finally:
            residuals[comm.rank] = (before, reducer.residual)

    with pytest.raises((OktopkError, TypeError), match="out must be"):
        on_threads(SIZE, job)
    assert all(same_bits(before, after) for before, after in residuals)


@pytest.mark.parametrize("name", COVER)
def test_a_right_out_is_filled_and_returned(name: str) -> None:
    case = Case(algorithms(0.1)[name], 2, NUMEL, dtype=torch.bfloat16)

    def job(comm: Any) -> None:
        grad, out = case.gradient(comm.rank, 0).view(6, 10), torch.full((6, 10), 9.0, dtype=torch.bfloat16)
        expected = case.reducer(comm).all_reduce(grad)
        assert case.reducer(comm).all_reduce(grad, out=out) is out
        assert same_bits(out, expected)
        assert case.reducer(comm).all_reduce(grad, out=grad) is grad  # in place
        assert same_bits(grad, expected)

    on_threads(2, job)


# ---- segments


BOUNDED, PAPER = (oktopk(mode, density=0.1, ranking="scaled") for mode in ("bounded", "paper"))
SUMS = [[NUMEL - 1], [NUMEL, 1], [-1, NUMEL + 1], [10, 20]]
NO_LENGTHS: list[Any] = [[30.5, 29.5], ["a"], [[30], [30]]]


@pytest.mark.parametrize(
    ("algorithm", "segments", "kind", "says"),
    [
        *((each, wrong, InputError, "must add up to the tensor's 60") for each in (BOUNDED, PAPER) for wrong in SUMS),
        *((BOUNDED, wrong, OktopkError, "") for wrong in NO_LENGTHS),
        *((each, [NUMEL], OktopkError, "") for each in (TopkA(), Dense())),  # which have no use for them
    ],
)
def test_segments_that_cannot_be(algorithm: Any, segments: list[Any], kind: Any, says: str) -> None:
    def job(comm: Any) -> None:
        with pytest.raises(kind, match=f"segments {says}" if says else "segments"):
            Reducer(algorithm, comm, segments=segments).all_reduce(torch.ones(NUMEL))

    on_threads(2, job)


# ---- ranks that disagree


DISAGREEING: dict[str, Callable[[Any, bool], Reducer]] = {
    "density": lambda comm, odd: Reducer(OkTopk(density=0.2 if odd else 0.1), comm),
    "algorithm": lambda comm, odd: Reducer(Dense() if odd else TopkA(), comm),
    "form": lambda comm, odd: Reducer(OkTopkPaper() if odd else OkTopk(), comm),
    "segments": lambda comm, odd: Reducer(OkTopk(ranking="scaled"), comm, segments=[30, 30] if odd else [20, 40]),
    "on_nonfinite": lambda comm, odd: Reducer(Dense(), comm, on_nonfinite="skip" if odd else "raise"),
}


def disagree(comm: Any) -> None:
    for make in DISAGREEING.values():
        reducer = make(comm, comm.rank == CULPRIT)
        with pytest.raises(MismatchError, match="disagree on the algorithm, its settings or the segments"):
            reducer.all_reduce(torch.ones(NUMEL))
        comm.all_gather(torch.ones(1))  # nobody is out of step


def test_ranks_with_different_settings(run: Run) -> None:
    run(SIZE, disagree)


# ---- NaN and Inf (that they are refused, and nothing lost, is in `test_traps`)


def skipping(comm: Any, name: str, at: int) -> list[Step]:
    """Return the steps of a run in which one gradient that is not finite is skipped."""
    case = case_of(name)
    reducer = Reducer(case.algorithm, comm, segments=case.segments, on_nonfinite="skip")
    steps = []
    for step in range(case.steps):
        if step == at:
            bad = case.gradient(comm.rank, 99)
            bad[7] = math.inf if comm.rank == CULPRIT else 1.0
            before, mean = reducer.residual, reducer.all_reduce(bad)
            after, record = reducer.residual, reducer.last
            assert same_bits(mean, torch.zeros(NUMEL))
            assert same_bits(after, torch.zeros_like(after) if before is None else before)
            assert (record.skipped, record.selected, record.nnz, record.step) == (True, 0, 0, at)
            assert record.phase == ("dense" if name == "dense" else "sparse")
        steps.append(take_step(reducer, case, step))
    assert [step.record.step for step in steps] == [step + (step >= at) for step in range(case.steps)]
    return steps


@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("name", COVER)
def test_a_step_that_is_skipped_leaves_no_trace(name: str, at: int) -> None:
    same_run(on_threads(SIZE, skipping, name, at), on_threads(SIZE, trace, case_of(name)))


def refused(comm: Any) -> list[str]:
    said = []
    for name in ("dense", "gaussiank-bf16", "oktopk-bounded-magnitude-fp32"):
        case = Case(algorithms(0.1)[name], comm.size, NUMEL)
        bad = case.gradient(comm.rank, 0)
        bad[[11, 30]] = math.nan if comm.rank in (1, 2) else 0.0
        with pytest.raises(NonFiniteError) as caught:
            case.reducer(comm).all_reduce(bad)
        said.append(str(caught.value))
    return said


def test_every_rank_names_the_same_rank_and_index(run: Run) -> None:
    first, *others = run(3, refused)
    assert all(other == first for other in others)
    assert all("rank 1" in said and "index 11 of 60" in said for said in first)


def test_a_residual_that_would_overflow_is_refused_as_well() -> None:
    def job(comm: Any) -> None:
        reducer = Reducer(TopkA(density=1e-9), comm)
        grad = torch.tensor([3e38, 2e38, 0.0])
        reducer.all_reduce(grad)
        with pytest.raises(NonFiniteError, match="index 1 of 3"):
            reducer.all_reduce(grad)
        assert reducer.residual.tolist() == torch.tensor([0.0, 2e38, 0.0]).tolist()

    on_threads(1, job)


@pytest.mark.parametrize("on_nonfinite", ["raise", "skip"])
@pytest.mark.parametrize("name", COVER)
def test_a_refused_step_is_not_in_the_next_steps_record(name: str, on_nonfinite: str) -> None:
    """Its messages are traffic of the run, but not of the step that follows."""
    case = Case(algorithms(0.1)[name], SIZE, NUMEL)

    def job(comm: Any) -> tuple[Any, int, int]:
        reducer = Reducer(case.algorithm, comm, segments=case.segments, on_nonfinite=on_nonfinite)
        reducer.all_reduce(case.gradient(comm.rank, 0))
        before = reducer.traffic.sent_bytes
        with pytest.raises(NonFiniteError) if on_nonfinite == "raise" else nullcontext():
            reducer.all_reduce(torch.full((NUMEL,), math.nan))
        reducer.all_reduce(case.gradient(comm.rank, 1))
        return reducer.last, before, reducer.traffic.sent_bytes

    for rank, (record, before, after) in enumerate(on_threads(SIZE, job)):
        assert record.sent_bytes <= 4 * predicted(case, rank).most
        assert record.sent_bytes < after - before

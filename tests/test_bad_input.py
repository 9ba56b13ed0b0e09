"""Bad input: a clear error, on every rank, before any gradient travels; nothing lost, and the reducer goes on."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import oktopk as ok
from oktopk import InputError, MismatchError, NonFiniteError, OkTopk, OktopkError, Reducer, SettingError, TopkA
from tests.cases import COVER, Case, Step, algorithms, oktopk, take_step, trace
from tests.harness import on_threads
from tests.laws import same_bits, same_run

SIZE, NUMEL = 3, 60
CULPRIT = 1
ON_PROCESSES = ("dense", "oktopk-bounded-scaled-fp32")
Run = Callable[..., list[Any]]


def case_of(name: str) -> Case:
    return Case(algorithms(0.1, rethreshold_every=2, repartition_every=2)[name], SIZE, NUMEL)


DENSITIES = [{"density": density} for density in (0, -1, 1.5, math.nan, math.inf, "x", None, (0.1,))]
SLACKS = [{"slack": 0.5}, {"slack": math.nan}]
NAMES = {"oktop": "oktopk", "OkTopk": "oktopk", "topk-a": "topka", "Dens": "dense", "gausiank": "gaussiank"}
OF_PAPER = ({"cap": 0}, {"rethreshold_every": 0}, {"repartition_every": -3})


@pytest.mark.parametrize(("name", "settings", "says"), [
    *((name, each, "density must be above 0 and at most 1") for name in ("topka", "oktopk") for each in DENSITIES),
    *((name, {"wire": "bf61"}, "unknown wire 'bf61'.*Did you mean 'bf16'") for name in ("gtopk", "oktopk")),
    *((name, {}, f"unknown algorithm '{name}'.*Did you mean '{hint}'") for name, hint in NAMES.items()),
    *(("oktopk", each, "slack must be at least 1") for each in SLACKS),
    *(("oktopk_paper", each, f"{next(iter(each))} must be at least 1") for each in OF_PAPER),
    *(("oktopk", each, "unknown setting of oktopk ") for each in OF_PAPER),
    ("oktopk", {"ranking": "scale"}, "unknown ranking.*Did you mean 'scaled'"),
    ("oktopk", {"rescale_every": 0}, "rescale_every must be at least 1"),
    ("oktopk", {"wire": "atuo"}, "unknown wire.*Did you mean .auto."),
    ("oktopk", {"densty": 0.1}, "setting of oktopk 'densty'.*Did you mean 'density'"),
    ("dense", {"density": 0.1}, "dense has no settings"),
    ("zzz", {}, ", ".join(sorted(ok.ALGORITHMS)) + r"\.$"),  # and no hint
], ids=str)  # fmt: skip
def test_settings_that_cannot_be(name: str, settings: dict[str, Any], says: str) -> None:
    with pytest.raises(SettingError, match=says):
        ok.make_algorithm(name, **settings)


@pytest.mark.parametrize(("name", "settings"), [
    ("topka", {"density": 1}), ("oktopk", {"slack": 1}), ("oktopk", {"rescale_every": 1}),
    *(("oktopk_paper", {setting: 1}) for each in OF_PAPER for setting in each),
], ids=str)  # fmt: skip
def test_settings_at_their_limit_are_taken(name: str, settings: dict[str, Any]) -> None:
    algorithm = ok.make_algorithm(name, **settings)
    assert all(getattr(algorithm, setting) == value for setting, value in settings.items())


def test_more_that_cannot_be_set() -> None:
    with pytest.raises(SettingError, match="Did you mean 'oktopk'"):
        ok.run_local(1, lambda comm: Reducer("oktop", comm))
    with pytest.raises(SettingError, match=r"on_nonfinite 'skp'.*Did you mean 'skip'"):
        ok.run_local(1, lambda comm: Reducer("dense", comm, on_nonfinite="skp"))
    sizes: list[Any] = [0, -1, "two"]
    for size in sizes:
        with pytest.raises(SettingError, match="number of ranks must be at least 1"):
            ok.run_local(size, id)


def test_every_error_is_of_one_family() -> None:
    errors = (SettingError, InputError, MismatchError, ok.MalformedError, ok.StateError)
    assert all(issubclass(error, OktopkError) and issubclass(error, ValueError) for error in errors)
    assert issubclass(NonFiniteError, InputError)
    assert issubclass(ok.PeerError, RuntimeError)


HUGE = torch.full((NUMEL,), 1e30)
BAD_TENSORS: dict[str, tuple[Callable[[], Any], Any, str]] = {
    "longer": (lambda: torch.ones(NUMEL + 1), MismatchError, str(NUMEL + 1)),
    "shorter": (lambda: torch.ones(NUMEL - 7), MismatchError, str(NUMEL - 7)),
    "empty": (lambda: torch.ones(0), MismatchError, "0"),
    "float64": (lambda: torch.ones(NUMEL, dtype=torch.float64), (InputError, MismatchError), "dtype"),
    "int64": (lambda: torch.ones(NUMEL, dtype=torch.int64), InputError, "rank"),
    "bool": (lambda: torch.ones(NUMEL, dtype=torch.bool), InputError, "rank"),
    "complex": (lambda: torch.ones(NUMEL, dtype=torch.complex64), InputError, "rank"),
    "NaN": (lambda: HUGE.index_fill(0, torch.tensor([41, 50]), math.nan), NonFiniteError, "index 41 of 60"),
    "-Inf": (lambda: HUGE.index_fill(0, torch.tensor([41, 50]), -math.inf), NonFiniteError, "index 41 of 60"),
}
NEVER_A_GRADIENT = ("int64", "bool", "complex", "NaN", "-Inf")  # the others are, on all ranks at the first step


def interrupted(comm: Any, name: str) -> list[Step]:
    """Return the steps of a run in which every bad tensor comes before two of them, on one rank and on all."""
    case = case_of(name)
    reducer, steps = case.reducer(comm), []
    for step in range(case.steps):
        for what, (make, kind, says) in BAD_TENSORS.items() if step in (0, 2) else ():
            for everywhere in (False, True) if step or what in NEVER_A_GRADIENT else (False,):
                grad = make() if everywhere or comm.rank == CULPRIT else case.gradient(comm.rank, 99)
                before = reducer.residual
                with pytest.raises(kind, match=says) as caught:
                    reducer.all_reduce(grad)
                assert f"rank {0 if everywhere else CULPRIT}" in str(caught.value)  # all ranks name the same one
                assert before is None or same_bits(before, reducer.residual)
        steps.append(take_step(reducer, case, step))
    return steps


@pytest.mark.parametrize("name", COVER)
def test_bad_tensors_are_refused_and_leave_no_trace(name: str) -> None:
    """A NaN would never be selected, and would poison its coordinate of the residual."""
    same_run(on_threads(SIZE, interrupted, name), on_threads(SIZE, trace, case_of(name)))


@pytest.mark.processes
@pytest.mark.parametrize("name", ON_PROCESSES)
def test_bad_tensors_and_skipped_steps_on_processes(processes: Any, name: str) -> None:
    calm = on_threads(SIZE, trace, case_of(name))
    same_run(processes.run(SIZE, interrupted, name), calm)
    same_run(processes.run(SIZE, skipping, name, 2), calm)


def test_something_that_is_no_tensor() -> None:
    with pytest.raises(TypeError, match="all_reduce wants a tensor, not list"):
        on_threads(2, lambda comm: Reducer(OkTopk(density=0.1), comm).all_reduce([1.0, 2.0]))


WRONG_OUT: dict[str, Any] = {
    "shape": torch.empty(NUMEL + 1),
    "dtype": torch.empty(NUMEL, dtype=torch.float64),
    "stride": torch.empty(2 * NUMEL)[::2],
    "kind": [0.0] * NUMEL,
}


@pytest.mark.parametrize("what", WRONG_OUT)
@pytest.mark.parametrize("everywhere", [False, True], ids=["one rank", "all ranks"])
def test_a_wrong_out_is_refused_before_anything_is_delivered(what: str, everywhere: bool) -> None:
    """The rank with the wrong `out` says so; no rank has then let go of what the others did not get."""
    case, residuals = case_of("oktopk-bounded-as-is"), {}

    def job(comm: Any) -> None:
        reducer = case.reducer(comm)
        reducer.all_reduce(case.gradient(comm.rank, 0))
        before = reducer.residual
        try:
            out = WRONG_OUT[what] if everywhere or comm.rank == CULPRIT else None
            reducer.all_reduce(case.gradient(comm.rank, 1), out=out)
        finally:
            residuals[comm.rank] = (before, reducer.residual)

    with pytest.raises((OktopkError, TypeError), match="out must be"):
        on_threads(SIZE, job)
    assert len(residuals) == SIZE
    assert all(same_bits(before, after) for before, after in residuals.values())


@pytest.mark.parametrize("name", COVER)
def test_a_right_out_is_filled_and_returned(name: str) -> None:
    case = Case(algorithms(0.1)[name], 2, NUMEL, dtype=torch.bfloat16)

    def job(comm: Any) -> None:
        grad, out = case.gradient(comm.rank, 0).view(6, 10), torch.full((6, 10), 9.0, dtype=torch.bfloat16)
        expected = case.reducer(comm).all_reduce(grad)
        for given in (out, grad):  # the second: in place
            assert case.reducer(comm).all_reduce(grad, out=given) is given
            assert same_bits(given, expected)

    on_threads(2, job)


BOUNDED, PAPER = (oktopk(mode, density=0.1, ranking="scaled") for mode in ("bounded", "paper"))
SUMS = [[NUMEL - 1], [NUMEL, 1], [-1, NUMEL + 1], [10, 20]]
NO_LENGTHS: list[Any] = [[30.5, 29.5], ["a"], [[30], [30]]]


@pytest.mark.parametrize(("algorithm", "segments", "kind", "says"), [
    *((each, wrong, InputError, " must add up to the tensor's 60") for each in (BOUNDED, PAPER) for wrong in SUMS),
    *((BOUNDED, wrong, OktopkError, "") for wrong in NO_LENGTHS),
    *((each, [NUMEL], OktopkError, "") for each in (TopkA(), ok.Dense())),  # which have no use for them
])  # fmt: skip
def test_segments_that_cannot_be(algorithm: Any, segments: list[Any], kind: Any, says: str) -> None:
    def job(comm: Any) -> None:
        with pytest.raises(kind, match=f"segments{says}"):
            Reducer(algorithm, comm, segments=segments).all_reduce(torch.ones(NUMEL))

    on_threads(2, job)


DISAGREEING: dict[str, Callable[[Any, bool], Reducer]] = {
    "density": lambda comm, odd: Reducer(OkTopk(density=0.2 if odd else 0.1), comm),
    "algorithm": lambda comm, odd: Reducer(ok.Dense() if odd else TopkA(), comm),
    "form": lambda comm, odd: Reducer(ok.OkTopkPaper() if odd else OkTopk(), comm),
    "segments": lambda comm, odd: Reducer(OkTopk(ranking="scaled"), comm, segments=[30, 30] if odd else [20, 40]),
    "on_nonfinite": lambda comm, odd: Reducer(ok.Dense(), comm, on_nonfinite="skip" if odd else "raise"),
}


def disagree(comm: Any) -> None:
    for make in DISAGREEING.values():
        reducer = make(comm, comm.rank == CULPRIT)
        with pytest.raises(MismatchError, match=r"the ranks disagree on .*: rank 0 has .*, rank \d has "):
            reducer.all_reduce(torch.ones(NUMEL))
        comm.all_gather(torch.ones(1))  # nobody is out of step


def test_ranks_with_different_settings(run: Run) -> None:
    run(SIZE, disagree)


def skipping(comm: Any, name: str, at: int) -> list[Step]:
    """Return the steps of a run in which one gradient that is not finite is skipped."""
    case = case_of(name)
    reducer = Reducer(case.algorithm, comm, segments=case.segments, on_nonfinite="skip")
    steps = []
    for step in range(case.steps):
        if step == at:
            bad = case.gradient(comm.rank, 99)
            bad[7] = math.inf if comm.rank == CULPRIT else 1.0
            before, sent, mean = reducer.residual, reducer.traffic.sent_bytes, reducer.all_reduce(bad)
            after, record = reducer.residual, reducer.last
            assert reducer.traffic.sent_bytes > sent  # of the run; the records of later steps do not have it
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


def test_a_residual_that_would_overflow_is_refused_as_well() -> None:
    def job(comm: Any) -> None:
        reducer = Reducer(TopkA(density=1e-9), comm)
        grad = torch.tensor([3e38, 2e38, 0.0])
        reducer.all_reduce(grad)
        with pytest.raises(NonFiniteError, match="index 1 of 3"):
            reducer.all_reduce(grad)
        assert reducer.residual.tolist() == torch.tensor([0.0, 2e38, 0.0]).tolist()

    on_threads(1, job)

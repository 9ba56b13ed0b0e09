"""Bad input: a clear error, on every rank, before any gradient travels; nothing lost, and the reducer goes on."""

from __future__ import annotations

from collections.abc import Callable
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
    PeerError,
    Reducer,
    SettingError,
    TopkA,
    TopkDSA,
    make_algorithm,
    run_local,
)
from tests.cases import COVER, Case, Step, algorithms, take_step, trace
from tests.harness import on_threads
from tests.laws import check_conserved, predicted, same_bits, same_run

SIZE, NUMEL = 3, 60
CULPRIT = 1
Run = Callable[..., list[Any]]


# ---- settings


@pytest.mark.parametrize("density", [0, -1, 1.5, float("nan"), float("inf"), "x", None, (0.1,)])
@pytest.mark.parametrize("cls", [TopkA, TopkDSA, GTopk, GaussianK, OkTopk])
def test_a_density_that_cannot_be(cls: Any, density: Any) -> None:
    with pytest.raises(SettingError, match="density must be above 0 and at most 1"):
        cls(density=density)


@pytest.mark.parametrize(
    ("name", "hint"),
    [("oktop", "oktopk"), ("OkTopk", "oktopk"), ("topk-a", "topka"), ("Dens", "dense"), ("gausiank", "gaussiank")],
)
def test_an_unknown_algorithm(name: str, hint: str) -> None:
    with pytest.raises(SettingError, match=f"Did you mean '{hint}'"):
        make_algorithm(name)
    with pytest.raises(SettingError, match=f"Did you mean '{hint}'"):
        run_local(1, lambda comm: Reducer(name, comm))


def test_a_name_that_is_like_nothing_lists_what_there_is() -> None:
    with pytest.raises(SettingError, match=", ".join(sorted(ALGORITHMS))) as caught:
        make_algorithm("zzz")
    assert "Did you mean" not in str(caught.value)


@pytest.mark.parametrize("cls", [TopkA, TopkDSA, GTopk, GaussianK, OkTopk])
def test_an_unknown_wire(cls: Any) -> None:
    with pytest.raises(SettingError, match=r"unknown wire 'bf61'.*Did you mean 'bf16'"):
        cls(wire="bf61")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"mode": "papper"}, "unknown mode.*Did you mean 'paper'"),
        ({"mode": "Bounded"}, "unknown mode.*Did you mean 'bounded'"),
        ({"ranking": "scale"}, "unknown ranking.*Did you mean 'scaled'"),
        ({"slack": 0.5}, "slack must be at least 1"),
        ({"cap": 0}, "cap must be at least 1"),
        ({"rethreshold_every": 0}, "rethreshold_every must be at least 1"),
        ({"repartition_every": -3}, "repartition_every must be at least 1"),
        ({"rescale_every": 0}, "rescale_every must be at least 1"),
        ({"wire": "atuo"}, "unknown wire.*Did you mean .auto."),
        ({"slack": float("nan")}, "slack must be at least 1"),
    ],
)
def test_other_settings_that_cannot_be(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(SettingError, match=says):
        OkTopk(**settings)


def test_an_unknown_setting() -> None:
    with pytest.raises(SettingError, match=r"setting of oktopk 'densty'.*Did you mean 'density'"):
        make_algorithm("oktopk", densty=0.1)
    with pytest.raises(SettingError, match="dense has no settings"):
        make_algorithm("dense", density=0.1)


def test_an_unknown_choice_for_non_finite_gradients() -> None:
    with pytest.raises(SettingError, match=r"on_nonfinite 'skp'.*Did you mean 'skip'"):
        run_local(1, lambda comm: Reducer("dense", comm, on_nonfinite="skp"))


@pytest.mark.parametrize("size", [0, -1, "two"])
def test_a_number_of_ranks_that_cannot_be(size: Any) -> None:
    with pytest.raises(SettingError, match="number of ranks must be at least 1"):
        run_local(size, id)


def test_every_error_is_of_one_family() -> None:
    for error in (SettingError, InputError, NonFiniteError, MismatchError, MalformedError):
        assert issubclass(error, OktopkError)
        assert issubclass(error, ValueError)
    assert issubclass(NonFiniteError, InputError)
    assert issubclass(PeerError, RuntimeError)


# ---- tensors: each of these comes instead of the gradient of step `at`, on one rank or on all


BAD_TENSORS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "longer": (lambda: torch.ones(NUMEL + 1), MismatchError, str(NUMEL + 1)),
    "shorter": (lambda: torch.ones(NUMEL - 7), MismatchError, str(NUMEL - 7)),
    "empty": (lambda: torch.ones(0), MismatchError, "0"),
    "int64": (lambda: torch.ones(NUMEL, dtype=torch.int64), InputError, "rank"),
    "bool": (lambda: torch.ones(NUMEL, dtype=torch.bool), InputError, "rank"),
    "complex": (lambda: torch.ones(NUMEL, dtype=torch.complex64), InputError, "rank"),
}
WIDER = {"float64": (lambda: torch.ones(NUMEL, dtype=torch.float64), (InputError, MismatchError), "dtype")}


def interrupted(comm: Any, name: str, what: str, at: int, everywhere: bool) -> list[Step]:
    """Return the steps of a run in which a bad tensor comes once, is refused on every rank, and leaves no trace."""
    case = Case(algorithms(0.1, rethreshold_every=2, repartition_every=2)[name], SIZE, NUMEL)
    make, kind, says = {**BAD_TENSORS, **WIDER}[what]
    reducer, steps = case.reducer(comm), []
    for step in range(case.steps):
        if step == at:
            grad = make() if everywhere or comm.rank == CULPRIT else case.gradient(comm.rank, 99)
            before = reducer.residual
            with pytest.raises(kind, match=says) as caught:
                reducer.all_reduce(grad)
            assert everywhere or f"rank {CULPRIT}" in str(caught.value)
            assert before is None or same_bits(before, reducer.residual)
        steps.append(take_step(reducer, case, step))
    return steps


@pytest.mark.parametrize("everywhere", [False, True], ids=["one rank", "all ranks"])
@pytest.mark.parametrize("what", [*BAD_TENSORS, *WIDER])
@pytest.mark.parametrize("name", ["dense", "oktopk-bounded-scaled-fp32"])
def test_a_bad_tensor_at_a_later_step(name: str, what: str, everywhere: bool) -> None:
    case = Case(algorithms(0.1, rethreshold_every=2, repartition_every=2)[name], SIZE, NUMEL)
    same_run(on_threads(SIZE, interrupted, name, what, 2, everywhere), on_threads(SIZE, trace, case))


@pytest.mark.parametrize("what", [*BAD_TENSORS, *WIDER])
@pytest.mark.parametrize("name", COVER)
def test_a_bad_tensor_on_one_rank_at_the_first_step(name: str, what: str) -> None:
    case = Case(algorithms(0.1, rethreshold_every=2, repartition_every=2)[name], SIZE, NUMEL)
    same_run(on_threads(SIZE, interrupted, name, what, 0, False), on_threads(SIZE, trace, case))


@pytest.mark.parametrize("what", ["int64", "bool", "complex"])
def test_integers_on_all_ranks_at_the_first_step(what: str) -> None:
    case = Case(algorithms(0.1, rethreshold_every=2, repartition_every=2)["dense"], SIZE, NUMEL)
    same_run(on_threads(SIZE, interrupted, "dense", what, 0, True), on_threads(SIZE, trace, case))


@pytest.mark.processes
@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("what", ["shorter", "int64", "float64"])
@pytest.mark.parametrize("name", ["dense", "oktopk-bounded-scaled-fp32", "oktopk-paper-magnitude-bf16"])
def test_a_bad_tensor_on_processes(processes: Any, name: str, what: str, at: int) -> None:
    case = Case(algorithms(0.1, rethreshold_every=2, repartition_every=2)[name], SIZE, NUMEL)
    same_run(processes.run(SIZE, interrupted, name, what, at, False), on_threads(SIZE, trace, case))


@pytest.mark.parametrize("thing", [[1.0, 2.0], None, 3.0, "grad"], ids=repr)
def test_something_that_is_no_tensor(thing: Any) -> None:
    def job(comm: Any) -> None:
        Reducer(OkTopk(density=0.1), comm).all_reduce(thing)

    with pytest.raises((InputError, TypeError), match="tensor"):
        on_threads(2, job)


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


@pytest.mark.parametrize("segments", [[NUMEL - 1], [NUMEL, 1], [-1, NUMEL + 1], [10, 20]])
@pytest.mark.parametrize("mode", ["bounded", "paper"])
def test_segments_that_do_not_add_up(segments: list[int], mode: str) -> None:
    def job(comm: Any) -> None:
        reducer = Reducer(OkTopk(density=0.1, mode=mode, ranking="scaled"), comm, segments=segments)
        with pytest.raises(InputError, match="segments must add up to the tensor's 60 elements"):
            reducer.all_reduce(torch.ones(NUMEL))

    on_threads(2, job)


@pytest.mark.parametrize("segments", [[30.5, 29.5], ["a"], [[30], [30]]], ids=repr)
def test_segments_that_are_no_lengths(segments: list[Any]) -> None:
    def job(comm: Any) -> None:
        reducer = Reducer(OkTopk(density=0.1, ranking="scaled"), comm, segments=segments)
        reducer.all_reduce(torch.ones(NUMEL))

    with pytest.raises(OktopkError, match="segments"):
        on_threads(2, job)


@pytest.mark.parametrize("algorithm", [TopkA(), Dense()], ids=lambda a: type(a).__name__)
def test_segments_for_an_algorithm_that_has_no_use_for_them(algorithm: Any) -> None:
    def job(comm: Any) -> None:
        reducer = Reducer(algorithm, comm, segments=[NUMEL])
        with pytest.raises(OktopkError, match="segments"):
            reducer.all_reduce(torch.ones(NUMEL))

    on_threads(2, job)


# ---- ranks that disagree


DISAGREEING: dict[str, Callable[[Any, bool], Reducer]] = {
    "density": lambda comm, odd: Reducer(OkTopk(density=0.2 if odd else 0.1), comm),
    "algorithm": lambda comm, odd: Reducer(Dense() if odd else TopkA(), comm),
    "mode": lambda comm, odd: Reducer(OkTopk(mode="paper" if odd else "bounded"), comm),
    "segments": lambda comm, odd: Reducer(OkTopk(ranking="scaled"), comm, segments=[30, 30] if odd else [20, 40]),
    "on_nonfinite": lambda comm, odd: Reducer(Dense(), comm, on_nonfinite="skip" if odd else "raise"),
}


def disagree(comm: Any, what: str) -> None:
    reducer = DISAGREEING[what](comm, comm.rank == CULPRIT)
    with pytest.raises(MismatchError, match="disagree on the algorithm, its settings or the segments"):
        reducer.all_reduce(torch.ones(NUMEL))
    comm.all_gather(torch.ones(1))  # nobody is out of step


@pytest.mark.parametrize("what", DISAGREEING)
def test_ranks_with_different_settings(run: Run, what: str) -> None:
    run(SIZE, disagree, what)


# ---- NaN and Inf (that they are refused, and nothing lost, is in `test_traps`)


def skipping(comm: Any, name: str, at: int) -> list[Step]:
    """Return the steps of a run in which one gradient that is not finite is skipped."""
    case = Case(algorithms(0.1, rethreshold_every=2, repartition_every=2)[name], SIZE, NUMEL)
    reducer = Reducer(case.algorithm, comm, segments=case.segments, on_nonfinite="skip")
    steps = []
    for step in range(case.steps):
        if step == at:
            bad = case.gradient(comm.rank, 99)
            bad[7] = float("inf") if comm.rank == CULPRIT else 1.0
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
    case = Case(algorithms(0.1, rethreshold_every=2, repartition_every=2)[name], SIZE, NUMEL)
    same_run(on_threads(SIZE, skipping, name, at), on_threads(SIZE, trace, case))


@pytest.mark.processes
@pytest.mark.parametrize("name", ["dense", "gtopk-fp32", "oktopk-bounded-magnitude-fp32", "oktopk-paper-scaled-bf16"])
def test_a_step_that_is_skipped_on_processes(processes: Any, name: str) -> None:
    case = Case(algorithms(0.1, rethreshold_every=2, repartition_every=2)[name], SIZE, NUMEL)
    same_run(processes.run(SIZE, skipping, name, 2), on_threads(SIZE, trace, case))


def refused(comm: Any, name: str) -> str:
    case = Case(algorithms(0.1)[name], comm.size, NUMEL)
    reducer = case.reducer(comm)
    bad = case.gradient(comm.rank, 0)
    bad[[11, 30]] = float("nan") if comm.rank in (1, 2) else 0.0
    with pytest.raises(NonFiniteError) as caught:
        reducer.all_reduce(bad)
    return str(caught.value)


@pytest.mark.parametrize("name", ["dense", "gaussiank-bf16", "oktopk-bounded-magnitude-fp32"])
def test_every_rank_names_the_same_rank_and_index(run: Run, name: str) -> None:
    said = run(3, refused, name)
    assert len(set(said)) == 1
    assert "rank 1" in said[0]
    assert "index 11 of 60" in said[0]


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
        bad = torch.full((NUMEL,), float("nan"))
        if on_nonfinite == "raise":
            with pytest.raises(NonFiniteError):
                reducer.all_reduce(bad)
        else:
            reducer.all_reduce(bad)
        reducer.all_reduce(case.gradient(comm.rank, 1))
        return reducer.last, before, reducer.traffic.sent_bytes

    for rank, (record, before, after) in enumerate(on_threads(SIZE, job)):
        assert record.sent_bytes <= 4 * predicted(case, rank).most
        assert record.sent_bytes < after - before


@pytest.mark.parametrize("name", COVER)
def test_a_run_with_many_refusals_loses_nothing(name: str) -> None:
    case = Case(algorithms(0.1, rethreshold_every=2, repartition_every=3)[name], SIZE, NUMEL, kind="heavy tails")

    def job(comm: Any) -> list[Step]:
        reducer, steps = case.reducer(comm), []
        for step in range(6):
            for culprit in range(SIZE):
                bad = case.gradient(comm.rank, step)
                bad[step] = float("nan") if comm.rank == culprit else 1e30
                with pytest.raises(NonFiniteError, match=f"rank {culprit}"):
                    reducer.all_reduce(bad)
            steps.append(take_step(reducer, case, step))
        return steps

    for steps in zip(*on_threads(SIZE, job), strict=True):
        check_conserved(case, steps)

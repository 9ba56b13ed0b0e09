"""Every law, for every algorithm in every setting, on threads: any P, n, density, dtype and kind of gradient.

Runs of 200 steps show what residuals, thresholds and regions do once they are reused. Processes give the same bits.
"""

import hashlib
import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from oktopk import Dense
from oktopk.kernels import WORTH_COMPILING
from tests.cases import COVER, DTYPES, KINDS, NAMES, OKTOPK_COVER, PLAIN, Case, algorithms, cases, oktopk, trace
from tests.harness import Processes, on_threads
from tests.laws import RELATIVE, check_every_law, same_run, wanted

MORE = settings.default.max_examples // 25  # 10 in `make test-long`
STEPS = 200
SHOWN = ("oktopk-bounded-as-is", "oktopk-bounded-magnitude-fp32", "oktopk-paper-scaled-int8")
SETTLED = 20  # sparse steps after which a stationary gradient's count has to be in the band
SETTLING = [(1, 20_000, 0.01), (8, 20_000, 0.01), (4, 5_000, 0.02), (3, 60_000, 0.003)]
SETTLING += [(2, 120_000, 0.02)]  # k is large enough for sampled thresholds


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=12 * MORE)
@given(data=st.data())
def test_every_law_holds_on_every_step(name: str, data: st.DataObject) -> None:
    case = data.draw(cases(name))
    check_every_law(case, on_threads(case.size, trace, case))


@pytest.mark.parametrize(
    ("kind", "size", "numel"), [*((kind, 3, 700) for kind in KINDS), *(("normal", 8, n) for n in (0, 1, 7))]
)
@pytest.mark.parametrize("name", COVER)
def test_every_kind_of_gradient_is_conserved_by_every_algorithm(name: str, kind: str, size: int, numel: int) -> None:
    """Each pair, across a repartition and a rethreshold, and vectors shorter than P, which hypothesis may not draw."""
    algorithm = algorithms(0.05, rethreshold_every=2, repartition_every=3)[name]
    case = Case(algorithm, size, numel, kind=kind, seed=len(kind))
    check_every_law(case, on_threads(size, trace, case))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", OKTOPK_COVER)
def test_the_laws_hold_where_kernels_are_compiled(name: str, dtype: torch.dtype) -> None:
    algorithm = algorithms(0.02, rethreshold_every=2, repartition_every=3)[name]
    case = Case(algorithm, size=2, numel=WORTH_COMPILING + 77, kind="heavy tails", dtype=dtype)
    check_every_law(case, on_threads(2, trace, case))


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=6 * MORE)
@given(
    dtype=st.sampled_from(DTYPES), size=st.integers(1, 8), numel=st.integers(0, 4000), kind=st.sampled_from([*KINDS])
)
def test_density_1_equals_dense(name: str, dtype: torch.dtype, size: int, numel: int, kind: str) -> None:
    """On the first step; on later ones each holds the rounding of its own earlier ones, which conservation covers."""
    case = Case(algorithms(1.0)[name], size, numel, kind, dtype, steps=1)
    sparse, dense = (on_threads(size, trace, c)[0][0].mean.double() for c in (case, replace(case, algorithm=Dense())))
    magnitude = sum(case.gradient(rank, 0).double().abs() for rank in range(size)) / size
    if name.endswith("int8") and numel:
        magnitude = magnitude.new_full((numel,), float(magnitude.max()))  # that of the group is what counts
    assert bool(((sparse - dense).abs() <= magnitude * _unit(case) + torch.finfo(torch.float32).smallest_normal).all())


def _unit(case: Case) -> float:
    """Return the relative difference that rounding explains: of the dtype, of float32, of the wire on each side."""
    wire = {"fp32": 0.0, "bf16": torch.finfo(torch.bfloat16).eps, "int8": case.size / 127}
    named = getattr(case.algorithm, "wire", "fp32")
    return 2 * max(torch.finfo(case.dtype).eps, 1e-6, wire["fp32" if named == "auto" else named])


@pytest.mark.parametrize("kind", ["heavy tails", "ties"])
@pytest.mark.parametrize("name", [name for name in NAMES if name.endswith(("fp32", "dense", "as-is"))])
def test_density_1_leaves_nothing_behind(name: str, kind: str) -> None:
    case = Case(algorithms(1.0)[name], size=4, numel=5001, kind=kind)
    for steps in on_threads(4, trace, case):
        assert not any(bool(step.residual.any()) for step in steps)


@pytest.mark.parametrize("name", COVER)
def test_the_gradient_is_not_touched_and_the_result_looks_like_it(name: str) -> None:
    """Whatever its shape and strides; elements need not lie side by side."""
    case = Case(algorithms(0.1)[name], size=2, numel=60)
    normal = torch.randn(120, generator=torch.Generator().manual_seed(1))

    def job(comm: object) -> None:
        for grad in (normal[:60].view(5, 12).t(), normal.view(3, 4, 10)[..., ::2], torch.ones(1).expand(60)):
            before = grad.clone()
            mean = case.reducer(comm).all_reduce(grad)
            assert torch.equal(grad, before)
            assert (mean.shape, mean.dtype, mean.is_contiguous()) == (grad.shape, grad.dtype, True)
            assert torch.equal(mean.reshape(-1), case.reducer(comm).all_reduce(before.reshape(-1)))
        for shape in ((), (1,), (0, 3)):
            grad = torch.full(shape, 3.0)
            assert torch.equal(replace(case, numel=grad.numel()).reducer(comm).all_reduce(grad), grad)

    on_threads(2, job)


def totals(case: Case) -> tuple[Tensor, list[float]]:
    """Run a case, check that nothing was lost over all of it; return all that was delivered, and counts over k."""
    by_rank = on_threads(case.size, trace, case)
    put_in = magnitude = torch.zeros(case.numel, dtype=torch.float64)
    for rank, step in itertools.product(range(case.size), range(case.steps)):
        grad = case.gradient(rank, step).double()
        put_in, magnitude = put_in + grad, magnitude + grad.abs()
    delivered = sum(step.mean.double() for step in by_rank[0])
    missing = put_in - sum(steps[-1].residual.double() for steps in by_rank) - case.size * delivered
    assert bool((missing.abs() <= RELATIVE * magnitude).all())
    return delivered, [step.record.selected / wanted(case) for steps in by_rank for step in steps[SETTLED:]]


@pytest.mark.parametrize("kind", ["growing", *(pytest.param(k, marks=pytest.mark.long) for k in ("skew", "waking"))])
@pytest.mark.parametrize("name", [n if n in SHOWN else pytest.param(n, marks=pytest.mark.long) for n in NAMES])
def test_every_law_holds_for_200_steps(name: str, kind: str) -> None:
    case = Case(algorithms(0.02)[name], size=2, numel=400, kind=kind, steps=STEPS, jump_at=100)
    check_every_law(case, on_threads(2, trace, case))


@pytest.mark.timeout(180)  # eight ranks on a busy machine
@pytest.mark.parametrize("mode", ["bounded", "paper"])
@pytest.mark.parametrize("kind", ["heavy tails", pytest.param("drifting", marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("size", "numel", "density"),
    [(2, 20_000, 0.01), *(pytest.param(*each, marks=pytest.mark.long) for each in SETTLING)],
)
def test_the_selected_count_settles_in_the_band(mode: str, kind: str, size: int, numel: int, density: float) -> None:
    """Of independent steps, and of a base vector plus noise ("drifting"), which correlates in time."""
    _, settled = totals(Case(oktopk(mode, density=density), size, numel, kind, steps=STEPS))
    k = int(numel * density)
    capacity = size * math.ceil(1.25 * k / size) / k  # a sweep fills the messages, whose capacity is rounded up
    assert 0.8 <= min(settled) <= max(settled) <= capacity


@pytest.mark.parametrize(
    ("settings", "steps"),
    [pytest.param(PLAIN, 60, id="plain"), pytest.param({}, 240, id="as it is", marks=pytest.mark.long)],
)
@pytest.mark.parametrize("mode", ["bounded", "paper"])
def test_no_coordinate_waits_for_ever(mode: str, settings: dict[str, Any], steps: int) -> None:
    """A constant gradient asks for everything at once, every step: whoever is left out must have its turn later.

    Scales let a segment wait longer: they are those of what waits, too, and grow with it.
    """
    delivered, _ = totals(Case(oktopk(mode, density=0.05, **settings), 4, numel=400, kind="constant", steps=steps))
    assert float(delivered.abs().min()) > 0


@pytest.mark.processes
@pytest.mark.parametrize("name", COVER)
def test_threads_and_processes_give_the_same_bits(processes: Processes, name: str) -> None:
    """One run of each algorithm; of a vector shorter than the ranks are many, too."""
    algorithm = algorithms(0.03, rethreshold_every=2, repartition_every=3)[name]
    dtype = DTYPES[COVER.index(name) % 4]
    for size, numel, kind in ((3, 3001, "skew"), (4, 3 * (COVER.index(name) % 2), "heavy tails")):
        case = Case(algorithm, size, numel, kind, dtype, steps=5)
        real = processes.run(size, trace, case)
        check_every_law(case, real)
        same_run(real, on_threads(size, trace, case))


@pytest.mark.processes
@pytest.mark.parametrize("size", [3, *(pytest.param(size, marks=pytest.mark.long) for size in (2, 4))])
def test_sums_of_many_lengths_have_the_same_bits(processes: Processes, size: int) -> None:
    assert processes.run(size, sums) == on_threads(size, sums)


def sums(comm: Any) -> list[str]:
    """Return a digest of each sum's bits; for the longest, gloo cuts its ring's pieces at their largest size."""
    lengths = [*range(10), 15, 16, 17, 31, 63, 64, 65, 100, 127, 255, 1000, 4097, 65_537, 300_001, 3_000_001]
    generator, digests = torch.Generator().manual_seed(comm.rank), []
    for length, dtype in itertools.product(lengths, (torch.float32, torch.float64)):
        total = comm.all_reduce(torch.randn(length, generator=generator, dtype=dtype))
        digests.append(hashlib.sha256(total.numpy().tobytes()).hexdigest())
    return digests

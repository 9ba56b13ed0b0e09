"""Every law, for every algorithm in every setting, on threads: any P, n, density, dtype and kind of gradient."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oktopk import Dense
from oktopk.kernels import WORTH_COMPILING
from tests.cases import COVER, DTYPES, KINDS, NAMES, Case, algorithms, cases, trace
from tests.harness import on_threads
from tests.laws import check_every_law, same_run

MORE = settings.default.max_examples // 25  # 10 in `make test-long`


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=12 * MORE)
@given(data=st.data())
def test_every_law_holds_on_every_step(name: str, data: st.DataObject) -> None:
    case = data.draw(cases(name))
    check_every_law(case, on_threads(case.size, trace, case))


@pytest.mark.parametrize("name", COVER)
@settings(max_examples=2 * MORE)
@given(data=st.data())
def test_a_repeated_run_gives_the_same_bits(name: str, data: st.DataObject) -> None:
    case = data.draw(cases(name))
    same_run(on_threads(case.size, trace, case), on_threads(case.size, trace, case))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", COVER)
def test_every_kind_of_gradient_is_conserved_by_every_algorithm(name: str, kind: str) -> None:
    """What hypothesis may not have drawn: each pair once, at P = 3, across a repartition and a rethreshold."""
    algorithm = algorithms(0.05, rethreshold_every=2, repartition_every=3)[name]
    case = Case(algorithm, size=3, numel=700, kind=kind, seed=len(kind))
    check_every_law(case, on_threads(3, trace, case))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", [name for name in COVER if name.startswith("oktopk")])
def test_the_laws_hold_where_kernels_are_compiled(name: str, dtype: torch.dtype) -> None:
    algorithm = algorithms(0.02, rethreshold_every=2, repartition_every=3)[name]
    case = Case(algorithm, size=2, numel=WORTH_COMPILING + 77, kind="heavy tails", dtype=dtype)
    check_every_law(case, on_threads(2, trace, case))


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=6 * MORE)
@given(
    dtype=st.sampled_from(DTYPES),
    size=st.integers(1, 8),
    numel=st.integers(0, 4000),
    kind=st.sampled_from(tuple(KINDS)),
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


@pytest.mark.parametrize(("size", "numel"), [(8, 0), (8, 1), (8, 7), (1, 500)])
@pytest.mark.parametrize("name", COVER)
def test_a_short_vector_and_one_rank_alone(name: str, size: int, numel: int) -> None:
    case = Case(algorithms(0.05)[name], size, numel)
    by_rank = on_threads(size, trace, case)
    check_every_law(case, by_rank)
    records = [step.record for steps in by_rank for step in steps]
    assert all(record.nnz > 0 for record in records) == (numel > 0)
    assert size > 1 or all((record.sent_bytes, record.messages) == (0, 0) for record in records)


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

from __future__ import annotations

import pytest
import torch

from oktopk import Sparse
from oktopk.feedback import Residual
from tests.laws import same_bits

CPU = torch.device("cpu")


def residual_of(*values: float) -> Residual:
    residual = Residual(len(values), torch.float32, CPU)
    residual.held.copy_(torch.tensor(values))
    return residual


@pytest.mark.parametrize(
    "taken",
    [torch.tensor([1, 3]), torch.tensor([False, True, False, True]), slice(1, 4, 2)],
    ids=["index", "mask", "slice"],
)
def test_what_was_taken_is_gone_and_the_rest_stays(taken: torch.Tensor | slice) -> None:
    residual = residual_of(1, 2, 3, 4)
    assert residual.accumulate_(torch.tensor([10.0, 10, 10, 10])).tolist() == [11, 12, 13, 14]
    residual.retain_(taken)
    residual.commit_()
    assert residual.held.tolist() == [11, 0, 13, 0]
    residual.accumulate_(torch.ones(4))  # in the other buffer, which holds nothing of the first step
    residual.retain_(taken)
    residual.commit_()
    assert residual.held.tolist() == [12, 0, 14, 0]


def test_what_is_returned_is_added_to_what_stays() -> None:
    residual = residual_of(0, 0, 0)
    residual.accumulate_(torch.tensor([1.0, 2, 3]))
    part = Sparse(torch.tensor([0, 2]), torch.tensor([0.5, 0.25]), 3)
    residual.retain_(torch.tensor([0]), (part, part, torch.tensor([0.0, 1.0, 0.0])))
    residual.commit_()
    assert residual.held.tolist() == [1.0, 3.0, 3.5]


def test_a_step_that_is_not_committed_never_was() -> None:
    residual = residual_of(0.1, -0.0, 1e-45)
    before = residual.held.clone()
    for taken in (slice(None), torch.tensor([2])):
        residual.accumulate_(torch.tensor([5.0, float("nan"), float("inf")]))
        residual.retain_(taken, (Sparse(torch.tensor([1]), torch.tensor([9.0]), 3),))
        assert same_bits(residual.held, before)
        assert residual.nonfinite_at == 1
    assert residual.accumulate_(torch.zeros(3)).tolist() == pytest.approx(before.tolist())
    assert residual.nonfinite_at == -1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_narrow_gradient_is_accumulated_in_float32(dtype: torch.dtype) -> None:
    residual = residual_of(0.001)
    acc = residual.accumulate_(torch.tensor([256.0], dtype=dtype))
    assert acc.dtype == torch.float32
    assert float(acc) == float(torch.tensor(256.0) + torch.tensor(0.001))


def test_a_part_of_it_can_be_made_alone() -> None:
    """Where a residual is many parameters', each slice is a step of its own until all are committed."""
    residual = residual_of(1, 2, 3, 4)
    residual.accumulate_(torch.tensor([10.0, 10.0]), at=slice(0, 2), scale=0.5)
    acc = residual.accumulate_(torch.tensor([1.0, float("nan")]), at=slice(2, 4), decay=0.5)
    assert (acc[0].item(), residual.nonfinite_at) == (2.5, 3)
    residual.accumulate_(torch.tensor([1.0, 1.0]), at=slice(2, 4))
    residual.retain_(torch.tensor([1]), (Sparse(torch.tensor([0]), torch.tensor([100.0]), 2),), at=slice(2, 4))
    residual.commit_()
    assert residual.held.tolist() == [6, 7, 104, 0]

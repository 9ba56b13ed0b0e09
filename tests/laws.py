"""The laws, as checks of what all ranks saw of one step: `steps[rank]`."""

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from oktopk import Dense, GTopk, OkTopk
from oktopk.cost import Cost, agreement, predict
from oktopk.words import HEADER_WORDS
from tests.cases import Case, Step

RELATIVE = 1e-6
WORD_BYTES = 4


def same_bits(ours: Tensor, theirs: Tensor) -> bool:
    """Whether two tensors are the same to the last bit: unlike `equal`, this tells -0.0 from 0.0 and knows NaN."""
    if ours.dtype != theirs.dtype or ours.shape != theirs.shape or not ours.numel():
        return ours.dtype == theirs.dtype and ours.shape == theirs.shape
    return torch.equal(ours.contiguous().view(-1).view(torch.uint8), theirs.contiguous().view(-1).view(torch.uint8))


def check_every_law(case: Case, by_rank: Sequence[Sequence[Step]]) -> None:
    """Hold every step of a run to every law."""
    for number, steps in enumerate(zip(*by_rank, strict=True)):
        check_conserved(case, steps)
        check_whole(case, steps)
        check_same_result(steps)
        check_record(case, number, steps)
        check_budget(case, steps)
        check_selected(case, steps)


def check_conserved(case: Case, steps: Sequence[Step]) -> None:
    """Sum of acc = P * mean + sum of residuals, element by element."""
    went_in = torch.stack([step.acc.double() for step in steps])
    stayed = torch.stack([step.residual.double() for step in steps]).sum(0)
    missing = (went_in.sum(0) - len(steps) * steps[0].mean.double().view(-1) - stayed).abs()
    assert bool((missing <= tolerance(case, went_in)).all()), (
        f"{case}: lost {missing.max():.3g} at {int(missing.argmax())}"
    )


def tolerance(case: Case, went_in: Tensor) -> Tensor:
    """Return what rounding may lose: 1e-6 of the magnitudes, and one least number a rank, where a mean is denormal."""
    least = torch.finfo(case.wide).smallest_normal * torch.finfo(case.wide).eps
    return RELATIVE * went_in.abs().sum(0) + len(went_in) * least


def check_whole(case: Case, steps: Sequence[Step]) -> None:
    """Where nothing is rounded, a coordinate of a rank stays, bit for bit, or goes whole, into the sum."""
    exact = getattr(case.algorithm, "wire", "") == "fp32" and case.dtype == torch.float32
    for step in steps if exact and not isinstance(case.algorithm, GTopk) else ():  # gTop-k returns what a merge cut
        gone = (step.residual == 0) & (step.acc != 0)
        assert torch.equal(step.residual[~gone], step.acc[~gone])
        assert int(gone.sum()) <= step.record.selected


def check_same_result(steps: Sequence[Step]) -> None:
    """Every rank holds the same bits."""
    for one, other in pairwise(steps):
        assert same_bits(one.mean, other.mean)


def check_record(case: Case, number: int, steps: Sequence[Step]) -> None:
    """The record says what happened, in figures that agree with each other."""
    for step in steps:
        record = step.record
        dense = isinstance(case.algorithm, Dense)
        assert (record.step, record.numel, record.skipped) == (number, case.numel, False)
        assert record.phase == ("dense" if dense else "sparse")
        assert int(step.mean.count_nonzero()) <= record.nnz <= case.numel
        assert record.nnz == (case.numel if dense else steps[0].record.nnz)
        assert record.sparsity == (1 - record.nnz / case.numel if case.numel else 0.0)
        expected_ratio = case.numel / record.nnz if record.nnz else (None if case.numel else 1.0)
        assert record.compression_ratio == expected_ratio
        assert record.nominal_bytes == (4 * case.numel if dense else 8 * record.nnz)
        assert record.sent_bytes == sum(record.sent_by_phase.values())
        assert 0 <= record.selected <= case.numel
        assert record.wanted == (case.numel if dense else wanted(case))
        assert all(seconds >= 0 for seconds in record.seconds.values())
    sent, received = (sum(getattr(s.record, name) for s in steps) for name in ("sent_bytes", "received_bytes"))
    assert sent == received


def check_budget(case: Case, steps: Sequence[Step]) -> None:
    """No rank sends more, or less, than `predict` says; bounded Ok-Topk never more than 4c(P-1) words and headers."""
    for rank, step in enumerate(steps):
        cost, words = predicted(case, rank), step.record.sent_bytes / WORD_BYTES
        assert cost.least <= words <= cost.most, f"{case}, rank {rank}: {words} words, {cost}"
        assert step.record.messages <= cost.messages
        if isinstance(case.algorithm, OkTopk):
            assert cost.least == cost.most or case.algorithm.codec(case.numel).wire != "fp32"  # packed by region
            assert words <= bounded_words(case)


def predicted(case: Case, rank: int) -> Cost:
    """Return what a rank should send; what Dense sends of a float64 vector is twice as wide as `predict` assumes."""
    cost = predict(case.algorithm, case.numel, case.size, rank)
    if isinstance(case.algorithm, Dense) and case.dtype == torch.float64:
        extra = cost.most - agreement(case.size - 1).most
        return Cost(cost.least + extra, cost.typical + extra, cost.most + extra, cost.messages)
    return cost


def bounded_words(case: Case) -> int:
    """Return 4c(P-1) words with c = ceil(slack k/P), and the two headers a peer gets (with int8, a scale in each)."""
    capacity = -(-case.algorithm.slack * wanted(case) // case.size)
    header = HEADER_WORDS + (case.algorithm.codec(case.numel).wire == "int8")
    return int(4 * capacity + 2 * header) * (case.size - 1)


def check_selected(case: Case, steps: Sequence[Step]) -> None:
    """Nobody ever selects more than the setting allows, however the gradient grows."""
    for step in steps:
        assert step.record.selected <= selected_limit(case), f"{case}: {step.record.selected} selected"


def selected_limit(case: Case) -> int:
    """Return how many elements one rank may select in one step."""
    if isinstance(case.algorithm, Dense):
        return case.numel
    factor = {"GaussianK": 1.25, "OkTopkPaper": 2.0}.get(type(case.algorithm).__name__, 1.0)
    if isinstance(case.algorithm, OkTopk):  # P blocks of ceil(slack k/P) pairs
        return min(case.size * math.ceil(case.algorithm.slack * wanted(case) / case.size), case.numel)
    return min(max(int(factor * wanted(case)), 1), case.numel)


def wanted(case: Case) -> int:
    """Return k."""
    return min(case.numel, max(1, int(case.numel * case.algorithm.density)))


def same_run(ours: Sequence[Sequence[Step]], theirs: Sequence[Sequence[Step]]) -> None:
    """Check that two runs of a case gave the same bits, on every rank and step."""
    for mine, other in zip(ours, theirs, strict=True):
        for number, (a, b) in enumerate(zip(mine, other, strict=True)):
            assert same_bits(a.mean, b.mean), f"mean of step {number}"
            assert same_bits(a.residual, b.residual), f"residual of step {number}"
            for figure in ("selected", "nnz", "sent_bytes"):
                assert getattr(a.record, figure) == getattr(b.record, figure), f"{figure} of step {number}"

"""Compare the kernels in use with the reference, bit by bit, and an exchange of two ranks with conservation.

Inputs are new at every run; a failure tells the seed, so that it can be repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from oktopk.algorithms import OkTopk
from oktopk.codec.indices import WIDTHS
from oktopk.comm import Comm, run_local
from oktopk.cuda import reference as plain_torch
from oktopk.cuda.reference import HEADER_WORDS, TILE, Found, bins
from oktopk.cuda.step import supports_device_step
from oktopk.doctor.finding import FAIL, OK, Finding, raising_is_failing
from oktopk.doctor.here import RESIDENT
from oktopk.kernels import WORTH_COMPILING, Kernels, kernels_for, reference
from oktopk.partition import even_cuts
from oktopk.reducer import Reducer

ABOUT = "self-test"
SIZES = (1, 1000, WORTH_COMPILING + 77, 300_007)
GPU_SIZES = (1, TILE + 1, 40 * TILE + 77, 1_000_007)
NARROW = (torch.bfloat16, torch.float16)
DTYPES = [(dtype, dtype) for dtype in (torch.float32, torch.float64)] + [(torch.float32, dtype) for dtype in NARROW]
"""Dtypes of the residual and of the gradient."""

RANKS, STEPS, NUMEL = 2, 4, 40_000
TOLERANCE = 1e-5
"""Part of the largest element, because float32 loses that much in a few sums."""

Results = Sequence[Tensor | float]


@raising_is_failing(ABOUT)
def kernels(device: torch.device) -> Iterator[Finding]:
    """Compare the kernels in use on a device with the reference."""
    seed = int(torch.randint(1 << 31, (1,), generator=_fresh()))
    if device.type == "cpu":
        wrong = [line for size in SIZES for line in _differences(size, seed)]
        sizes, against = SIZES, "the reference"
    elif supports_device_step(RESIDENT, NUMEL, torch.float32, device):
        from oktopk.cuda import triton as fast

        wrong = [line for size in GPU_SIZES for line in triton_differences(fast, size, seed, device)]
        sizes, against = GPU_SIZES, "plain torch"
    else:
        return  # the reference itself is in use
    name, figures = f"kernels, {device}", {"seed": seed, "different": wrong}
    found = f"the bits of {against}, at {', '.join(f'{size:,}' for size in sizes)} elements"
    if wrong:
        advice = "do not train with it: please report this line and the versions above"
        yield Finding(ABOUT, name, f"not {found} (seed {seed}): {'; '.join(wrong)}", FAIL, advice, figures)
    else:
        yield Finding(ABOUT, name, found, OK, figures=figures)


def _fresh() -> torch.Generator:
    generator = torch.Generator()
    generator.seed()
    return generator


def _same_bits(one: Tensor | float, other: Tensor | float) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(_bytes_of(one), _bytes_of(other))
    return not isinstance(one, Tensor) and not isinstance(other, Tensor) and one == other


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


@dataclass(frozen=True)
class _Inputs:
    """Heavy-tailed values in three segments, `acc` = residual + gradient, and two sorted sets of indices."""

    grad: Tensor
    residual: Tensor
    acc: Tensor
    bounds: list[int]
    floors: list[float]
    index: Tensor
    other: Tensor

    @staticmethod
    def make(numel: int, wide: torch.dtype, narrow: torch.dtype, seed: int) -> _Inputs:
        generator = torch.Generator().manual_seed(seed)
        grad, residual = (torch.randn(numel, generator=generator, dtype=torch.float64).pow_(3) for _ in range(2))
        index, other = ((torch.rand(numel, generator=generator) < 0.05).nonzero().view(-1) for _ in range(2))
        residual, grad = residual.to(wide), grad.to(narrow)
        bounds, floors = [0, numel // 3, numel // 3, numel], [4.0, 1.0, 5.0]
        return _Inputs(grad, residual, residual + grad, bounds, floors, index, other)


def _accumulate(use: Kernels, x: _Inputs) -> Results:
    out = torch.empty_like(x.residual)
    return use.accumulate(x.grad, x.residual, out), out


def _accumulate_above(use: Kernels, x: _Inputs) -> Results:
    out = torch.empty_like(x.residual)
    return (*use.accumulate_above(x.grad, x.residual, out, x.bounds, x.floors), out)


def _spread(use: Kernels, x: _Inputs) -> Results:
    out = torch.full_like(x.acc, 7.0)
    use.spread(x.index, x.acc[x.index], out)
    return (out,)


def _pack(use: Kernels, x: _Inputs) -> Results:
    results: list[Tensor | float] = []
    for width in WIDTHS:
        packed, slots = use.pack(x.index, width)
        whole = -(-(slots + slots % 2) * width // 8)  # a message has room for pairs of slots, zeros at the end
        padded = pad(packed, (0, whole - len(packed)))
        results += [padded, slots, use.unpack(padded, slots, width)]
    return results


KERNELS: dict[str, Callable[[Kernels, _Inputs], Results]] = {
    "accumulate": _accumulate,
    "accumulate_above": _accumulate_above,
    "at_least": lambda use, x: [use.at_least(x.acc, x.bounds, x.floors)],
    "kth_largest": lambda use, x: [use.kth_largest(x.acc.abs(), max(len(x.acc) // 100, 1))],
    "merge": lambda use, x: use.merge([x.index, x.other], [x.acc[x.index], x.acc[x.other]]),
    "shared": lambda use, x: [use.shared(x.other, x.index), float(use.is_increasing(x.index))],
    "spread": _spread,
    "pack": _pack,
}


def _differences(numel: int, seed: int) -> Iterator[str]:
    """Yield a line for each kernel that gives other bits than the reference."""
    for wide, narrow in DTYPES:
        inputs = _Inputs.make(numel, wide, narrow, seed)
        for name, work in KERNELS.items():
            if not all(map(_same_bits, work(kernels_for(inputs.acc), inputs), work(reference, inputs))):
                yield f"{name} at {numel:,} elements of {_short(wide)}, gradient {_short(narrow)}"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def triton_differences(fast: Any, numel: int, seed: int, device: torch.device) -> Iterator[str]:
    """Yield a line for each kernel of a step on the GPU that gives other bits than plain torch there."""
    for dtype in (torch.float32, *NARROW):
        inputs = _Inputs.make(numel, torch.float32, dtype, seed)
        grad, residual = inputs.grad.to(device), inputs.residual.to(device)
        ours, theirs = _step(fast, grad, residual), _step(plain_torch, grad, residual)
        yield from (
            f"{name} at {numel:,} elements, gradient {_short(dtype)}"
            for name in ours
            if not _same_bits(ours[name], theirs[name])
        )


def _step(use: Any, grad: Tensor, residual: Tensor) -> dict[str, Tensor]:
    """Return the results of a step's kernels, up to the message, by name."""
    numel, device = len(residual), residual.device
    threshold = torch.zeros(1, device=device)
    wanted = torch.tensor([max(numel // 100, 1)], device=device)
    step_offset = torch.tensor([3], dtype=torch.int32, device=device)
    use.sample_threshold(grad, residual, None, step_offset, 1, wanted, bins(device), threshold)
    found, acc = Found.make(numel, TILE, device), torch.empty_like(residual)
    use.accumulate_compact(grad, residual, acc, threshold, step_offset, found)
    capacity = max(numel // 50, 1)
    message = torch.zeros(RANKS, HEADER_WORDS + 2 * capacity, dtype=torch.int32, device=device)
    use.pack_blocks(found, even_cuts(numel, RANKS).to(device), step_offset, message, capacity)
    region = torch.zeros(numel, device=device)
    use.scatter_add(message[0], capacity, region)
    return {"sample_threshold": threshold, "accumulate_compact": acc, "pack_blocks": message, "scatter_add": region}


@raising_is_failing(ABOUT)
def exchange(device: torch.device) -> Iterator[Finding]:
    """Let two ranks reduce a few gradients: the sum of the inputs must be that of the results and the residuals."""
    grads = torch.randn(RANKS, STEPS, NUMEL, generator=_fresh()).pow_(3).to(device)

    def rank(comm: Comm) -> tuple[Tensor, Tensor]:
        reducer = Reducer(OkTopk(), comm)
        out = torch.stack([reducer.all_reduce(grad) for grad in grads[comm.rank]])
        assert reducer.residual is not None
        return out, reducer.residual

    (out, residual), (other, other_residual) = run_local(RANKS, rank)
    lost = grads.double().sum((0, 1)) - RANKS * out.double().sum(0) - residual - other_residual
    missing = float(lost.abs().max() / grads.abs().max())
    status = FAIL
    if not _same_bits(out, other):
        found = "the ranks have different results"
    elif not missing <= TOLERANCE:
        found = f"{missing:.1e} of the largest element is missing"
    else:
        found, status = f"the same bits on both; nothing is lost (to {missing:.0e} of the largest element)", OK
    found = f"{RANKS} ranks, {STEPS} steps, default settings: {found}"
    yield Finding(ABOUT, f"exchange, {device}", found, status, figures={"missing": missing})

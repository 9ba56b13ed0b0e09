"""Does what is in use compute right? The kernels against the reference, bit by bit; an exchange against conservation.

Inputs are fresh at every run; the seed is told, so that a failure can be had again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from oktopk.algorithms import OkTopk
from oktopk.codec.indices import WIDTHS
from oktopk.comm import Comm, run_local
from oktopk.cuda import reference as blocks
from oktopk.cuda.reference import HEADER_WORDS, TILE, Found, bins
from oktopk.cuda.step import supports_device_step
from oktopk.doctor.finding import FAIL, OK, Finding, raising_is_failing
from oktopk.doctor.here import RESIDENT
from oktopk.kernels import WORTH_COMPILING, Kernels, kernels_for, reference
from oktopk.partition import even_cuts
from oktopk.reducer import Reducer

ABOUT = "self-test"
SIZES = (1, 1000, WORTH_COMPILING + 77, 300_007)
WIDE = (torch.float32, torch.float64)
NARROW = (torch.bfloat16, torch.float16)
GPU_SIZES = (1, TILE + 1, 40 * TILE + 77, 1_000_007)
RANKS, STEPS, NUMEL = 2, 4, 40_000
TOLERANCE = 1e-5
"""Of the largest element: what float32 loses in a few sums."""

Results = Sequence[Tensor | float]


@raising_is_failing(ABOUT)
def kernels(device: torch.device) -> Iterator[Finding]:
    """Compare the kernels in use on a device with what they should give."""
    seed = int(torch.randint(1 << 31, (1,), generator=_fresh()))
    if device.type == "cpu":
        wrong = [line for size in SIZES for line in _differences(size, seed)]
        sizes, against = SIZES, "the reference"
    elif supports_device_step(RESIDENT, NUMEL, torch.float32, device):
        from oktopk.cuda import triton as fast

        wrong = [line for size in GPU_SIZES for line in _triton_differences(fast, size, seed, device)]
        sizes, against = GPU_SIZES, "plain torch"
    else:
        return  # the reference itself is in use
    found = f"the bits of {against}, at {', '.join(f'{size:,}' for size in sizes)} elements"
    figures = {"seed": seed, "different": wrong}
    if wrong:
        advice = "do not train with it: please report this line and the versions above"
        yield Finding(
            ABOUT, f"kernels, {device}", f"not {found} (seed {seed}): {'; '.join(wrong)}", FAIL, advice, figures
        )
    else:
        yield Finding(ABOUT, f"kernels, {device}", found, OK, figures=figures)


def _fresh() -> torch.Generator:
    generator = torch.Generator()
    generator.seed()
    return generator


def same_bits(one: Tensor | float, other: Tensor | float) -> bool:
    """Whether two results are the same, to the bit."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(_bytes_of(one), _bytes_of(other))
    return not isinstance(one, Tensor) and not isinstance(other, Tensor) and one == other


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


# ---- kernels of the CPU


@dataclass(frozen=True)
class Inputs:
    """What a kernel is tried with: `acc` is the sum of the others."""

    grad: Tensor
    held: Tensor
    acc: Tensor
    bounds: list[int]
    floors: list[float]
    index: Tensor
    other: Tensor

    @staticmethod
    def make(numel: int, wide: torch.dtype, narrow: torch.dtype, seed: int) -> Inputs:
        """Return heavy-tailed values in three segments, and two sorted sets of indices."""
        generator = torch.Generator().manual_seed(seed)
        grad, held = (torch.randn(numel, generator=generator, dtype=torch.float64).pow_(3) for _ in range(2))
        index, other = ((torch.rand(numel, generator=generator) < 0.05).nonzero().view(-1) for _ in range(2))
        held, grad = held.to(wide), grad.to(narrow)
        return Inputs(grad, held, held + grad, [0, numel // 3, numel // 3, numel], [4.0, 1.0, 5.0], index, other)


def _accumulate(use: Kernels, given: Inputs) -> Results:
    out = torch.empty_like(given.held)
    return use.accumulate(given.grad, given.held, out), out


def _accumulate_above(use: Kernels, given: Inputs) -> Results:
    out = torch.empty_like(given.held)
    return (*use.accumulate_above(given.grad, given.held, out, given.bounds, given.floors), out)


def _at_least(use: Kernels, given: Inputs) -> Results:
    return (use.at_least(given.acc, given.bounds, given.floors),)


def _kth_largest(use: Kernels, given: Inputs) -> Results:
    return (use.kth_largest(given.acc.abs(), max(len(given.acc) // 100, 1)),)


def _merge(use: Kernels, given: Inputs) -> Results:
    index = (given.index, given.other)
    return use.merge(index, [given.acc[each] for each in index])


def _shared(use: Kernels, given: Inputs) -> Results:
    return (use.shared(given.other, given.index), float(use.is_increasing(given.index)))


def _spread(use: Kernels, given: Inputs) -> Results:
    out = torch.full_like(given.acc, 7.0)
    use.spread(given.index, given.acc[given.index], out)
    return (out,)


def _pack(use: Kernels, given: Inputs) -> Results:
    results: list[Tensor | float] = []
    for width in WIDTHS:
        packed, slots = use.pack(given.index, width)
        whole = -(-(slots + slots % 2) * width // 8)  # a message has room for pairs of slots, zeros at the end
        padded = torch.nn.functional.pad(packed, (0, whole - len(packed)))
        results += [padded, slots, use.unpack(padded, slots, width)]
    return results


KERNELS: dict[str, Callable[[Kernels, Inputs], Results]] = {
    "accumulate": _accumulate,
    "accumulate_above": _accumulate_above,
    "at_least": _at_least,
    "kth_largest": _kth_largest,
    "merge": _merge,
    "shared": _shared,
    "spread": _spread,
    "pack": _pack,
}


def _differences(numel: int, seed: int) -> Iterator[str]:
    """Yield a line for each kernel that gives other bits than the reference."""
    pairs = [(wide, wide) for wide in WIDE] + [(torch.float32, narrow) for narrow in NARROW]
    for wide, narrow in pairs:
        given = Inputs.make(numel, wide, narrow, seed)
        for name, work in KERNELS.items():
            ours, theirs = work(kernels_for(given.acc), given), work(reference, given)
            if not all(map(same_bits, ours, theirs)):
                yield f"{name} at {numel:,} elements of {_short(wide)}, gradient {_short(narrow)}"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ---- kernels of a step that stays on the GPU


def _triton_differences(fast: Any, numel: int, seed: int, device: torch.device) -> Iterator[str]:
    """Yield a line for each kernel that gives other bits than plain torch on the same GPU."""
    for dtype in (torch.float32, *NARROW):
        given = Inputs.make(numel, torch.float32, dtype, seed)
        grad, held = given.grad.to(device), given.held.to(device)
        ours, theirs = _found_by(fast, grad, held), _found_by(blocks, grad, held)
        yield from (
            f"{name} at {numel:,} elements, gradient {_short(dtype)}"
            for name in ours
            if not same_bits(ours[name], theirs[name])
        )


def _found_by(use: Any, grad: Tensor, held: Tensor) -> dict[str, Tensor]:
    """Return what the kernels of a step, up to the message, make of a gradient."""
    numel, device = len(held), held.device
    threshold = torch.zeros(1, device=device)
    wanted = torch.tensor([max(numel // 100, 1)], device=device)
    turn = torch.tensor([3], dtype=torch.int32, device=device)
    use.sample_threshold(grad, held, None, turn, 1, wanted, bins(device), threshold)
    found, acc = Found.make(numel, TILE, device), torch.empty_like(held)
    use.accumulate_compact(grad, held, acc, threshold, turn, found)
    capacity = max(numel // 50, 1)
    message = torch.zeros(RANKS, HEADER_WORDS + 2 * capacity, dtype=torch.int32, device=device)
    use.pack_blocks(found, even_cuts(numel, RANKS).to(device), turn, message, capacity)
    region = torch.zeros(numel, device=device)
    use.scatter_add(message[0], capacity, region)
    return {"sample_threshold": threshold, "accumulate_compact": acc, "pack_blocks": message, "scatter_add": region}


# ---- an exchange


@raising_is_failing(ABOUT)
def exchange(device: torch.device) -> Iterator[Finding]:
    """Let two ranks reduce a few gradients: what went in has to be what came out and what is held back."""
    grads = torch.randn(RANKS, STEPS, NUMEL, generator=_fresh()).pow_(3).to(device)

    def rank(comm: Comm) -> tuple[Tensor, Tensor]:
        reducer = Reducer(OkTopk(), comm)
        out = torch.stack([reducer.all_reduce(grad) for grad in grads[comm.rank]])
        held = reducer.residual
        assert held is not None
        return out, held

    (out, held), (other, other_held) = run_local(RANKS, rank)
    went_in, came_out = grads.double().sum((0, 1)), RANKS * out.double().sum(0)
    missing = float((went_in - came_out - held - other_held).abs().max() / grads.abs().max())
    what, figures = f"{RANKS} ranks, {STEPS} steps, default settings", {"missing": missing}
    if not same_bits(out, other):
        found, status = "the ranks have different results", FAIL
    elif not missing <= TOLERANCE:
        found, status = f"{missing:.1e} of the largest element is missing", FAIL
    else:
        found, status = f"the same bits on both; nothing is lost (to {missing:.0e} of the largest element)", OK
    yield Finding(ABOUT, f"exchange, {device}", f"{what}: {found}", status, figures=figures)

"""Compare the kernels in use with the reference, bit by bit, and an exchange of two ranks with conservation.

Inputs are new at every run; a failure tells the seed, so that it can be repeated.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from oktopk.algorithms import OkTopk
from oktopk.codec import Codec
from oktopk.codec.indices import field_words
from oktopk.comm import Comm, run_local
from oktopk.cuda import reference as plain_torch
from oktopk.cuda.packing import Packing
from oktopk.cuda.reference import TILE, Found, bins
from oktopk.cuda.step import supports_device_step
from oktopk.doctor.here import RESIDENT
from oktopk.doctor.report import FAIL, OK, Finding
from oktopk.kernels import REFERENCE, WORTH_COMPILING, Kernels, kernels_for
from oktopk.partition import even_cuts
from oktopk.reducer import Reducer
from oktopk.words import HEADER_WORDS

ABOUT = "self-test"
SIZES = (1, 1000, WORTH_COMPILING + 77, 300_007)
GPU_SIZES = (1, TILE + 1, 40 * TILE + 77, 1_000_007)
NARROW = (torch.bfloat16, torch.float16)
DTYPES = [(dtype, dtype) for dtype in (torch.float32, torch.float64)] + [(torch.float32, dtype) for dtype in NARROW]
"""Dtypes of the residual and of the gradient."""

RANKS, STEPS, NUMEL = 2, 4, 40_000
TOLERANCE = 1e-5
"""Part of the largest element, because float32 loses that much in a few sums."""

Results = Mapping[str, Sequence[Tensor | float]]


def kernels(device: torch.device) -> Iterator[Finding]:
    """Compare the kernels in use on a device with the reference."""
    seed = _fresh_seed()
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


def _fresh_seed() -> int:
    return torch.Generator().seed() % (1 << 31)


def _differences(numel: int, seed: int) -> Iterator[str]:
    """Yield a line for each kernel that gives other bits than the reference."""
    for wide, narrow in DTYPES:
        grad, residual = _inputs(numel, wide, narrow, seed)
        ours, theirs = (_results(use, grad, residual, seed) for use in (kernels_for(residual), REFERENCE))
        yield from _compare(ours, theirs, f"{numel:,} elements of {_short(wide)}, gradient {_short(narrow)}")


def triton_differences(fast: Any, numel: int, seed: int, device: torch.device) -> Iterator[str]:
    """Yield a line for each kernel of a step on the GPU that gives other bits than plain torch there."""
    for dtype in (torch.float32, *NARROW):
        grad, residual = (each.to(device) for each in _inputs(numel, torch.float32, dtype, seed))
        ours, theirs = (_step(use, grad, residual) for use in (fast, plain_torch))
        yield from _compare(ours, theirs, f"{numel:,} elements, gradient {_short(dtype)}")


def _compare(ours: Results, theirs: Results, where: str) -> Iterator[str]:
    for name, results in ours.items():
        if [*map(_bits, results)] != [*map(_bits, theirs[name])]:
            yield f"{name} at {where}"


def _bits(result: Tensor | float) -> Any:
    if not isinstance(result, Tensor):
        return result
    return result.dtype, result.shape, result.cpu().numpy().tobytes()


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _inputs(numel: int, wide: torch.dtype, narrow: torch.dtype, seed: int) -> tuple[Tensor, Tensor]:
    """Return a gradient and a residual with heavy tails."""
    generator = torch.Generator().manual_seed(seed)
    grad, residual = (torch.randn(numel, generator=generator, dtype=torch.float64).pow_(3) for _ in range(2))
    return grad.to(narrow), residual.to(wide)


def _results(use: Kernels, grad: Tensor, residual: Tensor, seed: int) -> Results:
    """Return the results of each kernel, by name: over three segments, and with two sorted sets of indices."""
    numel, generator = len(grad), torch.Generator().manual_seed(seed + 1)
    bounds, floors = [0, numel // 3, numel // 3, numel], [4.0, 1.0, 5.0]
    index, other = ((torch.rand(numel, generator=generator) < 0.05).nonzero().view(-1) for _ in range(2))
    acc, out, above, dense = residual + grad, *(torch.full_like(residual, 7.0) for _ in range(3))
    bad, noted = use.accumulate_above(grad, residual, above, bounds, floors, numel)
    use.spread(index, acc[index], dense)
    placed, added = acc.clone(), acc.clone()
    use.put_(placed, index, acc[index] / 3)
    use.add_(added, index, acc[index] / 3)
    steps, scale = use.quantise(acc.float())
    middle = max(numel // 100, 1)
    packed: list[Tensor | float] = []
    for low_bits in (1, 5, 12):
        words = [torch.zeros(count, dtype=torch.int32) for count in field_words(numel, len(index), low_bits)]
        use.pack_(index, 0, low_bits, words[0], words[1])
        packed += [*words, use.unpack(words[0], words[1], 0, low_bits, len(index))]
    return {
        "accumulate": [use.accumulate(grad, residual, out), out],
        "accumulate_above": [bad, *(noted or ()), above],
        "at_least": [use.at_least(acc, bounds, floors)],
        "kth_largest": [use.kth_largest(acc.abs(), middle)],
        "first_at_least": [use.first_at_least(acc.abs(), use.kth_largest(acc.abs(), middle), middle)],
        "merge": use.merge([index, other], [acc[index], acc[other]]),
        "shared": [use.shared(other, index), float(use.is_increasing(index))],
        "spread": [dense],
        "put": [placed, added],
        "quantise": [steps, scale, use.scaled(steps, scale, acc.dtype)],
        "pack": packed,
    }


def _step(use: Any, grad: Tensor, residual: Tensor) -> Results:
    """Return the results of a step's kernels, up to the message, by name."""
    numel, device = len(residual), residual.device
    threshold = torch.zeros(1, device=device)
    wanted = torch.tensor([max(numel // 100, 1)], device=device)
    step_offset = torch.tensor([3], dtype=torch.int32, device=device)
    use.sample_threshold(grad, residual, None, step_offset, 1, wanted, bins(device), threshold)
    found, acc = Found(numel, TILE, device), torch.empty_like(residual)
    use.accumulate_compact(grad, residual, acc, threshold, step_offset, found)
    capacity = max(numel // 50, 1)
    message = torch.zeros(RANKS, HEADER_WORDS + 2 * capacity, dtype=torch.int32, device=device)
    packing = Packing(Codec(numel, "int8"), capacity, RANKS, device)
    use.pack_blocks(found, even_cuts(numel, RANKS).to(device), step_offset, message, capacity, packing.rooms)
    errors, blocks, back = message.clone(), message.new_zeros(RANKS, packing.words), torch.zeros_like(message)
    use.encode(errors, blocks, packing.rows, packing)
    use.decode(blocks, back, packing.rows, packing)
    region = torch.zeros(numel, device=device)
    use.scatter_add(back[0], capacity, region)
    results = {"sample_threshold": threshold, "accumulate_compact": acc, "pack_blocks": message}
    results |= {"encode": torch.cat([errors, blocks], 1), "decode": back, "scatter_add": region}
    return {name: [result] for name, result in results.items()}


def exchange(device: torch.device) -> Iterator[Finding]:
    """Let two ranks reduce a few gradients: the sum of the inputs must be that of the results and the residuals."""
    grads = torch.randn(RANKS, STEPS, NUMEL, generator=torch.Generator().manual_seed(_fresh_seed())).pow_(3).to(device)

    def rank(comm: Comm) -> tuple[Tensor, Tensor]:
        reducer = Reducer(OkTopk(), comm)
        out = torch.stack([reducer.all_reduce(grad) for grad in grads[comm.rank]])
        assert reducer.residual is not None
        return out, reducer.residual

    (out, residual), (other, other_residual) = run_local(RANKS, rank)
    lost = grads.double().sum((0, 1)) - RANKS * out.double().sum(0) - residual - other_residual
    missing = float(lost.abs().max() / grads.abs().max())
    status = FAIL
    if _bits(out) != _bits(other):
        found = "the ranks have different results"
    elif not missing <= TOLERANCE:
        found = f"{missing:.1e} of the largest element is missing"
    else:
        found, status = f"the same bits on both; nothing is lost (to {missing:.0e} of the largest element)", OK
    found = f"{RANKS} ranks, {STEPS} steps, default settings: {found}"
    yield Finding(ABOUT, f"exchange, {device}", found, status, figures={"missing": missing})

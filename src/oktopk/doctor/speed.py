"""Time the pass over a gradient beside the speed of memory.

Adding a gradient to the residual reads 8 bytes an element and writes 4, so that no selection can be faster than 12
bytes an element at the speed of a copy, which is measured here, too.
"""

import time
from collections.abc import Callable, Iterator
from statistics import median

import torch
from torch import Tensor

from oktopk.algorithms import OkTopk
from oktopk.bench.machine import torch_threads
from oktopk.bench.models import heavy_tailed
from oktopk.cuda.reference import Found, room_for
from oktopk.cuda.step import supports_device_step
from oktopk.doctor.here import LSTM_NUMEL, RESIDENT
from oktopk.doctor.report import NOTE, OK, Finding
from oktopk.feedback import FEW
from oktopk.kernels import kernels_for

ROUNDS, LIMIT_S = 9, 0.4
SAMPLE = 100_000
COPY_BYTES, FLOOR_BYTES = 8, 12
SLOW = 0.25
"""Fraction of the speed of a copy below which the report gives advice."""


def selection(device: torch.device) -> Iterator[Finding]:
    """Time a copy, and adding and selecting at the default density."""
    numel, density = LSTM_NUMEL, OkTopk().density
    grad, residual = heavy_tailed(numel, 1, str(device)), heavy_tailed(numel, 2, str(device))
    acc = torch.empty_like(residual)
    one_core = device.type == "cpu"
    with torch_threads(1 if one_core else torch.get_num_threads()):  # the compiled pass has one
        copy_s = seconds(lambda: acc.copy_(residual), device)
    bandwidth = COPY_BYTES * numel / copy_s
    found = f"{bandwidth / 1e9:,.1f} GB/s{' by one core' if one_core else ''}"
    yield Finding("speed", f"copy, {device}", found, figures={"bytes_per_s": bandwidth})
    select_s = seconds(_pass_of(grad, residual, acc, density), device)
    fraction = FLOOR_BYTES * numel / bandwidth / select_s
    found = f"{1e3 * select_s:.3g} ms for {numel:,} elements at {density:.0%}: {fraction:.0%} of the speed of a copy"
    figures = {"numel": numel, "density": density, "seconds": select_s, "of_copy": fraction}
    advice = "are the cores busy? are the kernels above the fast ones?" if fraction < SLOW else ""
    yield Finding("speed", f"add and select, {device}", found, NOTE if advice else OK, advice, figures)


def _pass_of(grad: Tensor, residual: Tensor, acc: Tensor, density: float) -> Callable[[], object]:
    """Return the pass of a step over its gradient: acc = residual + grad, and its elements above a threshold."""
    numel, device = len(residual), residual.device
    sample = (residual + grad)[:: max(numel // SAMPLE, 1)].abs()
    threshold = sample.topk(max(int(density * len(sample)), 1)).values[-1:].clone()
    if supports_device_step(RESIDENT, numel, residual.dtype, device):
        from oktopk.cuda import triton as fast

        found = Found(numel, room_for(density), device)
        step_offset = torch.zeros(1, dtype=torch.int32, device=device)
        return lambda: fast.accumulate_compact(grad, residual, acc, threshold, step_offset, found)
    kernels, floors = kernels_for(acc), threshold.tolist()
    return lambda: kernels.accumulate_above(grad, residual, acc, [0, numel], floors, numel // FEW)


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Return the median time of up to `ROUNDS` rounds, after one that does not count; fewer where they are slow."""
    wait = torch.cuda.synchronize if device.type == "cuda" else torch.cpu.synchronize
    work()
    took: list[float] = []
    began = time.perf_counter()
    while len(took) < ROUNDS and (len(took) < 2 or time.perf_counter() - began < LIMIT_S):
        wait()
        start = time.perf_counter()
        work()
        wait()
        took.append(time.perf_counter() - start)
    return median(took)

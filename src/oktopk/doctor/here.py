"""Versions, devices and backends here, and the kernels in use because of them.

No package is imported to learn its version; triton, above all, is imported only where there is a GPU.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from importlib import metadata

import torch
import torch.distributed as dist

import oktopk
from oktopk.algorithms import OkTopk, OkTopkPaper
from oktopk.bench.machine import num_cores, processor
from oktopk.cuda.step import LEAST_TRITON, supports_device_step
from oktopk.doctor.finding import NOTE, OK, Finding
from oktopk.kernels import WORTH_COMPILING, kernels_for

GIB = 1 << 30
LSTM_NUMEL = 27_569_568
"""Parameters of the paper's speech recogniser."""

BACKENDS = ("gloo", "nccl", "mpi", "ucc", "xccl")
RESIDENT = OkTopk(wire="fp32")
"""Settings with which steps stay on a GPU that supports it."""

ON_DEVICE = {"the defaults": OkTopk(), 'wire="fp32"': RESIDENT, "OkTopkPaper": OkTopkPaper()}


def versions() -> Iterator[Finding]:
    """Yield the versions of the packages."""
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    found = {
        "oktopk": oktopk.__version__,
        "python": platform.python_version(),
        "torch": f"{torch.__version__}, {built}",
    }
    found |= {name: version_of(name) or "not installed" for name in ("numpy", "numba", "triton")}
    yield from (Finding("versions", name, version) for name, version in found.items())


def version_of(name: str) -> str | None:
    """Return the version of an installed package, without importing it."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def devices() -> Iterator[Finding]:
    """Yield the processor and the GPUs."""
    threads, cores = torch.get_num_threads(), num_cores()
    many = f"{cores} core{'s' if cores > 1 else ''} for this process, torch uses {threads} thread{'s'[: threads - 1]}"
    advice = f"OMP_NUM_THREADS={cores}, or less where several workers share the cores" if threads > cores else ""
    figures = {"cores": cores, "threads": threads}
    yield Finding("device", "cpu", f"{processor()}; {many}", NOTE if advice else OK, advice, figures)
    for i in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(i)
        found, figures = f"{gpu.name}, {gpu.total_memory / GIB:.0f} GiB", {"memory_bytes": gpu.total_memory}
        yield Finding("device", f"cuda:{i}", found, OK, figures=figures)
    if torch.version.cuda and not torch.cuda.is_available():
        yield Finding("device", "cuda", "torch was built for it, and finds no GPU", NOTE, "see what nvidia-smi says")


def usable() -> list[torch.device]:
    """Return the devices to examine: the CPU and each GPU."""
    return [torch.device("cpu"), *(torch.device("cuda", i) for i in range(torch.cuda.device_count()))]


def backends() -> Iterator[Finding]:
    """Yield the backends of torch.distributed."""
    there = [name for name in BACKENDS if getattr(dist, f"is_{name}_available", lambda: False)()]
    if there:
        yield Finding("backends", "torch.distributed", ", ".join(there), OK)
    else:
        yield Finding("backends", "torch.distributed", "none", NOTE, "this torch cannot train on several workers")


def kernels(device: torch.device) -> Iterator[Finding]:
    """Yield the kernels in use on a device, and why."""
    yield from _of_gpu(device) if device.type == "cuda" else _of_cpu()


def _of_cpu() -> Iterator[Finding]:
    large, small = kernels_for(torch.empty(WORTH_COMPILING)), kernels_for(torch.empty(0))
    if large is not small:
        found = f"{large.NAME}; {small.NAME} below {WORTH_COMPILING:,} elements, where compiling gains nothing"
        yield Finding("kernels", "cpu", found, OK)
    else:  # without the compiled kernels, which are more than twice as fast
        yield Finding("kernels", "cpu", f"{large.NAME}: {_why_no_numba()}", NOTE, "pip install 'oktopk[cpu]'")


def _why_no_numba() -> str:
    if version_of("numba") is None:
        return "numba is not installed"
    try:
        from oktopk.kernels import numba_cpu  # noqa: F401
    except ImportError as error:
        return f"numba cannot be imported ({error})"
    return "numba was found only now"


def _of_gpu(device: torch.device) -> Iterator[Finding]:
    name = str(device)
    fast = [
        settings
        for settings, algorithm in ON_DEVICE.items()
        if supports_device_step(algorithm, LSTM_NUMEL, torch.float32, device)
    ]
    if not fast:
        least = ".".join(map(str, LEAST_TRITON))
        found = f"plain torch: there is no triton {least} or later, and every step waits for the device to count"
        yield Finding("kernels", name, found, NOTE, "pip install 'oktopk[gpu]'")
        return
    yield Finding("kernels", name, f"triton: steps stay on the device with {', '.join(fast)}", OK)
    others = ", ".join(settings for settings in ON_DEVICE if settings not in fast)
    if others:
        yield Finding("kernels", name, f"plain torch, which waits for the device to count, with {others}")

"""Versions, devices and backends here, and the kernels in use because of them.

No package is imported to learn its version; triton, above all, is imported only where there is a GPU.
"""

import platform
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec

import torch
import torch.distributed as dist

import oktopk
from oktopk.algorithms import OkTopk, OkTopkPaper
from oktopk.bench.machine import num_cores, processor
from oktopk.cuda.step import LEAST_TRITON, supports_device_step
from oktopk.doctor.report import NOTE, OK, Finding
from oktopk.kernels import WORTH_COMPILING, kernels_for

GIB = 1 << 30
LSTM_NUMEL = 27_569_568
"""Parameters of the paper's speech recogniser."""

BACKENDS = ("gloo", "nccl", "mpi", "ucc", "xccl")
RESIDENT = OkTopk()
"""Settings with which steps stay on a GPU that supports it."""

PACKED_THERE = 'wire="auto" sends float32 there; "int8" and "bf16" are packed by kernels that have not run on a GPU yet'

ON_DEVICE = {"OkTopk": RESIDENT, "OkTopkPaper": OkTopkPaper()}


def versions() -> Iterator[Finding]:
    """Yield the versions of the packages."""
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    torch_version = f"{torch.__version__}, {built}"
    found = {"oktopk": oktopk.__version__, "python": platform.python_version(), "torch": torch_version}
    for name in ("numpy", "numba", "triton"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    yield from (Finding("versions", name, version) for name, version in found.items())


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


def backends() -> Iterator[Finding]:
    """Yield the backends of torch.distributed."""
    there = [name for name in BACKENDS if getattr(dist, f"is_{name}_available", lambda: False)()]
    advice = "" if there else "this torch cannot train on several workers"
    yield Finding("backends", "torch.distributed", ", ".join(there) or "none", OK if there else NOTE, advice)


def kernels(device: torch.device) -> Iterator[Finding]:
    """Yield the kernels in use on a device, and why."""
    yield from _of_gpu(device) if device.type == "cuda" else _of_cpu()


def _of_cpu() -> Iterator[Finding]:
    large, small = kernels_for(torch.empty(WORTH_COMPILING)), kernels_for(torch.empty(0))
    if large is not small:
        found = f"{large.name}; {small.name} below {WORTH_COMPILING:,} elements, where compiling gains nothing"
        yield Finding("kernels", "cpu", found, OK)
        return
    try:
        import oktopk.kernels.numba_cpu  # noqa: F401
    except ImportError as error:  # and the compiled kernels are more than twice as fast
        why = f"numba cannot be imported ({error})" if find_spec("numba") else "numba is not installed"
        found = f"{large.name}: {why}"
        yield Finding("kernels", "cpu", found, NOTE, "pip install 'oktopk[cpu]'")


def _of_gpu(device: torch.device) -> Iterator[Finding]:
    name = str(device)
    vector = LSTM_NUMEL, torch.float32, device
    fast = [settings for settings, algorithm in ON_DEVICE.items() if supports_device_step(algorithm, *vector)]
    if not fast:
        least = ".".join(map(str, LEAST_TRITON))
        found = f"plain torch: there is no triton {least} or later, and every step waits for the device to count"
        yield Finding("kernels", name, found, NOTE, "pip install 'oktopk[gpu]'")
        return
    yield Finding("kernels", name, f"triton: steps stay on the device with {', '.join(fast)}", OK)
    yield Finding("kernels", name, PACKED_THERE, NOTE)
    others = ", ".join(settings for settings in ON_DEVICE if settings not in fast)
    if others:
        yield Finding("kernels", name, f"plain torch, which waits for the device to count, with {others}")

"""What is here: versions, devices, backends, and which kernels are in use because of that.

Nothing is imported to learn its version: triton, above all, only where there is a GPU.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from importlib import metadata

import torch
import torch.distributed as dist

import oktopk
from oktopk.algorithms import OkTopk
from oktopk.bench.processes import num_cores
from oktopk.bench.provenance import processor
from oktopk.cuda.step import LEAST_TRITON, supports_device_step
from oktopk.doctor.finding import NOTE, OK, Finding
from oktopk.kernels import WORTH_COMPILING, kernels_for

GIB = 1 << 30
LSTM_NUMEL = 27_569_568
"""The parameters of the paper's speech recogniser."""

BACKENDS = ("gloo", "nccl", "mpi", "ucc", "xccl")
RESIDENT = OkTopk(wire="fp32")
"""The settings with which steps stay on a GPU, if they can."""

STAYING = {"the defaults": OkTopk(), 'wire="fp32"': RESIDENT, 'mode="paper"': OkTopk(mode="paper")}


def versions() -> Iterator[Finding]:
    """Say what is installed."""
    yield Finding("versions", "oktopk", oktopk.__version__)
    yield Finding("versions", "python", platform.python_version())
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    yield Finding("versions", "torch", f"{torch.__version__}, {built}")
    for name in ("numpy", "numba", "triton"):
        yield Finding("versions", name, version_of(name) or "not installed")


def version_of(name: str) -> str | None:
    """Return the version of an installed package, which is not imported."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def devices() -> Iterator[Finding]:
    """Say what computes."""
    threads, cores = torch.get_num_threads(), num_cores()
    many = f"{cores} core{'s' if cores > 1 else ''} for this process, torch uses {threads} thread{'s'[: threads - 1]}"
    advice = f"OMP_NUM_THREADS={cores}, or less where several workers share the cores" if threads > cores else ""
    figures = {"cores": cores, "threads": threads}
    yield Finding("device", "cpu", f"{processor()}; {many}", NOTE if advice else OK, advice, figures)
    for i in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(i)
        yield Finding(
            "device", f"cuda:{i}", f"{about.name}, {about.total_memory / GIB:.0f} GiB", OK,
            figures={"memory_bytes": about.total_memory},
        )  # fmt: skip
    if torch.version.cuda and not torch.cuda.is_available():
        yield Finding("device", "cuda", "torch was built for it, and finds no GPU", NOTE, "see what nvidia-smi says")


def usable() -> list[torch.device]:
    """Return what is examined: the CPU and each GPU."""
    return [torch.device("cpu"), *(torch.device("cuda", i) for i in range(torch.cuda.device_count()))]


def backends() -> Iterator[Finding]:
    """Say by what the ranks can talk."""
    there = [name for name in BACKENDS if dist.is_available() and getattr(dist, f"is_{name}_available", _never)()]
    if there:
        yield Finding("backends", "torch.distributed", ", ".join(there), OK)
    else:
        yield Finding("backends", "torch.distributed", "none", NOTE, "this torch cannot train on several workers")


def _never() -> bool:
    return False


def kernels(device: torch.device) -> Iterator[Finding]:
    """Say which kernels are in use on a device, and why."""
    yield from _of_gpu(device) if device.type == "cuda" else _of_cpu()


def _of_cpu() -> Iterator[Finding]:
    large = kernels_for(torch.empty(WORTH_COMPILING))
    small = kernels_for(torch.empty(0))
    if large is not small:
        found = f"{large.NAME}; {small.NAME} below {WORTH_COMPILING:,} elements, where compiling gains nothing"
        yield Finding("kernels", "cpu", found, OK)
    else:
        yield Finding("kernels", "cpu", f"{large.NAME}: {_why_no_numba()}", NOTE, "pip install 'oktopk[cpu]'")


def _why_no_numba() -> str:
    """Return why the compiled kernels, which are more than twice as fast, are not in use."""
    if version_of("numba") is None:
        return "numba is not installed"
    try:
        from oktopk.kernels import numba_cpu  # noqa: F401
    except ImportError as error:
        return f"numba cannot be imported ({error})"
    return "numba was found only now"


def _of_gpu(device: torch.device) -> Iterator[Finding]:
    stays = [
        name
        for name, algorithm in STAYING.items()
        if supports_device_step(algorithm, LSTM_NUMEL, torch.float32, device)
    ]
    others = ", ".join(name for name in STAYING if name not in stays)
    if stays:
        yield Finding("kernels", str(device), f"triton: steps stay on the device with {', '.join(stays)}", OK)
    else:
        least = ".".join(map(str, LEAST_TRITON))
        found = f"plain torch: there is no triton {least} or later, and every step waits for the device to count"
        yield Finding("kernels", str(device), found, NOTE, "pip install 'oktopk[gpu]'")
    if stays and others:
        yield Finding("kernels", str(device), f"plain torch, which waits for the device to count, with {others}")

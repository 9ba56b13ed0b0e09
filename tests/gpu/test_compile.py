"""Every triton kernel compiles for a GPU, with the arguments that steps give it; no GPU is needed for that."""

import os
import threading
from functools import partial
from unittest import mock

import pytest
import torch

import oktopk
from oktopk.codec.values import WIRES
from oktopk.cuda.reference import group_of
from tests.cases import device_step

pytest.importorskip("triton", reason="triton is not installed")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.skipif(INTERPRETED, reason="TRITON_INTERPRET=1 is set: kernels are interpreted, not compiled"),
]

HOPPER = 90
SHARED_BYTES = 227 * 1024
"""Shared memory that a block of threads can have there."""

NUMEL = 20_000
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class NoGPU:
    """What triton asks its driver before it compiles."""

    @staticmethod
    def get_current_target():
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", HOPPER, 32)

    @staticmethod
    def get_current_device():
        return 0

    @staticmethod
    def get_current_stream(device):
        return device


@pytest.fixture
def compiled():
    """Compile kernels on steps of CPU tensors, and launch none; return the names of those that were compiled."""
    import triton

    from oktopk.cuda import triton as kernels
    from oktopk.cuda.triton_launch import Kernel

    names, lock = set(), threading.Lock()

    def compile_only(kernel, grid, *args):
        with lock:  # Python 3.11 parses in one thread at a time
            made = kernel.jit.warmup(*args, grid=grid)
        assert made.asm["cubin"]
        assert made.metadata.shared <= SHARED_BYTES
        names.add(kernel.jit.__name__)

    with (
        mock.patch.object(triton.runtime.driver, "_active", NoGPU()),
        mock.patch.object(Kernel, "__call__", compile_only),
        mock.patch("oktopk.cuda.step.step_kernels", return_value=kernels),
        device_step(),
    ):
        yield names


def steps(comm, wire):
    """One step with every dtype and ranking, and at two densities."""
    for density, dtype in (*((0.03, dtype) for dtype in DTYPES), (1.0, torch.float32)):
        for ranking, segments in (("magnitude", None), ("scaled", [NUMEL // 200] * 200)):
            algorithm = oktopk.OkTopk(density=density, wire=wire, ranking=ranking)
            oktopk.Reducer(algorithm, comm, segments=segments).all_reduce(torch.ones(NUMEL, dtype=dtype))


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_kernels_of_steps_compile(compiled, wire, size):
    """All of them, where there are several ranks and blocks are packed."""
    from oktopk.cuda import triton, triton_codec
    from oktopk.cuda.triton_launch import Kernel

    oktopk.run_local(size, partial(steps, wire=wire))
    everything = {**vars(triton), **vars(triton_codec)}.values()
    names = {each.jit.__name__ for each in everything if isinstance(each, Kernel)} - {"_settle"}
    packed = {"_encode", "_count_ones", "_decode"} if wire == "fp32" else set()
    owned = {"_refuse", "_add"} if size == 1 else set()
    assert compiled == names - packed - owned


def test_those_of_a_large_vector_compile(compiled):
    """It counts more tiles together: those of a small one, by a number that a large one has."""
    with mock.patch("oktopk.cuda.triton.group_of", return_value=group_of(1 << 20)):
        oktopk.run_local(2, partial(steps, wire="fp32"))
    assert {"_find", "_plan", "_send"} <= compiled


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_takes_a_step_back_compiles(compiled, dtype):
    from oktopk.cuda import triton

    vector = torch.zeros(NUMEL)
    triton.rollback_if(torch.zeros(1, dtype=torch.int32), vector, vector, vector.to(dtype), 0.0)

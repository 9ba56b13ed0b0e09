"""PyTorch's own DDP tests, as shipped in torch.testing, with our hook at density 1. Run by test_torch_comm_hooks.py.

    BACKEND=gloo WORLD_SIZE=2 python -m tests.integrations.torch_suite Registered.test_...

They are unittest classes that spawn their ranks by running this file again; so what is patched here is patched there.
"""

import inspect
import sys
from collections.abc import Callable
from contextlib import contextmanager
from typing import ClassVar
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.testing._internal.common_utils import run_tests
from torch.testing._internal.distributed import distributed_test
from torch.testing._internal.distributed.distributed_test import DDPUnevenTestInput, DistributedTest, TestDistBackend

import oktopk
from oktopk.ddp.hook import _hook
from tests.integrations.test_torch_comm_hooks import TESTS

MADE = []  # models and their handles, to be asked at the end whether gradients went through oktopk
really_register = DistributedDataParallel.register_comm_hook
really_init = DistributedDataParallel.__init__


def attach(model):
    MADE.append((model, oktopk.attach(model, oktopk.OkTopk(density=1.0), dense_steps=0, exclude=(), timeout=60)))


def register(self, state, hook):
    if hook is _hook:
        really_register(self, state, hook)
    else:
        attach(self)


def init(self, *args, **kwargs):
    really_init(self, *args, **kwargs)
    attach(self)


def init_on_cpu(self, module, device_ids=None, **kwargs):
    really_init(self, module, **kwargs)


def init_on_cpu_and_attach(self, *args, **kwargs):
    init_on_cpu(self, *args, **kwargs)
    attach(self)


class StayOnCpu(TorchFunctionMode):
    """Makes moves to a GPU no moves, and tensors that are asked for on a GPU, by its number, CPU tensors."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if isinstance(kwargs.get("device"), int):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


@contextmanager
def staying_on_cpu(size):
    def itself(module, *_):
        return module

    gpus = {rank: [rank] for rank in range(size)}
    with (
        mock.patch.multiple(torch.cuda, **{name: mock.Mock() for name in ("set_device", "synchronize", "manual_seed")}),
        mock.patch.object(torch.cuda, "current_device", return_value="cpu"),
        mock.patch.multiple(nn.Module, to=itself, cuda=itself),
        mock.patch.object(distributed_test, "init_multigpu_helper", return_value=gpus),
        StayOnCpu(),
    ):
        yield


class Suite(TestDistBackend, DistributedTest._DistTestBase):
    """Spawns the ranks before each test, and asks each of them after it whether our hook was at work."""

    patches: ClassVar[dict[str, Callable[..., None]]] = {}

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def run_test(self, test_name, parent_pipe):
        torch.set_num_threads(1)
        with mock.patch.multiple(DistributedDataParallel, **self.patches):
            super().run_test(test_name, parent_pipe)
        assert MADE, "no DDP model got our hook"
        assert all(attached.active for _, attached in MADE)
        steps = sum(attached.summary().sparse.steps for _, attached in MADE)
        sys.stderr.write(f"rank {self.rank}: oktopk made {steps} steps\n")
        for _, attached in MADE:
            attached.detach()


class OnCpu(Suite):
    def run_test(self, test_name, parent_pipe):
        with staying_on_cpu(int(self.world_size)):
            super().run_test(test_name, parent_pipe)


class Registered(Suite):
    """A test that registers a hook gets ours in its place."""

    patches: ClassVar = {"register_comm_hook": register}


class RegisteredOnCpu(OnCpu):
    """The same for a test that asks for GPUs, but only to put its tensors there: they stay here."""

    patches: ClassVar = {"register_comm_hook": register, "__init__": init_on_cpu}

    def test_ddp_uneven_inputs(self):
        """Only the part that registers a hook; the rest is about large nets without one, and slow on a CPU."""
        iterations = {rank: 2 * (rank + 1) for rank in range(dist.get_world_size())}
        hook, inputs = distributed_test.default.allreduce_hook, torch.ones(1, 1000)
        for early in (False, True):
            model = nn.Linear(1000, 1000, bias=False)
            case = DDPUnevenTestInput("small_model", model, inputs, 1, early, hook=hook, state=None)
            self._run_uneven_inputs_test(case, iterations, find_unused_params=False)


class Constructed(Suite):
    """A test that makes DDP models without a hook gets ours attached to each of them."""

    patches: ClassVar = {"__init__": init}


class ConstructedOnCpu(OnCpu):
    patches: ClassVar = {"__init__": init_on_cpu_and_attach}


for group in (RegisteredOnCpu, ConstructedOnCpu):
    for name in TESTS[group.__name__]:
        if name not in vars(group):
            # Without its decorators, which skip it where there are too few GPUs.
            setattr(group, name, inspect.unwrap(getattr(DistributedTest._DistTestBase, name)))


if __name__ == "__main__":
    run_tests()

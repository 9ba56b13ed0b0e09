"""Ranks that may be killed, frozen or broken: processes of their own session, which tell what they do over a pipe."""

import os
import time
from contextlib import ExitStack, suppress
from datetime import timedelta
from functools import partial
from multiprocessing.connection import wait
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD

from oktopk import JsonlSink, LocalSteps, OkTopk
from tests.ddp.accounts import weights_of
from tests.ddp.harness import attach, end_now, started
from tests.ddp.nets import Net, descend_, step_

EXCHANGE_S = 5.0  # attach(timeout=...)
WORLD_S = 60.0  # init_process_group(timeout=...)
START_S = 40.0  # for everything before the first step, on a busy machine
SPARSE = OkTopk(density=0.05)
ERROR = 1  # the exit code of a rank that saw an error


class Mortals(ExitStack):
    """The ranks of one job, whose plan are the keywords of `_live`. `with` it; at the end none is left.

    A rank has `told` its latest step, and how it ended (its error, or the sum of its weights), and when.
    """

    def __init__(self, size, **plan):
        super().__init__()
        self.told = [SimpleNamespace(step=-1, end=None, at_s=0.0, gone=False) for _ in range(size)]
        self._pipes, self._processes = started(size, partial(_live, **plan), size)
        self.callback(end_now, self._pipes, self._processes)
        port = self._pipes[0].recv()
        for pipe in self._pipes[1:]:
            pipe.send(port)

    def send_signal(self, rank, number):
        os.kill(self._processes[rank].pid, number)
        return time.monotonic()

    def release(self):
        """Let ranks end that stayed after their error."""
        for pipe in self._pipes:
            with suppress(OSError):  # of a rank that has not stayed
                pipe.send("end")

    def wait_for_step(self, rank, step):
        self._listen(lambda: self.told[rank].step >= step, START_S, f"step {step} of rank {rank}")

    def wait_for_word(self, rank, timeout_s):
        """Return what a rank told in the end: its error, or the sum of its weights."""
        told = self.told[rank]
        self._listen(lambda: told.end is not None or told.gone, timeout_s, f"a word of rank {rank}")
        assert told.end is not None, f"rank {rank} went without a word: {self.told}"
        return told.end

    def wait_for_exit(self, rank, timeout_s):
        """Return a rank's exit code, once it and all that it may have started are gone."""
        process = self._processes[rank]
        self._listen(lambda: self.told[rank].gone, timeout_s, f"the end of rank {rank}")
        process.join(timeout_s)
        assert process.exitcode is not None, f"rank {rank} did not end in {timeout_s:g} s"
        with pytest.raises(ProcessLookupError):  # its session is empty
            os.killpg(process.pid, 0)
        return process.exitcode

    def _listen(self, ready, timeout_s, what):
        """Note what ranks tell until `ready`."""
        give_up = time.monotonic() + timeout_s
        while not ready():
            here = {self._pipes[rank]: told for rank, told in enumerate(self.told) if not told.gone}
            came = wait(list(here), max(give_up - time.monotonic(), 0))
            assert came, f"waited {timeout_s:g} s for {what}: {self.told}"
            for pipe in came:
                try:
                    name, value = pipe.recv()
                except (EOFError, OSError):
                    name, value = "gone", True
                setattr(here[pipe], name, value)
                if name == "end":
                    here[pipe].at_s = time.monotonic()


def _live(
    rank,
    pipe,
    size,
    algorithm=SPARSE,
    steps=1_000_000,
    dense_steps=2,
    jsonl=None,
    before_step=None,
    stays=False,
    every=0,
    shards=0,
):
    """Train as a rank; `before_step` gets rank, step and handle. One that `stays` after an error waits for its end.

    With `every` it makes local steps, and exchanges every so many of them. With `shards` FSDP shards the model.
    """
    os.setsid()
    torch.set_num_threads(1)
    timeout = timedelta(seconds=WORLD_S)
    if rank == 0:  # which hosts the store, as in scripts that set MASTER_ADDR
        store = dist.TCPStore("127.0.0.1", 0, size, is_master=True, timeout=timeout, wait_for_workers=False)
        pipe.send(store.port)
    else:
        store = dist.TCPStore("127.0.0.1", pipe.recv(), size, timeout=timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    sinks = [] if jsonl is None else [JsonlSink(f"{jsonl}{rank}")]
    settings = {"timeout": EXCHANGE_S, "sinks": sinks}
    if every:
        model = Net()
        attached = LocalSteps(model, SGD(model.parameters()), algorithm, every=every, **settings)
    elif shards:
        mesh = init_device_mesh("cpu", (size // shards, shards), mesh_dim_names=("replicate", "shard"))
        model = fully_shard(Net(), mesh=mesh["shard"])
        attached = attach(model, algorithm, dense_steps=dense_steps, mesh=mesh["replicate"], **settings)
    else:
        model = DDP(Net())
        attached = attach(model, algorithm, dense_steps=dense_steps, **settings)
    try:
        for step in range(steps):
            if before_step is not None:
                before_step(rank, step, attached)
            step_(model, step)
            attached.step() if every else descend_(model)
            pipe.send(("step", step))
        assert attached.active
        weights = weights_of(getattr(model, "module", model))
        pipe.send(("end", sum(float(weight.double().sum()) for weight in weights.values())))
    except Exception as error:
        pipe.send(("end", f"{type(error).__name__}: {error}"))
        if stays:
            pipe.recv()
        raise SystemExit(ERROR) from None
    finally:
        attached.detach()

"""Our own way to start workers on this machine."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from oktopk.errors import PeerError
from oktopk.train.dist import HERE, STARTER, STORE


def start_workers(command: Sequence[str], nproc: int, folder: Path, max_restarts: int, threads: int) -> None:
    """Run `nproc` workers of this program until all are done; one that fails ends all, or restarts all.

    They meet through files in `folder` and talk through this machine's loopback: nothing listens to the outside.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    meeting = folder / f".meeting-{os.getpid()}"
    meeting.mkdir()
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=folder.name,
        rdzv_backend="c10d",
        rdzv_endpoint=str(meeting / "rendezvous"),
        rdzv_configs={"store_type": "file"},
        local_addr=HERE,
        max_restarts=max_restarts,
        logs_specs=DefaultLogsSpecs(log_dir=str(meeting)),
    )
    try:
        with _environment(_for_workers(meeting, threads)):
            elastic_launch(config, sys.executable)(*command)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        how = f"was killed by {failure.signal_name()}" if failure.exitcode < 0 else f"ended with {failure.exitcode}"
        raise PeerError(f"worker {rank} {how}, and all others were ended; its last words are above") from None
    except SignalException as error:
        name = signal.Signals(error.sigval).name
        raise PeerError(f"{name} ended the run; oktopk train --resume {folder} goes on from a checkpoint") from None
    finally:
        shutil.rmtree(meeting, ignore_errors=True)


def _for_workers(meeting: Path, threads: int) -> dict[str, str]:
    return {
        STORE: str(meeting / "store-"),
        STARTER: str(os.getpid()),
        "OMP_NUM_THREADS": str(threads),
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # or the launcher would listen on all addresses
    }


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Have these variables for a while: the elastic launcher's workers get what its own process has."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            os.environ.pop(name)
            os.environ.update({name: before[name]} if name in before else {})

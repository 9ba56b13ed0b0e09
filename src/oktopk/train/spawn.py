"""Start the workers of a run on this machine, with torch's elastic launcher."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from oktopk.errors import PeerError
from oktopk.train.dist import HERE, STARTER, STORE


def start_workers(command: Sequence[str], nproc: int, folder: Path, max_restarts: int, threads: int) -> None:
    """Run `nproc` workers until all are done; one that fails ends all, or restarts all.

    They meet through files in `folder` and talk through the loopback: nothing listens to the outside.
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
    variables = {
        STORE: str(meeting / "store-"),
        STARTER: str(os.getpid()),
        "OMP_NUM_THREADS": str(threads),
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # or the launcher would listen on all addresses
    }
    before = dict(os.environ)
    os.environ.update(variables)  # the launcher hands its own environment to the workers
    try:
        elastic_launch(config, sys.executable)(*command)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        how = f"was killed by {failure.signal_name()}" if failure.exitcode < 0 else f"ended with {failure.exitcode}"
        raise PeerError(f"worker {rank} {how}, and all others were ended; its last words are above") from None
    except SignalException as error:
        name = signal.Signals(error.sigval).name
        raise PeerError(f"{name} ended the run; oktopk train --resume {folder} goes on from a checkpoint") from None
    finally:
        os.environ.clear()
        os.environ.update(before)
        shutil.rmtree(meeting, ignore_errors=True)

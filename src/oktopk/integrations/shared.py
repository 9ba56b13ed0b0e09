"""Helpers of the integrations: find the DDP model, and keep residuals in checkpoint directories."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from torch.nn.parallel import DistributedDataParallel

from oktopk.ddp.attach import Attached
from oktopk.ddp.checkpoint import load_distributed, save_distributed
from oktopk.errors import SettingError

FOLDER = "oktopk"
"""Name of the folder of the residuals in a checkpoint."""


def ddp_of(model: object, how: str) -> DistributedDataParallel:
    """Return the DDP model of a trainer; the error says with `how` how to get one."""
    model = getattr(model, "_orig_mod", model)  # the model inside torch.compile
    if not isinstance(model, DistributedDataParallel):
        raise SettingError(f"the model is a {type(model).__name__}, not in DDP, so there is no exchange: {how}")
    return model


def save_beside(checkpoint: str | os.PathLike[str], attached: Attached) -> None:
    """Put every rank's residuals into a checkpoint directory that all ranks see. All ranks call this."""
    save_distributed(Path(checkpoint) / FOLDER, attached)


def load_beside(checkpoint: str | os.PathLike[str], attached: Attached) -> None:
    """Load the residuals that `save_beside` wrote, and print that, or that there are none. All ranks call this."""
    folder = Path(checkpoint) / FOLDER
    if folder.is_dir():
        load_distributed(folder, attached)
        said = f"residuals of step {attached.step} from {folder}"
    else:
        said = f"WARNING: no residuals in {checkpoint}: going on without them, dense steps first"
    if not attached.rank:
        sys.stderr.write(f"oktopk: {said}\n")

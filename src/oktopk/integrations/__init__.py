"""Integrations with trainers above DDP. Each needs its package; importing oktopk imports none of them.

    from oktopk.integrations.lightning import OktopkCallback      # Trainer(callbacks=[OktopkCallback("oktopk")])
    from oktopk.integrations.accelerate import attach             # attach(accelerator, model, "oktopk")
    from oktopk.integrations.transformers import attach           # attach(trainer, "oktopk")

Each attaches to the DDP model inside the trainer, hands over the GradScaler, and puts the residuals into the
checkpoints. `docs/trainers.md` lists the hooks that each trainer drops without a word.
"""

import os
import sys
from pathlib import Path

from torch.nn.parallel import DistributedDataParallel

from oktopk import Attached, SettingError, load_distributed

FOLDER = "oktopk"
"""Name of the folder of the residuals in a checkpoint."""


def ddp_of(model: object, how: str) -> DistributedDataParallel:
    """Return the DDP model of a trainer; the error says with `how` how to get one."""
    model = getattr(model, "_orig_mod", model)  # the model inside torch.compile
    if not isinstance(model, DistributedDataParallel):
        raise SettingError(f"the model is a {type(model).__name__}, not in DDP, so there is no exchange: {how}")
    return model


def load_beside(checkpoint: str | os.PathLike[str], attached: Attached) -> None:
    """Load the residuals from a checkpoint directory, and print that, or that there are none. All ranks call this."""
    folder = Path(checkpoint) / FOLDER
    if folder.is_dir():
        load_distributed(folder, attached)
        said = f"residuals of step {attached.step} from {folder}"
    else:
        said = f"WARNING: no residuals in {checkpoint}: going on without them, dense steps first"
    if not attached.rank:
        sys.stderr.write(f"oktopk: {said}\n")

"""Integrations with trainers above DDP. Each needs its package; importing oktopk imports none of them.

    from oktopk.integrations.lightning import OktopkCallback      # Trainer(callbacks=[OktopkCallback("oktopk")])
    from oktopk.integrations.accelerate import attach             # attach(accelerator, model, "oktopk")
    from oktopk.integrations.transformers import attach           # attach(trainer, "oktopk")

Each attaches to the DDP model inside the trainer, hands over the GradScaler and the optimizers, and puts the residuals
into the checkpoints. Figures go both ways: the trainer's logger gets those of the exchange, the record gets the
trainer's. `docs/trainers.md` lists the hooks that each trainer drops without a word.
"""

import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from oktopk import Attached, SettingError, StepRecord, load_distributed

FOLDER = "oktopk"
"""Name of the folder of the residuals in a checkpoint."""

PREFIX = "oktopk/"
"""Beginning of the names of the exchange's figures in a trainer's logger."""


class Latest:
    """A sink that keeps the latest record, so that a trainer's thread can log it without a wait."""

    def __init__(self) -> None:
        self._record: StepRecord | None = None

    def write(self, record: StepRecord) -> None:
        """Keep the record."""
        self._record = record

    def close(self) -> None:
        """Keep the last one."""

    def figures(self) -> dict[str, float]:
        """Return the figures of the record under the names of a logger; none before the first step."""
        return {} if self._record is None else {PREFIX + tag: each for tag, each in self._record.scalars().items()}

    def among(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings of `attach` with this sink among the sinks."""
        return {**settings, "sinks": [*settings.get("sinks", ()), self]}


def log_numbers(attached: Attached, values: Mapping[str, Any]) -> None:
    """Put those of a trainer's figures that are numbers into the record."""
    numbers = {name: each for name, each in values.items() if not name.startswith(PREFIX) and _is_number(each)}
    if numbers:
        attached.log(**numbers)


def _is_number(value: Any) -> bool:
    return value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, (int, float))


def ddp_of(model: object, how: str) -> DistributedDataParallel:
    """Return the DDP model of a trainer; the error says with `how` how to get one."""
    model = getattr(model, "_orig_mod", model)  # the model inside torch.compile
    if not isinstance(model, DistributedDataParallel):
        raise SettingError(f"the model is a {type(model).__name__}, not in DDP, so there is no exchange: {how}")
    return model


def optimizer_setting(optimizers: Iterable[Any], model: DistributedDataParallel) -> dict[str, list[Any]]:
    """Return the setting `optimizer` of `attach`: those of the trainer that step this model alone, if there are any."""
    ours = {id(parameter) for parameter in model.parameters()}
    found = [each for each in optimizers if all(id(p) in ours for group in each.param_groups for p in group["params"])]
    return {"optimizer": found} if found else {}


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

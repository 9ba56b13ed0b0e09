"""Ok-Topk under Hugging Face's `Trainer`.

`TrainingArguments` has no setting for a communication hook, and callbacks get the bare model, never the DDP one. This
callback takes the DDP model from the trainer itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import oktopk
from oktopk import Attached, save_distributed
from oktopk.algorithms import Algorithm
from oktopk.integrations import FOLDER, Latest, ddp_of, load_beside, log_numbers, optimizer_setting

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise ImportError(
        "oktopk.integrations.transformers needs Transformers: pip install 'transformers[torch]'"
    ) from error


def attach(trainer: Any, algorithm: Algorithm | str, **settings: Any) -> OktopkCallback:
    """Make `trainer.train()` attach before its first step, with the settings of `oktopk.attach`."""
    callback = OktopkCallback(trainer, algorithm, settings)
    trainer.add_callback(callback)
    return callback


class OktopkCallback(TrainerCallback):
    """Attaches when training begins, and keeps the residuals in the trainer's checkpoints.

    sparse    the `Attached`, once training has begun; further calls of `train` go on with it
    """

    def __init__(self, trainer: Any, algorithm: Algorithm | str, settings: dict[str, Any]) -> None:
        self.sparse: Attached | None = None
        self._model: Any = None  # the one to which `sparse` is attached
        self._latest = Latest()
        self._trainer, self._algorithm, self._settings = trainer, algorithm, self._latest.among(settings)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Attach: the model is in DDP, and the checkpoint, if any, is loaded."""
        model = ddp_of(self._trainer.model_wrapped, "start two processes or more, with torchrun")
        if self.sparse is None or model is not self._model or not self.sparse.active:
            if self.sparse is not None:
                self.sparse.detach()
            scaler = self._trainer.accelerator.scaler
            defaults = {"scaler": scaler, **optimizer_setting([self._trainer.optimizer], model)}
            self.sparse = oktopk.attach(model, self._algorithm, **{**defaults, **self._settings})
            self._model = model
        if state.global_step:
            load_beside(args.resume_from_checkpoint or self._checkpoint(args, state), self.sparse)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Log the exchange's figures where the trainer logs, as often."""
        if control.should_log and (figures := self._latest.figures()):
            self._trainer.log(figures)
            control.should_log = True  # log() takes it back, and the trainer's own figures are still to come

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:  # noqa: ARG002
        """Put the trainer's figures into the record."""
        if self.sparse is not None and self.sparse.active:
            log_numbers(self.sparse, logs or {})

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Put the residuals into the checkpoint that the trainer has just written. All ranks call this."""
        if self.sparse is not None and not state.is_hyper_param_search:  # whose checkpoints lie elsewhere
            save_distributed(self._checkpoint(args, state) / FOLDER, self.sparse)

    @staticmethod
    def _checkpoint(args: Any, state: Any) -> Path:
        return Path(args.output_dir) / f"checkpoint-{state.global_step}"

"""Ok-Topk under PyTorch Lightning.

Lightning's own `DDPStrategy(ddp_comm_hook=...)` registers a hook on CUDA only, and ignores it elsewhere. This callback
attaches on any device.
"""

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch.distributed as dist

from oktopk import Attached, attach
from oktopk.algorithms import Algorithm
from oktopk.integrations import Latest, ddp_of, log_numbers, optimizer_setting

try:
    from lightning.pytorch.callbacks import Callback
except ImportError as error:
    raise ImportError("oktopk.integrations.lightning needs Lightning: pip install lightning") from error

KEY = "oktopk"
"""Key of the residuals in a checkpoint: a list of every rank's `Attached.state_dict`."""


class OktopkCallback(Callback):
    """Attaches to the DDP model before the first step of `fit`, with the settings of `oktopk.attach`.

    sparse    the `Attached` of the latest `fit`; it is detached when `fit` is over, and keeps its summary
    """

    def __init__(self, algorithm: Algorithm | str, **settings: Any) -> None:
        self.sparse: Attached | None = None
        self._latest = Latest()
        self._algorithm, self._settings = algorithm, self._latest.among(settings)
        self._loaded: list[dict[str, Any]] | None = None

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """Attach: the strategy has wrapped the model and restored the checkpoint."""
        model = ddp_of(trainer.strategy.model, 'use Trainer(strategy="ddp", devices=2 or more)')
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        defaults = {"scaler": scaler, **optimizer_setting(trainer.optimizers, model)}
        self.sparse = attach(model, self._algorithm, **{**defaults, **self._settings})
        if self._loaded is not None:
            self.sparse.load_state_dict(self._loaded[self.sparse.rank % len(self._loaded)])
            self._loaded = None

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:  # noqa: ARG002
        """Log the exchange's figures where Lightning logs, as often, and put Lightning's into the record."""
        if self.sparse is None or trainer.global_step % trainer.log_every_n_steps:
            return
        outputs = outputs if isinstance(outputs, Mapping) else {"loss": outputs}
        log_numbers(self.sparse, {"loss": outputs.get("loss"), **trainer.callback_metrics})
        for logger in trainer.loggers:
            logger.log_metrics(self._latest.figures(), step=trainer.global_step)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: MutableMapping[str, Any]) -> None:  # noqa: ARG002
        """Gather every rank's state into the one file that Lightning writes. All ranks call this."""
        if self.sparse is None:
            return
        every: list[Any] = [None] * self.sparse.size
        dist.all_gather_object(every, self.sparse.state_dict(), group=self.sparse.group)
        checkpoint[KEY] = every

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: MutableMapping[str, Any]) -> None:  # noqa: ARG002
        """Keep the states for `on_fit_start`, because the model is not wrapped yet."""
        self._loaded = checkpoint.get(KEY)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:  # noqa: ARG002
        """Detach when `fit` is over: Lightning has taken the model out of DDP."""
        if self.sparse is not None and stage == "fit":
            self.sparse.detach()

"""`LocalTrainer`: the training loop of a worker that trains alone for H steps, and then exchanges how far it moved.

Nothing is sent between two exchanges: the figures of all steps since the last one travel with it. Validation and
checkpoints have the agreed point as the net, with the mean of the workers' buffers. A worker's own weights, buffers and
optimizer state are in its own file of a checkpoint.
"""

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from oktopk.ddp.local import LocalSteps
from oktopk.telemetry.record import local_record
from oktopk.telemetry.schema import StepRecord
from oktopk.train.loop import Laps, Trainer


class LocalTrainer(Trainer):
    """One worker of a run with local steps."""

    sparse: LocalSteps

    def _connect(self) -> None:
        """Leave the net as it is: all workers drew the same weights from the seed, and exchange how far they move."""
        config = self.config
        self.model = self.net
        self.sparse = LocalSteps(
            self.net,
            self.optimizers[0],  # `_update` steps all of them, and calls `advance`
            config.algorithm(),
            every=config.local_steps,
            outer=config.outer,
            on_nonfinite="skip",  # `_check_health` raises, with step and learning rate
            timeout=config.timeout_s,
        )

    def _phase_of(self, step: int) -> str:  # noqa: ARG002
        """Return the phase whose rates a step has: the exchange does not change them."""
        return "local"

    @property
    def _first_sparse_step(self) -> int:
        return self.config.local_steps - 1

    def _no_sync(self) -> AbstractContextManager[None]:
        return nullcontext()

    def _update(self, loss: Tensor, norm: Tensor, laps: Laps) -> None:
        """Make a step of the optimizers, unless it would bring them a NaN or Inf, and an exchange if one is due."""
        if bool((loss + norm).isfinite()):
            for optimizer in self.optimizers:
                optimizer.step()
        laps.end("update")
        self.sparse.advance()
        laps.end("wait")
        self._records.put(self._record())

    def _record(self) -> StepRecord:
        """Return the record of this step's exchange, or of a step without one."""
        step = self.progress.step
        if self.sparse.since:
            return local_record(step, self.plan.numel, self.sparse.size)
        assert self.sparse.last is not None
        return replace(self.sparse.last, step=step)

    def _measures_residual(self, phase: str) -> bool:  # noqa: ARG002
        return not self.sparse.since

    def _after_step(self) -> None:
        """Write the steps since the last exchange, all workers' figures of which travel now."""
        if not self.sparse.since:
            self._finish_steps()

    def _figures_of(self, step: Any) -> tuple[StepRecord, dict[str, Any]]:
        """Return record and figures; a step that this worker left out has an unknown loss, which all workers see."""
        made, own = super()._figures_of(step)
        if own["norm"] is not None and not math.isfinite(own["norm"]):
            own |= {"loss": None, "norm": None}
        return made, own

    def _own_state(self) -> dict[str, Any]:
        return {
            **super()._own_state(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "buffers": {name: buffer.clone() for name, buffer in self._saved_buffers().items()},
        }

    def _saved_buffers(self) -> dict[str, Tensor]:
        saved = self.net.state_dict().keys()
        return {name: buffer for name, buffer in self.net.named_buffers() if name in saved}

    @contextmanager
    def _as_one(self) -> Iterator[None]:
        """Let the net be the agreed point, with the mean of the workers' buffers, inside the block."""
        here = {**dict(self.net.named_parameters()), **dict(self.net.named_buffers())}
        own = {name: tensor.detach().clone() for name, tensor in here.items()}
        with torch.no_grad():
            for name, tensor in {**self._mean_buffers(), **self.sparse.agreed}.items():
                here[name].copy_(tensor)
        try:
            yield
        finally:
            with torch.no_grad():
                for name, tensor in own.items():
                    here[name].copy_(tensor)

    def _mean_buffers(self) -> dict[str, Tensor]:
        """Return the means over the workers; where all have the same, those are its bits."""
        means = dict[str, Tensor]()
        for name, buffer in self._saved_buffers().items():
            first = buffer.clone()
            dist.broadcast(first, 0)
            apart = (buffer - first).double()
            dist.all_reduce(apart)
            means[name] = (first + apart / self.place.size).to(buffer.dtype)
        return means

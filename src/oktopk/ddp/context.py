"""`StepContext`: what an attachment does in one step."""

from __future__ import annotations

from dataclasses import dataclass

from oktopk.algorithms import Algorithm


@dataclass(frozen=True)
class Momentum:
    """DGC's momentum correction: momentum is accumulated on each rank, before selection, in place of the optimizer's.

    factor     as in SGD; the optimizer then has none
    masking    what was delivered loses its momentum here, so that a stale direction is not followed
    """

    factor: float = 0.9
    masking: bool = True


@dataclass(frozen=True)
class StepContext:
    """What all groups do in one step."""

    step: int
    algorithm: Algorithm | None  # None: this step is dense
    loss_scale: float = 1.0
    clip: float = 1.0  # factor on this rank's gradient
    momentum: Momentum | None = None
    may_be_unused: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether this step, where nothing is held back, is what DDP would do."""
        return self.algorithm is None and self.momentum is None

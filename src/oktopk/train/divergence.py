"""Divergence: words for a loss or gradient that is not finite, and the detection of one that explodes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn

from oktopk.errors import OktopkError
from oktopk.telemetry.format import format_value

EXPLODED = 10.0
"""Factor over the loss of the first steps, which is that of an untrained net."""
FIRST_STEPS = 5
"""Steps whose mean loss counts as that of the untrained net."""
IN_A_ROW = 3
"""Minimum of steps above the limit, because one odd batch is no explosion."""


class DivergedError(OktopkError, RuntimeError):
    """The run was stopped because its loss or gradient is not finite, or exploded."""


@dataclass
class Health:
    """Detects an exploding loss. Losses are per character of text, so that long utterances do not count as high."""

    first: list[float] = field(default_factory=list)  # losses of the first steps
    high: int = 0  # consecutive steps above the limit

    def check(self, losses: Sequence[float], step: int, lr: float, norm: float | None, net: nn.Module) -> str | None:
        """Return the message about an explosion of the losses (per character, by rank); None if there is none."""
        worst = max(range(len(losses)), key=lambda rank: losses[rank])
        if len(self.first) < FIRST_STEPS:
            self.first.append(sum(losses) / len(losses))
        limit = EXPLODED * sum(self.first) / len(self.first)
        self.high = self.high + 1 if losses[worst] > limit else 0
        if self.high < IN_A_ROW:
            return None
        self.high = 0
        return (
            f"step {step}, rank {worst}: the loss exploded: {losses[worst]:.4g} per character for {IN_A_ROW} steps, "
            f"{limit / EXPLODED:.4g} at the start; lr {lr:g}, gradient norm {format_value(norm)}, "
            f"largest gradient in {largest_gradient(net)!r}; a lower --lr or --set clip=... helps"
        )


def nonfinite_message(step: int, losses: Sequence[float], lr: float, grad_norm: float | None, reason: str) -> str:
    """Return the message about a step whose loss or gradient is not finite."""
    bad = [rank for rank, loss in enumerate(losses) if not math.isfinite(loss)]
    where = f"the loss is not finite on rank {', '.join(map(str, bad))}" if bad else "the loss is finite on every rank"
    return (
        f"step {step}: {reason}; {where}; lr {lr:g}, gradient norm of the step before {format_value(grad_norm)}; "
        "a lower --lr helps, or --on-nonfinite skip to leave such steps out"
    )


def largest_gradient(model: nn.Module) -> str:
    """Return the name of the parameter with the largest gradient."""
    norms = {name: float(each.grad.norm()) for name, each in model.named_parameters() if each.grad is not None}
    return max(norms, key=lambda name: norms[name])

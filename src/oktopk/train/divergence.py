"""Is the run still learning anything? What is not finite or explodes is named, and never printed as a result."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import nn

from oktopk.errors import OktopkError

EXPLODED = 10.0
"""Times the loss of the first steps, which is that of an untrained net."""

FIRST_STEPS = 5
IN_A_ROW = 3
"""One odd batch is no explosion."""


class DivergedError(OktopkError, RuntimeError):
    """The run was stopped because its numbers mean nothing any more."""


@dataclass
class Health:
    """Looks at each step's loss, per character of text, so that long utterances do not look like trouble.

    first    losses of the first steps
    high     steps in a row whose loss was too high
    """

    first: list[float] = field(default_factory=list)
    high: int = 0

    def check(
        self, losses: Sequence[float], step: int, lr: float, grad_norm: float | None, largest: Callable[[], str]
    ) -> str | None:
        """Return what is wrong with the losses (per character, by rank) of this step, if anything is."""
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
            f"{limit / EXPLODED:.4g} at the start; lr {lr:g}, gradient norm {shown(grad_norm)}, "
            f"largest gradient in {largest()!r}; a lower --lr or --set clip=... helps"
        )


def nonfinite_message(step: int, losses: Sequence[float], lr: float, grad_norm: float | None, reason: str) -> str:
    """Return the words for a step whose loss or gradient is not finite."""
    bad = [rank for rank, loss in enumerate(losses) if not math.isfinite(loss)]
    where = f"the loss is not finite on rank {', '.join(map(str, bad))}" if bad else "the loss is finite on every rank"
    return (
        f"step {step}: {reason}; {where}; lr {lr:g}, gradient norm of the step before {shown(grad_norm)}; "
        "a lower --lr helps, or --on-nonfinite skip to leave such steps out"
    )


def largest_gradient(model: nn.Module) -> str:
    """Return the name of the parameter with the largest gradient."""
    norms = {
        name: float(parameter.grad.norm()) for name, parameter in model.named_parameters() if parameter.grad is not None
    }
    return max(norms, key=lambda name: norms[name]) if norms else "none"


def shown(value: float | None) -> str:
    """Return a figure for people; what is not known, or no number, says so."""
    return "n/a" if value is None or not math.isfinite(value) else f"{value:.4g}"

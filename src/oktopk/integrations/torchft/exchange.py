"""`Exchange`: the groups of a model's vectors, reduced over the members of each step, committed all or none."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import oktopk
from oktopk.algorithms import ALGORITHMS
from oktopk.comm import Comm
from oktopk.comm.agree import digest_of
from oktopk.ddp.engine import DDPConfig
from oktopk.ddp.exclude import excluded
from oktopk.errors import NonFiniteError, PeerError, StateError
from oktopk.integrations.torchft.members import Ballot, Meeting, Members, check_settings
from oktopk.kernels import WORTH_COMPILING
from oktopk.reducer import compile_kernels
from oktopk.steps import MadeStep, StepContext, make_groups
from oktopk.steps.host import HostSteps
from oktopk.telemetry.record import total_of
from oktopk.telemetry.schema import VERSION, StepRecord
from oktopk.telemetry.sinks import SINK_PATIENCE_S, Sink, Sinks
from oktopk.telemetry.summary import Summary

STATE_VERSION = 1
GROUP_BYTES = 25 << 20
"""Bytes of a group, because DDP's buckets have as many."""
NORM_EVERY = 10
"""Steps from one norm of the residual to the next, because each takes a pass over all elements. The first step among
new members has one, too, so that each member's is known."""

State = dict[str, Any]


class Exchange:
    """Vectors by name, their residuals, and the members that share their means.

    save, load    the state that a member that heals gets beside the exchange's own
    """

    def __init__(
        self,
        vectors: Mapping[str, Tensor],
        config: DDPConfig,
        manager: Any,
        *,
        save: Callable[[], State],
        load: Callable[[State], None],
        sinks: Sequence[Sink | Callable[[StepRecord], object]] = (),
        timeout: float = 300.0,
        checkpoint_step: int = 0,
        make_comm: Callable[[Any], Comm] | None = None,
        one_group: bool = False,
    ) -> None:
        self.vectors, self.config = dict(vectors), config
        cap = math.inf if one_group else GROUP_BYTES
        self.groups = make_groups(list(self.vectors.items()), cap, first_bytes=cap)
        dense = excluded(config.exclude, self.vectors)
        for group in self.groups:
            group.lay_out_(dense.__contains__)
        self._save, self._load = save, load
        self.members = Members(
            manager, self.settings, self._has_residual, timeout, checkpoint_step, make_comm=make_comm,
            start=lambda: digest_of(self.vectors.values()),
        )  # fmt: skip
        self.last: StepRecord | None = None
        self.summary, self.sinks = Summary(), Sinks(sinks, min(SINK_PATIENCE_S, timeout / 2))
        self.size = 0  # of the members, as the residuals are scaled
        self.wants_flush = False  # whether this member asks for a dense step
        self._is_new = True  # whether no step has been committed among these members
        self._lost_mass: float | None = None
        self._steps: HostSteps | None = None
        self._ended_s: float | None = None
        is_worth_it = max((group.numel for group in self.groups), default=0) >= WORTH_COMPILING
        if is_worth_it and type(config.algorithm.given) in ALGORITHMS.values():
            compile_kernels(config.algorithm, torch.float32)  # not while the others wait
        manager.register_state_dict_fn("oktopk", self.load_state_dict, self.state_dict)

    def settings(self) -> dict[str, Any]:
        """Return the settings that all members must share, by the names that an error gives them."""
        return {
            "the version of oktopk": oktopk.__version__,
            "the parameters": [f"{name} {list(each.shape)} {each.dtype}" for name, each in self.vectors.items()],
            **{name: _plain(value) for name, value in self.config.settings().items()},
            "the parameters that travel dense": [name for group in self.groups for name in group.dense_names],
        }

    def meet(self) -> None:
        """Join the quorum of the next step; where it is another one, scale the residuals to its size."""
        meeting = self.members.meet()
        if meeting is not None:
            self.change_members(meeting)

    def change_members(self, meeting: Meeting) -> None:
        """Go on among other members. What this one owes of the mean stays the same: (1/Q) (Q/P) e = (1/P) e."""
        factor = meeting.comm.size / self.size if self.size else 1.0
        for group, has_residual in zip(self.groups, meeting.has_residual, strict=True):
            group.change_members_(factor, has_residual)
        self.size, self._steps, self._is_new = meeting.comm.size, HostSteps(meeting.comm, self._agree), True
        self._comm, self._lost_mass = meeting.comm, _sum(self._lost_mass, meeting.lost_mass)
        step, lost = self.members.step, "" if meeting.lost_mass is None else f", lost mass {meeting.lost_mass:.3g}"
        message = f"{meeting.comm.size} members, this one number {meeting.comm.rank}{lost}"
        self.sinks.log({"kind": "event", "event": "members", "step": step, "message": message})

    @torch.no_grad()
    def reduce(self, vectors: Mapping[str, Tensor], *, flush: bool = False, figures: Sequence[float] = ()) -> bool:
        """Write the means into the flat vectors and return True; or return False, with residuals as they were.

        Then the vectors hold nothing of use. With `flush` the step is dense, on all members alike.
        """
        assert self._steps is not None, "meet() comes before reduce()"
        step = self.members.step
        is_dense = flush or self.members.wants_flush
        context = self._context = StepContext(step, None if is_dense else self.config.algorithm_at(step))
        self._steps.abandon()
        self._voted, self._figures = False, tuple(figures)
        try:
            for group in self.groups:
                tensors = [vectors[name] for name in group.names]
                self._steps.start(group, tensors, tensors, context)
            made = self._steps.finish(context)
        except PeerError as error:
            if not self._voted:
                self.members.give_up(error)
                self.members.vote(None)
            self.sinks.log({"kind": "event", "event": "uncommitted", "step": step, "message": str(error)})
            return False
        except BaseException as error:
            self.members.give_up(PeerError(f"{type(error).__name__}: {error}"))
            raise
        self._record(made)
        if made.error is not None and self.config.on_nonfinite == "raise":
            raise made.error
        return True

    def state_dict(self) -> State:
        """Return the state that all members share. Residuals are none of it: each is one member's own."""
        return {
            "version": STATE_VERSION,
            "settings": self.settings(),
            "history": self.members.history,
            "flush": self.members.wants_flush,
            "manager": self.members.manager.state_dict(),
            **self._save(),
        }

    def load_state_dict(self, saved: State) -> None:
        """Go on with the state of another member, or of a checkpoint, and no residual: what it held is lost."""
        version = saved.get("version")
        if version != STATE_VERSION:
            raise StateError(f"wanted the state of a member of version {STATE_VERSION}, not of version {version!r}")
        check_settings(self.settings(), saved["settings"])
        self._load(saved)
        self.members.manager.load_state_dict(saved["manager"])
        self.members.history, self.members.wants_flush = saved["history"], bool(saved["flush"])
        self.members.is_healed = True
        for group in self.groups:
            group.change_members_(0.0, False)

    def residual(self) -> dict[str, Tensor]:
        """Return a copy of what this member has not delivered yet, by name, flat."""
        return {name: tensor for group in self.groups for name, tensor in group.by_name().items()}

    def is_sparse(self, coming: bool) -> bool:
        """Return whether the latest step was sparse; or if the next will be."""
        if not coming:
            return self.last is not None and self.last.phase == "sparse"
        return self.config.algorithm_at(self.members.step) is not None and not self.members.wants_flush

    def close(self) -> None:
        """Close the sinks."""
        self.sinks.close()

    def begin_record(self, model: str) -> None:
        """Tell the sinks what will be done, as the first record of a run."""
        config: dict[str, Any] = {"model": model} | {k: v for k, v in self.settings().items() if " " not in k}
        started = time.strftime("%Y-%m-%d %H:%M:%S")
        self.sinks.log({"kind": "run", "version": VERSION, "started": started, "step": self.members.step,
                        "numel": sum(each.numel() for each in self.vectors.values()), "config": config})  # fmt: skip

    def _has_residual(self) -> list[bool]:
        return [group.has_residual for group in self.groups]

    def _agree(self, error: NonFiniteError | None) -> NonFiniteError | None:
        """Vote on the step, which all members made with this error or all with none."""
        self._voted = True
        is_due = self._is_new or self.members.step % NORM_EVERY == 0
        norm = self._coming_norm(error) if is_due else math.nan
        if not self.members.vote(Ballot(norm, self.wants_flush, self._figures)):
            raise PeerError("the step is not committed: a member of the quorum did not make it")
        self.wants_flush = self._is_new = False
        return error

    def _coming_norm(self, error: NonFiniteError | None) -> float:
        """Return the norm of the residual as it will be if this step is committed."""
        if error is not None:
            left = [group.residual.held for group in self.groups]
        else:
            left = [group.residual.acc for group in self.groups if not group.is_plain_allreduce(self._context)]
        return math.sqrt(math.fsum(float(torch.linalg.vector_norm(each)) ** 2 for each in left))

    def _record(self, made: MadeStep) -> None:
        now_s, phase = time.perf_counter(), made.context.phase
        self.last = replace(
            total_of(made.records(made.read(), self.size, phase), step=made.context.step, phase=phase),
            skipped=made.error is not None,
            reason=None if made.error is None else str(made.error),
            step_seconds=None if self._ended_s is None else now_s - self._ended_s,
            lost_mass=self._lost_mass,
        )
        self._ended_s, self._lost_mass = now_s, None
        self.summary.add_(self.last)
        self.sinks.write(self.last)


def _plain(value: Any) -> Any:
    """Return a setting as JSON gives it back: a tuple as a list."""
    return [_plain(each) for each in value] if isinstance(value, (list, tuple)) else value


def _sum(first: float | None, second: float | None) -> float | None:
    return second if first is None else first + (second or 0.0)

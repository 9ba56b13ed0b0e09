"""`Members`: the quorum of a torchft Manager, which may change from step to step, and its vote on each step.

torchft lets each member decide alone whether it commits a step. Here the members of a quorum first tell each other that
their exchange is whole, in a collective that ends nowhere if one of them is missing. So all commit, or none. A member
that dies while the votes travel can still leave some with all of them and some without. Those are a step behind, or
have another `history`, and heal: they get weights and no residual, so that nothing is delivered twice.
"""

from __future__ import annotations

import hashlib
import math
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from oktopk.comm import Comm, MeteredComm
from oktopk.comm.agree import START, first_difference, gather_settings
from oktopk.errors import MismatchError, OktopkError, PeerError, SettingError, StateError
from oktopk.integrations.torchft.comm import GroupComm


@dataclass(frozen=True)
class Meeting:
    """The members of a new quorum as they met: all are at one step, with one history."""

    comm: MeteredComm
    has_residual: list[bool]  # of each group, on any member
    lost_mass: float | None  # see `StepRecord`; None if nobody left


@dataclass(frozen=True)
class Ballot:
    """A member's vote on a step that it could make: its residual's norm, NaN if not measured, and a wish.

    `figures` are the script's, as many on all members.
    """

    residual_norm: float = math.nan
    wants_flush: bool = False
    figures: tuple[float, ...] = ()

    def words(self) -> torch.Tensor:
        """Return the vote as numbers."""
        return torch.tensor([self.residual_norm, float(self.wants_flush), *self.figures], dtype=torch.float64)


class Members:
    """Joins a quorum for each step, and votes on the step.

    settings          what all members must share, by name
    has_residual      whether any member may have a residual, for each group
    patience_s        seconds to wait for a quorum before a `PeerError`
    checkpoint_step   the step of the newest checkpoint: a quorum that is not as far is refused
    start             a digest of the weights, which no healing made the same if the Manager has init_sync=False
    """

    def __init__(
        self,
        manager: Any,
        settings: Callable[[], Mapping[str, Any]],
        has_residual: Callable[[], list[bool]],
        patience_s: float,
        checkpoint_step: int = 0,
        make_comm: Callable[[Any], Comm] | None = None,
        start: Callable[[], str] = str,
    ) -> None:
        check_manager(manager)
        self.manager, self.checkpoint_step = manager, checkpoint_step
        self.history = ""  # of the quorums that made the committed steps
        self.is_healed = False  # since the last meeting
        self.wants_flush = False  # whether any member asked for a dense step
        self._settings, self._has_residual, self._patience_s = settings, has_residual, patience_s
        self._make_comm, self._start = make_comm or group_of, start
        self.uid = uuid.uuid4().hex[:12]
        self._quorum_id: int | None = None  # of the quorum that met last, while it is sound
        self.key = ""  # of that quorum
        self._comm: MeteredComm | None = None
        self.uids: list[str] = []
        self.told: list[list[float]] = []  # the figures of all members' votes
        self._norms: dict[str, float] = {}  # of the members' residuals, as they last told

    @property
    def step(self) -> int:
        """The number of committed steps."""
        return int(self.manager.current_step())

    def meet(self) -> Meeting | None:
        """Join the next quorum, healed if this member is behind; return its meeting if it is a new one."""
        deadline = time.monotonic() + self._patience_s
        while True:
            self._join(deadline)
            self._refuse_older_quorum()
            if self.manager._quorum_id == self._quorum_id and self.manager.errored() is None:
                return None
            try:
                meeting = self._introduce()
                if meeting is not None:
                    return meeting
                error = PeerError("a member of the quorum is not ready")
                self.manager.report_error(error)
            except PeerError as failed:
                error = failed
                self.give_up(failed)
            self.manager.should_commit()  # no, and the next quorum is another one
            if time.monotonic() > deadline:
                raise PeerError(f"no quorum could begin a step within {self._patience_s:g} s: {error}") from error

    def vote(self, ballot: Ballot | None) -> bool:
        """Return whether the step is committed: all members made it, and this one has all of their votes.

        None is the vote of a member that could not make it.
        """
        told = None
        if ballot is not None and self.manager.errored() is None:
            assert self._comm is not None
            try:
                told = self._comm.all_gather(ballot.words()).tolist()
            except PeerError as error:
                self.give_up(error)
        is_committed = bool(self.manager.should_commit()) and told is not None
        if not is_committed or told is None:
            self._quorum_id = None
            return False
        self.history = _digest(self.history, self.key)
        self._norms |= {uid: norm for uid, (norm, *_) in zip(self.uids, told, strict=True) if math.isfinite(norm)}
        self.wants_flush, self.told = any(flush for _, flush, *_ in told), [figures for _, _, *figures in told]
        return True

    def give_up(self, error: Exception) -> None:
        """Make this step an uncommitted one, here and on all others, who then wait for nobody."""
        self._quorum_id = None
        self.manager.report_error(error)
        if self._comm is not None:
            self._comm.fail(error)

    def _join(self, deadline: float) -> None:
        while True:
            try:
                self.manager.start_quorum()
                return
            except OktopkError:  # of a state that does not fit
                raise
            except Exception as error:  # torchft raises its RPCs' errors as they come
                asked = self.manager._quorum_future
                if asked is None or not asked.done() or asked.exception() is None:
                    raise
                self.manager._quorum_future = None  # or it would raise that error for ever
                self._quorum_id = None
                if time.monotonic() > deadline:
                    raise PeerError(
                        f"no quorum within {self._patience_s:g} s. Is the lighthouse running and can it be reached "
                        f"from here, and are there as many members as it wants? {error}"
                    ) from error

    def _refuse_older_quorum(self) -> None:
        """Refuse a quorum that is not as far as the run is known to be: its weights would become everybody's."""
        asked = getattr(getattr(self.manager, "_checkpoint_transport", None), "asked_step", 0)
        known = max(self.checkpoint_step, asked)
        if self.step < known and self.manager.errored() is None:
            raise StateError(
                f"every member of this quorum is at step {self.step} or before, and the run has reached step {known}: "
                f"its weights would be lost. Load the checkpoint before the first step, or start a new run"
            )

    def _introduce(self) -> Meeting | None:
        """Meet the members of a new quorum; None if one of them cannot take part."""
        if self.manager.errored() is not None and getattr(self.manager._pg, "_pg", self) is None:
            raise PeerError(f"the group of the quorum could not be made: {self.manager.errored()}")
        self._comm = comm = MeteredComm(self._make_comm(self.manager))
        mine = {"uid": self.uid, "step": self.step, "history": self.history, "healed": self.is_healed,
                "ready": self.manager.errored() is None, "residual": self._has_residual(),
                "flush": self.wants_flush, "settings": dict(self._settings()),
                "start": {} if self.step else {START: self._start()}}  # fmt: skip
        told = gather_settings(mine, comm, torch.device("cpu"))
        if not self._is_sound(told, comm.rank):
            return None
        lost = self._lost_mass(told)
        self.uids, self._quorum_id = [each["uid"] for each in told], self.manager._quorum_id
        self.wants_flush = any(each["flush"] for each in told)
        self.key, self.is_healed = _digest(str(self._quorum_id), *self.uids), False
        comm.pop()
        return Meeting(comm, [any(each) for each in zip(*(each["residual"] for each in told), strict=True)], lost)

    def _is_sound(self, told: Sequence[Mapping[str, Any]], rank: int) -> bool:
        """Whether these members can make a step together; raise if this one can do it with none of them."""
        truth = _most_common([each["settings"] for each in told])
        check_settings(told[rank]["settings"], truth)
        newest = max(each["step"] for each in told)
        history = next(each["history"] for each in told if each["step"] == newest)
        if all(each["ready"] and each["step"] == newest and each["history"] == history for each in told):
            start = _most_common([each["start"] for each in told])
            check_settings(told[rank]["start"], start)
            return all(each["settings"] == truth and each["start"] == start for each in told)
        if told[rank]["step"] == newest and told[rank]["history"] != history:
            # As many steps as the others, but others: torchft compares the number alone.
            self.manager.load_state_dict({**self.manager.state_dict(), "step": newest - 1})
        return False

    def _lost_mass(self, told: Sequence[Mapping[str, Any]]) -> float | None:
        """Forget the norms of members that left or came back without residual; return what the means may lack."""
        stayed = {each["uid"] for each in told if not each["healed"]}
        gone = [norm for uid, norm in self._norms.items() if uid not in stayed]
        factor = len(told) / max(len(self.uids), 1)
        self._norms = {uid: norm * factor for uid, norm in self._norms.items() if uid in stayed}
        return math.fsum(gone) / len(self.uids) if gone else None


def group_of(manager: Any) -> GroupComm:
    """Return the members of the manager's quorum; refuse one with spares, which take part in no mean."""
    rank, size = manager.participating_rank(), manager.num_participants()
    if rank is None or size != manager._pg.size():
        raise SettingError("the Manager keeps spares: give it world_size_mode=WorldSizeMode.DYNAMIC, its default")
    return GroupComm(manager._pg, rank, size)


def check_manager(manager: Any) -> None:
    """Refuse a Manager under which the residual law cannot hold."""
    if not hasattr(manager, "start_quorum"):
        raise SettingError(f"manager= wants a torchft Manager, not {type(manager).__name__}")
    if manager._use_async_quorum:
        raise SettingError(
            "residuals are rescaled before a step, so that its quorum has to be known then: make the Manager with "
            "use_async_quorum=False"
        )
    if manager._group_world_size > 1:
        raise SettingError(
            f"this replica has {manager._group_world_size} ranks, and a member is one: make the Manager with "
            "rank=0, world_size=1"
        )


def check_settings(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    """Raise a `MismatchError` that names the first setting in which this member differs from the others."""
    found = first_difference(theirs, ours)
    if found is not None:
        name, there, here = found
        raise MismatchError(
            f"this member and the others disagree on {name}: here it is {here}, there {there}. Start it as the others"
        )


def _most_common(every: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the settings that most members have; of several, those of the first."""
    return max(every, key=lambda each: sum(each == other for other in every))


def _digest(*words: str) -> str:
    return hashlib.sha256(" ".join(words).encode()).hexdigest()[:16]

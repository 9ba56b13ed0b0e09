"""`ParamGroup`: tensors that are reduced together as one vector, with their residual and algorithm state.

`StepContext` has the settings of one step.

DDP rebuilds its buckets after the first step, so buckets cannot hold state. A group is a fixed set of parameters in the
order of backward. Whichever bucket brings a gradient, it goes to its parameter's slot. A `Reducer` has one group with
one slot.
"""

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from oktopk.algorithms import Algorithm
from oktopk.comm import Comm
from oktopk.feedback import Residual
from oktopk.state import from_plain, kind_of, to_plain

FIRST_GROUP_BYTES = 1 << 20
"""Bytes of the first group: small, like DDP's first bucket, so that the exchange starts early."""

SAMPLE = 256
"""Elements of a sample, because two gathers of 256 elements take microseconds."""


@dataclass(frozen=True)
class StepContext:
    """The settings of one step, the same for all groups.

    algorithm       None: a dense step
    grad_scale      factor on this rank's gradient: clipping, and the inverse of the loss scale; a tensor on the device
                    path, where the host must not wait for it
    loss_scale      factor on the means; residuals are kept without it
    may_be_unused   parameters may have no gradient on any rank, so that the ranks have to agree on which
    filling         the number that fills every mean if any rank's gradient is not finite; None: they are left alone
    divides_last    a plain all_reduce divides the sum, as FSDP does, not each rank's part of it, as DDP does
    """

    step: int
    algorithm: Algorithm | None
    grad_scale: float | Tensor = 1.0
    loss_scale: float | Tensor = 1.0
    may_be_unused: bool = False
    filling: float | None = 0.0
    divides_last: bool = False

    @property
    def phase(self) -> str:
        """The phase that the record names."""
        return "dense" if self.algorithm is None else "sparse"

    @property
    def is_scaled(self) -> bool:
        """Whether a transform changes the gradients or the means."""
        return any(isinstance(scale, Tensor) or scale != 1 for scale in (self.grad_scale, self.loss_scale))


@dataclass(frozen=True)
class ParamSlot:
    """A parameter's slot: `rows` are the lengths of its segments, each of which is ranked by a scale of its own."""

    name: str
    numel: int
    rows: tuple[int, ...] = ()


class ParamGroup:
    """Slots of one dtype on one device: sparse ones first, then those that travel dense."""

    def __init__(self, slots: Sequence[ParamSlot], dtype: torch.dtype, device: torch.device) -> None:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        self.dtype = dtype
        self.numel = sum(slot.numel for slot in slots)
        self.residual = Residual(self.numel, wide, device)
        self.waits = WaitSample(self.numel)
        self.sums = False  # delivers the sum over ranks, not their mean
        self.state: Any = None
        self.num_sparse = self.numel  # elements, from the first on, that sparse steps send sparsely
        self.names = [slot.name for slot in slots]  # in the order of backward
        self._slots = list(slots)
        self.spans = _spans(self._slots)
        self._state_kind = 0  # of the algorithm that `state` is for, see `kind_of`
        self._has_residual = False  # whether any rank's residual may be nonzero; the same on all ranks

    @property
    def device(self) -> torch.device:
        """The device of the residual."""
        return self.residual.held.device

    @property
    def dense_names(self) -> list[str]:
        """The parameters that travel dense on every step."""
        return [name for name, span in self.spans.items() if span.start >= self.num_sparse]

    @property
    def segments(self) -> tuple[int, ...]:
        """Lengths of the rows of the sparse slots, in the order in which the slots lie."""
        rows = {slot.name: slot.rows for slot in self._slots}
        return tuple(row for name, span in self.spans.items() if span.start < self.num_sparse for row in rows[name])

    def is_plain_allreduce(self, context: StepContext) -> bool:
        """Whether this step is a plain all_reduce: dense, with no residual to add."""
        return context.algorithm is None and not self._has_residual

    def name_at(self, index: int) -> str:
        """Return the name of the parameter that the element at `index` belongs to."""
        return next(name for name, span in self.spans.items() if index < span.stop)

    def lay_out_(self, travels_dense: Callable[[str], bool]) -> None:
        """Put the sparse parameters first; every residual stays with its parameter."""
        saved, has_residual = self.by_name(), self._has_residual
        dense = {slot.name for slot in self._slots if travels_dense(slot.name)}
        if dense != set(self.dense_names):
            self.state = None
        self.spans = _spans(sorted(self._slots, key=lambda slot: slot.name in dense))
        self.num_sparse = sum(slot.numel for slot in self._slots if slot.name not in dense)
        self.load_by_name_(saved)
        self._has_residual = has_residual

    def by_name(self) -> dict[str, Tensor]:
        """Return a copy of the residual of each parameter, flat."""
        return {name: self.residual.held[span].clone() for name, span in self.spans.items()}

    def load_by_name_(self, saved: Mapping[str, Tensor]) -> None:
        """Make the residual what `by_name` returned."""
        for name, span in self.spans.items():
            self.residual.held[span] = saved[name]
        self.waits = WaitSample(self.numel)
        self._has_residual = True  # on all ranks alike, even where this rank's part happens to be zero

    @property
    def fingerprint(self) -> int:
        """A number that differs where the algorithm's state would be for other parameters or another order."""
        return zlib.crc32(repr((self._slots, self.spans)).encode())

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the group as a whole."""
        return {
            "group": self.fingerprint,
            "has_residual": int(self._has_residual),
            "kind": self._state_kind,
            "state": to_plain(self.state),
            "waits": self.waits.steps,
        }

    def load_state_dict_(self, saved: Mapping[str, Any], algorithm: Algorithm, comm: Comm) -> bool:
        """Go on with the result of `state_dict`; return False if its state was another kind of algorithm's.

        The algorithm then starts anew.
        """
        self._has_residual = bool(saved["has_residual"])
        self.waits.steps = saved.get("waits", self.waits.steps)
        if saved.get("state") is None:
            return True
        if int(saved["kind"]) != kind_of(algorithm):
            return False
        self.prepare_(algorithm, comm)
        self.state = from_plain(self.state, saved["state"])
        return True

    def prepare_(self, algorithm: Algorithm, comm: Comm) -> None:
        """Make a state for this algorithm, unless there is one for its kind."""
        kind = kind_of(algorithm)
        if self.state is None or kind != self._state_kind:
            self.state, self._state_kind = algorithm.init_state(self.num_sparse, comm, self.segments), kind

    @property
    def has_residual(self) -> bool:
        """Whether any rank's residual may be nonzero; the same on all ranks."""
        return self._has_residual

    def change_members_(self, factor: float, has_residual: bool) -> None:
        """Go on among other ranks, with `factor` times this rank's residual; the algorithm starts anew.

        `has_residual` is whether any of these ranks brings a residual.
        """
        self.residual.held.mul_(factor)
        self.state, self.waits, self._has_residual = None, WaitSample(self.numel), has_residual

    def commit_(self, context: StepContext, has_unused: bool = False) -> None:
        """Make this step's residual the current one."""
        self.residual.commit_()
        rounds = self.dtype != self.residual.held.dtype  # then a dense step has a rounding error to keep
        self._has_residual = context.algorithm is not None or has_unused or rounds


class WaitSample:
    """A fixed sample of a vector's elements, evenly spread, with the steps that each has waited.

    An element waits in a step that neither sends it nor leaves it zero.
    """

    def __init__(self, numel: int) -> None:
        size = min(numel, SAMPLE)
        self._index = torch.arange(size) * numel // max(size, 1)
        self.steps = torch.zeros(size, dtype=torch.int64)

    def look(self, acc: Tensor) -> Tensor | None:
        """Return the sampled elements before they are sent; None on a GPU, for which the host must not wait."""
        return acc[self._index] if acc.device.type == "cpu" and len(self._index) else None

    def update_(self, before: Tensor | None, acc: Tensor) -> int | None:
        """Count a step that left `acc` of the elements `before`; return the longest wait."""
        if before is None:
            return None
        after = acc[self._index]
        self.steps = torch.where((after == before) & (after != 0), self.steps + 1, 0)
        return int(self.steps.max())


def make_groups(
    parameters: Sequence[tuple[str, Tensor]],
    cap_bytes: float,
    dtype: torch.dtype | None = None,
    first_bytes: float = FIRST_GROUP_BYTES,
) -> list[ParamGroup]:
    """Return groups of about `cap_bytes` each, in the reverse order of the parameters, the order of backward.

    Gradients are of `dtype`, or else of their parameter's. The first group has at most about `first_bytes`.
    """
    groups, open_groups = list[ParamGroup](), dict[tuple[torch.dtype, torch.device], list[ParamSlot]]()
    limit = min(first_bytes, cap_bytes)
    for name, parameter in reversed(parameters):
        kind = (dtype or parameter.dtype, parameter.device)
        slots = open_groups.setdefault(kind, [])
        slots.append(slot_of(name, parameter))
        if sum(slot.numel for slot in slots) * parameter.element_size() >= limit:
            groups.append(ParamGroup(open_groups.pop(kind), *kind))
            limit = cap_bytes
    return groups + [ParamGroup(slots, *kind) for kind, slots in open_groups.items()]


def slot_of(name: str, parameter: Tensor) -> ParamSlot:
    """Return the slot of a parameter, or of a rank's shard of one, by its shape."""
    row = parameter[0].numel() if parameter.dim() > 1 and len(parameter) else parameter.numel()
    return ParamSlot(name, parameter.numel(), (row,) * (parameter.numel() // max(row, 1)))


def _spans(slots: Sequence[ParamSlot]) -> dict[str, slice]:
    ends = list(accumulate((slot.numel for slot in slots), initial=0))
    return {slot.name: slice(low, high) for slot, low, high in zip(slots, ends, ends[1:], strict=False)}

"""`ParamGroup`: the parameters that are reduced together, and what is kept for each of them.

DDP's buckets are no place for state: it rebuilds them after the first step, and another `bucket_cap_mb` makes others. A
group is a fixed set of parameters, in the order in which backward reaches them; whatever bucket brings a parameter's
gradient, it goes to that parameter's place in its group. So residuals are kept by parameter, and what is sent does not
depend on how DDP cuts its buckets.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from oktopk.algorithms import Algorithm
from oktopk.algorithms.base import (
    InputStatus,
    Reduced,
    StepStats,
    make_prefilter,
    observe,
    reduce_if_fine,
    takes_segments,
)
from oktopk.codec.values import round_to
from oktopk.comm import MeteredComm, Traffic
from oktopk.ddp.context import StepContext
from oktopk.errors import NonFiniteError
from oktopk.feedback import Residual
from oktopk.kernels import kernels_for
from oktopk.kernels.reference import divide_, first_nonfinite, is_finite
from oktopk.prefilter import Prefilter
from oktopk.sparse import Sparse
from oktopk.state import from_plain, kind_of, to_plain
from oktopk.telemetry import StepRecord, record_of

FIRST_GROUP_BYTES = 1 << 20
"""The first group is small, as DDP's first bucket is, so that the exchange starts early."""

NONE = StepStats(selected=0, pairs=0)
"""Nothing was sparse, or nothing was delivered."""


@dataclass(frozen=True)
class ParamSlot:
    """A parameter's place: its name and length, and that of its rows, which are ranked by a scale of their own."""

    name: str
    numel: int
    row: int


class ParamGroup:
    """A group of parameters of one dtype on one device: sparse ones first, then those that travel dense."""

    def __init__(self, pieces: Sequence[ParamSlot], dtype: torch.dtype, device: torch.device) -> None:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        numel = sum(piece.numel for piece in pieces)
        self.dtype = dtype
        self.residual = Residual(numel, wide, device)
        self.velocity: Residual | None = None
        self.state: Any = None
        self._state_of = 0  # the kind of algorithm, see `kind_of`
        self._pieces: list[ParamSlot] = list(pieces)
        self.names = [piece.name for piece in pieces]  # in the order in which backward reaches them
        self.num_sparse = 0  # elements, from the first on, that sparse steps send sparsely
        self._pending = False  # whether any rank's residual may hold anything; the same on all ranks
        self._unused_params: list[
            str
        ] = []  # parameters that no rank used in this step: they keep what is held for them
        self.made = False  # whether this step made an acc to commit
        self.spans = _spans(self._pieces)

    @property
    def dense_names(self) -> list[str]:
        """The parameters that travel dense on every step."""
        return [name for name, span in self.spans.items() if span.start >= self.num_sparse]

    def lay_out_(self, travels_dense: Callable[[str], bool]) -> None:
        """Put the sparse parameters first; every residual keeps to its parameter."""
        saved, pending = self.by_name(), self._pending
        dense = {piece.name for piece in self._pieces if travels_dense(piece.name)}
        if dense != set(self.dense_names):
            self.state = None
        self.spans = _spans(sorted(self._pieces, key=lambda piece: piece.name in dense))
        self.num_sparse = sum(piece.numel for piece in self._pieces if piece.name not in dense)
        self.load_by_name_(saved)
        self._pending = pending

    def by_name(self) -> dict[str, dict[str, Tensor]]:
        """Return a copy of what is held for each parameter, flat."""
        kept = {"residual": {name: self.residual.held[span].clone() for name, span in self.spans.items()}}
        if self.velocity is not None:
            kept["velocity"] = {name: self.velocity.held[span].clone() for name, span in self.spans.items()}
        return kept

    def load_by_name_(self, saved: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Hold what `by_name` returned, and nothing else."""
        self.velocity = None
        for name, span in self.spans.items():
            self.residual.held[span] = saved["residual"][name]
            if name in saved.get("velocity", {}):
                self._velocity().held[span] = saved["velocity"][name]
        self._pending = True  # on all ranks alike, even where this rank's part happens to be zero

    @property
    def fingerprint(self) -> int:
        """A number that differs where the algorithm's state would be for other parameters, or in another order."""
        return zlib.crc32(repr((self._pieces, self.spans)).encode())

    def state_dict(self) -> dict[str, Any]:
        """Return what is kept for the group as a whole."""
        return {
            "lane": self.fingerprint,
            "pending": int(self._pending),
            "kind": self._state_of,
            "state": to_plain(self.state),
        }

    def load_state_dict_(self, saved: Mapping[str, Any], algorithm: Algorithm, comm: MeteredComm) -> bool:
        """Go on with what `state_dict` returned for a group of this fingerprint.

        Return False if its state was another kind of algorithm's: this one then starts anew.
        """
        self._pending = bool(saved["pending"])
        if saved.get("state") is None:
            return True
        if int(saved["kind"]) != kind_of(algorithm):
            return False
        self.prepare_(algorithm, comm)
        self.state = from_plain(self.state, saved["state"])
        return True

    def start_(self, grads: Mapping[str, Tensor], context: StepContext, comm: MeteredComm) -> Callable[[], StepRecord]:
        """Begin to replace the gradients by the mean over ranks of what this step delivers; return what ends it.

        Where DDP would just sum, the sum is under way when this returns; all else is done at the end. Nothing is
        committed yet.
        """
        self.made = not self.is_plain_allreduce(context)
        end = partial(self._reduce_, grads, context, comm) if self.made else self._start_plain_(grads, context, comm)
        return partial(self._naming_the_parameter, end)

    def is_plain_allreduce(self, context: StepContext) -> bool:
        """Whether this step is to the group what it is to DDP: nothing is held back, and nothing will be."""
        return context.is_plain and not self._pending

    def _reduce_(self, grads: Mapping[str, Tensor], context: StepContext, comm: MeteredComm) -> StepRecord:
        split = 0 if context.algorithm is None else self.num_sparse
        self._unused_params = self._find_unused(grads, comm) if context.may_be_unused else []
        prefilter = self._make_prefilter(context.algorithm, comm) if context.algorithm is not None and split else None
        with comm.phase("accumulate"):
            first_bad = self._accumulate_(grads, context, prefilter)
            if context.algorithm is not None and split and first_bad < 0:
                observe(context.algorithm, self.state, self.residual.acc[:split], self.residual.held[:split])
            for name in self._unused_params:
                self.residual.acc[self.spans[name]] = 0
        reduced = self._reduce_sparse(split, context, comm, first_bad)
        self._reduce_dense_(split, comm, first_bad)
        with comm.phase("apply"):
            self._deliver_(grads, split, reduced, context, comm.size)
            for name in self._unused_params:
                self._undo_(self.spans[name])
        outcome = NONE if reduced is None else StepStats.of(reduced, split, self.state)
        return self.record(split, outcome, context, comm.pop(), comm.size)

    def refused(self, context: StepContext, traffic: Traffic, size: int) -> StepRecord:
        """Return the record of a step that was refused: nothing was delivered."""
        made = self.record(self.residual.held.numel(), NONE, context, traffic, size)
        return replace(made, skipped=True)

    def commit_(self, context: StepContext) -> None:
        """Make this step's residual the one that is held."""
        if not self.made:
            return
        self.residual.commit_()
        if self.velocity is not None and context.momentum is not None:
            self.velocity.commit_()
        rounds = self.dtype != self.residual.held.dtype  # then a dense step, too, keeps something back
        self._pending = context.algorithm is not None or bool(self._unused_params) or rounds

    def _make_prefilter(self, algorithm: Algorithm, comm: MeteredComm) -> Prefilter | None:
        """Return where to note what is large in acc, if the algorithm asks for it and acc is what will be reduced."""
        self.prepare_(algorithm, comm)
        return None if self._unused_params else make_prefilter(algorithm, self.state)

    def _accumulate_(self, grads: Mapping[str, Tensor], context: StepContext, prefilter: Prefilter | None) -> int:
        """Make acc of this step's gradients; return the index of its first NaN or Inf, or -1."""
        bad = []
        for name, span in self.spans.items():
            grad, scale = grads[name], context.clip / context.loss_scale
            if context.momentum is not None:
                grad, scale = self._velocity().accumulate_(grad, span, scale, context.momentum.factor), 1.0
            self.residual.accumulate_(grad, span, scale, prefilter=prefilter)
            bad.append(self.residual.nonfinite_at)
        return min((index for index in bad if index >= 0), default=-1)

    def _find_unused(self, grads: Mapping[str, Tensor], comm: MeteredComm) -> list[str]:
        """Return the parameters without a gradient on any rank: DDP would drop what is delivered to them."""
        heard = torch.tensor([int(bool(grads[name].any())) for name in self.names])
        with comm.phase("agree"):
            heard = comm.all_reduce(heard.to(self.residual.held.device))
        return [name for name, count in zip(self.names, heard.tolist(), strict=True) if not count]

    def _reduce_sparse(self, split: int, context: StepContext, comm: MeteredComm, first_bad: int) -> Reduced | None:
        if not split:
            return None
        assert context.algorithm is not None
        return reduce_if_fine(context.algorithm, self.residual.acc[:split], self.state, comm, InputStatus.on(first_bad))

    def _reduce_dense_(self, split: int, comm: MeteredComm, first_bad: int) -> None:
        """Sum the parameters that travel dense. All ranks see alike whether that sum is finite."""
        dense_tail = self.residual.acc[split:]
        if not len(dense_tail):
            return
        with comm.phase("dense_tail"):
            comm.all_reduce(dense_tail)
        if not is_finite(dense_tail):
            self._refuse(first_bad, comm)

    def _start_plain_(
        self, grads: Mapping[str, Tensor], context: StepContext, comm: MeteredComm
    ) -> Callable[[], StepRecord]:
        """Do what DDP would: the gradients themselves are summed, where they lie together.

        A rank whose gradient is not finite puts a NaN first, and the sum carries that to every rank: no message more.
        Nor is there a second look at the sum, unless it may overflow (`_may_overflow`).
        """
        together = _lie_together([grads[name] for name in self.names])
        dense_tail = torch.cat([grads[name] for name in self.names]) if together is None else together
        with comm.phase("dense_tail"):
            largest = divide_(dense_tail, comm.size)
            first_bad = -1 if math.isfinite(largest) else self._first_bad(grads)
            if first_bad >= 0:
                dense_tail[0] = math.nan
            pending = comm.start_all_reduce(dense_tail)
        started = comm.pop()
        telling = dense_tail if _may_overflow(largest, dense_tail.dtype, comm.size) else dense_tail[:1]

        def end() -> StepRecord:
            with comm.phase("dense_tail"):
                pending.wait()
            if not is_finite(telling):
                self._refuse(first_bad, comm)
            if together is None:
                self._take_apart(dense_tail, grads, comm)
            started.add_(comm.pop())
            return self.record(0, NONE, context, started, comm.size)

        return end

    def _take_apart(self, dense_tail: Tensor, grads: Mapping[str, Tensor], comm: MeteredComm) -> None:
        means = torch.split(dense_tail, [piece.numel for piece in self._pieces])
        with comm.phase("apply"):
            for name, mean in zip(self.names, means, strict=True):
                grads[name].copy_(mean)

    def _first_bad(self, grads: Mapping[str, Tensor]) -> int:
        """Return the place in acc of the first NaN or Inf, or -1."""
        for name, span in self.spans.items():
            bad = first_nonfinite(grads[name])
            if bad >= 0:
                return bad + int(span.start)
        return -1

    def _refuse(self, first_bad: int, comm: MeteredComm) -> None:
        """Raise, on all ranks alike, whose gradient it was that made a sum not finite."""
        held = self.residual.held
        InputStatus.raise_if_any(InputStatus.gather(InputStatus.on(first_bad), held.device, comm), held.numel())
        raise NonFiniteError("the sum over ranks is not finite, though every rank's gradient is")

    def _deliver_(
        self, grads: Mapping[str, Tensor], split: int, reduced: Reduced | None, context: StepContext, size: int
    ) -> None:
        """Write the mean into the gradients, and make acc what remains."""
        acc, factor = self.residual.acc, context.loss_scale / size
        for name, span in self.spans.items():
            if span.start >= split:
                self._deliver_dense_(grads[name], acc[span], factor, context.loss_scale)
        if reduced is None:
            return
        sparse = [(span, grads[name]) for name, span in self.spans.items() if span.start < split]
        lost = _write_mean_(reduced.sum, sparse, factor)
        rounding = [] if lost is None else [_divided(lost, context.loss_scale)]
        self.residual.retain_(reduced.taken, (*reduced.returned, *rounding), slice(0, split), reduced.kept)
        if self.velocity is not None and context.momentum is not None and context.momentum.masking:
            self.velocity.retain_(reduced.taken, at=slice(0, split))

    def _deliver_dense_(self, grad: Tensor, total: Tensor, factor: float, loss_scale: float) -> None:
        """Write the mean into a gradient, and into `total` what rounding to its dtype keeps back."""
        if grad.dtype == total.dtype:
            torch.mul(total, factor, out=grad)
            total.zero_()
            return
        mean = total * factor
        grad.copy_(round_to(mean, grad.dtype))
        torch.sub(mean, grad, out=total).div_(loss_scale)

    def _undo_(self, span: slice) -> None:
        self.residual.acc[span] = self.residual.held[span]
        if self.velocity is not None:
            self.velocity.acc[span] = self.velocity.held[span]

    def record(self, split: int, outcome: StepStats, context: StepContext, traffic: Traffic, size: int) -> StepRecord:
        """Return the record of what a step did, all but the first `split` elements having travelled dense."""
        numel = self.residual.held.numel()
        return record_of(
            outcome,
            traffic,
            step=context.step,
            phase="dense" if context.algorithm is None else "sparse",
            numel=numel,
            dense_tail=numel - split,
            density=getattr(context.algorithm, "density", 1.0),
            size=size,
        )

    def prepare_(self, algorithm: Algorithm, comm: MeteredComm) -> None:
        """Make a state for this algorithm, if there is none for one of its kind."""
        kind = kind_of(algorithm)
        if self.state is not None and kind == self._state_of:
            return
        extra = {}
        if takes_segments(algorithm):
            sparse = [piece for piece in self._pieces if self.spans[piece.name].start < self.num_sparse]
            extra["segments"] = [piece.row for piece in sparse for _ in range(piece.numel // piece.row)]
        self.state, self._state_of = algorithm.init(self.num_sparse, comm, **extra), kind

    def _velocity(self) -> Residual:
        if self.velocity is None:
            held = self.residual.held
            self.velocity = Residual(held.numel(), held.dtype, held.device)
        return self.velocity

    def _naming_the_parameter(self, end: Callable[[], StepRecord]) -> StepRecord:
        """Return what `end` does; what is not finite is told by parameter, not by its index in the group."""
        try:
            return end()
        except NonFiniteError as error:
            if error.index is None:
                raise
            index, rank = error.index, error.rank
        name = next(name for name, span in self.spans.items() if index < span.stop)
        raise NonFiniteError(f"rank {rank}: the gradient of {name!r} is not finite", rank, index)


def make_groups(
    parameters: Sequence[tuple[str, Tensor]], cap_bytes: int, dtype: torch.dtype | None = None
) -> list[ParamGroup]:
    """Return groups of about `cap_bytes` each, in the reverse order of the parameters: the order of backward.

    Gradients are of `dtype`, or else of their parameter's.
    """
    groups, open_groups = list[ParamGroup](), dict[tuple[torch.dtype, torch.device], list[ParamSlot]]()
    limit = min(FIRST_GROUP_BYTES, cap_bytes)
    for name, parameter in reversed(parameters):
        kind = (dtype or parameter.dtype, parameter.device)
        pieces = open_groups.setdefault(kind, [])
        row = parameter[0].numel() if parameter.dim() > 1 and len(parameter) else parameter.numel()
        pieces.append(ParamSlot(name, parameter.numel(), max(row, 1)))
        if sum(piece.numel for piece in pieces) * parameter.element_size() >= limit:
            groups.append(ParamGroup(open_groups.pop(kind), *kind))
            limit = cap_bytes
    return groups + [ParamGroup(pieces, *kind) for kind, pieces in open_groups.items()]


def _spans(pieces: Sequence[ParamSlot]) -> dict[str, slice]:
    ends = list(accumulate((piece.numel for piece in pieces), initial=0))
    return {piece.name: slice(low, high) for piece, low, high in zip(pieces, ends, ends[1:], strict=False)}


def _lie_together(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return the tensors as one, if each begins where the one before it ends, in the same storage."""
    end, storage = tensors[0].data_ptr(), tensors[0].untyped_storage().data_ptr()
    for tensor in tensors:
        # Two allocations may touch, and still no tensor can reach from one into the other.
        if tensor.data_ptr() != end or tensor.untyped_storage().data_ptr() != storage:
            return None
        end += tensor.numel() * tensor.element_size()
    return tensors[0].as_strided((sum(tensor.numel() for tensor in tensors),), (1,))


def _may_overflow(largest: float, dtype: torch.dtype, size: int) -> bool:
    """Whether the sum over ranks of what was divided by their number may be infinite, `largest` being this rank's.

    Only rounding can make it so, and only where every rank's number is about the largest there is: then all ranks look
    at the sum, and see the same. Where many ranks' rounding adds up to more than one rank's part, they always do.
    """
    info = torch.finfo(dtype)
    return size * size * info.eps >= 1 or not largest <= info.max / (2 * size)


def _write_mean_(
    total: Sparse | Tensor, grads: Sequence[tuple[slice, Tensor]], factor: float
) -> Sparse | Tensor | None:
    """Write total * factor into the gradients; return what rounding to their dtype lost, if that is narrower."""
    dtype = grads[0][1].dtype
    if isinstance(total, Tensor):
        if dtype == total.dtype:
            for span, grad in grads:
                torch.mul(total[span], factor, out=grad)
            return None
        mean = total * factor
        means = round_to(mean, dtype)
        for span, grad in grads:
            grad.copy_(means[span])
        return mean - means
    value = total.value * factor
    rounded = round_to(value, dtype)
    cuts = torch.tensor([span.start for span, _ in grads] + [total.numel], device=total.index.device)
    ends = torch.searchsorted(total.index, cuts).tolist()
    for (span, grad), i, j in zip(grads, ends, ends[1:], strict=False):
        kernels_for(grad).spread(total.index[i:j] - span.start, rounded[i:j], grad)
    if rounded.dtype == value.dtype:
        return None
    return Sparse(total.index, value - rounded.to(value.dtype), total.numel)


def _divided(lost: Sparse | Tensor, divisor: float) -> Sparse | Tensor:
    return lost / divisor if isinstance(lost, Tensor) else Sparse(lost.index, lost.value / divisor, lost.numel)

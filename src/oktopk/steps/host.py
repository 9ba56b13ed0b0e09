"""`HostSteps`: steps of any algorithm on any device, whose counts and thresholds the host reads as it goes."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from oktopk.algorithms.base import InputStatus, Reduced, StepInput, StepStats, check_finite
from oktopk.codec.values import round_to
from oktopk.comm import Comm, MeteredComm, Traffic
from oktopk.comm.agree import gather_settings
from oktopk.errors import NonFiniteError
from oktopk.kernels import kernels_for
from oktopk.kernels.reference import divide_, first_nonfinite, is_finite
from oktopk.sparse import Sparse
from oktopk.steps.group import ParamGroup, StepContext
from oktopk.steps.made import NOTHING, MadeStep, Part

Agree = Callable[[NonFiniteError | None], NonFiniteError | None]


@dataclass
class _Started:
    """A group whose reduction was started: where its means go, and the function that ends it."""

    group: ParamGroup
    outs: Sequence[Tensor]
    end: Callable[[], StepStats]
    commits: bool
    traffic: Traffic
    waits: Tensor  # the group's before the step, which an update replaces
    has_unused: bool = False
    stats: StepStats | None = None


class HostSteps:
    """The steps of groups, started one by one and finished together: committed all or none.

    `agree` has the last word before a commit: it gets the error of the step here, and returns the one that counts.
    """

    delay = 0

    def __init__(self, comm: MeteredComm, agree: Agree | None = None) -> None:
        self._comm, self._agree = comm, agree
        self._started: list[_Started] = []
        self._error: NonFiniteError | None = None

    def start(self, group: ParamGroup, grads: Sequence[Tensor], outs: Sequence[Tensor], context: StepContext) -> None:
        """Start to write the mean over ranks of what this step delivers into `outs`, which may be `grads`.

        A plain all_reduce is under way when this returns. Any other reduction is done but for its commit.
        """
        waits = group.waits.steps
        if group.is_plain_allreduce(context):
            end = _start_plain_allreduce(group, grads, outs, context, self._comm)
            self._started.append(_Started(group, outs, end, False, self._comm.pop(), waits))
            return
        reduction = _Reduction(group, dict(zip(group.names, grads, strict=True)), context, self._comm)
        end = partial(reduction.run, dict(zip(group.names, outs, strict=True)))
        self._started.append(_Started(group, outs, end, True, Traffic(), waits, bool(reduction.unused)))
        self._end(self._started[-1])

    def finish(self, context: StepContext, error: NonFiniteError | None = None) -> MadeStep:
        """End what was started; commit all groups unless there is an error, an earlier step's or this one's."""
        for started in self._started:
            if not started.commits:
                self._end(started)
        error = error or self._error
        if self._agree is not None:
            error = self._agree(error)
        for started in self._started:
            if error is not None:
                started.group.waits.steps = started.waits
                if context.filling is not None:
                    for out in started.outs:
                        out.fill_(context.filling)
            elif started.commits:
                started.group.commit_(context, started.has_unused)
        parts = [Part(started.group, started.traffic) for started in self._started]
        stats = [started.stats for started in self._started]
        self.abandon()
        return MadeStep(context, parts, lambda: stats, error)

    def abandon(self) -> None:
        """Forget the step that is being made."""
        self._started, self._error = [], None

    def _end(self, started: _Started) -> None:
        try:
            started.stats = started.end()
        except NonFiniteError as error:
            name = "" if error.index is None else started.group.name_at(error.index)
            if name:  # which says more than an index in the group
                says = f"rank {error.rank}: the gradient of {name!r} is not finite"
                error = NonFiniteError(says, error.rank, error.index)
            self._error = self._error or error
        started.traffic.add_(self._comm.pop())


def agree_with_shards(error: NonFiniteError | None, shards: Comm) -> NonFiniteError | None:
    """Return an error on the ranks of all shards if those of one have it: that of the first such shard."""
    here = torch.tensor([int(error is not None)])  # on the host, also for gradients on a GPU, as the group is gloo's
    if not int(shards.all_reduce(here)):
        return None
    every = gather_settings({"error": error and str(error)}, shards, here.device)
    shard, first = next((shard, each["error"]) for shard, each in enumerate(every) if each["error"])
    # One that the shards agreed on before names its shard.
    return NonFiniteError(first if first.startswith("shard ") else f"shard {shard}, {first}")


class _Reduction:
    """One step of one group, with error feedback."""

    def __init__(self, group: ParamGroup, grads: dict[str, Tensor], context: StepContext, comm: MeteredComm) -> None:
        self._group, self._grads, self._context, self._comm = group, grads, context, comm
        self._split = 0 if context.algorithm is None else group.num_sparse
        self._algorithm = context.algorithm if self._split or not group.numel else None
        self.unused = self._find_unused() if context.may_be_unused else []

    def run(self, outs: dict[str, Tensor]) -> StepStats:
        """Write the means into `outs` and the remainder into the residual's acc; nothing is committed yet."""
        group, split = self._group, self._split
        inputs, first_bad = self._accumulate()
        before = group.waits.look(group.residual.acc)
        reduced = None
        if self._algorithm is not None:
            acc = group.residual.acc[:split]
            reduced = check_finite(self._algorithm.reduce_step(acc, group.state, self._comm, inputs))
        self._reduce_dense_(first_bad)
        with self._comm.phase("apply"):
            self._deliver_(outs, reduced)
            for name in self.unused:  # DDP drops what is delivered to them
                span = group.spans[name]
                group.residual.acc[span] = group.residual.held[span]
        stats = NOTHING if reduced is None else StepStats.of(reduced, split, group.state)
        return replace(stats, oldest_wait_steps=group.waits.update_(before, group.residual.acc))

    def _find_unused(self) -> list[str]:
        """Return the parameters without a gradient on any rank."""
        used = torch.tensor([int(bool(grad.any())) for grad in self._grads.values()])
        with self._comm.phase("agree"):
            used = self._comm.all_reduce(used.to(self._group.device))
        return [name for name, count in zip(self._grads, used.tolist(), strict=True) if not count]

    def _accumulate(self) -> tuple[StepInput, int]:
        """Make acc; return the algorithm's other inputs, and the index of the first NaN or Inf, or -1."""
        group, context, residual = self._group, self._context, self._group.residual
        algorithm, split = self._algorithm, self._split
        if algorithm is not None:
            group.prepare_(algorithm, self._comm)
        wrong = self._wrong_shape()
        if wrong:
            return StepInput(wrong), -1
        candidates = None if algorithm is None or self.unused else algorithm.prefilter(group.state)
        with self._comm.phase("accumulate"):
            assert not isinstance(context.grad_scale, Tensor)
            first_bad = -1
            for name, span in group.spans.items():  # in the order of the indices
                residual.accumulate_(self._grads[name], span, context.grad_scale, prefilter=candidates)
                first_bad = residual.nonfinite_at if first_bad < 0 else first_bad
            measured = None
            if algorithm is not None and first_bad < 0:
                measured = algorithm.measure(group.state, residual.acc[:split], residual.held[:split])
            for name in self.unused:
                residual.acc[group.spans[name]] = 0
        return StepInput(InputStatus.on(first_bad), candidates, measured), first_bad

    def _wrong_shape(self) -> int:
        """Return the input status of gradients that are not this group's; FINE if they are."""
        numel = sum(grad.numel() for grad in self._grads.values())
        if numel != self._group.numel:
            return InputStatus.of(InputStatus.WRONG_NUMEL, numel)
        same = all(g.dtype == self._group.dtype and g.device == self._group.device for g in self._grads.values())
        return InputStatus.FINE if same else InputStatus.of(InputStatus.WRONG_DTYPE)

    def _reduce_dense_(self, first_bad: int) -> None:
        """Sum the parameters that travel dense. All ranks see alike whether that sum is finite."""
        dense_tail = self._group.residual.acc[self._split :]
        if not len(dense_tail):
            return
        with self._comm.phase("dense_tail"):
            self._comm.all_reduce(dense_tail)
        if not is_finite(dense_tail):
            _refuse(self._group, first_bad, self._comm)

    def _deliver_(self, outs: dict[str, Tensor], reduced: Reduced | None) -> None:
        """Write the mean into `outs`, and make acc the remainder."""
        group, split, loss_scale = self._group, self._split, self._context.loss_scale
        assert not isinstance(loss_scale, Tensor)
        acc, size = group.residual.acc, self._comm.size
        loss_scale *= size if group.sums else 1
        for name, span in group.spans.items():
            if span.start >= split:
                lost = _write_mean_(acc[span], [(slice(None), outs[name])], size, loss_scale)
                acc[span] = 0 if lost is None else lost  # type: ignore[assignment]
        if reduced is not None:
            sparse = [(span, outs[name]) for name, span in group.spans.items() if span.start < split]
            lost = _write_mean_(reduced.sum, sparse, size, loss_scale) if sparse else None
            leftover = reduced.leftover if lost is None else (*reduced.leftover, lost)
            group.residual.retain_(reduced.taken, leftover, slice(0, split), reduced.rounding_error)


def _start_plain_allreduce(
    group: ParamGroup, grads: Sequence[Tensor], outs: Sequence[Tensor], context: StepContext, comm: MeteredComm
) -> Callable[[], StepStats]:
    """Start to sum the gradients in place, as DDP or FSDP would; return the function that waits for the sum.

    A rank whose gradient is not finite puts a NaN first, which the sum carries to every rank without another message.
    The ranks look at the whole sum only where it may overflow (`_may_overflow`), as an undivided one always may.
    """
    size = 1 if group.sums else comm.size
    before, after = (1, size) if context.divides_last else (size, 1)
    joined = _as_one(grads)
    total = torch.cat(list(grads)) if joined is None else joined
    with comm.phase("dense_tail"):
        largest = divide_(total, before)
        first_bad = -1 if math.isfinite(largest) else _first_nonfinite(group, grads)
        if first_bad >= 0:
            total[0] = math.nan
        pending = comm.start_all_reduce(total)
    checked = total if before < comm.size or _may_overflow(largest, total.dtype, comm.size) else total[:1]

    def end() -> StepStats:
        with comm.phase("dense_tail"):
            pending.wait()
        if not is_finite(checked):
            _refuse(group, first_bad, comm)
        if after > 1:
            total.div_(after)
        if joined is None:
            with comm.phase("apply"):
                for out, mean in zip(outs, torch.split(total, [grad.numel() for grad in grads]), strict=True):
                    out.copy_(mean)
        return NOTHING

    return end


def _first_nonfinite(group: ParamGroup, grads: Sequence[Tensor]) -> int:
    """Return the index in the group's vector of the first NaN or Inf, or -1."""
    places = ((group.spans[name].start, first_nonfinite(grad)) for name, grad in zip(group.names, grads, strict=True))
    return min((start + bad for start, bad in places if bad >= 0), default=-1)


def _refuse(group: ParamGroup, first_bad: int, comm: MeteredComm) -> None:
    """Raise, on all ranks alike, the error of the rank whose gradient made a sum not finite."""
    InputStatus.agree(InputStatus.on(first_bad), group.device, comm, group.numel)
    raise NonFiniteError("the sum over ranks is not finite, though every rank's gradient is")


def _as_one(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return the tensors as one, if each begins where the one before it ends in the same storage."""
    end, storage = tensors[0].data_ptr(), tensors[0].untyped_storage().data_ptr()
    for tensor in tensors:
        # Two allocations may touch, and still no tensor can reach from one into the other.
        if tensor.data_ptr() != end or tensor.untyped_storage().data_ptr() != storage:
            return None
        end += tensor.numel() * tensor.element_size()
    return tensors[0].as_strided((sum(tensor.numel() for tensor in tensors),), (1,))


def _may_overflow(largest: float, dtype: torch.dtype, size: int) -> bool:
    """Whether the sum over ranks of quotients by their number may be infinite; `largest` is this rank's largest.

    Only rounding can make it so, and only where every rank's number is near the dtype's largest. Then all ranks look at
    the sum and see the same. Where many ranks' rounding errors add up to more than one rank's part, they always look.
    """
    info = torch.finfo(dtype)
    return size * size * info.eps >= 1 or not largest <= info.max / (2 * size)


def _write_mean_(
    total: Sparse | Tensor, outs: Sequence[tuple[slice, Tensor]], size: int, loss_scale: float
) -> Sparse | Tensor | None:
    """Write loss_scale * total / size into the tensors at their slices.

    Return the rounding error of a narrower dtype, without the loss scale.
    """
    dtype, divisor = outs[0][1].dtype, size / loss_scale
    if isinstance(total, Tensor) and dtype == total.dtype:
        for span, out in outs:
            torch.div(total[span], divisor, out=out)
        return None
    mean = (total.value if isinstance(total, Sparse) else total) / divisor
    rounded = round_to(mean, dtype)
    if isinstance(total, Sparse):
        cuts = torch.tensor([span.start for span, _ in outs] + [total.numel], device=total.index.device)
        ends = torch.searchsorted(total.index, cuts).tolist()
        for (span, out), i, j in zip(outs, ends, ends[1:], strict=False):
            kernels_for(out).spread(total.index[i:j], rounded[i:j], out, span.start)
    else:
        for span, out in outs:
            out.copy_(rounded[span])
    if rounded.dtype == mean.dtype:
        return None
    lost = (mean - rounded.to(mean.dtype)) / loss_scale
    return Sparse(total.index, lost, total.numel) if isinstance(total, Sparse) else lost

"""`Reducer`: tensor in, tensor out, with its residual, its state and its record."""

from __future__ import annotations

import sys
import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from oktopk.algorithms import Algorithm, Dense, OkTopk, make_algorithm
from oktopk.algorithms.base import InputStatus, StepStats, make_prefilter, observe, reduce_if_fine, takes_segments
from oktopk.codec.values import round_to
from oktopk.comm import Comm, MeteredComm, Traffic
from oktopk.cuda.readback import READBACK_DELAY, DeferredErrors, DeviceStats, PinnedBuffer, Readback
from oktopk.cuda.step import CudaStep, supports_device_step
from oktopk.errors import InputError, MismatchError, NonFiniteError, PeerError, SettingError, StateError, one_of
from oktopk.feedback import Residual
from oktopk.kernels import kernels_for
from oktopk.sparse import Sparse
from oktopk.state import from_plain, kind_of, to_plain
from oktopk.telemetry import StepRecord, record_of

VERSION = 2
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class Reducer:
    """Averages one gradient over all ranks, step after step, and keeps what a step did not deliver for the next.

    algorithm       an algorithm, or the name of one
    comm            a `Comm`: `ProcessGroupComm`, or what `run_local` hands out
    segments        lengths of the rows (or tensors) that the gradient is made of, for `ranking="scaled"`
    on_nonfinite    "raise": a NaN or Inf on any rank is an error on all; "skip": such a step delivers zeros
    In both cases the residual stays as it was.

    >>> from oktopk import OkTopk, run_local
    >>> def step(comm):
    ...     return Reducer(OkTopk(density=0.25), comm).all_reduce(torch.tensor([1.0, 9.0, 2.0, 3.0]))
    >>> run_local(2, step)[0]
    tensor([0., 9., 0., 0.])
    """

    def __init__(
        self,
        algorithm: Algorithm | str,
        comm: Comm,
        *,
        segments: Sequence[int] | None = None,
        on_nonfinite: str = "raise",
    ) -> None:
        self.algorithm = make_algorithm(algorithm) if isinstance(algorithm, str) else algorithm
        self.on_nonfinite = one_of("choice for on_nonfinite", on_nonfinite, ("raise", "skip"))
        self._last: StepRecord | None = None
        self.traffic = Traffic()
        self._comm = MeteredComm(comm)
        self._segments = None if segments is None else tuple(segments)
        self._step = 0
        self._agreed = False
        self._dtype: torch.dtype | None = None
        self._residual: Residual | None = None
        self._state: Any = None
        self._cuda_step: CudaStep | None = None
        self._readback = Readback()
        self._pending_stats: deque[tuple[PinnedBuffer, Traffic]] = deque()
        self._latest_stats: tuple[DeviceStats, Traffic, int] | None = (
            None  # of which there is no record yet, and its step
        )
        self._deferred = DeferredErrors()

    @property
    def last(self) -> StepRecord | None:
        """The record of the latest step; where steps stay on the device, asking for it waits for that step."""
        while self._pending_stats:
            self._drain_one()
        if self._latest_stats is not None:
            told, traffic, step = self._latest_stats
            outcome, self._latest_stats = told.outcome(self._comm.size), None
            self._last = self._record_of(outcome, traffic, step, skipped=bool(told.bad))
        return self._last

    @property
    def residual(self) -> Tensor | None:
        """A copy of what this rank has not delivered yet, flat; None before the first step."""
        return None if self._residual is None else self._residual.held.clone()

    def all_reduce(self, grad: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Return the mean over ranks of what this step delivered, like `grad` in shape and dtype."""
        try:
            return self._all_reduce(grad, out)
        except (InputError, MismatchError, PeerError):
            self.traffic.add_(self._comm.pop())  # what was sent is in the total, and in no step's record
            raise  # every rank raises the same, or the one that failed has told the others: nobody waits
        except BaseException as error:
            self._comm.fail(error)
            raise

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank needs to go on as if it had never stopped; `torch.load(weights_only=True)` reads it."""
        if self._cuda_step is not None:
            self._cuda_step.save_(self._state)
        return {
            "version": VERSION,
            "algorithm": type(self.algorithm).__name__,
            "rank": self._comm.rank,
            "size": self._comm.size,
            "step": self._step,
            "dtype": None if self._dtype is None else str(self._dtype).removeprefix("torch."),
            "residual": self.residual,
            "kind": kind_of(self.algorithm, self._segments),
            "state": to_plain(self._state),
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on from a `state_dict` of this rank; a dict that does not fit is refused and changes nothing.

        Mode, ranking and segments are this reducer's: if the saved ones were others, the algorithm starts anew.
        """
        self._check_fits(saved)
        residual, state = None, None
        if saved["residual"] is not None:
            held = saved["residual"]
            state = self._init(held.numel())
            if saved["kind"] == kind_of(self.algorithm, self._segments):
                state = from_plain(state, saved["state"])
            elif not self._comm.rank:
                sys.stderr.write(
                    f"oktopk: the state was saved with another mode, ranking or segments than {self.algorithm}: "
                    f"the residual is kept, the algorithm starts anew\n"
                )
            residual = Residual.of(held, held.device)
        self._residual, self._state, self._step = residual, state, saved["step"]
        self._cuda_step, self._latest_stats = None, None
        self._pending_stats.clear()
        self._deferred.clear()
        self._dtype = None if saved["dtype"] is None else getattr(torch, saved["dtype"])
        self._agreed = False

    def _all_reduce(self, grad: Tensor, out: Tensor | None) -> Tensor:
        _check_usable(grad, out)
        flat = _flat(grad)
        if not self._agreed:
            self._agree(flat)
        assert self._residual is not None
        if self._cuda_step is not None:
            return self._all_reduce_there(flat, self._residual, self._cuda_step, grad, out)
        with self._comm.phase("accumulate"):
            acc, status = self._accumulate(flat, self._residual)
        try:
            reduced = reduce_if_fine(self.algorithm, acc, self._state, self._comm, status)
        except NonFiniteError:
            if self.on_nonfinite == "raise":
                raise
            return self._skip(grad, out)
        with self._comm.phase("apply"):
            mean, rounding = _mean(reduced.sum, self._comm.size, grad, out)
            self._residual.retain_(reduced.taken, (*reduced.returned, *rounding), kept=reduced.kept)
            self._residual.commit_()
        self._record(StepStats.of(reduced, flat.numel(), self._state))
        return mean

    def _agree(self, flat: Tensor) -> None:
        """Make sure, before the first gradient travels, that all ranks are about to do the same; then make room."""
        dtype = DTYPES.index(flat.dtype) if flat.dtype in DTYPES else -1
        algorithm = self.algorithm if isinstance(self.algorithm, OkTopk) else None
        on_device = algorithm is not None and supports_device_step(algorithm, flat.numel(), flat.dtype, flat.device)
        mine = [flat.numel(), dtype, self._step, zlib.crc32(self._description().encode()), int(on_device)]
        every = self._comm.all_gather(torch.tensor(mine, device=flat.device)).tolist()
        if -1 in (row[1] for row in every):
            rank = [row[1] for row in every].index(-1)
            raise InputError(f"rank {rank} came with a tensor that is not float32, float64, bfloat16 or float16")
        for what, column in zip(
            ("numel", "dtype", "step", "settings", "kind of device"), zip(*every, strict=True), strict=True
        ):
            if len(set(column)) > 1:
                raise MismatchError(_disagreement(what, column))
        self._check_same_numel(flat)
        if self._residual is not None and self._residual.held.device != flat.device:  # as it was loaded
            self._residual = Residual.of(self._residual.held, flat.device)
        if self._residual is None:
            wide = torch.float64 if flat.dtype == torch.float64 else torch.float32
            self._state = self._init(flat.numel())
            self._residual = Residual(flat.numel(), wide, flat.device)
        if algorithm is not None and on_device:
            self._cuda_step = CudaStep.make(algorithm, self._state, self._comm, flat.device)
        self._dtype, self._agreed = flat.dtype, True
        self.traffic.add_(self._comm.pop())

    def _all_reduce_there(
        self, flat: Tensor, residual: Residual, cuda_step: CudaStep, grad: Tensor, out: Tensor | None
    ) -> Tensor:
        """Reduce without ever waiting for the device; what the step did is heard of when it is long over."""
        while len(self._pending_stats) >= READBACK_DELAY:
            self._drain_one()
        error = self._deferred.take_due(self._step)
        if error is not None:
            raise error
        if flat.numel() != residual.held.numel() or flat.dtype != self._dtype or flat.device != residual.held.device:
            raise SettingError(
                f"this reducer is for {residual.held.numel()} elements of {self._dtype} on {residual.held.device}, "
                f"not for {flat.numel()} of {flat.dtype} on {flat.device}"
            )
        mean = torch.empty_like(grad, memory_format=torch.contiguous_format) if out is None else out
        with torch.cuda.device_of(flat):  # type: ignore[no-untyped-call]
            cuda_step.reduce_(flat, residual.held, residual.acc, _flat(mean))
            residual.commit_()
            buffer, traffic = self._readback.send(cuda_step.words), self._comm.pop()
        self._pending_stats.append((buffer, traffic))
        self.traffic.add_(traffic)
        self._step += 1
        return mean

    def _drain_one(self) -> None:
        """Learn what the oldest step did that the device has not told of; its record is made if it is asked for."""
        buffer, traffic = self._pending_stats.popleft()
        (told,), step = self._readback.read(buffer), self._step - len(self._pending_stats) - 1
        self._latest_stats = told, traffic, step
        if told.bad and self.on_nonfinite == "raise":
            message = (
                f"step {step}: a rank's gradient plus its residual was not finite; that step delivered zeros on all "
                f"ranks, and the residual is as it was before it"
            )
            self._deferred.add(step, NonFiniteError(message))

    def _accumulate(self, flat: Tensor, residual: Residual) -> tuple[Tensor, int]:
        """Return acc, and this rank's input status."""
        if flat.numel() != residual.held.numel():
            return residual.held, InputStatus.of(InputStatus.WRONG_NUMEL, flat.numel())
        if flat.dtype != self._dtype or flat.device != residual.held.device:
            return residual.held, InputStatus.of(InputStatus.WRONG_DTYPE)
        acc = residual.accumulate_(flat, prefilter=make_prefilter(self.algorithm, self._state))
        if residual.nonfinite_at >= 0:
            return acc, InputStatus.of(InputStatus.NON_FINITE, residual.nonfinite_at)
        observe(self.algorithm, self._state, acc, residual.held)
        return acc, InputStatus.FINE

    def _skip(self, grad: Tensor, out: Tensor | None) -> Tensor:
        """Deliver nothing; the residual is still what it was."""
        empty = Sparse.empty(grad.numel(), grad)
        mean, _ = _mean(empty, self._comm.size, grad, out)
        self._record(StepStats(selected=0, pairs=0), skipped=True)
        return mean

    def _record(self, outcome: StepStats, skipped: bool = False) -> None:
        traffic = self._comm.pop()
        self.traffic.add_(traffic)
        self._last = self._record_of(outcome, traffic, self._step, skipped)
        self._step += 1

    def _record_of(self, outcome: StepStats, traffic: Traffic, step: int, skipped: bool) -> StepRecord:
        assert self._residual is not None
        dense = outcome.pairs is None or (skipped and isinstance(self.algorithm, Dense))
        made = record_of(
            outcome,
            traffic,
            step=step,
            phase="dense" if dense else "sparse",
            numel=self._residual.held.numel(),
            dense_tail=0,
            density=getattr(self.algorithm, "density", 1.0),
            size=self._comm.size,
        )
        return replace(made, skipped=skipped)

    def _init(self, numel: int) -> Any:
        if self._segments is None:
            return self.algorithm.init(numel, self._comm)
        if not takes_segments(self.algorithm):
            raise InputError(f"{type(self.algorithm).__name__} has no use for segments")
        return self.algorithm.init(numel, self._comm, segments=self._segments)  # type: ignore[call-arg]

    def _description(self) -> str:
        algorithm = self.algorithm if is_dataclass(self.algorithm) else type(self.algorithm).__qualname__
        return f"{algorithm} {self._segments} {self.on_nonfinite}"

    def _check_same_numel(self, flat: Tensor) -> None:
        if self._residual is not None and self._residual.held.numel() != flat.numel():
            wanted = self._residual.held.numel()
            raise MismatchError(f"the loaded state is for {wanted} elements, the tensor has {flat.numel()}")

    def _check_fits(self, saved: dict[str, Any]) -> None:
        version = saved.get("version") if isinstance(saved, dict) else None
        if version != VERSION:
            raise StateError(f"wanted a Reducer's state dict of version {VERSION}, not of version {version!r}")
        missing = [key for key in self.state_dict() if key not in saved]
        if missing:
            raise StateError(f"the state dict has no {', '.join(missing)}")
        ours = {"algorithm": type(self.algorithm).__name__, "rank": self._comm.rank, "size": self._comm.size}
        for what, wanted in ours.items():
            if saved[what] != wanted:
                raise StateError(f"the state dict is of {what} {saved[what]!r}, this reducer's {what} is {wanted!r}")
        if saved["residual"] is not None and self._residual is not None:
            have, came = self._residual.held.numel(), saved["residual"].numel()
            if have != came:
                raise StateError(f"the state dict is for {came} elements, this reducer has reduced {have}")


def _check_usable(grad: Tensor, out: Tensor | None) -> None:
    """Refuse what no rank could work with, before anything travels; the other ranks are told."""
    if not isinstance(grad, Tensor):
        raise TypeError(f"all_reduce wants a tensor, not {type(grad).__name__}")
    fits = out is None or (isinstance(out, Tensor) and out.shape == grad.shape and out.dtype == grad.dtype)
    if not fits or (out is not None and not (out.is_contiguous() and out.device == grad.device)):
        raise SettingError(
            f"out must be a contiguous {grad.dtype} tensor of shape {tuple(grad.shape)} on {grad.device}"
        )


def _flat(tensor: Tensor) -> Tensor:
    """Return it flat: a view, unless its elements do not lie side by side."""
    if tensor.dim() == 1 and tensor.is_contiguous() and not tensor.requires_grad:
        return tensor  # as a view of it would be, which takes torch several microseconds
    return tensor.detach().contiguous().view(-1)


def _mean(total: Sparse | Tensor, size: int, grad: Tensor, out: Tensor | None) -> tuple[Tensor, list[Sparse | Tensor]]:
    """Return total / size like `grad`, and what rounding to its dtype loses, if it is narrower than the sum."""
    out = torch.empty_like(grad, memory_format=torch.contiguous_format) if out is None else out
    flat = _flat(out)
    value = (total.value if isinstance(total, Sparse) else total) / size
    rounded = round_to(value, grad.dtype)
    if isinstance(total, Sparse):
        kernels_for(flat).spread(total.index, rounded, flat)
    else:
        flat.copy_(rounded)
    if rounded.dtype == value.dtype:
        return out, []
    lost = value - rounded.to(value.dtype)
    return out, [Sparse(total.index, lost, total.numel) if isinstance(total, Sparse) else lost]


def _disagreement(what: str, column: Sequence[int]) -> str:
    if what == "settings":
        return "the ranks disagree on the algorithm, its settings or the segments; give every rank the same"
    names = {"dtype": DTYPES, "kind of device": ("a host's", "a GPU's, on which steps stay")}.get(what)
    said = ", ".join(f"rank {rank} has {names[x] if names else x}" for rank, x in enumerate(column))
    return f"the ranks disagree on the {'step they are at' if what == 'step' else f'{what} of the tensor'}: {said}"

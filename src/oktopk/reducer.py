"""`Reducer`: tensor in, tensor out, with its residual, its state and its record."""

import sys
import time
from collections import deque
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from oktopk.algorithms import Algorithm, as_algorithm, make_algorithm
from oktopk.algorithms.base import StepStats, describe
from oktopk.comm import Comm, MeteredComm, Traffic, run_local
from oktopk.comm.agree import check_same, gather_settings
from oktopk.errors import InputError, MismatchError, PeerError, SettingError, StateError, one_of
from oktopk.kernels import WORTH_COMPILING
from oktopk.steps import READBACK_DELAY, MadeStep, ParamGroup, ParamSlot, StepContext, StepLog, Steps
from oktopk.telemetry.schema import StepRecord

VERSION = 3
COMPILING_STEPS = 3
"""Steps after which no further kernel is compiled: the third has a threshold of two steps before."""

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
        self.traffic = Traffic()
        self._algorithm = as_algorithm(self.algorithm)
        self._comm = MeteredComm(comm)
        self._segments = () if segments is None else tuple(segments)
        if segments is not None and not self._algorithm.takes_segments:
            raise InputError(f"{self._algorithm.name} has no use for segments")
        self._step = 0
        self._agreed = False
        self._group: ParamGroup | None = None
        self._steps = Steps((), self._comm)
        self._latest: deque[tuple[MadeStep, Sequence[StepStats | None]]] = deque(maxlen=1)  # without a record yet
        # A method of self would make a cycle, and a process group that is collected late aborts the process.
        latest = self._latest
        self._log = StepLog(lambda *step: latest.append(step), self.on_nonfinite == "raise", READBACK_DELAY)
        self._last: StepRecord | None = None

    @property
    def last(self) -> StepRecord | None:
        """The record of the latest step; on the device path, asking for it waits for that step."""
        self._log.drain()
        if self._latest:
            made, (stats,) = self._latest.pop()
            is_dense = not self._algorithm.has_density or (stats is not None and stats.pairs is None)
            (self._last,) = made.records([stats], self._comm.size, "dense" if is_dense else "sparse")
        return self._last

    @property
    def residual(self) -> Tensor | None:
        """A copy of the gradient that this rank has not delivered yet, flat; None before the first step."""
        return None if self._group is None else self._group.residual.held.clone()

    def all_reduce(self, grad: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Return the mean over ranks of what this step delivered, like `grad` in shape and dtype."""
        try:
            return self._all_reduce(grad, out)
        except (InputError, MismatchError, PeerError):
            self.traffic.add_(self._comm.pop())  # sent in vain: part of the total, and of no step's record
            raise  # every rank raises the same, or the one that failed has told the others: nobody waits
        except BaseException as error:
            self._comm.fail(error)
            raise

    def state_dict(self) -> dict[str, Any]:
        """Return the state with which this rank can resume; `torch.load(weights_only=True)` reads it."""
        self._steps.save_()
        return {
            "version": VERSION,
            "algorithm": self._algorithm.name,
            "rank": self._comm.rank,
            "size": self._comm.size,
            "step": self._step,
            "dtype": None if self._group is None else str(self._group.dtype).removeprefix("torch."),
            "residual": self.residual,
            **({"state": None} if self._group is None else self._group.state_dict()),
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Resume from a `state_dict` of this rank; a dict that does not fit is refused and changes nothing.

        Ranking and segments are this reducer's: if the saved ones were others, the algorithm starts anew.
        """
        self._check_fits(saved)
        group, residual = None, saved["residual"]
        if residual is not None:
            group = self._new_group(residual.numel(), getattr(torch, saved["dtype"]), residual.device)
            group.load_by_name_({"": residual})
            fits = saved["group"] == group.fingerprint and group.load_state_dict_(saved, self._algorithm, self._comm)
            if not fits and not self._comm.rank:
                sys.stderr.write(
                    f"oktopk: the state was saved with another ranking or other segments than {self.algorithm}: "
                    f"the residual is kept, the algorithm starts anew\n"
                )
        self._use(group)
        self._step, self._agreed = saved["step"], False
        self._latest.clear()

    def _all_reduce(self, grad: Tensor, out: Tensor | None) -> Tensor:
        _check_usable(grad, out)
        flat = _flat(grad)
        if not self._agreed:
            self._agree(flat)
        group, steps = self._group, self._steps
        assert group is not None
        if steps.delay:
            self._log.drain(but=READBACK_DELAY - 1)
            self._check_same(flat, group)
        error = self._log.take_due(self._step)
        if error is not None:
            raise error
        mean = torch.empty_like(grad, memory_format=torch.contiguous_format) if out is None else out
        with torch.cuda.device_of(flat):  # type: ignore[no-untyped-call]
            filling = 0.0 if self.on_nonfinite == "skip" else None
            steps.begin(StepContext(self._step, self._algorithm, filling=filling))
            steps.start(group, [flat], [_flat(mean)])
            made = steps.finish()
        self.traffic.add_(made.parts[0].traffic)
        if made.error is not None and self.on_nonfinite == "raise":
            raise made.error
        self._log.add(made)
        if not steps.delay:
            self._log.drain()
        self._step += 1
        return mean

    def _agree(self, flat: Tensor) -> None:
        """Make sure, before the first gradient travels, that all ranks are about to do the same; then make the group.

        A loaded residual moves to the device of the gradient.
        """
        loaded, is_known = self._group, flat.dtype in DTYPES
        group = loaded
        if loaded is None or (loaded.dtype, loaded.device) != (flat.dtype, flat.device):
            group = self._new_group(flat.numel(), flat.dtype, flat.device) if is_known else None
        mine = {
            "the numel of the tensor": flat.numel(),
            "the dtype of the tensor": str(flat.dtype),
            "the step": self._step,
            "the algorithm": describe(self.algorithm),
            "segments": self._segments,
            "on_nonfinite": self.on_nonfinite,
            "the device path": group is not None and Steps([group], self._comm).on_device(self._algorithm),
            "known": is_known,
        }
        every = gather_settings(mine, self._comm, flat.device)
        for rank, settings in enumerate(every):
            if not settings["known"]:
                raise InputError(f"rank {rank} came with a tensor that is not float32, float64, bfloat16 or float16")
        check_same(every)
        assert group is not None
        if loaded is not None and loaded.numel != flat.numel():
            raise MismatchError(f"the loaded state is for {loaded.numel} elements, the tensor has {flat.numel()}")
        if loaded is not None and loaded is not group:
            group.load_by_name_(loaded.by_name())
            group.load_state_dict_(loaded.state_dict(), self._algorithm, self._comm)
        group.prepare_(self._algorithm, self._comm)
        self._use(group)
        self._agreed = True
        self.traffic.add_(self._comm.pop())

    def _new_group(self, numel: int, dtype: torch.dtype, device: torch.device) -> ParamGroup:
        return ParamGroup([ParamSlot("", numel, self._segments)], dtype, device)

    def _use(self, group: ParamGroup | None) -> None:
        """Reduce through this group from now on."""
        self._log.drain()
        self._log.clear()
        self._group, self._steps = group, Steps([] if group is None else [group], self._comm)

    def _check_same(self, flat: Tensor, group: ParamGroup) -> None:
        """Refuse another kind of tensor on the device path, where no rank would tell the others of it."""
        if (flat.numel(), flat.dtype, flat.device) != (group.numel, group.dtype, group.device):
            raise SettingError(
                f"this reducer is for {group.numel} elements of {group.dtype} on {group.device}, "
                f"not for {flat.numel()} of {flat.dtype} on {flat.device}"
            )

    def _check_fits(self, saved: dict[str, Any]) -> None:
        version = saved.get("version") if isinstance(saved, dict) else None
        if version != VERSION:
            raise StateError(f"wanted a Reducer's state dict of version {VERSION}, not of version {version!r}")
        missing = [key for key in self.state_dict() if key not in saved]
        if missing:
            raise StateError(f"the state dict has no {', '.join(missing)}")
        ours = {"algorithm": self._algorithm.name, "rank": self._comm.rank, "size": self._comm.size}
        for what, wanted in ours.items():
            if saved[what] != wanted:
                raise StateError(f"the state dict is of {what} {saved[what]!r}, this reducer's {what} is {wanted!r}")
        if saved["residual"] is not None and self._group is not None:
            have, came = self._group.numel, saved["residual"].numel()
            if have != came:
                raise StateError(f"the state dict is for {came} elements, this reducer has reduced {have}")


def _check_usable(grad: Tensor, out: Tensor | None) -> None:
    """Refuse what no rank could work with, before anything travels; the other ranks are told."""
    if not isinstance(grad, Tensor):
        raise TypeError(f"all_reduce wants a tensor, not {type(grad).__name__}")
    wanted = (grad.shape, grad.dtype, grad.device, True)
    if out is None or (isinstance(out, Tensor) and (out.shape, out.dtype, out.device, out.is_contiguous()) == wanted):
        return
    raise SettingError(f"out must be a contiguous {grad.dtype} tensor of shape {tuple(grad.shape)} on {grad.device}")


def _flat(tensor: Tensor) -> Tensor:
    """Return it flat: a view, unless its elements do not lie side by side."""
    if tensor.dim() == 1 and tensor.is_contiguous() and not tensor.requires_grad:
        return tensor  # as a view of it would be, which takes torch several microseconds
    return tensor.detach().contiguous().view(-1)


@cache
def compile_kernels(algorithm: Algorithm, dtype: torch.dtype) -> float:
    """Compile the CPU kernels of an algorithm, or load them from numba's cache; return the seconds that it took.

    Two ranks as threads make some steps, because the types of the arguments choose the code to compile.
    """
    start = time.perf_counter()

    def make_steps(comm: Comm) -> None:
        reducer = Reducer(algorithm, comm)
        for number in range(COMPILING_STEPS):
            seeded = torch.Generator().manual_seed(2 * number + comm.rank)
            reducer.all_reduce(torch.randn(WORTH_COMPILING, generator=seeded).to(dtype))

    run_local(2, make_steps)
    return time.perf_counter() - start

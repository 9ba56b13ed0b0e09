"""`Algorithm`: the base class of all algorithms, its results, and the pieces that several of them share.

    init(numel, comm)         -> state      once for each vector length; plain data, saved in checkpoints
    reduce(acc, state, comm)  -> Reduced    once a step, on all ranks

Error feedback is one rule for all: residual = acc with `taken` replaced by its `rounding_error` (zero, unless the wire
rounds), plus the `leftover`. Then, element by element,

    sum over ranks of acc  =  sum  +  sum over ranks of residual

which is the law that every algorithm is tested against.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from oktopk.codec import Codec
from oktopk.codec.values import WIRES
from oktopk.comm.base import Comm
from oktopk.errors import InputError, MismatchError, NonFiniteError, SettingError, one_of, within
from oktopk.feedback import Prefilter
from oktopk.kernels.reference import is_finite
from oktopk.partition import even_cuts, sweep_of
from oktopk.selection import Ranking, largest, num_selected
from oktopk.sparse import Sparse, merge

AUTO = "auto"
"""The wire that is chosen for each vector."""


@dataclass(frozen=True)
class Reduced:
    """The result of a step.

    sum              the delivered sum, with the same bits on every rank
    taken            the part of this rank's acc that is inside it: indices, a mask, or a slice
    rounding_error   of the taken values, by place: it stays in this rank's residual
    leftover         values that a merge, or rounding a sum, left out: they are added to this rank's residual

    The other fields are for the record.
    """

    sum: Sparse | Tensor
    taken: Tensor | slice
    leftover: tuple[Sparse, ...] = ()
    selected: int | None = None
    threshold: float | None = None
    global_threshold: float | None = None
    rounding_error: Tensor | None = None

    def num_selected(self, numel: int) -> int:
        """Return the number of elements that this rank selected; if the algorithm does not say, of those taken."""
        if self.selected is not None:
            return self.selected
        if isinstance(self.taken, slice):
            return len(range(numel)[self.taken])
        return int(self.taken.sum()) if self.taken.dtype == torch.bool else len(self.taken)


@dataclass(frozen=True)
class StepStats:
    """The numbers of a reduction, for its record.

    `pairs` counts the delivered pairs, None if every element was delivered. `owners` counts them by rank's region.
    """

    selected: int
    pairs: int | None
    owners: tuple[int, ...] = ()
    threshold: float | None = None
    global_threshold: float | None = None
    oldest_wait_steps: int | None = None

    @staticmethod
    def of(reduced: Reduced, numel: int, state: Any) -> StepStats:
        """Count the delivered elements of a vector of `numel`, also between the state's cuts, if it has any."""
        pairs, owners, cuts = None, (), getattr(state, "cuts", None)
        if isinstance(reduced.sum, Sparse):
            pairs, index = reduced.sum.nnz, reduced.sum.index
            if isinstance(cuts, Tensor) and numel:
                owners = tuple(torch.searchsorted(index, cuts.to(index)).diff().tolist())
        return StepStats(reduced.num_selected(numel), pairs, owners, reduced.threshold, reduced.global_threshold)


@dataclass(frozen=True)
class StepInput:
    """Further inputs of a step: this rank's `InputStatus`, and the results of `prefilter` and `measure`."""

    status: int = 0
    prefilter: Prefilter | None = None
    measured: Tensor | None = None


class Algorithm:
    """Base class of all algorithms: `init` and `reduce` make one, the rest are options."""

    density: float = 1.0

    def init(self, numel: int, comm: Comm) -> Any:  # noqa: ARG002
        """Return the state for vectors of `numel` elements: plain data, saved in checkpoints."""
        return State(numel)

    def reduce(self, acc: Tensor, state: Any, comm: Comm) -> Reduced:
        """Return the sum that this step delivers of `acc`, which it may overwrite only where all of it is taken."""
        raise NotImplementedError

    @property
    def name(self) -> str:
        """The name of the class that the user gave, for messages and checkpoints."""
        return type(self.given).__name__

    @property
    def given(self) -> Any:
        """The object that the user gave."""
        return self

    @property
    def has_density(self) -> bool:
        """Whether the density is a setting."""
        return is_dataclass(self.given) and "density" in (each.name for each in fields(self.given))

    @property
    def takes_segments(self) -> bool:
        """Whether `init` has an argument for the lengths of the rows."""
        parameters = inspect.signature(self.given.init).parameters.values()
        return any(parameter.name == "segments" or parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)

    def init_state(self, numel: int, comm: Comm, segments: Sequence[int]) -> Any:
        """Return `init` with the segments, if it takes them."""
        extra = {"segments": segments} if segments and self.takes_segments else {}
        return self.init(numel, comm, **extra)

    def with_density(self, density: float) -> Algorithm:
        """Return the same algorithm with another density."""
        if not self.has_density:
            raise SettingError(f"{self.name} has no density to set")
        return as_algorithm(replace(self.given, density=density))

    def prefilter(self, state: Any) -> Prefilter | None:  # noqa: ARG002
        """Return the place for candidates, noted while acc is made; None if the algorithm does not want them."""
        return None

    def measure(self, state: Any, acc: Tensor, residual: Tensor) -> Tensor | None:  # noqa: ARG002
        """Return a measurement of this step's gradient, acc - residual, if the algorithm wants one."""
        return None

    def reduce_step(self, acc: Tensor, state: Any, comm: Comm, inputs: StepInput) -> Reduced:
        """Return `reduce`, or raise on every rank, once all ranks know all input statuses."""
        InputStatus.agree(inputs.status, acc.device, comm, acc.numel())
        return self.reduce(acc, state, comm)


@dataclass(frozen=True)
class _Adapted(Algorithm):
    """An object with `init` and `reduce` as an `Algorithm`."""

    inner: Any

    @property
    def density(self) -> float:  # type: ignore[override]
        return float(getattr(self.inner, "density", 1.0))

    @property
    def given(self) -> Any:
        return self.inner

    def init(self, numel: int, comm: Comm, **extra: Any) -> Any:
        return self.inner.init(numel, comm, **extra)

    def reduce(self, acc: Tensor, state: Any, comm: Comm) -> Reduced:
        reduced = self.inner.reduce(acc, state, comm)
        if not isinstance(reduced, Reduced):
            raise SettingError(f"{CONTRACT}; reduce of this {self.name} returned a {type(reduced).__name__}")
        return reduced


CONTRACT = "an algorithm has init(numel, comm) -> state and reduce(acc, state, comm) -> Reduced(sum, taken)"


def as_algorithm(algorithm: Any) -> Algorithm:
    """Return the object itself if it is an `Algorithm`; any other with `init` and `reduce` is adapted."""
    if isinstance(algorithm, type):
        raise SettingError(f"{algorithm.__name__} is a class: write {algorithm.__name__}(), with brackets")
    if isinstance(algorithm, Algorithm):
        return algorithm
    this = f"this {type(algorithm).__name__}"
    missing = [name for name in ("init", "reduce") if not callable(getattr(algorithm, name, None))]
    if missing:
        raise SettingError(f"{CONTRACT}; {this} has no {' and no '.join(missing)}")
    for method, arguments in ((algorithm.init, 2), (algorithm.reduce, 3)):
        signature = inspect.signature(method)
        try:
            signature.bind(*range(arguments))
        except TypeError as error:
            raise SettingError(f"{CONTRACT}; {this} has {method.__name__}{signature}: {error}") from None
    return _Adapted(algorithm)


def describe(algorithm: Any) -> str:
    """Return an algorithm with its settings, as text; the class of one that is no dataclass."""
    return repr(algorithm) if is_dataclass(algorithm) else type(algorithm).__qualname__


def check_finite(reduced: Reduced) -> Reduced:
    """Return the result of a reduction; raise, on every rank alike, if it is not finite."""
    total = reduced.sum.value if isinstance(reduced.sum, Sparse) else reduced.sum
    if not is_finite(total):
        raise NonFiniteError("the sum over ranks is not finite, though every rank's gradient is: nothing was delivered")
    return reduced


@dataclass
class State:
    """State of the baselines: the length of the vector, and the number of the next step."""

    numel: int
    step: int = 0


@dataclass(frozen=True, kw_only=True)
class Sparsifier(Algorithm):
    """Base class of the sparse baselines: a density, a wire, and nothing to remember."""

    density: float = 0.01
    wire: str = "fp32"

    def __post_init__(self) -> None:
        within("density", self.density, 0, 1, open_low=True)
        one_of("wire", self.wire, WIRES)

    def plan(self, numel: int) -> tuple[int, Codec]:
        """Return k and the codec for a vector of `numel` elements."""
        return num_selected(numel, self.density), Codec(numel, self.wire)


@dataclass(kw_only=True)
class OkTopkState(State):
    """The state of Ok-Topk: the cuts of the regions, the ranking, the thresholds in use."""

    cuts: Tensor
    ranking: Ranking
    threshold: float = 0.0
    global_threshold: float = 0.0
    floor: float = 0.0

    def fitting(self, part: Sparse, capacity: int) -> Sparse:
        """Return the part cut to `capacity` pairs: the largest, with ties broken in turn."""
        if part.nnz <= capacity:
            return part
        if not capacity:
            return part[:0]
        return part[largest(self.ranking.score(part.value, part.index), capacity, self.step)]

    def sweep(self, k: int, cuts: Tensor, comm: Comm, device: torch.device) -> Tensor | None:
        """Return the indices of this step's sweep, if it is one; a rank that is alone needs none."""
        sweep = sweep_of(self.step, k, cuts) if comm.size > 1 else None
        return None if sweep is None else sweep.to(device)


@dataclass(frozen=True, kw_only=True)
class OkTopkSettings(Algorithm):
    """The settings and the state that both forms of Ok-Topk share.

    density         part of the elements that a step delivers, in (0, 1]
    ranking         "magnitude": by |acc|; "scaled": by |acc| over a running rms of the gradient in its segment (a row
                    of a matrix), so that quiet rows wait no longer than loud ones
    wire            "fp32", "bf16" or "int8": the narrow ones round values and pack indices, to half the bytes and less;
                    "auto": int8, but fp32 at density 1, so that it equals dense, and on the device path
    rescale_every   steps between measurements of the gradient, for the scales
    """

    density: float = 0.03
    ranking: str = "magnitude"
    wire: str = AUTO
    rescale_every: int = 16

    def __post_init__(self) -> None:
        within("density", self.density, 0, 1, open_low=True)
        one_of("ranking", self.ranking, ("magnitude", "scaled"))
        one_of("wire", self.wire, (AUTO, *WIRES))
        within("rescale_every", self.rescale_every, 1)

    def init(self, numel: int, comm: Comm, segments: Sequence[int] = ()) -> OkTopkState:
        """Return the state before the first sparse step: even regions, no thresholds, all scales 1."""
        scaled = self.ranking == "scaled" and len(segments)
        ranking = Ranking.by_segment(numel, segments) if scaled else Ranking.by_magnitude(numel)
        return OkTopkState(numel, cuts=even_cuts(numel, comm.size), ranking=ranking)

    def codec(self, numel: int) -> Codec:
        """Return the codec for pairs of a vector of this length."""
        if self.wire != AUTO:
            return Codec(numel, self.wire)
        return Codec(numel, "int8" if num_selected(numel, self.density) < numel else "fp32")

    def measure(self, state: OkTopkState, acc: Tensor, residual: Tensor) -> Tensor | None:
        """Return the mean squares of this step's gradient by segments, if that is due."""
        if len(state.ranking.scale) == 1 or state.step % self.rescale_every:
            return None
        return state.ranking.mean_squares(acc, residual)

    def reduce(self, acc: Tensor, state: OkTopkState, comm: Comm) -> Reduced:
        """Return about k pairs: the largest of the sum of what the ranks selected."""
        return self.reduce_step(acc, state, comm, StepInput())


class InputStatus:
    """One number that says whether a rank's input can be reduced, and if not, why: reason + 4 * detail."""

    FINE = 0
    NON_FINITE = 1  # detail: index
    WRONG_NUMEL = 2  # detail: numel
    WRONG_DTYPE = 3

    @staticmethod
    def of(reason: int, detail: int = 0) -> int:
        """Return the status as a number."""
        return reason + 4 * detail

    @staticmethod
    def on(first_bad: int) -> int:
        """Return the status of a vector whose first NaN or Inf is at this index; -1: there is none."""
        return InputStatus.FINE if first_bad < 0 else InputStatus.of(InputStatus.NON_FINITE, first_bad)

    @staticmethod
    def agree(status: int, device: torch.device, comm: Comm, numel: int) -> None:
        """Tell every rank this one's status; raise, on every rank alike, if any refuses its input."""
        with comm.phase("agree"):
            statuses = comm.all_gather(torch.tensor([status], device=device)).view(-1).tolist()
        InputStatus.details(statuses, numel)

    @staticmethod
    def details(statuses: Sequence[int], numel: int) -> list[int]:
        """Return the details; raise, on every rank alike, the error of the first rank that refuses its input."""
        details = [status // 4 for status in statuses]
        for rank, (status, detail) in enumerate(zip(statuses, details, strict=True)):
            reason = status % 4
            if reason == InputStatus.NON_FINITE:
                message = (
                    f"rank {rank}: the gradient plus its residual is not finite at index {detail} of {numel}; "
                    f"nothing was sent, and the residual is as it was before this step"
                )
                raise NonFiniteError(message, rank=rank, index=detail)
            if reason == InputStatus.WRONG_NUMEL:
                raise MismatchError(f"rank {rank} came with {detail} elements, this reducer's state is for {numel}")
            if reason == InputStatus.WRONG_DTYPE:
                raise InputError(f"rank {rank} came with another dtype or device than at its first step")
        return details


def with_sweep(found: Sparse, acc: Tensor, sweep: Tensor | None) -> Sparse:
    """Return the pairs found in acc, and those of the sweep that are not zero."""
    if sweep is None:
        return found
    value = acc.index_select(0, sweep)
    is_new = value != 0
    is_new[found.shared(sweep)] = False
    return merge([found, Sparse(sweep[is_new], value[is_new], found.numel)])


def taken_of(sent: Tensor, lost: Tensor | None, delivered: Sparse) -> tuple[Tensor, Tensor | None]:
    """Return the `sent` indices that were delivered, and their rounding errors; `lost` has those of all sent values."""
    places = delivered.shared(sent)
    return sent.index_select(0, places), None if lost is None else lost.index_select(0, places)

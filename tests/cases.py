"""The cases that the laws are tried on: every algorithm with its settings, and gradients of every unkind sort."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any
from unittest import mock

import torch
from hypothesis import strategies as st
from torch import Tensor

from oktopk import Dense, GaussianK, GTopk, OkTopk, OkTopkPaper, Reducer, StepRecord, TopkA, TopkDSA
from oktopk.codec.values import WIRES
from oktopk.cuda.graphs import Graphs
from oktopk.ddp.engine import Bucket, Engine

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

PLAIN = {"ranking": "magnitude", "wire": "fp32"}
"""Ok-Topk as the paper has it: for tests that say what exactly is delivered."""


def oktopk(mode: str, **settings: Any) -> OkTopk | OkTopkPaper:
    """Return either form of Ok-Topk, with those of the settings that it has."""
    cls = OkTopkPaper if mode == "paper" else OkTopk
    known = {field.name for field in fields(cls)}
    return cls(**{name: value for name, value in settings.items() if name in known})


def algorithms(density: float, **periods: int) -> dict[str, Any]:
    """Return every algorithm in every setting that changes what it does, by name."""
    if "repartition_every" in periods:
        periods.setdefault("rescale_every", periods["repartition_every"])
    made: dict[str, Any] = {"dense": Dense(), "oktopk-bounded-as-is": oktopk("bounded", density=density, **periods)}
    for wire in WIRES:
        for cls in (TopkDSA, GTopk) if wire == "int8" else (TopkA, TopkDSA, GTopk, GaussianK):
            made[f"{cls.__name__.lower()}-{wire}"] = cls(density=density, wire=wire)
        for mode in ("bounded", "paper"):
            for ranking in ("scaled",) if wire == "int8" else ("magnitude", "scaled"):
                made[f"oktopk-{mode}-{ranking}-{wire}"] = oktopk(
                    mode, density=density, ranking=ranking, wire=wire, **periods
                )
    return made


NAMES = tuple(algorithms(1.0))
OKTOPK_COVER = ("oktopk-bounded-as-is", "oktopk-bounded-magnitude-fp32")
OKTOPK_COVER += ("oktopk-paper-magnitude-bf16", "oktopk-paper-scaled-int8")
COVER = ("dense", "topka-bf16", "topkdsa-int8", "gtopk-fp32", "gaussiank-fp32", *OKTOPK_COVER)
"""Dense, each baseline and each mode with each ranking, and every wire with a baseline and with Ok-Topk.

For tests that say something other than the laws; `test_laws` and `test_state` have every name."""


@dataclass(frozen=True)
class Case:
    """A run: who reduces what, for how many steps."""

    algorithm: Any
    size: int
    numel: int
    kind: str = "normal"
    dtype: torch.dtype = torch.float32
    seed: int = 0
    steps: int = 4
    jump_at: int = 2  # the step at which "growing" grows and "waking" wakes

    @property
    def wide(self) -> torch.dtype:
        """Return the dtype in which the residual is kept."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @property
    def segments(self) -> list[int] | None:
        """Return lengths that add up, some of them zero, where the ranking wants segments."""
        if getattr(self.algorithm, "ranking", "") != "scaled":
            return None
        edges = sorted(torch.randint(self.numel + 1, (4,), generator=_seeded(self.seed)).tolist())
        return [high - low for low, high in zip([0, *edges], [*edges, self.numel], strict=True)]

    def gradient(self, rank: int, step: int) -> Tensor:
        """Return the gradient of one rank at one step; always the same."""
        return KINDS[self.kind](self, rank, step).to(self.dtype)

    def reducer(self, comm: Any) -> Reducer:
        """Return a fresh reducer."""
        return Reducer(self.algorithm, comm, segments=self.segments)


@dataclass(frozen=True)
class Step:
    """One step as one rank saw it: the input, the result and the residual after it."""

    acc: Tensor
    mean: Tensor
    residual: Tensor
    record: StepRecord


def trace(comm: Any, case: Case) -> list[Step]:
    """Return all steps of a case, as one rank sees them."""
    reducer = case.reducer(comm)
    return [take_step(reducer, case, step) for step in range(case.steps)]


def take_step(reducer: Reducer, case: Case, step: int) -> Step:
    """Return one step; acc is computed here, from the residual that the reducer showed before."""
    grad = case.gradient(reducer.state_dict()["rank"], step)
    before = reducer.residual
    acc = grad.to(case.wide) + (0 if before is None else before)
    mean = reducer.all_reduce(grad)
    assert reducer.last is not None
    assert reducer.residual is not None
    return Step(acc, mean, reducer.residual, reducer.last)


@st.composite
def cases(draw: st.DrawFn, name: str) -> Case:
    """Draw a case of the algorithm of that name."""
    density = draw(st.sampled_from((0.01, 0.1, 1.0, 0.001)) | st.floats(1e-6, 1.0))
    rethreshold, repartition = draw(st.sampled_from(((2, 3), (32, 64), (1, 1))))
    return Case(
        algorithm=algorithms(density, rethreshold_every=rethreshold, repartition_every=repartition)[name],
        size=draw(st.integers(1, 8)),
        numel=draw(st.integers(0, 20) | st.integers(0, 20_000)),
        kind=draw(st.sampled_from(tuple(KINDS))),
        dtype=draw(st.sampled_from(DTYPES)),
        seed=draw(st.integers(0, 1000)),
    )


def _seeded(*numbers: int) -> torch.Generator:
    seed = 0
    for number in numbers:
        seed = seed * 1_000_003 + number + 1
    return torch.Generator().manual_seed(seed % (1 << 63))


def _normal(case: Case, *where: int) -> Tensor:
    return torch.randn(case.numel, generator=_seeded(case.seed, *where), dtype=torch.float64)


def heavy_tailed(case: Case, *where: int) -> Tensor:
    """Return Student's t with 3 degrees of freedom: about as heavy as a gradient's tails."""
    normal = torch.randn(4, case.numel, generator=_seeded(case.seed, *where), dtype=torch.float64)
    return normal[0] / normal[1:].square().mean(0).sqrt()


def _skew(case: Case, rank: int, step: int) -> Tensor:
    large = torch.full((case.numel,), 1e-3, dtype=torch.float64)
    tenth = case.seed % 10
    large[tenth * case.numel // 10 : (tenth + 1) * case.numel // 10] = 1.0
    return _normal(case, rank, step) * large


def _few(case: Case, rank: int, step: int) -> Tensor:
    grad = torch.zeros(case.numel, dtype=torch.float64)
    grad[(case.seed + rank) % max(case.numel, 1) :: max(case.numel // 3, 1)] = 1.0 + step
    return grad


@lru_cache(maxsize=4)
def _base(case: Case) -> Tensor:
    return heavy_tailed(case)


KINDS: dict[str, Callable[[Case, int, int], Tensor]] = {
    "normal": _normal,
    "heavy tails": heavy_tailed,
    "skew": _skew,
    "one rank zero": lambda case, rank, step: _normal(case, rank, step) * (rank != 0),
    "zero": lambda case, *_: torch.zeros(case.numel, dtype=torch.float64),
    "few": _few,
    "ties": lambda case, *at: torch.randint(-2, 3, (case.numel,), generator=_seeded(case.seed, *at)).double(),
    "constant": lambda case, *_: torch.full((case.numel,), -1.5, dtype=torch.float64),
    "correlated ranks": lambda case, *at: _base(case) + 0.1 * _normal(case, *at),
    "identical ranks": lambda case, _, step: heavy_tailed(case, step),
    "cancelling ranks": lambda case, rank, step: _normal(case, rank // 2, step) * (1 - 2 * (rank % 2)),
    "growing": lambda case, rank, step: _normal(case, rank, step) * (100 if step >= case.jump_at else 1),
    "waking": lambda case, rank, step: _normal(case, rank, step) * (step >= case.jump_at),
    "denormal": lambda case, *at: _normal(case, *at) * (torch.finfo(case.dtype).smallest_normal / 32),
    "drifting": lambda case, *at: _base(case) + heavy_tailed(case, *at),
}


@dataclass
class Seen:
    """Runs of a device step's captured work, counted while `device_step` holds: 0 if every step ran on the host."""

    runs: int = 0


@contextmanager
def device_step(supported: Callable[..., bool] = lambda algorithm, *_: isinstance(algorithm, OkTopk)) -> Iterator[Seen]:
    """Run Ok-Topk's steps as on a GPU, with the reference kernels, wherever `supported` says so.

    Captured work is replayed as a CUDA graph would: with tensors in the same places, the first time's, on its tensors.
    """
    seen = Seen()

    def replay(graphs: Graphs, work: Callable[..., None], *tensors: Tensor, kind: Hashable = None) -> None:
        seen.runs += 1
        places = (kind, *[tensor.data_ptr() for tensor in tensors])
        first, theirs = graphs._made.setdefault(places, (work, tensors))  # type: ignore[arg-type, misc]
        first(*theirs)

    with mock.patch("oktopk.cuda.step.supports_device_step", supported), mock.patch.object(Graphs, "run", replay):
        yield seen


@contextmanager
def broken_readback(message: str) -> Iterator[None]:
    """Let the host fail when it reads the stats of a device step."""
    with mock.patch("oktopk.steps.device.Readback.read", side_effect=RuntimeError(message)):
        yield


@contextmanager
def before_release(work: Callable[[Tensor], None]) -> Iterator[None]:
    """Do `work` with every bucket's buffer, on the exchange's stream, after a step and before backward() goes on."""
    release = Engine._release_backward

    def late(engine: Engine, buckets: Sequence[Bucket], error: Any) -> None:
        for bucket in buckets:
            work(bucket.buffer)
        release(engine, buckets, error)

    with mock.patch.object(Engine, "_release_backward", late):
        yield

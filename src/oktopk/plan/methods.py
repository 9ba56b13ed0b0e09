"""The candidates: dense in float32 and bf16, PowerSGD, our algorithms by density and wire, two levels, local steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from oktopk.algorithms import Algorithm, Dense, GaussianK, GTopk, OkTopk, OkTopkPaper, TopkA, TopkDSA
from oktopk.codec.values import WIRES

DENSE, BF16 = "dense", "bf16"
POWERSGD_RANKS = (1, 2, 4)
PAPER_DENSITY = 0.01
"""The density of the paper's experiments, at which the other algorithms are shown, too."""

EVERY = 30
"""H of local steps, as docs/local-steps.md says to begin with."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """A candidate. `algorithm` is ours; `rank` is PowerSGD's; `every` is H of local steps.

    computing is the name under which a profile has its rate. family is that of its learning factors.
    """

    name: str
    code: str
    family: str
    algorithm: Algorithm | None = None
    rank: int = 0
    every: int = 1
    two_level: bool = False
    computing: str = ""


def methods(levels: int = 1, every: int = EVERY) -> list[Method]:
    """Return the candidates for a network of that many levels."""
    found = [*_rivals(), *_ours(), *_local(every)]
    if levels > 1:
        found += [_two_level(each) for each in _ours() if each.family == "oktopk"]
    return found


def default() -> Method:
    """Return the library's default, as `attach` runs it."""
    return Method(
        name="OkTopk()",
        code="sparse = oktopk.attach(model, oktopk.OkTopk(), optimizer=optimizer)",
        family="oktopk",
        algorithm=OkTopk(),
        computing="OkTopk()",
    )


def _rivals() -> Iterator[Method]:
    hook = "from torch.distributed.algorithms.ddp_comm_hooks import"
    yield Method(name=DENSE, code="model = DistributedDataParallel(net)", family=DENSE)
    yield Method(
        name=BF16,
        code=f"{hook} default_hooks; model.register_comm_hook(None, default_hooks.bf16_compress_hook)",
        family=BF16,
        computing=BF16,
    )
    for rank in POWERSGD_RANKS:
        state = f"powerSGD_hook.PowerSGDState(None, {rank})"
        yield Method(
            name=f"powersgd-{rank}",
            code=f"{hook} powerSGD_hook; model.register_comm_hook({state}, powerSGD_hook.powerSGD_hook)",
            family="powersgd",
            rank=rank,
            computing=f"powersgd-{rank}",
        )


def _ours() -> Iterator[Method]:
    yield default()
    usual = OkTopk()
    for density in sorted({usual.density, PAPER_DENSITY}):
        for wire in WIRES:
            made = OkTopk(density=density, wire=wire)
            if made.codec(1 << 24) != usual.codec(1 << 24) or density != usual.density:
                yield _of("oktopk", made, f"OkTopk(density={density:g}, wire={wire!r})")
    for algorithm in (OkTopkPaper, TopkA, TopkDSA, GTopk, GaussianK):
        text = f"{algorithm.__name__}(density={PAPER_DENSITY:g})"
        yield _of(algorithm.__name__.lower(), algorithm(density=PAPER_DENSITY), text)


def _of(family: str, algorithm: Algorithm, text: str) -> Method:
    code = f"sparse = oktopk.attach(model, oktopk.{text}, optimizer=optimizer)"
    return Method(name=text, code=code, family=family, algorithm=algorithm, computing=text)


def _local(every: int) -> Iterator[Method]:
    for algorithm, text, outer in ((Dense(), "Dense()", ', outer="nesterov"'), (OkTopk(), "OkTopk()", "")):
        yield Method(
            name=f"local steps, H = {every}, {text}",
            code=f"local = oktopk.LocalSteps(net, optimizer, oktopk.{text}, every={every}{outer})",
            family="local steps",
            algorithm=algorithm,
            every=every,
            computing="" if isinstance(algorithm, Dense) else text,
        )


def _two_level(method: Method) -> Method:
    code = method.code.replace(", optimizer=optimizer", ', mesh=mesh["replicate"], optimizer=optimizer')
    return replace(method, name=f"{method.name}, two levels", code=code, two_level=True)

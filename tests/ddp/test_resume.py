"""A run that was stopped and resumed has the weights, to the last bit, of one that never stopped."""

from __future__ import annotations

import io
from contextlib import redirect_stderr
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

from oktopk import OkTopk, OkTopkPaper, TopkA, load_distributed, save_distributed
from tests.cases import COVER, algorithms
from tests.ddp.harness import (
    Net,
    Raised,
    Worlds,
    attach,
    error_of,
    loss_of,
    same_bits,
    through_a_file,
    weights_of,
)

pytestmark = pytest.mark.processes

DENSE_STEPS = 4
STEPS = 16
STOPS = (2, DENSE_STEPS, DENSE_STEPS + 1, 11)  # in the dense phase, at its end, right after, well inside


@dataclass(frozen=True)
class Run:
    """What is trained, and with what."""

    algorithm: Any
    settings: dict[str, Any] = field(default_factory=dict)
    unused: bool = False


class Session:
    """What a training script has in hand, from its start to its end."""

    def __init__(self, run: Run, seed: int = 0) -> None:
        self.run = run
        self.model = DDP(Net(seed=seed), bucket_cap_mb=0.01, find_unused_parameters=run.unused)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.attached = attach(self.model, run.algorithm, **{"dense_steps": DENSE_STEPS, **run.settings})

    def train(self, first: int, end: int) -> None:
        rank = dist.get_rank()
        for step in range(first, end):
            self.optimizer.zero_grad()
            branch = not self.run.unused or (step % 5 != 0 and (step + rank) % 3 != 0)
            loss_of(self.model, rank, step, branch=branch).backward()
            self.optimizer.step()

    def saved(self) -> Any:
        parts = {"net": self.model.module, "optimizer": self.optimizer, "oktopk": self.attached}
        return through_a_file({name: part.state_dict() for name, part in parts.items()})

    def load(self, state: Any) -> None:
        self.model.module.load_state_dict(state["net"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.attached.load_state_dict(state["oktopk"])

    def end(self) -> dict[str, Tensor]:
        self.attached.detach()
        residual = {f"residual of {name}": tensor for name, tensor in self.attached.residual.items()}
        return weights_of(self.model.module) | residual


def stop_and_resume(run: Run, stops: tuple[int, ...]) -> list[bool]:
    """Return, for each stop, whether the resumed run ended like the one that never stopped."""
    states = {}
    whole = Session(run)
    for first, end in zip((0, *stops), (*stops, STEPS), strict=True):
        states[first] = whole.saved()
        whole.train(first, end)
    expected, same = whole.end(), []
    for stop in stops:
        session = Session(run, seed=stop)
        session.load(states[stop])
        session.train(stop, STEPS)
        same.append(same_bits(session.end(), expected))
    return same


PERIODS = {"repartition_every": 5, "rethreshold_every": 3}
RUNS = {
    "bounded": Run(OkTopk(density=0.05, rescale_every=5)),
    "paper": Run(OkTopkPaper(density=0.05, **PERIODS), {"exclude": "*bias"}),
    "unused": Run(OkTopk(density=0.05), unused=True),
}
MORE_RUNS = {
    "clip": Run(OkTopk(density=0.05), {"clip": 0.1}),
    "schedule": Run(OkTopk(density=0.01), {"density_schedule": [(3, 0.25), (3, 0.1)]}),
    **{name: Run(algorithms(0.05, **PERIODS)[name]) for name in (*COVER, "oktopk-bounded-scaled-bf16")},
}


@pytest.mark.parametrize(
    ("size", "runs", "stops"),
    [
        (2, RUNS, STOPS),
        pytest.param(3, MORE_RUNS, (1, 7, 13), marks=pytest.mark.slow),
        pytest.param(3, RUNS, tuple(range(1, STEPS, 2)), marks=pytest.mark.long),
    ],
    ids=["quick", "slow", "long"],
)
def test_a_resumed_run_ends_with_the_same_bits(
    worlds: Worlds, size: int, runs: dict[str, Run], stops: tuple[int, ...]
) -> None:
    for name, by_rank in worlds.run_all(size, stop_and_resume, {n: (run, stops) for n, run in runs.items()}).items():
        assert by_rank == [[True] * len(stops)] * size, name


def go_back() -> list[bool]:
    """As after a divergence: the same handle gets a state that is older than what it holds."""
    session, states = Session(RUNS["bounded"]), []
    for step in (0, 2, 7):
        session.train(states[-1][0] if states else 0, step)
        states.append((step, session.saved()))
    session.train(7, STEPS)
    expected, same = weights_of(session.model.module), []
    for step, state in states:
        session.load(state)
        session.train(step, STEPS)
        same.append(same_bits(weights_of(session.model.module), expected))
    session.end()
    return same


def test_going_back_to_an_earlier_state_in_place_repeats_the_run(worlds: Worlds) -> None:
    assert worlds.run(2, go_back) == [[True] * 3] * 2


def change_and_resume(excluded: tuple[Any, ...], algorithms: tuple[Any, ...], settings: dict[str, Any]) -> bool:
    """Stop after exclusions or algorithm changed, one after another: a new session is given the last of them."""
    run = RUNS["bounded"]
    whole = Session(run)
    whole.train(0, 4)
    for step, names in zip((4, 6), excluded, strict=False):
        whole.attached.exclude(names)
        whole.train(step, step + 2)
    for step, algorithm in zip((4, 6), algorithms, strict=False):
        whole.attached.algorithm = algorithm
        whole.train(step, step + 2)
    whole.train(8, 10)
    state = whole.saved()
    whole.train(10, STEPS)
    resumed = Session(Run(run.algorithm, settings), seed=1)
    resumed.load(state)
    resumed.train(10, STEPS)
    return same_bits(resumed.end(), whole.end())


def test_a_run_whose_settings_changed_resumes_with_the_same_bits(worlds: Worlds) -> None:
    cases: dict[str, tuple[Any, ...]] = {
        "exclusion, there and back": (("exit.*", ()), (), {}),
        "algorithm, there and back": ((), (TopkA(density=0.05), RUNS["bounded"].algorithm), {}),
        "exclusion": (("exit.*", ("body.0.*", "norm.*")), (), {"exclude": ("body.0.*", "norm.*")}),
    }
    assert list(worlds.run_all(2, change_and_resume, cases).values()) == [[True, True]] * len(cases)


def load_and_change(asked: Any, folder: Path | None) -> tuple[bool, str]:
    changed = Session(Run(OkTopk(density=0.05, ranking="magnitude")))
    changed.train(0, 8)
    state = changed.saved()
    if folder is not None:
        save_distributed(folder, changed.attached)
    changed.attached.algorithm = asked
    changed.train(8, STEPS)
    loaded, said = Session(Run(asked), seed=1), io.StringIO()
    with redirect_stderr(said):
        loaded.load(state)
        if folder is not None:
            said.truncate(0)
            load_distributed(folder, loaded.attached)
    loaded.train(8, STEPS)
    return same_bits(loaded.end(), changed.end()), said.getvalue()


def test_the_mode_ranking_and_density_asked_for_are_those_used_after_loading(worlds: Worlds, tmp_path: Path) -> None:
    """A run that loads a state goes on as one that holds these residuals and changes its algorithm."""
    asked = {"ranking": OkTopk(density=0.05, ranking="scaled"), "density": OkTopk(density=0.2, ranking="magnitude")}
    cases = {f"{name} {path}": (each, path) for name, each in asked.items() for path in (None, tmp_path / name)}
    for name, by_rank in worlds.run_all(2, load_and_change, cases).items():
        assert [same for same, _ in by_rank] == [True, True], name
        anew = [said.count("starts anew") for _, said in by_rank]
        assert anew == ([0, 0] if name.startswith("density") else [1, 0]), name


def hand_over() -> tuple[bool, bool]:
    """Return whether a saved state stays as it was while the run goes on, and can be loaded after detach()."""
    session = Session(RUNS["bounded"])
    session.train(0, 8)
    state = session.attached.state_dict()
    before = through_a_file(state)
    session.train(8, 10)
    unchanged = same_bits(state["residual"], before["residual"])
    session.attached.detach()
    second = attach(session.model, session.run.algorithm)
    second.load_state_dict(session.attached.state_dict())
    same = same_bits(second.residual, session.attached.residual) and second.step == 10
    second.detach()
    return unchanged, same


def test_a_saved_state_does_not_change_with_the_run_and_one_of_after_detach_will_do(worlds: Worlds) -> None:
    assert worlds.run(2, hand_over) == [(True, True)] * 2


def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(worlds: Worlds) -> None:
    for rank, (refusals, unchanged) in enumerate(worlds.run(2, load_what_does_not_fit)):
        assert unchanged
        assert all(refusal is not None and refusal.kind == "StateError" for refusal in refusals.values()), refusals
        said = {name: refusal.message for name, refusal in refusals.items()}
        assert "version 7" in said["version"]
        assert f"rank {1 - rank}" in said["rank"]
        assert "size 5" in said["size"]
        assert "load_distributed" in said["size"]
        assert "TopkA" in said["algorithm"]
        assert all(f"'{name}'" in said["names"] for name in ("exit.bias", "another"))
        assert "'exit.bias'" in said["numel"]
        assert "version" in said["not a state"]


def load_what_does_not_fit() -> tuple[dict[str, Raised | None], bool]:
    session = Session(RUNS["bounded"])
    session.train(0, 7)
    state = session.saved()["oktopk"]
    before = session.attached.state_dict()
    residual = state["residual"]
    wrong: dict[str, Any] = {
        "version": state | {"version": 7},
        "rank": state | {"rank": 1 - state["rank"]},
        "size": state | {"size": 5},
        "algorithm": state | {"algorithm": "TopkA"},
        "names": state | {"residual": {n if n != "exit.bias" else "another": t for n, t in residual.items()}},
        "numel": state | {"residual": residual | {"exit.bias": torch.zeros(1)}},
        "not a state": {},
    }
    refusals = {name: error_of(lambda bad=bad: session.attached.load_state_dict(bad)) for name, bad in wrong.items()}
    after = session.attached.state_dict()
    unchanged = same_bits(after["residual"], before["residual"]) and after["step"] == before["step"]
    session.end()
    return refusals, unchanged


def test_ranks_that_resume_at_different_steps_are_told(worlds: Worlds) -> None:
    for raised in worlds.run(2, resume_apart):
        assert raised is not None
        assert "MismatchError" in raised.message
        assert "disagree on the step" in raised.message


def resume_apart() -> Raised | None:
    session = Session(RUNS["bounded"])
    session.train(0, 2)
    early = session.saved()
    session.train(2, 3)
    late = session.saved()
    session.load(early if dist.get_rank() == 0 else late)
    raised = error_of(lambda: session.train(3, 4))
    session.end()
    return raised

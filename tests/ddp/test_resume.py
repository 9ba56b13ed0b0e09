"""A run that was stopped and resumed has the weights, to the last bit, of one that never stopped."""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import redirect_stderr
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

from oktopk import GaussianK, GTopk, OkTopk, OkTopkPaper, TopkA, TopkDSA, load_distributed, save_distributed
from tests.ddp.harness import Net, Raised, Worlds, attach, error_of, loss_of, same_bits, through_a_file, weights_of

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
    bucket_cap_mb: float = 0.01


class Session:
    """What a training script has in hand, from its start to its end."""

    def __init__(self, run: Run, seed: int = 0) -> None:
        self.run = run
        self.model = DDP(Net(seed=seed), bucket_cap_mb=run.bucket_cap_mb, find_unused_parameters=run.unused)
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
    "bounded": Run(OkTopk(density=0.05)),
    "paper": Run(OkTopkPaper(density=0.05, **PERIODS), {"exclude": "*bias"}),
    "unused": Run(OkTopk(density=0.05), unused=True),
}
MORE_RUNS = {
    "bounded scaled bf16": Run(OkTopk(density=0.05, ranking="scaled", wire="bf16")),
    "paper scaled": Run(OkTopkPaper(density=0.05, ranking="scaled", **PERIODS)),
    "clip": Run(OkTopk(density=0.05), {"clip": 0.1}),
    "schedule": Run(OkTopk(density=0.01), {"density_schedule": [(3, 0.25), (3, 0.1)]}),
    "topka": Run(TopkA(density=0.05)),
    "topkdsa": Run(TopkDSA(density=0.05)),
    "gtopk": Run(GTopk(density=0.05)),
    "gaussiank": Run(GaussianK(density=0.05)),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_resumed_run_ends_with_the_same_bits(worlds: Worlds, name: str) -> None:
    assert worlds.run(2, stop_and_resume, RUNS[name], STOPS) == [[True] * len(STOPS)] * 2


@pytest.mark.slow
@pytest.mark.parametrize("name", [*(pytest.param(name, marks=pytest.mark.long) for name in RUNS), *MORE_RUNS])
def test_a_resumed_run_ends_with_the_same_bits_on_three_ranks(worlds: Worlds, name: str) -> None:
    run = {**RUNS, **MORE_RUNS}[name]
    assert worlds.run(3, stop_and_resume, run, tuple(range(1, STEPS, 2))) == [[True] * (STEPS // 2)] * 3


@pytest.mark.parametrize("name", ["bounded", "unused"])
def test_going_back_to_an_earlier_state_in_place_repeats_the_run(worlds: Worlds, name: str) -> None:
    """As after a divergence: the same handle gets a state that is older than what it holds."""
    assert worlds.run(2, go_back, RUNS[name]) == [[True] * 3] * 2


def go_back(run: Run) -> list[bool]:
    session, states = Session(run), []
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


def swap_back(session: Session) -> None:
    session.attached.exclude("exit.*")
    session.train(6, 8)
    session.attached.exclude(())


def other_algorithm_and_back(session: Session) -> None:
    session.attached.algorithm = TopkA(density=0.05)
    session.train(6, 8)
    session.attached.algorithm = session.run.algorithm


@pytest.mark.parametrize("change", [swap_back, other_algorithm_and_back])
def test_a_run_whose_settings_went_there_and_back_resumes_with_the_same_bits(
    worlds: Worlds, change: Callable[[Session], None]
) -> None:
    assert worlds.run(2, change_and_resume, change) == [True, True]


def change_and_resume(change: Callable[[Session], None]) -> bool:
    """Stop after the settings were changed and changed back: a new session has them as they are."""
    run = RUNS["bounded"]
    whole = Session(run)
    whole.train(0, 6)
    change(whole)
    whole.train(8, 10)
    state = whole.saved()
    whole.train(10, STEPS)
    resumed = Session(run, seed=1)
    resumed.load(state)
    resumed.train(10, STEPS)
    return same_bits(resumed.end(), whole.end())


def test_a_state_after_a_changed_exclusion_resumes_where_that_is_given(worlds: Worlds) -> None:
    assert worlds.run(2, resume_with_the_changed_exclusion) == [True, True]


def resume_with_the_changed_exclusion() -> bool:
    whole = Session(RUNS["bounded"])
    whole.train(0, 8)
    whole.attached.exclude(("body.0.*", "norm.*"))
    whole.train(8, 10)
    state = whole.saved()
    whole.train(10, STEPS)
    resumed = Session(Run(RUNS["bounded"].algorithm, {"exclude": ("body.0.*", "norm.*")}), seed=1)
    resumed.load(state)
    resumed.train(10, STEPS)
    return same_bits(resumed.end(), whole.end())


ASKED = {
    "ranking": OkTopk(density=0.05, ranking="scaled"),
    "density": OkTopk(density=0.2, ranking="magnitude"),
}


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("distributed", [False, True], ids=["state dict", "distributed"])
def test_the_mode_ranking_and_density_asked_for_are_those_used_after_loading(
    worlds: Worlds, tmp_path: Path, asked: str, distributed: bool
) -> None:
    """A run that loads a state goes on as one that holds these residuals and changes its algorithm."""
    for rank, (same, said) in enumerate(worlds.run(2, load_and_change, ASKED[asked], tmp_path, distributed)):
        assert same
        assert said.count("starts anew") == (1 if rank == 0 and asked != "density" else 0)


def load_and_change(asked: Any, folder: Path, distributed: bool) -> tuple[bool, str]:
    changed = Session(Run(OkTopk(density=0.05, ranking="magnitude")))
    changed.train(0, 8)
    state = changed.saved()
    if distributed:
        save_distributed(folder, changed.attached)
    changed.attached.algorithm = asked
    changed.train(8, STEPS)
    loaded, said = Session(Run(asked), seed=1), io.StringIO()
    with redirect_stderr(said):
        loaded.load(state)
        if distributed:
            said.truncate(0)
            load_distributed(folder, loaded.attached)
    loaded.train(8, STEPS)
    return same_bits(loaded.end(), changed.end()), said.getvalue()


def test_a_saved_state_does_not_change_with_the_run(worlds: Worlds) -> None:
    assert all(worlds.run(2, save_then_go_on))


def save_then_go_on() -> bool:
    session = Session(RUNS["bounded"])
    session.train(0, 8)
    state = session.attached.state_dict()
    before = through_a_file(state)
    session.train(8, 10)
    session.end()
    return same_bits(state["residual"], before["residual"])


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

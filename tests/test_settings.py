"""The number of knobs that a user meets, by place; docs/settings.md has the table of those that went.

A knob is a name that changes the work, and counts once in each place. One run is one place: a flag of `oktopk train`
and the setting of that name are the same knob. So are all commands of `oktopk bench` or `data`, and all algorithms.
"""

import inspect
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import oktopk
from oktopk.algorithms import ALGORITHMS
from oktopk.cli import COMMANDS
from oktopk.cli.root import load
from oktopk.train.config import Config

PAGE = Path(__file__).parents[1] / "docs" / "settings.md"


def options_of(command: Any) -> Iterator[str]:
    for each in getattr(command, "commands", {}).values():
        yield from options_of(each)
    yield from (p.name for p in command.params if p.param_type_name == "option" and not p.is_eager and p.name != "help")


def keywords_of(function: Any) -> set[str]:
    return {name for name, p in inspect.signature(function).parameters.items() if p.kind is p.KEYWORD_ONLY}


MOST = 75
LATER = {
    "oktopk train": {"optimizer", "precision", "local_steps", "outer", "elastic", "lighthouse"},
    "oktopk bench": {"compute_s", "every", "shard", "minutes", "faults"},  # of local and sharded steps, of members
    "attach": {"mesh", "optimizer", "sparse_momentum"},  # FSDP, and the momentum of sparse steps
    "LocalSteps": keywords_of(oktopk.LocalSteps),
    "oktopk plan": set(options_of(load("plan"))),
}
"""Knobs of capabilities that came after the count: they add to nobody's choices who does not use these."""


def knobs() -> dict[str, set[str]]:
    places = {f"oktopk {name}": set(options_of(load(name))) for name in COMMANDS if name != "doctor"}
    places["oktopk doctor"] = {"json"}
    places["oktopk train"] |= {each.name for each in fields(Config)}
    for call in (oktopk.attach, oktopk.Reducer, oktopk.LocalSteps):
        places[call.__name__] = keywords_of(call)
    places["algorithms"] = {each.name for algorithm in ALGORITHMS.values() for each in fields(algorithm)}  # type: ignore[arg-type]
    return places


def test_knobs_are_few_and_the_page_counts_them() -> None:
    counts = {place: (len(names - LATER.get(place, set())), len(names)) for place, names in knobs().items()}
    assert sum(least for least, _ in counts.values()) <= MOST, counts
    rows = [line.split("|") for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    shown = {row[1].strip().strip("`"): (int(row[3]), int(row[4])) for row in rows if len(row) == 6}
    assert shown == counts

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

MOST = 97
PAGE = Path(__file__).parents[1] / "docs" / "settings.md"


def options_of(command: Any) -> Iterator[str]:
    for each in getattr(command, "commands", {}).values():
        yield from options_of(each)
    yield from (p.name for p in command.params if p.param_type_name == "option" and not p.is_eager and p.name != "help")


def keywords_of(function: Any) -> set[str]:
    return {name for name, p in inspect.signature(function).parameters.items() if p.kind is p.KEYWORD_ONLY}


def knobs() -> dict[str, set[str]]:
    places = {f"oktopk {name}": set(options_of(load(name))) for name in COMMANDS if name != "doctor"}
    places["oktopk doctor"] = {"json"}
    places["oktopk train"] |= {each.name for each in fields(Config)}
    for call in (oktopk.attach, oktopk.Reducer, oktopk.LocalSteps):
        places[call.__name__] = keywords_of(call)
    places["algorithms"] = {each.name for algorithm in ALGORITHMS.values() for each in fields(algorithm)}  # type: ignore[arg-type]
    return places


def test_knobs_are_few_and_the_page_counts_them() -> None:
    counts = {place: len(names) for place, names in knobs().items()}
    assert sum(counts.values()) <= MOST, counts
    rows = [line.split("|") for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    shown = {row[1].strip().strip("`"): int(row[3]) for row in rows if len(row) == 5 and row[3].strip().isdigit()}
    assert shown == counts

"""The number of knobs that a user meets, by place; docs/settings.md has those that went, and those that came later.

A knob is a name that changes the work, and counts once in each place. One run is one place: a flag of `oktopk train`
and the setting of that name are the same knob. So are all commands of `oktopk bench` or `data`, and all algorithms.
"""

import ast
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
TORCHFT = Path(oktopk.__file__).parent / "integrations" / "torchft"


def options_of(command: Any) -> Iterator[str]:
    for each in getattr(command, "commands", {}).values():
        yield from options_of(each)
    options = (p for p in command.params if p.param_type_name == "option" and not p.is_eager and p.name != "help")
    yield from (p.opts[0].lstrip("-").replace("-", "_") for p in options)


def keywords_of(function: Any) -> set[str]:
    return {name for name, p in inspect.signature(function).parameters.items() if p.kind is p.KEYWORD_ONLY}


def torchft_keywords() -> set[str]:
    """Return the keywords under torchft, from the source: an import of it needs torchft."""
    nodes = [node for file in TORCHFT.glob("*.py") for node in ast.parse(file.read_text()).body]
    places = [n for n in nodes if getattr(n, "name", "") in ("attach", "LocalSteps", "make_manager", "Patience")]
    inner = [node for place in places for node in (place, *getattr(place, "body", ()))]
    calls = [n for n in inner if isinstance(n, ast.FunctionDef) and n.name in ("attach", "__init__", "make_manager")]
    times = {ast.unparse(n.target) for n in inner if isinstance(n, ast.AnnAssign)}
    return times | {each.arg for call in calls for each in call.args.kwonlyargs} - {"patience"}


MOST = 75
LATER = {
    "oktopk train": {"optimizer", "precision", "local_steps", "outer", "elastic", "lighthouse"},
    "oktopk bench": {"compute_s", "every", "shard", "minutes", "faults"},  # of local and sharded steps, of members
    "attach": {"mesh", "optimizer", "sparse_momentum"},  # FSDP, and the momentum of sparse steps
    "LocalSteps": keywords_of(oktopk.LocalSteps),
    "oktopk plan": set(options_of(load("plan"))),
    "torchft": torchft_keywords(),
}
"""Knobs of capabilities that came after the count: they add to nobody's choices who does not use these."""


def knobs() -> dict[str, set[str]]:
    places = {f"oktopk {name}": set(options_of(load(name))) for name in COMMANDS if name != "doctor"}
    places["oktopk doctor"] = {"json"}
    places["oktopk train"] |= {each.name for each in fields(Config)}
    for call in (oktopk.attach, oktopk.Reducer, oktopk.LocalSteps):
        places[call.__name__] = keywords_of(call)
    places["torchft"] = torchft_keywords()
    places["algorithms"] = {each.name for algorithm in ALGORITHMS.values() for each in fields(algorithm)}  # type: ignore[arg-type]
    return places


def test_knobs_are_few_and_the_page_counts_them() -> None:
    counts = {place: (len(names - LATER.get(place, set())), len(names)) for place, names in knobs().items()}
    assert sum(least for least, _ in counts.values()) <= MOST, counts
    rows = [line.split("|") for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    shown = {row[1].strip().strip("`"): (int(row[3]), int(row[4])) for row in rows if len(row) == 6}
    assert shown == counts
    first, last = (sum(count) for count in zip(*counts.values(), strict=True))
    assert f" and {first} now, or {last} with the newer capabilities." in PAGE.read_text()


def test_the_page_says_what_each_later_knob_is_for() -> None:
    table = PAGE.read_text().partition("## Added since")[2].partition("\n## ")[0]
    rows = [line.replace("`", "").split(" | ") for line in table.splitlines() if line.startswith("| `")]
    shown = [(place.strip("| "), knob) for place, knobs, _ in rows for knob in knobs.split(", ")]
    assert sorted(shown) == sorted((place, knob) for place, names in LATER.items() for knob in names)

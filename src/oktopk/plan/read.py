"""The TOML file of a plan: the model's numbers, the levels of the network, the host, the training and its price."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oktopk.errors import SettingError, hint, one_of, within
from oktopk.plan.learning import OPTIMIZERS
from oktopk.plan.methods import EVERY
from oktopk.plan.profile import Host, Profile, from_numbers
from oktopk.plan.topology import Level, Topology

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

NUMBER, TEXT, FLAG = (int, float), str, bool
KEYS: dict[str, dict[str, Any]] = {
    "model": {
        "name": TEXT, "numel": int, "compute_ms": NUMBER, "optimizer_ms": NUMBER, "optimizer": TEXT, "layers": int,
    },
    "level": {"name": TEXT, "size": int, "mbit": NUMBER, "latency_ms": NUMBER},
    "host": {"message_us": NUMBER, "word_ns": NUMBER, "shares": FLAG},
    "training": {"steps": int, "every": int},
    "money": {"currency": TEXT, "rank_hour": NUMBER, "gigabyte": NUMBER},
}  # fmt: skip
NEEDED = {"model": ("numel", "compute_ms"), "level": ("name", "size", "mbit"), "money": ("rank_hour",)}


@dataclass(frozen=True, kw_only=True)
class Money:
    """The price of an hour of a rank, and of a gigabyte that leaves a part of the outermost level."""

    rank_hour: float
    gigabyte: float = 0.0
    currency: str = ""


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The contents of a file. `steps` are those that dense training takes; a profile may come from elsewhere."""

    profile: Profile | None = None
    topology: Topology | None = None
    steps: int | None = None
    every: int = EVERY
    money: Money | None = None


def read_plan(path: Path) -> Inputs:
    """Return the inputs of a file; a `SettingError` names the table and the key that is wrong."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise SettingError(f"{path} is no TOML file: {error}") from None
    _check(path, tables)
    training, money = tables.get("training", {}), tables.get("money")
    return Inputs(
        profile=_profile(tables) if "model" in tables else None,
        topology=Topology(tuple(map(_level, tables["level"]))) if "level" in tables else None,
        steps=training.get("steps"),
        every=int(within(f"{path}: [training] every", training.get("every", EVERY), 2)),
        money=None if money is None else Money(**money),
    )


def _check(path: Path, tables: Mapping[str, Any]) -> None:
    """Refuse unknown tables and keys, values of another type, and tables without what they need."""
    for name, content in tables.items():
        if name not in KEYS:
            raise SettingError(f"{path}: unknown table [{name}]; there is {', '.join(KEYS)}.{hint(name, KEYS)}")
        many = name == "level"
        if isinstance(content, list) != many:
            raise SettingError(f"{path}: write {'[[level]], once for each level' if many else f'[{name}], once'}")
        for table in content if many else [content]:
            _check_table(f"{path}: [{name}]", table, KEYS[name], NEEDED.get(name, ()))


def _check_table(where: str, table: Any, keys: Mapping[str, Any], needed: Sequence[str]) -> None:
    if not isinstance(table, dict):
        raise SettingError(f"{where} must be a table of keys and values, not {table!r}")
    for key, value in table.items():
        if key not in keys:
            raise SettingError(f"{where} has an unknown key {key!r}; there is {', '.join(keys)}.{hint(key, keys)}")
        if not isinstance(value, keys[key]) or (isinstance(value, bool) and keys[key] is not FLAG):
            wanted = {TEXT: "a text", FLAG: "true or false", int: "a whole number"}.get(keys[key], "a number")
            raise SettingError(f"{where} {key} wants {wanted}, not {value!r}")
        if not isinstance(value, (str, bool)):
            within(f"{where} {key}", value, 0)
    missing = [key for key in needed if key not in table]
    if missing:
        raise SettingError(f"{where} needs {' and '.join(missing)}")


def _level(table: Mapping[str, Any]) -> Level:
    return Level(
        name=table["name"], size=table["size"], mbit=table["mbit"], latency_s=1e-3 * table.get("latency_ms", 0.0)
    )


def _profile(tables: Mapping[str, Any]) -> Profile:
    model, host, made = tables["model"], tables.get("host", {}), Host()
    optimizer = one_of("optimizer", model.get("optimizer", "sgd"), OPTIMIZERS)
    message_s = {"": 1e-6 * host["message_us"]} if "message_us" in host else made.message_s
    word_s = {"": 1e-9 * host["word_ns"]} if "word_ns" in host else made.word_s
    return from_numbers(
        int(within("[model] numel", model["numel"], 1)),
        1e-3 * model["compute_ms"],
        optimizer,
        model.get("name", ""),
        Host(message_s=message_s, word_s=word_s, shares=host.get("shares", False)),
        model.get("layers", 0),
        1e-3 * model.get("optimizer_ms", 0.0),
    )

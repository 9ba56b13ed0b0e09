"""The results as tables on a terminal."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from oktopk.bench.summary import Row

UNKNOWN = "n/a"


def table_of(setting: dict[str, Any], title: str) -> Table:
    """Return the rows of one setting as a table."""
    table = Table(title=title, title_justify="left")
    for i, column in enumerate(COLUMNS):
        table.add_column(column, justify="right" if i else "left")
    for row in setting["rows"]:
        table.add_row(*cells_of(row))
    return table


def split_of(row: Row) -> str:
    """Return where the time of a step goes, by the slowest rank; what its own thread does overlaps backward."""
    parts = {name: ms(seconds) for name, seconds in row["parts_s"].items()}
    text = f"{row['name']}: forward {parts.pop('forward')} ms, backward {parts.pop('backward')}"
    if "wait" not in parts:
        return text
    text += f", {parts.pop('wait')} of it waiting for the exchange: "
    return text + ", ".join(f"{name} {spent}" for name, spent in parts.items())


COLUMNS = ("method", "ms: median (min..max)", "x dense", "x bf16", "MB sent", "MB by record")


def cells_of(row: Row) -> list[str]:
    """Return what the table says of a row."""
    return [
        row["name"],
        ms_spread(row["seconds"]),
        times(row["x_dense"]),
        times(row["x_bf16"]),
        megabytes(row["sent_bytes"]),
        megabytes(row["record_bytes"]),
    ]


def ms(seconds: float | None) -> str:
    """Return seconds as milliseconds, to three figures or a whole number of them."""
    return UNKNOWN if seconds is None else f"{1e3 * seconds:.3g}" if seconds < 1 else f"{1e3 * seconds:.0f}"


def ms_spread(seconds: dict[str, float]) -> str:
    """Return the median and how far the others are from it."""
    return f"{ms(seconds['median'])} ({ms(seconds['min'])}..{ms(seconds['max'])})"


def times(ratio: dict[str, float] | None) -> str:
    """Return the median of a ratio."""
    return UNKNOWN if ratio is None else f"{ratio['median']:.2f}"


def megabytes(count: float | None) -> str:
    """Return bytes in units of a million."""
    return UNKNOWN if count is None else f"{count / 1e6:.3f}"

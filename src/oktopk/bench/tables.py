"""The results as tables on a terminal."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from oktopk.bench.summary import Row

UNKNOWN = "n/a"
COLUMNS = ("method", "ms: median (min..max)", "x dense", "x bf16", "MB sent", "MB by record")
PREDICTED = ("predicted ms", "error")


def table_of(setting: dict[str, Any], title: str) -> Table:
    """Return the rows of one setting as a table."""
    table = Table(title=title, title_justify="left")
    for i, column in enumerate(columns_of(setting)):
        table.add_column(column, justify="right" if i else "left")
    for row in setting["rows"]:
        table.add_row(*cells_of(row))
    return table


def columns_of(setting: dict[str, Any]) -> tuple[str, ...]:
    """Return the columns of a setting's table: an exchange is predicted, a step is not."""
    return COLUMNS + (PREDICTED if "predicted_s" in setting["rows"][0] else ())


def split_of(row: Row) -> str:
    """Return where the time of a step goes, by the slowest rank; what its own thread does overlaps backward."""
    parts = {name: ms(seconds) for name, seconds in row["parts_s"].items()}
    text = f"{row['name']}: forward {parts.pop('forward')} ms, backward {parts.pop('backward')}"
    if "wait" not in parts:
        return text
    text += f", {parts.pop('wait')} of it waiting for the exchange: "
    return text + ", ".join(f"{name} {spent}" for name, spent in parts.items())


def cells_of(row: Row) -> list[str]:
    """Return what the table says of a row."""
    cells = [
        row["name"],
        ms_spread(row["seconds"]),
        times(row["x_dense"]),
        times(row["x_bf16"]),
        megabytes(row["sent_bytes"]),
        megabytes(row["record_bytes"]),
    ]
    return [*cells, ms(row["predicted_s"]), percent(row["error_percent"])] if "predicted_s" in row else cells


def ms(seconds: float | None) -> str:
    """Return seconds as milliseconds, to three figures or a whole number of them."""
    return UNKNOWN if seconds is None else f"{1e3 * seconds:.3g}" if seconds < 1 else f"{1e3 * seconds:.0f}"


def ms_spread(seconds: dict[str, float]) -> str:
    """Return the median and how far the others are from it."""
    return f"{ms(seconds['median'])} ({ms(seconds['min'])}..{ms(seconds['max'])})"


def times(ratio: dict[str, float] | None) -> str:
    """Return the median of a ratio."""
    return UNKNOWN if ratio is None else f"{ratio['median']:.2f}"


def percent(error: float | None) -> str:
    """Return a deviation with its sign."""
    return UNKNOWN if error is None else f"{error:+.0f} %"


def probe_table(probe: dict[str, Any], title: str) -> Table:
    """Return what a call and a word take, by collective, and what each method computes."""
    table = Table(title=title, title_justify="left")
    for i, column in enumerate(("", "ms a call", "ns a word", "as Mbit/s", "computing, ns an element")):
        table.add_column(column, justify="right" if i else "left")
    for name, alpha_s in probe["alpha_s"].items():
        beta_s = probe["beta_s_per_word"][name]
        table.add_row(name, ms(alpha_s), f"{1e9 * beta_s:.3g}", f"{32e-6 / beta_s:.0f}" if beta_s else UNKNOWN, "")
    for row in probe["computing_s_per_element"]:
        seconds = UNKNOWN if row["seconds"] is None else f"{1e9 * row['seconds']:.3g}"
        table.add_row(f"{row['method']} {'' if row['density'] is None else row['density']}", "", "", "", seconds)
    return table


def megabytes(count: float | None) -> str:
    """Return bytes in units of a million."""
    return UNKNOWN if count is None else f"{count / 1e6:.3f}"

"""The results as tables: cells of text, for the terminal and for the page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.table import Table

from oktopk.bench.summary import Row

UNKNOWN = "n/a"
COLUMNS = ("method", "ms: median (min..max)", "x dense", "x bf16", "MB sent", "MB by record")
PREDICTED = ("predicted ms", "error")
PROBED = ("", "ms a call", "ns a word", "as Mbit/s", "computing, ns an element")


def terminal_table(columns: Sequence[str], rows: Iterable[Sequence[str]], title: str) -> Table:
    """Return the cells as a table of rich's."""
    table = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left")
    for row in rows:
        table.add_row(*row)
    return table


def columns_of(setting: dict[str, Any]) -> tuple[str, ...]:
    """Return the columns of a setting's table: an exchange is predicted, a step is not."""
    return COLUMNS + (PREDICTED if "predicted_s" in setting["rows"][0] else ())


def cells_of(row: Row) -> list[str]:
    """Return the cells of a row."""
    seconds = row["seconds"]
    cells = [
        row["name"],
        f"{ms(seconds['median'])} ({ms(seconds['min'])}..{ms(seconds['max'])})",
        *(UNKNOWN if row[x] is None else f"{row[x]['median']:.2f}" for x in ("x_dense", "x_bf16")),
        *(UNKNOWN if row[by] is None else f"{row[by] / 1e6:.3f}" for by in ("sent_bytes", "record_bytes")),
    ]
    if "predicted_s" in row:
        error = row["error_percent"]
        cells += [ms(row["predicted_s"]), UNKNOWN if error is None else f"{error:+.0f} %"]
    return cells


def probe_cells(probe: dict[str, Any]) -> list[list[str]]:
    """Return a row for each collective, and one for the computing of each method."""
    rows = []
    for name, alpha_s in probe["alpha_s"].items():
        beta_s = probe["beta_s_per_word"][name]
        rows.append([name, ms(alpha_s), f"{1e9 * beta_s:.3g}", f"{32e-6 / beta_s:.0f}" if beta_s else UNKNOWN, ""])
    for row in probe["computing_s_per_element"]:
        seconds = UNKNOWN if row["seconds"] is None else f"{1e9 * row['seconds']:.3g}"
        rows.append([f"{row['method']} {'' if row['density'] is None else row['density']}", "", "", "", seconds])
    return rows


def split_of(row: Row) -> str:
    """Return the split of a step's time on the slowest rank; the exchange overlaps backward."""
    parts = {name: ms(seconds) for name, seconds in row["parts_s"].items()}
    text = f"{row['name']}: forward {parts.pop('forward')} ms, backward {parts.pop('backward')}"
    if "wait" not in parts:
        return text
    text += f", {parts.pop('wait')} of it waiting for the exchange: "
    return text + ", ".join(f"{name} {spent}" for name, spent in parts.items())


def ms(seconds: float | None) -> str:
    """Return seconds as milliseconds, to three figures or a whole number of them."""
    return UNKNOWN if seconds is None else f"{1e3 * seconds:.3g}" if seconds < 1 else f"{1e3 * seconds:.0f}"

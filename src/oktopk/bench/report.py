"""The results as files: JSON with everything, CSV with a row for each method and setting, plots, and a page."""

from __future__ import annotations

import csv
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from oktopk.bench.plot import draw, plots_of
from oktopk.bench.settings import Setting, link_name
from oktopk.bench.summary import Row
from oktopk.bench.tables import cells_of, columns_of, split_of
from oktopk.errors import SettingError

JSON, CSV, PAGE = "results.json", "results.csv", "index.html"
NEEDED = ("matplotlib", "jinja2")


def check_possible(folder: Path) -> None:
    """Raise, before anything is measured, if the folder cannot be made or a package is missing."""
    for module in NEEDED:
        if find_spec(module) is None:
            raise SettingError(f"--out draws plots and writes a page with {module}: pip install 'oktopk[report]'")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingError(f"--out wants a folder to write to, and {folder} cannot be one: {error.strerror}") from None


def write_json(result: dict[str, Any], folder: Path) -> None:
    """Write the results so far."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / JSON).write_text(json.dumps(result, allow_nan=False, indent=1) + "\n")


def write_report(result: dict[str, Any], folder: Path) -> None:
    """Write everything into the folder."""
    write_json(result, folder)
    rows = [_csv_row(setting, row, result) for setting in result["settings"] for row in setting["rows"]]
    with (folder / CSV).open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    (folder / PAGE).write_text(_page(result, [draw(plot, folder) for plot in plots_of(result)]))


def _csv_row(setting: dict[str, Any], row: Row, result: dict[str, Any]) -> dict[str, Any]:
    return {
        **{name: result.get(name) for name in ("bench", "model", "numel")},
        "link": link_name(setting["mbit"]),
        **{name: setting[name] for name in ("ranks", "mbit", "delay_ms", "rounds")},
        **{name: row[name] for name in ("method", "density")},
        **{f"{key}_s": value for key, value in row["seconds"].items()},
        **{rival: row[rival] and row[rival]["median"] for rival in ("x_dense", "x_bf16")},
        **{name: row.get(name) for name in ("sent_bytes", "record_bytes", "predicted_s", "error_percent")},
    }


def _page(result: dict[str, Any], svgs: list[str]) -> str:
    from jinja2 import Environment, PackageLoader

    page = Environment(loader=PackageLoader("oktopk.bench", "."), autoescape=True).get_template("page.html")
    tables = [
        {
            "title": f"{Setting.of(setting)}, {setting['rounds']} rounds",
            "columns": columns_of(setting),
            "rows": [cells_of(row) for row in setting["rows"]],
            "split": [split_of(row) for row in setting["rows"]] if result["bench"] == "step" else [],
        }
        for setting in result["settings"]
    ]
    return page.render(result=result, tables=tables, svgs=svgs)

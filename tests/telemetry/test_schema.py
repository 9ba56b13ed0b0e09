"""The catalogue: docs/accounting.md has its rows, and per-rank figures travel as numbers and come back.

`python -m tests.telemetry.test_schema` writes the rows into docs/accounting.md.
"""

import math
import random
import re
from pathlib import Path

from oktopk.telemetry.format import WRITTEN
from oktopk.telemetry.schema import EpochRecord, Figure, StepRecord, TrainStep, catalogue, from_row, to_row
from tests.report.synthetic import SPLIT, make_step

PAGE = Path(__file__).parents[2] / "docs" / "accounting.md"
TABLES = {"step": StepRecord, "training step": TrainStep, "epoch": EpochRecord}


def row_of(name: str, figure: Figure) -> str:
    tag = f"`{figure.tag}{'/...' if figure.parts else ''}`" if figure.tag else ""
    return f"| `{name}` | {figure.unit} | {'each' * figure.per_rank} | {tag} | {figure.definition} |\n"


def with_rows(text: str) -> str:
    """Return the page with the rows of the catalogue in its tables of figures."""
    for title, kind in TABLES.items():
        known = catalogue(StepRecord) if kind is TrainStep else {}
        rows = "".join(row_of(name, figure) for name, figure in catalogue(kind).items() if name not in known)
        head = rf"(\| figure of an? {title} \|.*\n\|[-|]+\n)(?:\|.*\n)*"
        text, found = re.subn(head, lambda match, rows=rows: match[1] + rows, text)
        assert found == 1, f"no table of the figures of a {title}"
    return text


def test_the_tables_of_the_docs_are_the_catalogue() -> None:
    assert PAGE.read_text() == with_rows(PAGE.read_text()), "run: python -m tests.telemetry.test_schema"


def test_every_figure_has_a_unit_a_definition_and_a_tag_of_its_own() -> None:
    figures = [*catalogue(TrainStep).values(), *catalogue(EpochRecord).values()]
    tags = [figure.tag for figure in figures if figure.tag]
    assert len(set(tags)) == len(tags)
    for figure in figures:
        assert figure.unit in WRITTEN or figure.unit == "object"
        assert figure.definition.endswith(".")
        assert len(figure.definition.split()) <= 25


def test_figures_of_a_rank_travel_as_numbers_and_come_back() -> None:
    step = make_step(random.Random(1), 3, 2, True, False, 100, 0)
    row = to_row({**step, "residual_norm": None})
    assert all(isinstance(number, float) for number in row)
    found = from_row(row)
    assert found.pop("residual_norm") is None
    assert {name: found.pop(name) for name in SPLIT} == step["split"]
    assert found == {name: step.get(name) for name in found}
    assert {"loss", "sent_bytes", "seconds", "sent_by_phase"} <= found.keys()
    assert from_row(to_row({**step, "loss": math.inf}))["loss"] is None


if __name__ == "__main__":
    PAGE.write_text(with_rows(PAGE.read_text()))

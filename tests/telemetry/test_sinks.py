"""TensorBoard gets the scalars of every record under the catalogue's tags, and a page laid out for them."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2

from oktopk import JsonlSink, TensorBoardSink
from oktopk.telemetry.reader import read_records
from oktopk.telemetry.schema import EpochRecord, TrainStep, catalogue
from tests.report.synthetic import make_epoch, make_step

STEPS = [make_step(random.Random(i), i, 2, i > 1, False, 100, 0) for i in range(4)]
EPOCH = make_epoch(random.Random(9), 0, 4)


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> EventAccumulator:
    folder = tmp_path_factory.mktemp("board")
    sink = TensorBoardSink(folder, prefix="my/")
    for step in STEPS:
        sink.write(TrainStep(**step))
    sink.write({"kind": "event", "event": "end", "step": 4, "message": ""})
    sink.write(EpochRecord(**EPOCH))
    sink.close()
    return EventAccumulator(str(folder)).Reload()


def scalars(events: EventAccumulator, tag: str) -> dict[int, float]:
    return {event.step: event.value for event in events.Scalars(f"my/{tag}")}


def expected() -> dict[str, dict[int, Any]]:
    """Return every scalar that TensorBoard is to have, by tag and step."""
    found: dict[str, dict[int, Any]] = {}
    for kind, records in ((TrainStep, STEPS), (EpochRecord, [EPOCH])):
        for record in records:
            for name, figure in catalogue(kind).items():
                values = record[name] if figure.parts else {"": record.get(name)}
                for part, value in values.items() if figure.tag else ():
                    tag = f"{figure.tag}/{part}".rstrip("/")
                    found.setdefault(tag, {})
                    found[tag] |= {} if value is None else {record["step"]: value}
    found["compression/selected_of_k"] = {step["step"]: step["selected"] / step["wanted"] for step in STEPS}
    return {tag: values for tag, values in found.items() if values}


def test_every_figure_with_a_tag_is_a_scalar_of_each_record(events: EventAccumulator) -> None:
    wanted = expected()
    assert {f"my/{tag}" for tag in wanted} == set(events.Tags()["scalars"])
    assert {"loss/validation", "bytes/sent", "seconds_of_exchange/select", "seconds_of_step/wait"} <= wanted.keys()
    for tag, values in wanted.items():
        assert scalars(events, tag) == pytest.approx(values, rel=1e-6), tag


def test_the_layout_shows_every_scalar_once(events: EventAccumulator) -> None:
    content = events.Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0]
    layout = layout_pb2.Layout.FromString(content)
    patterns = [tag for category in layout.category for chart in category.chart for tag in chart.multiline.tag]
    left_out = {f"my/{tag}" for tag in ("learning/lr", "learning/momentum", "compression/nnz", "bytes/messages")}
    for tag in set(events.Tags()["scalars"]) - left_out:
        assert len([pattern for pattern in patterns if re.search(pattern, tag)]) == 1, tag


def test_a_line_is_there_as_soon_as_it_is_written_and_holds_no_nan(tmp_path: Path) -> None:
    path = tmp_path / "made" / "metrics.jsonl"
    sink = JsonlSink(path)
    for number, step in enumerate(STEPS, 1):
        sink.write(TrainStep(**step))
        found = [{name: record[name] for name in step} for record in read_records(path)]
        assert found == STEPS[:number]
    for value in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="JSON compliant"):
            sink.write(TrainStep(**{**STEPS[0], "loss": value}))
    sink.close()
    assert len(path.read_text().splitlines()) == len(STEPS)

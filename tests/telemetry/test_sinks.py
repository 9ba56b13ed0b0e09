"""TensorBoard gets the scalars of every record under the catalogue's tags, and a page laid out for them."""

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from oktopk import JsonlSink, TensorBoardSink
from oktopk.telemetry.reader import read_records
from oktopk.telemetry.schema import EpochRecord, TrainStep, catalogue
from tests.report.synthetic import make_epoch, make_event, make_step

STEPS = [make_step(random.Random(i), i, 2, i > 1, False, 100, 0) for i in range(4)]
EPOCH = make_epoch(random.Random(9), 0, 4)


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> EventAccumulator:
    folder = tmp_path_factory.mktemp("board")
    sink = TensorBoardSink(folder, prefix="my/")
    for record in (*(TrainStep(**step) for step in STEPS), make_event("end", 4), EpochRecord(**EPOCH)):
        sink.write(record)
    sink.close()
    return EventAccumulator(str(folder)).Reload()


def test_every_figure_with_a_tag_is_a_scalar_of_each_record(events: EventAccumulator) -> None:
    wanted: dict[str, dict[int, Any]] = {}
    for kind, records in ((TrainStep, STEPS), (EpochRecord, [EPOCH])):
        tagged = {name: figure for name, figure in catalogue(kind).items() if figure.tag}
        for record, (name, figure) in itertools.product(records, tagged.items()):
            parts = record[name] if figure.parts else {"": record.get(name)}
            for part, value in parts.items():
                if value is not None:
                    wanted.setdefault(f"{figure.tag}/{part}".rstrip("/"), {})[record["step"]] = value
    wanted["compression/selected_of_k"] = {step["step"]: step["selected"] / step["wanted"] for step in STEPS}
    assert {f"my/{tag}" for tag in wanted} == set(events.Tags()["scalars"])
    assert {"loss/validation", "bytes/sent", "seconds_of_exchange/select", "seconds_of_step/wait"} <= wanted.keys()
    for tag, values in wanted.items():
        assert {event.step: event.value for event in events.Scalars(f"my/{tag}")} == pytest.approx(values, rel=1e-6)


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

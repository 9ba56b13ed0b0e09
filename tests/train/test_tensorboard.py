"""TensorBoard gets the scalars of every record under the report's names, and a page laid out for them."""

from __future__ import annotations

import random
import re

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2

from oktopk.train.tensorboard import EPOCH_TAGS, GROUPS, STEP_TAGS, Board
from tests.report.synthetic import make_epoch, make_step

STEPS = [make_step(random.Random(i), i, 2, i > 1, False, 100, 0) for i in range(4)]


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> EventAccumulator:
    folder = tmp_path_factory.mktemp("board")
    board = Board(folder, None)
    for step in STEPS:
        board.step(step)
    board.epoch(make_epoch(random.Random(9), 0, 4))
    board.close()
    return EventAccumulator(str(folder)).Reload()


def scalars(events: EventAccumulator, tag: str) -> dict[int, float]:
    return {event.step: event.value for event in events.Scalars(tag)}


@pytest.mark.parametrize(("tag", "name"), STEP_TAGS.items())
def test_figures_of_a_step(events: EventAccumulator, tag: str, name: str) -> None:
    known = {step["step"]: step[name] for step in STEPS if step[name] is not None}
    assert (scalars(events, tag) if known else {}) == pytest.approx(known, rel=1e-6)


@pytest.mark.parametrize(("group", "name"), GROUPS.items())
def test_figures_by_phase(events: EventAccumulator, group: str, name: str) -> None:
    for part in {part for step in STEPS for part in step[name]}:
        known = {step["step"]: step[name][part] for step in STEPS if part in step[name]}
        assert scalars(events, f"{group}/{part}") == pytest.approx(known, rel=1e-6)


def test_figures_of_an_epoch_and_quotients(events: EventAccumulator) -> None:
    epoch = make_epoch(random.Random(9), 0, 4)
    for tag, name in EPOCH_TAGS.items():
        assert scalars(events, tag) == pytest.approx({4: epoch[name]}, rel=1e-6)
    shares = {step["step"]: step["selected"] / step["wanted"] for step in STEPS}
    assert scalars(events, "compression/selected_of_k") == pytest.approx(shares, rel=1e-6)


def test_the_layout_shows_every_scalar_once(events: EventAccumulator) -> None:
    content = events.Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0]
    layout = layout_pb2.Layout.FromString(content)
    patterns = [tag for category in layout.category for chart in category.chart for tag in chart.multiline.tag]
    assert len(set(patterns)) == len(patterns)
    left_out = {"learning/lr", "learning/momentum", "compression/nnz", "bytes/messages"}
    for tag in set(events.Tags()["scalars"]) - left_out:
        assert [pattern for pattern in patterns if re.search(pattern, tag)] == [f"^{tag}$"]

"""Claims about the default in README and guide are claims about `OkTopk()` as `attach` runs it."""

import inspect
from dataclasses import replace
from pathlib import Path

import pytest

import oktopk
from oktopk.cost import ELEMENT_S, GROUP_S, predict
from oktopk.ddp.audit import FIRST, SAMPLES
from oktopk.ddp.exclude import SMALL
from oktopk.ddp.momentum import ADAM, MOST_LR_FACTOR, SGD
from oktopk.telemetry.sinks import SINK_PATIENCE_S

ROOT = Path(__file__).parents[1]
NUMEL, SIZE = 27_569_568, 4


def text_of(page: str) -> str:
    """Return a page in one line."""
    return " ".join((ROOT / page).read_text().split())


@pytest.fixture
def default():
    return oktopk.OkTopk()


def of_dense_of(algorithm):
    """Return the part of dense's bytes that an algorithm sends, as the whole number under 1."""
    return int(predict(oktopk.Dense(), NUMEL, SIZE).typical / predict(algorithm, NUMEL, SIZE).typical)


def test_the_readme_states_density_wire_and_bytes_of_the_default(default):
    words = predict(default, NUMEL, SIZE).typical
    of_dense = of_dense_of(default)
    per_k = words / (int(NUMEL * default.density) * (SIZE - 1) / SIZE)
    readme, percent = text_of("README.md"), f"{100 * default.density:g} %"
    wire = default.codec(NUMEL).wire
    assert f"Each step sends the {percent} of the gradient" in readme
    assert f"as `attach` runs it ({percent} of the values as {wire})" in readme
    assert f"sends {percent} of the values as {wire} with packed indices" in readme
    assert f"At P = {SIZE} that is {per_k:.1f}k(P-1)/P words, 1/{of_dense} of dense." in readme
    on_gpu = of_dense_of(replace(default, wire="fp32"))  # a step there sends float32
    assert f"it sends float32, 1/{on_gpu} of dense" in readme
    assert f"1/{on_gpu} of dense on a GPU, not 1/{of_dense}" in text_of("docs/gpu.md")
    assert f"sends the {percent} of the gradient that matter" in text_of("docs/index.md")


def test_the_pages_of_cost_state_the_bytes_of_the_default(default):
    def pair_bytes(density):
        chosen = replace(default, density=density)
        return 4 * predict(chosen, NUMEL, SIZE).typical / (2 * 1.25 * NUMEL * density * (SIZE - 1) / SIZE)

    said = f"takes {pair_bytes(0.01):.2f} bytes at a density of 1 %, and {pair_bytes(default.density):.2f}"
    assert f"{said} at {100 * default.density:g} %" in text_of("docs/accounting.md")
    megabytes = 4 * predict(default, NUMEL, SIZE).typical / 1e6
    wire = default.codec(NUMEL).wire
    assert f"{megabytes:.1f} MB, which is {100 * default.density:g} % as {wire}" in text_of("docs/performance.md")


def test_the_guide_states_the_arguments_that_attach_has_by_default(default):
    defaults = {name: each.default for name, each in inspect.signature(oktopk.attach).parameters.items()}
    assert oktopk.make_algorithm(defaults["algorithm"]) == default
    same = f"attach(model, oktopk.OkTopk(), dense_steps={defaults['dense_steps']})"
    assert f"sparse = oktopk.attach(model) # the same as {same}" in text_of("docs/guide.md")
    for page in ("README.md", "docs/index.md"):
        assert same[:-1] in text_of(page)


def test_the_guide_states_the_limits_in_the_code():
    guide = text_of("docs/guide.md")
    assert f"| SGD, Nesterov's too | gradients | at most {SGD.sparse_momentum:g} |" in guide
    assert f"| Adam, AdamW | updates | beta1 at most {ADAM.sparse_momentum:g} |" in guide
    assert f"fewer than {SMALL:,} elements" in guide
    assert guide.count(f"x the root of the ranks, at most x {MOST_LR_FACTOR:g} |") == 2
    assert f"takes it more than {SINK_PATIENCE_S:g} seconds, or half of `timeout`" in guide
    assert f"A server that hangs for {SINK_PATIENCE_S:g} seconds is dropped" in text_of("docs/trainers.md")


def test_the_pages_state_the_constants_of_the_prediction_and_the_defaults(default):
    accounting = text_of("docs/accounting.md")
    assert f"taken as {1e3 * GROUP_S:g} ms a group and {1e9 * ELEMENT_S:g} ns an element" in accounting
    assert f"After {FIRST + SAMPLES} sparse steps" in accounting
    assert f"the median of {SAMPLES} steps" in accounting
    learning = text_of("docs/learning.md")
    assert f'| `ranking` | `"{default.ranking}"` |' in learning
    assert f"| `density`, `wire` | {default.density:g} as {default.codec(NUMEL).wire} |" in learning
    assert f"| `rescale_every` | {default.rescale_every} |" in learning
    lr = SGD.lr(1.0, 0.9, SGD.sparse_momentum)
    assert f"| `sparse_momentum` | {SGD.sparse_momentum:g}; for SGD with lr x {lr:g} |" in learning

"""Claims about the default in README and guide are claims about `OkTopk()` as `attach` runs it."""

import inspect
from pathlib import Path

import pytest

import oktopk
from oktopk.cost import predict

ROOT = Path(__file__).parents[1]
NUMEL, SIZE = 27_569_568, 4


def text_of(page: str) -> str:
    """Return a page in one line."""
    return " ".join((ROOT / page).read_text().split())


@pytest.fixture
def default():
    return oktopk.OkTopk()


def test_the_readme_states_density_wire_and_bytes_of_the_default(default):
    words = predict(default, NUMEL, SIZE).typical
    of_dense = int(predict(oktopk.Dense(), NUMEL, SIZE).typical / words)
    per_k = words / (int(NUMEL * default.density) * (SIZE - 1) / SIZE)
    readme, percent = text_of("README.md"), f"{100 * default.density:g} %"
    wire = default.codec(NUMEL).wire
    assert f"Each step sends the {percent} of the gradient" in readme
    assert f"as `attach` runs it ({percent} of the values as {wire})" in readme
    assert f"sends {percent} of the values as {wire} with packed indices" in readme
    assert f"At P = {SIZE} that is {per_k:.1f}k(P-1)/P words, 1/{of_dense} of dense." in readme


def test_the_guide_states_the_arguments_that_attach_has_by_default(default):
    defaults = {name: each.default for name, each in inspect.signature(oktopk.attach).parameters.items()}
    assert oktopk.make_algorithm(defaults["algorithm"]) == default
    same = f"attach(model, oktopk.OkTopk(), dense_steps={defaults['dense_steps']})"
    assert f"sparse = oktopk.attach(model) # the same as {same}" in text_of("docs/guide.md")

"""Names of methods, settings and models: what is known is found, what is not is refused with what would do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from oktopk.bench import settings
from oktopk.bench.exchange import matrices_of
from oktopk.bench.methods import GROUPS, METHODS, Entry, entries_of, parse_methods
from oktopk.bench.models import MODELS, check_model, load_model
from oktopk.bench.netlab import LabError
from oktopk.bench.settings import Setting, make_settings
from oktopk.errors import SettingError


def test_groups_name_methods_that_exist() -> None:
    assert all(set(group) <= set(METHODS) for group in GROUPS.values())
    assert parse_methods("all") == tuple(METHODS)
    assert {"dense", "bf16", "topka", "oktopk", "oktopk-bf16"} <= set(parse_methods("default"))


def test_only_our_methods_have_a_density() -> None:
    assert entries_of(["dense", "topka", "powersgd-1"], [0.01, 0.1]) == [
        Entry("dense"),
        Entry("topka", 0.01),
        Entry("topka", 0.1),
        Entry("powersgd-1"),
    ]


@pytest.mark.parametrize(
    ("names", "said"),
    [("oktop", "Did you mean 'oktopk'"), ("dense,", None), (" , ", "no method in"), ("", "no method")],
)
def test_a_method_that_is_not_there_is_refused(names: str, said: str | None) -> None:
    if said is None:
        assert parse_methods(names) == ("dense",)
        return
    with pytest.raises(SettingError, match=said):
        parse_methods(names)


@pytest.mark.parametrize("numel", [1, 2, 10, 20_000, 27_569_568])
def test_matrices_add_up_to_the_gradient(numel: int) -> None:
    assert sum(rows * columns for rows, columns in matrices_of(numel)) == numel


@pytest.fixture
def no_lab(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise LabError("the laboratory makes network namespaces, which only root may: use sudo")

    monkeypatch.setattr(settings, "check_possible", refuse)


@pytest.mark.usefixtures("no_lab")
@pytest.mark.parametrize("mbit", [None, [0.0]])
def test_without_a_lab_it_is_the_loopback_and_says_so(mbit: list[float] | None) -> None:
    chosen, (note,) = make_settings([2, 4], mbit, 0.0)
    assert chosen == [Setting(2, None), Setting(4, None)]
    assert "loopback" in note
    assert "use sudo" in note


@pytest.mark.usefixtures("no_lab")
@pytest.mark.parametrize(
    ("mbit", "delay_ms", "wanted"), [([100.0, 0.0], 0.0, "links of 100 Mbit/s"), ([0.0], 5.0, "delay")]
)
def test_without_a_lab_no_other_network_can_be_had(mbit: list[float] | None, delay_ms: float, wanted: str) -> None:
    with pytest.raises(SettingError, match=f"wanted {wanted}, but .* use sudo; --mbit 0"):
        make_settings([2], mbit, delay_ms)


def test_a_setting_says_what_it_is() -> None:
    assert str(Setting(4, 100.0)) == "P = 4, 100 Mbit/s"
    assert str(Setting(2, 0.0, delay_ms=5.0)) == "P = 2, unlimited link, 5 ms away"


def _batch(size: int, seed: int) -> Any:
    return torch.zeros(size, 3), seed


FACTORIES = {
    "good": lambda: (nn.Linear(3, 2), _batch, lambda output, _: output.sum()),
    "two": lambda: (nn.Linear(3, 2), _batch),
    "net": lambda: nn.Linear(3, 2),
    "order": lambda: (_batch, nn.Linear(3, 2), None),
    "vector": lambda: (nn.Linear(3, 2), _batch, lambda output, _: output),
    "cut": lambda: (nn.Linear(3, 2), _batch, lambda output, _: output.sum().detach()),
    "number": lambda: (nn.Linear(3, 2), _batch, lambda *_: 0.5),
    "wrong": lambda: (nn.Linear(7, 2), _batch, lambda output, _: output.sum()),
    "one": lambda: (nn.Linear(3, 2), lambda size, _: torch.zeros(size, 3), lambda output, _: output.sum()),
    "constant": 3,
}
globals().update({f"make_{name}": factory for name, factory in FACTORIES.items()})


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("lstm", "unknown model .* Did you mean 'lstman4'"),
        ("no.such.module:make", "cannot find the model .* No module named 'no'"),
        (f"{__name__}:missing", "has no attribute 'missing'"),
        (f"{__name__}:make_constant", "of type int, which cannot be called"),
        (f"{__name__}:make_two", r"returned \(Linear, function\); a factory takes no arguments"),
        (f"{__name__}:make_net", "returned a value of type Linear; a factory"),
        (f"{__name__}:make_order", r"returned \(function, Linear, NoneType\)"),
        (f"{__name__}:make_vector", r"is a tensor of shape \[2, 2\], not a scalar"),
        (f"{__name__}:make_cut", "not a scalar tensor to call backward"),
        (f"{__name__}:make_number", "of type float, not a scalar tensor"),
        (f"{__name__}:make_wrong", "a step of .* failed: RuntimeError"),
        (f"{__name__}:make_one", r"batch\(size, seed\) returned a tensor"),
    ],
)
def test_a_model_that_will_not_do_is_refused_with_the_contract(path: str, said: str) -> None:
    with pytest.raises(SettingError, match=said):
        check_model(path, 2)


def test_a_model_of_ones_own_is_found_and_counted() -> None:
    assert check_model(f"{__name__}:make_good", 2) == 3 * 2 + 2
    assert check_model("examples.bench_factory:make", 2) > 100_000


@pytest.mark.parametrize(("name", "least"), [("an4-small", 1_000_000), ("wide", 27_000_000)])
def test_the_models_with_a_name_make_a_step(name: str, least: int) -> None:
    assert least <= check_model(name, 1) < 1.1 * least


def test_the_weights_are_the_same_each_time() -> None:
    first, second = (load_model("an4-small").net.state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert set(MODELS) == {"lstman4", "an4-small", "wide"}

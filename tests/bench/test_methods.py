"""Names of methods, settings and models: what is known is found, what is not is refused with what would do."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from oktopk import Comm, Reducer, run_local
from oktopk.bench.candidates import matrices_of
from oktopk.bench.methods import GROUPS, METHODS, Entry, entries_of, parse_methods
from oktopk.bench.models import check_model, load_model
from oktopk.bench.processes import Setting, make_settings
from oktopk.errors import SettingError


def test_groups_name_methods_that_exist_and_only_ours_have_a_density() -> None:
    assert all(set(group) <= set(METHODS) for group in GROUPS.values())
    assert parse_methods("all") == tuple(METHODS)
    assert {"dense", "bf16", "topka", "oktopk", "oktopk-bf16"} <= set(parse_methods("default"))
    assert parse_methods("dense,") == ("dense",)
    topka = [Entry("topka", 0.01), Entry("topka", 0.1)]
    assert entries_of(["dense", "topka", "powersgd-1"], [0.01, 0.1]) == [Entry("dense"), *topka, Entry("powersgd-1")]
    with pytest.raises(SettingError, match="no method in"):
        parse_methods(" , ")


@pytest.mark.parametrize("numel", [1, 2, 10, 20_000, 27_569_568])
def test_matrices_add_up_to_the_gradient(numel: int) -> None:
    assert sum(rows * columns for rows, columns in matrices_of(numel)) == numel


def test_a_reducer_is_in_no_cycle() -> None:
    """It ends with its last reference: a process group that ends late aborts the process."""

    def ends(comm: Comm) -> bool:
        reducer = Reducer("oktopk", comm)
        reducer.all_reduce(torch.ones(100))
        assert reducer.last is not None
        watched = weakref.ref(reducer)
        del reducer
        return watched() is None

    gc.disable()
    try:
        assert run_local(2, ends) == [True, True]
    finally:
        gc.enable()


@pytest.mark.usefixtures("no_lab")
def test_without_a_lab_it_is_the_loopback_and_no_other_network_can_be_had() -> None:
    for mbit in (None, [0.0]):
        chosen, (note,) = make_settings([2, 4], mbit, 0.0)
        assert chosen == [Setting(2, None), Setting(4, None)]
        assert "loopback" in note
        assert "use sudo" in note
    with pytest.raises(SettingError, match=r"wanted links of 100 Mbit/s, delay, but .* use sudo; --mbit 0"):
        make_settings([2], [100.0, 0.0], 5.0)
    with pytest.raises(SettingError, match="wanted delay, but"):
        make_settings([2], [0.0], 5.0)
    assert str(Setting(2, 0.0, delay_ms=5.0)) == "P = 2, unlimited link, 5 ms away"


def _batch(size: int, seed: int) -> Any:
    return torch.zeros(size, 3), seed


def good() -> Any:
    return nn.Linear(3, 2), _batch, lambda output, _: output.sum()


REFUSED: dict[str, tuple[Any, str]] = {
    "constant": (3, "of type int, which cannot be called"),
    "two": (lambda: good()[:2], r"returned \(Linear, function\); a factory takes no arguments"),
    "net": (lambda: good()[0], "returned a value of type Linear; a factory"),
    "order": (lambda: (_batch, nn.Linear(3, 2), None), r"returned \(function, Linear, NoneType\)"),
    "vector": (lambda: (*good()[:2], lambda output, _: output), r"is a tensor of shape \[2, 2\], not a scalar"),
    "cut": (lambda: (*good()[:2], lambda output, _: output.sum().detach()), "not a scalar tensor to call backward"),
    "number": (lambda: (*good()[:2], lambda *_: 0.5), "of type float, not a scalar tensor"),
    "wrong": (lambda: (nn.Linear(7, 2), *good()[1:]), "a step of .* failed: RuntimeError"),
    "one": (lambda: (good()[0], lambda *_: torch.zeros(2, 3), good()[2]), r"batch\(size, seed\) returned a tensor"),
}
globals().update({name: factory for name, (factory, _) in REFUSED.items()})


@pytest.mark.parametrize("name", ["missing", *REFUSED])
def test_a_model_that_will_not_do_is_refused_with_the_contract(name: str) -> None:
    with pytest.raises(SettingError, match=REFUSED[name][1] if name in REFUSED else "has no attribute 'missing'"):
        check_model(f"{__name__}:{name}", 2)


@pytest.mark.parametrize(
    ("name", "least"),
    [(f"{__name__}:good", 8), ("examples.bench_factory:make", 301_000), ("an4-small", 1_000_000), ("wide", 27_000_000)],
)
def test_a_model_makes_a_step_and_is_counted(name: str, least: int) -> None:
    assert least <= check_model(name, 1) < 1.1 * least


def test_the_weights_are_the_same_each_time() -> None:
    first, second = (load_model("an4-small").net.state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)

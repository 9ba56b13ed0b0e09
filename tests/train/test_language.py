"""A GPT learns text: the figures of a run, all optimizers, and a stop on either side of the switch."""

import math
from functools import partial

import pytest
import torch
from torch.nn.functional import cross_entropy

from oktopk.errors import MismatchError, SettingError
from oktopk.report.report import make_report
from oktopk.report.watch import view
from oktopk.telemetry.run import load_run
from oktopk.train import language
from oktopk.train.config import Config, make_config
from oktopk.train.data.text import make_text, read_text, standard_library
from oktopk.train.models import make_model
from oktopk.train.optimizers import make_optimizers
from tests.train.runs import last, succeed, train

pytestmark = [pytest.mark.processes, pytest.mark.timeout(280)]
long = partial(pytest.param, marks=pytest.mark.long)
needs_muon = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon came with torch 2.9")


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """Half a megabyte of Python's sources."""
    folder = tmp_path_factory.mktemp("text")
    make_text([path for path in standard_library() if path.name < "b" and path.stat().st_size], folder)
    return folder


@pytest.fixture(scope="session")
def tiny(text):
    """Settings of a run of seconds: 4 steps an epoch on two workers, dense ones first."""
    return {
        "dnn": "gpt-tiny", "dataset": "text", "data_dir": str(text), "utterances": 16, "val_utterances": 7,
        "batch_size": 2, "max_epochs": 2, "optimizer": "adamw", "lr": 0.004, "lr_anneal": 1.0, "clip": 1.0,
        "sparse_momentum": 0.7, "dense_steps": 3, "threads": 1, "device": "cpu", "timeout_s": 20.0,
    }  # fmt: skip


@pytest.fixture(scope="session", params=["adamw", pytest.param("muon", marks=[pytest.mark.slow, needs_muon])])
def run(request, tmp_path_factory, tiny):
    settings = {**tiny, "optimizer": request.param, "checkpoint_every": 2}
    return succeed(tmp_path_factory.mktemp("gpt") / "run", 2, **settings)


def test_a_run_has_its_figures_and_the_report_shows_bits_a_byte(run):
    assert [step["phase"] for step in run.steps] == ["dense"] * 3 + ["sparse"] * 5
    assert [step["momentum"] for step in run.steps] == [0.9] * 3 + [0.7] * 5
    rates = [step["lr"] for step in run.steps]
    rates[3:] = [rate / 2**0.5 for rate in rates[3:]]  # two workers exchange updates
    assert rates[1:] == sorted(rates[1:], reverse=True)  # it rises in the first of eight steps
    assert 0 < rates[-1] < 0.1 * rates[1]
    assert {(step["utterances"], step["characters"]) for step in run.steps} == {(4, 512)}
    assert run.steps[0]["loss"] == pytest.approx(math.log(256), rel=0.05)  # of a net that knows nothing
    assert run.digests(0) == run.digests(1)
    for epoch in run.epochs:
        assert epoch["bits_per_byte"] == pytest.approx(epoch["val_loss"] / math.log(2))
        assert epoch["wer"] is epoch["cer"] is None
    made = make_report([load_run(run.folder)]).runs[0]
    assert made.notes == []
    assert {"loss", "bits"} <= {chart.name for chart in made.charts["Learning"]}
    assert [card.value for card in made.cards if card.name == "bits a byte"] == [run.epochs[-1]["bits_per_byte"]]
    assert view(made.run)
    compared = make_report([load_run(run.folder)] * 2).comparison
    assert "best bits a byte" in compared.columns
    assert "bits a byte" in run.printed[0]


def test_validation_is_that_of_the_saved_net(run, text):
    net = make_model("gpt-tiny").eval()
    net.load_state_dict(run.shared["net"])
    val = read_text(text)[1]
    windows = (len(val) - 1) // 128
    texts = torch.stack([val[at : at + 129] for at in (i * windows // 7 * 128 for i in range(7))]).long()
    with torch.no_grad():
        loss = cross_entropy(net(texts[:, :-1]).flatten(0, 1), texts[:, 1:].flatten())
    assert run.epochs[-1]["val_loss"] == pytest.approx(float(loss), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("stop", [long(2), 3, long(6)])  # before, at and after the switch
def test_resume_equals_never_having_stopped(tmp_path, run, tiny, stop):
    folder = tmp_path / "run"
    optimizer = run.of("run")[0]["config"]["optimizer"]
    succeed(folder, 2, **{**tiny, "optimizer": optimizer, "max_steps": stop})
    resumed = succeed(folder, 2, resume=last(folder), max_steps=0)
    assert resumed.steps == run.steps
    mine, theirs = (
        [each.shared["net"], *(optimizer["state"] for optimizer in each.shared["optimizers"])]
        for each in (resumed, run)
    )
    torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


def shorten_rank_1(rank):
    """Give rank 1 a byte less, as another version of Python has other sources."""
    language.read_text = lambda folder: tuple(each[: len(each) - (rank == 1)] for each in read_text(folder))


@pytest.mark.slow
def test_workers_that_read_other_data_are_refused(tmp_path, tiny):
    ended = train(tmp_path / "run", 2, **tiny, prepare=shorten_rank_1)
    assert [type(result) for result in ended.results] == [MismatchError] * 2
    assert "the data of ranks [1] is not that of rank 0" in str(ended.results[0])


@pytest.mark.slow
def test_it_learns_and_bf16_learns_as_well(tmp_path, tiny):
    settings = {**tiny, "utterances": 192, "batch_size": 4, "dense_steps": 10, "val_utterances": 32}
    for precision in ("fp32", "bf16"):
        ended = succeed(tmp_path / precision, 2, **settings, precision=precision)
        assert ended.epochs[-1]["bits_per_byte"] < 5.2, precision  # of 8


def test_muon_has_the_matrices_between_embedding_and_head_and_adamw_the_rest():
    net = make_model("gpt-tiny")
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    settings = {"dnn": "gpt-tiny", "dataset": "python"}
    if not hasattr(torch.optim, "Muon"):
        with pytest.raises(SettingError, match=r"torch 2\.9"):
            make_optimizers(net, Config(**settings, optimizer="muon"))
        return
    groups = [
        group for each in make_optimizers(net, Config(**settings, optimizer="muon")) for group in each.param_groups
    ]
    hidden, matrices, vectors = ([names[id(parameter)] for parameter in group["params"]] for group in groups)
    assert len(hidden) == 8
    assert all("blocks." in name for name in hidden)
    assert matrices == ["embedding.weight"]
    assert all("norm" in name for name in vectors)
    assert [group["weight_decay"] for group in groups] == [0.1, 0.1, 0.0]


def test_speech_for_a_gpt_is_refused(tmp_path):
    for settings in ({"dnn": "gpt-tiny"}, {"dataset": "text"}):
        with pytest.raises(SettingError, match="does not fit the net"):
            make_config(settings)

"""Does the learning experiment run, and do its mechanisms keep their promises?"""

import json
from dataclasses import replace
from functools import cache

import pytest
import torch

from oktopk import Comm, run_local
from oktopk.errors import SettingError
from oktopk.train.config import make_config
from research.learning import settings
from research.learning.__main__ import main
from research.learning.experiment import Record
from research.learning.learner import FlatAdam, FlatSgd, Learner, Rates
from research.learning.mechanisms import Exchange, Layout
from research.learning.recognition import Recognition
from research.learning.settings import CATALOGUE, Setting, parse, read_settings
from research.learning.speech import Recordings, Speech
from research.learning.tables import figures_of
from research.learning.workload import AdamW

pytestmark = pytest.mark.long

LAYOUT = Layout(lengths=(600, 300, 100), rows=(20, 30, 10), side=24)
RANKS, STEPS = 3, 8


def as_exchanged(name: str) -> Setting:
    """Return the setting without what only the optimizer sees."""
    ours = {"lr_scale": 1, "rewarm": 0, "momentum": 0, "nesterov": 0, "clip": 0, "quasi": 0, "lazy": False, "buffer": 1}
    return replace(parse(name), name="", dense_steps=0, **ours)


SPARSE = list({as_exchanged(name): name for name in reversed(CATALOGUE) if not parse(name).is_dense}.values())
LOSES = [name for name in SPARSE if parse(name).decay != 1 or parse(name).late == "drop"]


def made_up(count: int, val: int = 2) -> Recordings:
    """Return noise, said to be letters."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(2000, 4000, (count + val,), generator=generator).tolist()
    samples = [torch.randint(-3000, 3000, (length,), generator=generator, dtype=torch.int16) for length in lengths]
    return Recordings(samples, ["A B"] * (count + val), count)


def gradient(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + step)
    size = torch.cat([torch.full((length,), 10.0**-i) for i, length in enumerate((*LAYOUT.lengths, LAYOUT.side))])
    return torch.randn(LAYOUT.numel, generator=generator) * size


@cache
def exchanged(setting: Setting, steps: int = STEPS, buffer: float = 0.0) -> list[tuple[Exchange, list[torch.Tensor]]]:
    """Return each rank's exchange after so many sparse steps, and what trained in each of them."""

    def rank(comm: Comm) -> tuple[Exchange, list[torch.Tensor]]:
        exchange = Exchange(setting, comm, LAYOUT, clip=1e9, momentum=0.9)
        exchange.begin(torch.full((LAYOUT.numel,), buffer))
        return exchange, [exchange.sparse(gradient(comm.rank, step)) for step in range(steps)]

    return run_local(RANKS, rank)


def mean_gradient(step: int) -> torch.Tensor:
    return sum(gradient(rank, step) for rank in range(RANKS)) / RANKS


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", SPARSE)
def test_all_ranks_train_with_the_same_bits(name):
    first, *others = exchanged(parse(name))
    for _, trained in others:
        assert all(torch.equal(a, b) for a, b in zip(first[1], trained, strict=True))


@pytest.mark.parametrize("name", [name for name in SPARSE if name not in LOSES and not parse(name).local_momentum])
def test_what_was_not_delivered_is_in_a_residual(name):
    setting = parse(name)
    done = exchanged(setting)
    pending = sum(exchange.residual.held for exchange, _ in done) / RANKS
    if setting.ef21:  # what trains is all that was delivered so far; what is pending, how far that is behind
        delivered, wanted = done[0][1][-1], sum(exchange.source.average for exchange, _ in done) / RANKS
    else:
        delivered, wanted = sum(done[0][1]), sum(map(mean_gradient, range(STEPS)))
    close(delivered[: LAYOUT.large] + pending, wanted[: LAYOUT.large])
    close(delivered[LAYOUT.large :], wanted[LAYOUT.large :])


@pytest.mark.parametrize("name", [name for name in SPARSE if not parse(name).local_momentum])
def test_at_density_1_every_setting_delivers_what_dense_does(name):
    setting = parse(f"{name}+density=1+wire=fp32+ramp=+flush_wire=fp32+ceiling=0")
    _, trained = exchanged(setting)[0]
    average = torch.zeros(LAYOUT.numel)
    for step, got in enumerate(trained):
        average += setting.ef21 * (mean_gradient(step) - average)
        close(got, average if setting.ef21 else mean_gradient(step))


def test_at_density_1_local_momentum_is_momentum():
    _, trained = exchanged(parse("dgc-unmasked+density=1"), buffer=2.0)[0]
    velocity = torch.full((LAYOUT.numel,), 2.0)
    for step, got in enumerate(trained):
        velocity = 0.9 * velocity + mean_gradient(step)
        close(got, velocity)


def test_masking_forgets_the_velocity_of_what_was_delivered():
    exchange, trained = exchanged(parse("dgc+density=1"))[0]
    assert not exchange.source.velocity[: LAYOUT.large].any()
    close(trained[-1][: LAYOUT.large], mean_gradient(STEPS - 1)[: LAYOUT.large])


def test_ef21_with_the_recipes_momentum_goes_on_as_heavy_ball_does():
    _, trained = exchanged(parse("ef21m+density=1"), buffer=3.0)[0]
    buffer = torch.full((LAYOUT.numel,), 3.0)
    for step, got in enumerate(trained):
        buffer = 0.9 * buffer + mean_gradient(step)
        close(got * 10, buffer)


def test_a_flush_leaves_nothing_behind():
    exchange, trained = exchanged(parse("scaled-1+flush_every=4"))[0]
    assert not exchange.residual.held.any()
    close(sum(trained), sum(map(mean_gradient, range(STEPS))))


def test_a_flush_in_bf16_keeps_what_rounding_takes():
    done = exchanged(parse("scaled-1+flush_every=4+flush_wire=bf16"))
    pending = sum(exchange.residual.held for exchange, _ in done) / RANKS
    assert 0 < pending.norm() < 0.01 * mean_gradient(0).norm()
    total = sum(done[0][1])[: LAYOUT.large] + pending
    torch.testing.assert_close(total, sum(map(mean_gradient, range(STEPS)))[: LAYOUT.large], rtol=0, atol=0.05)


def test_decay_is_of_what_is_held():
    exchange, _ = exchanged(parse("scaled-1+decay=0.5"), steps=1)[0]
    held = exchange.residual.held.clone()

    def second(comm):
        again = Exchange(parse("scaled-1+decay=0.5"), comm, LAYOUT)
        again.residual.held.copy_(held)
        again.sparse(torch.zeros(LAYOUT.numel))
        return again.residual.held

    after = run_local(1, second)[0]
    assert torch.equal(after[after != 0], (0.5 * held)[after != 0])


def test_age_lets_nothing_wait_for_ever():
    def longest_wait(name):
        _, trained = exchanged(parse(f"{name}+density=0.1"), steps=60)[0]
        last = torch.zeros(LAYOUT.large)
        for step, got in enumerate(trained):
            last[got[: LAYOUT.large] != 0] = step
        return float((60 - last).max())

    assert longest_wait("age-2") < longest_wait("magnitude-1")


def row_rms(step: int) -> torch.Tensor:
    """Return the rms of each row of the large tensors over all ranks' gradients."""
    squares = sum(gradient(rank, step).square() for rank in range(RANKS))[: LAYOUT.large] / RANKS
    return torch.cat([row.mean().sqrt().expand(len(row)) for row in squares.split(LAYOUT.groups("row"))])


def test_scales_of_the_gradient_do_not_grow_with_what_waits():
    spec = "density=0.01+scale_over=row+scale_of=grad+scale_power=0.5+scale_every=1"
    done = exchanged(parse(spec))
    for exchange, _ in done:
        close(exchange.weights.scale_weight, row_rms(STEPS - 1) ** -0.5)
    pending = sum(exchange.residual.held for exchange, _ in done) / RANKS
    close(sum(done[0][1])[: LAYOUT.large] + pending, sum(map(mean_gradient, range(STEPS)))[: LAYOUT.large])


@pytest.mark.parametrize("ranking", ["scaled", "magnitude"])
def test_unpacked_indices_change_the_bytes_and_nothing_else(ranking):
    packed = exchanged(parse(f"library+ranking={ranking}"))
    plain = exchanged(parse(f"library+ranking={ranking}+packed=no"))
    for (exchange, trained), (other, same) in zip(packed, plain, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(trained, same, strict=True))
        assert torch.equal(exchange.residual.held, other.residual.held)
        assert exchange.take_sent_bytes() < other.take_sent_bytes()


def test_the_dense_steps_send_what_a_ring_does():
    def sent(comm):
        exchange = Exchange(parse("dense"), comm, LAYOUT)
        exchange.dense(gradient(comm.rank, 0))
        return exchange.take_sent_bytes()

    assert sum(run_local(4, sent)) == 4 * 2 * LAYOUT.numel * 4 * 3 // 4


def test_replicas_have_the_weights_of_the_net_and_statistics_of_their_own():
    speech = Speech(made_up(8), seed=1, workers=2, batch_size=2, device=torch.device("cpu"))
    recognition = Recognition(make_config({"dnn": "lstman4-small"}), speech, torch.device("cpu"))
    learner = Learner(recognition, 2, torch.device("cpu"))
    learner.update(torch.ones(learner.layout.numel), Rates(0.01, 0.0, False, 0.0))
    batch = speech.batch(0, worker=0)
    outputs = [replica.eval()(batch.inputs, batch.frames)[0] for replica in learner.replicas]
    assert torch.equal(*outputs)
    learner.fill_gradient(1, 0)
    assert torch.equal(learner.net.last_norm.running_mean, torch.zeros(160))
    assert learner.replicas[1].last_norm.running_mean.any()


@pytest.mark.parametrize("nesterov", [True, False])
def test_the_optimizer_is_torchs(nesterov):
    weight = torch.nn.Parameter(torch.zeros(50))
    theirs = torch.optim.SGD([weight], lr=0.1, momentum=0.9, nesterov=nesterov)
    ours, mine = FlatSgd(50, torch.device("cpu")), torch.zeros(50)
    for step in range(5):
        weight.grad = torch.randn(50, generator=torch.Generator().manual_seed(step))
        mine -= 0.1 * ours.direction(weight.grad, Rates(0.1, 0.9, nesterov, 0.0))
        theirs.step()
    torch.testing.assert_close(mine, weight.detach())


def test_adam_is_torchs_and_goes_on_from_what_was_saved():
    weight = torch.nn.Parameter(torch.zeros(50))
    theirs = torch.optim.AdamW([weight], lr=0.1, betas=(0.9, 0.95), weight_decay=0.0)
    usual = AdamW(0.9, 0.95, 0.0, 0.0)
    ours, mine = FlatAdam(usual, 50, torch.device("cpu")), torch.zeros(50)
    for step in range(5):
        weight.grad = torch.randn(50, generator=torch.Generator().manual_seed(step))
        theirs.param_groups[0]["betas"] = (0.9 if step < 3 else 0.5, 0.95)  # as a setting changes it at the switch
        again = FlatAdam(usual, 50, torch.device("cpu"))
        again.load_state_dict(ours.state_dict())
        ours = again
        mine -= 0.1 * ours.direction(weight.grad, Rates(0.1, 0.9 if step < 3 else 0.5, False, 0.0))
        theirs.step()
    torch.testing.assert_close(mine, weight.detach())


def test_adam_refuses_what_only_sgd_is_tried_with():
    ours = FlatAdam(AdamW(0.9, 0.95, 0.0, 0.0), 3, torch.device("cpu"))
    with pytest.raises(SettingError, match="without nesterov"):
        ours.direction(torch.ones(3), Rates(0.1, 0.9, False, 0.0, lazy=True))


def test_a_spec_changes_a_setting_of_the_catalogue(tmp_path):
    (tmp_path / "list").write_text("dense  # beside it\n\nm0-kept+density=0.02\n")
    dense, other = read_settings(str(tmp_path / "list"))
    assert dense.is_dense
    assert (other.momentum, other.lr_scale, other.density) == (0.0, 10.0, 0.02)
    assert other.name == "m0-kept+density=0.02"
    assert [each.name for each in read_settings("all")] == list(settings.CATALOGUE)


@pytest.mark.parametrize(
    ("spec", "hint"), [("scaled1", "scaled-1"), ("dense+densty=1", "density"), ("m0+lazy", "lazy")]
)
def test_a_wrong_spec_is_refused_with_a_hint(spec, hint):
    with pytest.raises(SettingError, match=hint):
        parse(spec)


def test_a_packed_corpus_is_the_same(tmp_path):
    made = made_up(5)
    made.save(tmp_path / "a" / "packed.pt")
    read = Recordings.load(tmp_path / "a" / "packed.pt")
    assert all(torch.equal(a, b) for a, b in zip(made.samples, read.samples, strict=True))
    assert (list(read.texts), read.num_train) == (list(made.texts), 5)


def test_every_worker_has_its_own_utterances_and_all_settings_the_same():
    def indices(seed):
        speech = Speech(made_up(8), seed=seed, workers=2, batch_size=2, device=torch.device("cpu"))
        return [speech.batch(step, worker).indices for step in range(4) for worker in range(2)]

    assert indices(1) == indices(1) != indices(2)
    assert sorted(i for batch in indices(1)[:4] for i in batch) == list(range(8))


def test_goals_are_reached_where_an_epochs_mean_is():
    record = Record(loss=[9.0, 7.0, 5.0, 3.0], sent_bytes=[100, 100, 1, 1], seconds=[1.0] * 4)
    run = {"curves": vars(record), "window": 2, "steps": 4, "ended": "", "setting": {"dense_steps": 2}}
    run["curves"] |= {"selected_over_k": [1.0] * 4, "residual_norm": [0.0] * 4}
    run["evaluations"] = [{"step": 2, "wer": 0.9}, {"step": 4, "wer": 0.5}]
    figures = figures_of(run, [6.0, 1.0], [0.5], compute_s=0.5)
    assert figures["reached"]["loss 6"]["steps"] == 3
    assert figures["reached"]["loss 6"]["bytes"] == 201
    assert figures["reached"]["loss 6"]["100 Mbit/s"] == pytest.approx(1.5 + 201 * 8 / 1e8)
    assert figures["reached"]["loss 1"] is None
    assert figures["reached"]["WER 0.5"]["steps"] == 4


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    folder = tmp_path_factory.mktemp("learning")
    made_up(8).save(folder / "packed.pt")
    arguments = ["--corpus", f"{folder}/packed.pt", "--batch", "2", "--workers", "2", "--set", "augment=no"]
    arguments += ["--steps", "5", "--dense-steps", "2", "--settings", "dense,scaled-1,ef21m", "--evaluate-every", "1"]
    return folder, arguments, main([*arguments, "--out", f"{folder}/out"])


def test_main_writes_table_json_and_plots(learned, capsys):
    folder, arguments, result = learned
    again = main([*arguments, "--out", f"{folder}/out"])  # all is there: nothing is trained
    said = capsys.readouterr()
    assert json.loads(said.out.splitlines()[-1]) == again == json.loads((folder / "out" / "summary.json").read_text())
    assert said.err == ""
    assert again["rows"] == result["rows"]
    assert (folder / "out" / "loss.png").stat().st_size > 1000
    assert (folder / "out" / "wer.png").stat().st_size > 1000


def test_settings_part_at_the_switch_and_not_before(learned):
    folder, _, result = learned
    runs = [json.loads(line) for line in (folder / "out" / "runs.jsonl").read_text().splitlines()]
    losses = {run["setting"]["name"]: run["curves"]["loss"] for run in runs}
    assert losses["dense"][:3] == losses["scaled-1"][:3] == losses["ef21m"][:3]
    assert losses["dense"][4] != losses["scaled-1"][4]
    assert all(not run["ended"] and run["steps"] == 5 for run in runs)
    fewer = {row["name"]: row["times_fewer_bytes"] for row in result["rows"]}
    assert fewer["dense"] == 1
    assert fewer["scaled-1"] == fewer["ef21m"] > 10


def test_the_same_seed_gives_the_same_bits(learned, tmp_path):
    folder, arguments, _ = learned
    main([*arguments, "--out", str(tmp_path), "--settings", "scaled-1", "--no-plots"])
    (run,) = map(json.loads, (tmp_path / "runs.jsonl").read_text().splitlines())
    before = [json.loads(line) for line in (folder / "out" / "runs.jsonl").read_text().splitlines()]
    (same,) = (each for each in before if each["setting"]["name"] == "scaled-1")
    for curve in ("loss", "grad_norm", "residual_norm", "sent_bytes"):
        assert run["curves"][curve] == same["curves"][curve]

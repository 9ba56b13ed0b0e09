"""The sweep on one device: dense steps are shared, exchanges conserve, density 1 is dense."""

import json
import math

import pytest
import torch

from oktopk import Dense, OkTopk
from oktopk.cost import predict
from research.learning import rivals, sweep
from research.learning.language import Text
from research.learning.schemes import BLOCK, SCHEMES, Demo, scheme_of
from research.learning.sweep import OUTER_LR, WORKERS, Line, Training, World, train

TEXT = Text(torch.randint(256, (4000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)), 3000)
CPU = torch.device("cpu")
EXCHANGES = {
    "bf16": ["scheme=bf16"],
    "demo": ["scheme=demo density=0.02", "scheme=demo density=0.02 bits=8"],
    "dgc": ["scheme=dgc eta=1"],
    "ef21": ["scheme=ef21 eta=1"],
    "gather": ["scheme=gather", "scheme=updates inner=gather bits=2"],
    "gradients": ["scheme=gradients", "scheme=gradients bits=4 power=0.5", "scheme=gradients bits=1",
                  "scheme=gradients low_rank=2"],
    "powersgd": ["scheme=powersgd"],
    "ternary": ["scheme=ternary", "scheme=updates inner=ternary part=1"],
    "whole": ["scheme=whole", "scheme=whole bits=4"],
}  # fmt: skip
"""Lines of each scheme; those with averages have eta 1, where the average is the gradient."""

ALL = [line for lines in EXCHANGES.values() for line in lines]


@pytest.fixture(scope="module")
def world():
    return World(TEXT, 1, (1, 128, 4, 8), 1, CPU)


@pytest.fixture(scope="module")
def vectors(world):
    return torch.randn(WORKERS, world.large, generator=torch.Generator().manual_seed(1))


def made(world, text):
    return scheme_of(world, Line.parse(text), torch.zeros_like(world.weights))


def close(a, b, atol=1e-4):
    torch.testing.assert_close(a, b, rtol=0, atol=atol)


def test_every_scheme_is_tested():
    assert EXCHANGES.keys() == SCHEMES.keys()


@pytest.mark.parametrize("text", ALL)
def test_what_is_not_delivered_is_held_back(world, vectors, text):
    scheme, delivered, steps = made(world, text), torch.zeros(world.large), 3
    for _ in range(steps):
        delivered += scheme.deliver(vectors)
    if text == "scheme=bf16":  # which loses what rounding takes
        close(delivered, steps * vectors.mean(0), 0.05)
        assert not torch.equal(delivered, steps * vectors.mean(0))
    elif text == "scheme=ef21 eta=1":  # what trains is all that was delivered so far; the changes end with the first
        close(scheme.followed + scheme.owed, vectors.mean(0))
    else:
        close(delivered + scheme.owed, steps * vectors.mean(0))
        assert (scheme.owed.norm() > 0) == (text != "scheme=whole")


@pytest.mark.parametrize("text", ["gradients", "gather", "dgc eta=1", "ef21 eta=1", "demo", "powersgd rank=256"])
def test_all_is_delivered_at_density_1(world, vectors, text):
    scheme = made(world, f"scheme={text} density=1")
    for factor in (1, -2):
        close(scheme.deliver(factor * vectors), factor * vectors.mean(0), 1e-3)


def test_dgc_chooses_by_momentum_and_forgets_that_of_what_it_chose(world, vectors):
    scheme = made(world, "scheme=dgc density=0.02")
    scheme.begin(torch.ones(world.large))
    velocity = 0.9 + 0.1 * vectors
    delivered = scheme.deliver(vectors)
    close(delivered + scheme.owed, velocity.mean(0))
    chosen = scheme.held == 0
    assert (chosen.sum(1) / world.large).tolist() == pytest.approx([0.02] * WORKERS, rel=0.2)
    close(scheme.velocity, velocity * ~chosen)


def test_ef21_follows_the_average_of_the_gradients(world, vectors):
    scheme, average = made(world, "scheme=ef21 density=0.1 eta=0.5"), torch.zeros(world.large)
    for step in range(40):
        average = average / 2 + vectors.mean(0) / 2
        behind = (scheme.deliver(vectors) - average).norm() / average.norm()
        close(scheme.followed + scheme.owed, average)
        assert behind > 0.3 or step
    assert behind < 0.1


def test_demo_sends_the_largest_waves_of_each_tile(world):
    scheme = made(world, f"scheme=demo density={1 / 64**2}")
    assert isinstance(scheme, Demo)
    rows = torch.cos(math.pi / 64 * 3 * (torch.arange(64) + 0.5))
    tensor = torch.cat(
        [rows.outer(torch.ones(64)).repeat(shape[0] // 64, shape[1] // 64).view(-1) for *_, shape in world.matrices]
    )
    close(scheme.deliver(tensor.repeat(WORKERS, 1)), tensor)
    close(scheme.owed, torch.zeros(world.large))


@pytest.mark.parametrize(
    ("text", "bits"),
    [
        ("scheme=whole", 2 * 0.75 * 32),
        ("scheme=whole bits=8", 2 * 0.75 * 8),
        ("scheme=bf16", 2 * 0.75 * 16),
        ("scheme=gather density=0.25 bits=8", 3 * 0.25 * (8 + 4)),
        ("scheme=ternary part=1", 2 * 0.75 * (1 + 32 / BLOCK)),
        ("scheme=ternary part=0.5", 2 * 0.75 * (1 + 0.5 + 32 / BLOCK)),
    ],
)
def test_the_bits_of_an_exchange_are_counted(world, text, bits):
    assert made(world, text).bits() / world.large == pytest.approx(bits)


def test_a_low_rank_takes_the_bits_of_two_factors(world):
    factors = sum(2 * (rows + columns) for *_, (rows, columns) in world.matrices)
    assert made(world, "scheme=powersgd rank=2").bits() == pytest.approx(2 * 0.75 * 32 * factors)


def test_ours_takes_the_librarys_bytes(world):
    ratio = predict(OkTopk(), world.large, WORKERS).typical / predict(Dense(), world.large, WORKERS).typical
    run = Training(world, Line.parse("scheme=updates"))
    run.steps(0, 0)
    run._step(0, sparse=True)
    assert run.bytes_of_dense == pytest.approx(ratio, rel=0.01)


def test_every_second_exchange_takes_half_of_the_bytes_and_all_workers_meet_in_it(world):
    """DiLoCo without momentum is the mean of what workers moved alone; with it the first exchange is 0.7 x 1.9."""
    moved = {}
    for outer in (0.0, 0.9):
        run = Training(world, Line.parse(f"scheme=updates inner=whole every=2 outer={outer} dense=0 lr=1e-3"))
        run._step(0, sparse=True)
        assert torch.equal(world.weights, world.first)
        alone = run._local.clone()
        assert not torch.equal(alone[0], alone[1])
        run._step(1, sparse=True)
        assert not run._local.any()
        assert run.bytes_of_dense == 0.5
        moved[outer] = world.weights - world.first
    close(moved[0.9], OUTER_LR * 1.9 * moved[0.0], 1e-6)
    assert moved[0.0].norm() > alone.mean(0).norm()


def test_density_1_trains_as_dense_does(world):
    lines = [Line.parse(f"steps=3 dense=1 {each}") for each in ("scheme=dense", "scheme=gradients density=1")]
    dense, whole = [result["nats"][3] for result in train(lines, lambda _: world, 60)]
    assert whole == pytest.approx(dense, abs=1e-3)
    assert not torch.equal(world.weights, world.first)


def test_the_table_of_rivals_is_of_all_schemes_and_goes_on_where_it_stopped(tmp_path, monkeypatch, capsys):
    schemes = {scheme: Line.parse(f"scheme={scheme}") for scheme in rivals.RIVALS.values()}
    tried = {line.inner if line.scheme == "updates" else line.scheme for line in schemes.values()}
    assert tried == SCHEMES.keys() | {"dense"}
    TEXT.save(tmp_path / "text.pt")
    monkeypatch.setattr(sweep, "SIZE", (1, 128, 4, 8))
    monkeypatch.setattr(sweep, "BATCH", 1)
    monkeypatch.setattr(rivals, "RIVALS", {"dense": "dense", "ours": "updates b1=0.5 lrs=2"})
    words = [f"{tmp_path / 'text.pt'}", f"{tmp_path}", "--with", "steps=4 dense=2"]
    rivals.main([*words, "--seeds", "2", "--no-plot"])
    rivals.main([*words, "--seeds", "2,1"])
    runs = [json.loads(line) for line in (tmp_path / "rivals.jsonl").read_text().splitlines()]
    assert [run["line"] for run in runs] == [
        f"seed={seed} steps=4 dense=2 scheme={scheme}" for seed in (2, 1) for scheme in rivals.RIVALS.values()
    ]
    *_, dense, ours = capsys.readouterr().out.strip().splitlines()
    means = [f"{(runs[i]['nats']['4'] + runs[i + 2]['nats']['4']) / 2:.3f}" for i in (0, 1)]
    assert dense.startswith(f"| dense | 1 | {means[0]} | 1: ")
    assert ours.startswith(f"| ours | 1/{1 / runs[1]['bytes']:.3g} | {means[1]} | 1: ")
    assert (tmp_path / "rivals.png").stat().st_size > 10_000

"""SimGrid replays the schedules. It shares links message by message, and the model adds up rounds: they must agree."""

import pytest

from oktopk import OkTopk, SettingError
from oktopk.plan import simulate as simulation
from oktopk.plan.methods import DENSE, default, methods
from oktopk.plan.model import exchange_of, round_seconds, schedules_of
from oktopk.plan.profile import Host, from_numbers
from oktopk.plan.simulate import simgrid_python, simulate
from oktopk.plan.topology import Level, Topology, flat

IDLE = Host(message_s={"": 0.0}, word_s={"": 0.0})
SITES = Topology((
    Level(name="GPU", size=2, mbit=1e5, latency_s=1e-6),
    Level(name="node", size=4, mbit=1e4, latency_s=5e-5),
    Level(name="site", size=3, mbit=100, latency_s=1e-2),
))  # fmt: skip
NUMEL = 27_569_568
AGREES = 0.05


@pytest.fixture(autouse=True)
def _needs_simgrid(request):
    if "refused" not in request.node.name and simgrid_python() is None:
        pytest.skip("no Python here has simgrid: apt-get install python3-simgrid")


@pytest.mark.slow
@pytest.mark.parametrize("name", [DENSE, default().name, "GTopk(density=0.01)", f"{default().name}, two levels"])
def test_the_model_agrees_with_simgrid_on_three_levels(name):
    method = next(each for each in methods(levels=3) if each.name == name)
    plan = [each for _, made in schedules_of(method, from_numbers(4_000_000, 0.1), SITES) for each in made]
    modelled = sum(round_seconds(each, SITES, IDLE)[0] for each in plan)
    assert modelled == pytest.approx(simulate(plan, SITES), rel=AGREES)


@pytest.mark.slow
def test_the_exchange_stays_flat_up_to_many_ranks():
    """The ratio of 512 to 32 ranks is 1.5 at most: 512 by the model, which SimGrid confirms at 64."""
    seconds = {}
    for size in (32, 64, 512):
        plan = exchange_of(OkTopk(), NUMEL, size)
        seconds[size] = round_seconds(plan, flat(size, 1000, 5e-5), IDLE)[0]
        if size == 64:
            assert seconds[size] == pytest.approx(simulate([plan], flat(size, 1000, 5e-5)), rel=AGREES)
    assert seconds[512] <= 1.5 * seconds[32]


def test_a_machine_without_simgrid_is_refused(monkeypatch):
    monkeypatch.setattr(simulation, "simgrid_python", lambda: None)
    with pytest.raises(SettingError, match="apt-get install python3-simgrid"):
        simulate([exchange_of(OkTopk(), 1000, 2)], flat(2, 1000))

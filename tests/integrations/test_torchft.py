"""Real managers of torchft over gloo, as threads of one process: joining, healing, leaving, and what is refused."""

import io
import threading
import time
from datetime import timedelta
from urllib.error import HTTPError

import pytest
import torch

from oktopk import OkTopk, PeerError, SettingError, StateError
from oktopk.errors import MismatchError

pytest.importorskip("torchft", reason="oktopk[torchft] is not installed")

from oktopk.integrations.torchft import LocalSteps, NamedTransport, attach
from oktopk.integrations.torchft.start import Lighthouse, Patience, make_manager, split_address

HERE = "127.0.0.1"
PATIENCE = Patience(collective_s=10.0, heartbeat_s=2.0, join_s=5.0, quorum_s=20.0)
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def lighthouse():
    server = Lighthouse(f"{HERE}:0", 1, PATIENCE)
    yield server.url
    server.close()


class Worker(threading.Thread):
    """A member that makes steps until `stop` is set; `stop` after a committed one is as a crash is for the others."""

    def __init__(self, url, name, make, algorithm=None, checkpoint_step=0):
        super().__init__(daemon=True)
        self.url, self.member_name, self.make, self.checkpoint_step = url, name, make, checkpoint_step
        self.algorithm = algorithm or OkTopk(density=0.1)
        self.stop, self.error, self.seen = threading.Event(), None, {}  # the weights after each step
        self.start()

    def run(self):
        manager, close = make_manager(self.url, HERE, name=self.member_name, min_members=1, patience=PATIENCE)
        try:
            for step, size, weights in self.make(self, manager):
                self.seen[step] = (size, weights)
                if self.stop.is_set():
                    break
                time.sleep(0.005)
        except Exception as error:
            self.error = error
        finally:
            close()

    def wait_for(self, condition):
        deadline = time.monotonic() + 25
        while time.monotonic() < deadline:
            if self.error is not None or condition(self.seen):
                return
            time.sleep(0.02)
        raise TimeoutError(f"{self.member_name} got to {max(self.seen, default=None)}: {list(self.seen.values())[-1:]}")

    def end(self):
        self.stop.set()
        self.join(25)
        assert not self.is_alive()


def never(seen):
    return False


def make_net():
    torch.manual_seed(threading.get_ident() % 1000)  # each its own: healing makes them one
    return torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Tanh(), torch.nn.Linear(30, 5))


def every_step(worker, manager):
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    member = attach(
        net, optimizer, worker.algorithm, manager=manager, dense_steps=3, checkpoint_step=worker.checkpoint_step
    )
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
    manager.register_state_dict_fn("scheduler", scheduler.load_state_dict, scheduler.state_dict)
    while True:
        member.zero_grad()
        net(torch.randn(8, 20)).square().mean().backward()
        if member.step():
            scheduler.step()  # members whose rates differ would have other weights soon
            yield member.step_number, member.size, torch.cat([each.detach().flatten() for each in net.parameters()])


def local_steps(worker, manager):
    net = make_net()
    local = LocalSteps(net, torch.optim.AdamW(net.parameters(), lr=0.01), worker.algorithm, manager=manager, every=3)
    while True:
        for _ in range(3):
            local.optimizer.zero_grad()
            net(torch.randn(8, 20)).square().mean().backward()
            local.step()
        agreed = torch.cat([each.flatten() for each in local.agreed.values()])
        yield local.exchanges, local.exchange.size, agreed


@pytest.mark.slow
@pytest.mark.parametrize("make", [every_step, local_steps])
def test_members_join_heal_and_leave_with_the_same_bits_after_each_step(lighthouse, make):
    first = Worker(lighthouse, "a", make)
    first.wait_for(lambda seen: len(seen) > 5)
    second = Worker(lighthouse, "b", make)
    second.wait_for(lambda seen: any(size == 2 for size, _ in seen.values()) and len(seen) > 10)
    first.end()
    last = max(second.seen)
    second.wait_for(lambda seen: max(seen) > last + 5)
    third = Worker(lighthouse, "c", make)
    third.wait_for(lambda seen: any(size == 2 for size, _ in seen.values()) and len(seen) > 5)
    for worker in (second, third):
        worker.end()
    assert [worker.error for worker in (first, second, third)] == [None] * 3
    for one, other in ((first, second), (second, third)):
        both = [step for step in one.seen.keys() & other.seen.keys() if one.seen[step][0] == 2]
        assert len(both) > 3
        assert all(torch.equal(one.seen[step][1], other.seen[step][1]) for step in both)


@pytest.mark.slow
def test_a_fresh_member_alone_and_one_with_other_settings_are_refused_by_name(lighthouse):
    alone = Worker(lighthouse, "fresh", every_step, checkpoint_step=50)
    alone.wait_for(never)
    assert isinstance(alone.error, StateError)
    assert "has reached step 50" in str(alone.error)
    good = Worker(lighthouse, "good", every_step)
    good.wait_for(lambda seen: len(seen) > 5)
    other = Worker(lighthouse, "other", every_step, algorithm=OkTopk(density=0.2))
    other.wait_for(never)
    assert isinstance(other.error, MismatchError)
    assert "disagree on algorithm: here it is OkTopk(density=0.2" in str(other.error)
    last = max(good.seen)
    good.wait_for(lambda seen: max(seen) > last + 5)
    good.end()
    assert good.error is None


def test_a_wrong_lighthouse_is_refused_by_its_address():
    with pytest.raises(PeerError, match=r"no lighthouse answers at http://127.0.0.1:9: Connection refused. Is it"):
        make_manager(f"http://{HERE}:9", HERE, name="m", min_members=1, patience=PATIENCE)
    with pytest.raises(SettingError, match="wanted an address as HOST:PORT"):
        split_address("somewhere")
    other = NamedTransport(HERE)  # listens, and is no lighthouse
    try:
        with pytest.raises(PeerError, match=r"no lighthouse answers at http.*: something else listens there"):
            make_manager(other.metadata().rstrip("/"), HERE, name="m", min_members=1, patience=PATIENCE)
    finally:
        other.shutdown()


def test_a_transport_serves_a_copy_for_one_step_and_loads_no_code(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # which is not asked
    transport = NamedTransport(HERE, timedelta(seconds=2))
    weights = torch.ones(3)
    try:
        transport.send_checkpoint([1], 7, {"user": {"w": weights}, "torchft": {"step": 7}}, timedelta(seconds=2))
        weights.zero_()
        got = transport.recv_checkpoint(0, transport.metadata(), 7, timedelta(seconds=2))
        assert torch.equal(got["user"]["w"], torch.ones(3))
        assert transport.asked_step == 7
        transport.disallow_checkpoint()
        with pytest.raises(HTTPError):
            transport.recv_checkpoint(0, transport.metadata(), 7, timedelta(seconds=0.1))
        code = io.BytesIO()
        torch.save({"user": threading.Event}, code)
        transport._served = (8, code.getvalue())
        with pytest.raises(Exception, match="weights_only"):
            transport.recv_checkpoint(0, transport.metadata(), 8, timedelta(seconds=2))
    finally:
        transport.shutdown()

"""The same bits on a GPU as on the CPU: NCCL on one rank, gloo on two ranks that share the GPU."""

import copy
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision
from torch.utils.checkpoint import checkpoint

import oktopk
from oktopk.cuda.step import supports_device_step
from tests.cases import PLAIN, before_release, device_step

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU, and there is none here")

NUMEL, STEPS = 20_000, 4
BASELINES = (oktopk.TopkA, oktopk.TopkDSA, oktopk.GTopk, oktopk.GaussianK)
ALGORITHMS = [oktopk.Dense(), *(each(density=0.05) for each in (*BASELINES, oktopk.OkTopk, oktopk.OkTopkPaper))]
ALGORITHMS += [oktopk.OkTopk(density=0.05, **PLAIN), *(oktopk.OkTopk(density=0.05, wire=w) for w in ("bf16", "int8"))]


def would_stay(algorithm, numel, dtype, _):
    """Whether the step would stay on a GPU: the one on the CPU that it is compared with is to be the same."""
    return supports_device_step(algorithm, numel, dtype, torch.device("cuda"))


def wrapped(net, device, **settings):
    return DistributedDataParallel(net.to(device), device_ids=[torch.device(device).index], **settings)


def attached(model, algorithm="oktopk", **settings):
    return oktopk.attach(model, algorithm, **{"dense_steps": 0, "timeout": 30, **settings})


def reduce_steps(algorithm, comm, device):
    reducer, made = oktopk.Reducer(algorithm, comm), torch.Generator().manual_seed(comm.rank)
    grads = [(torch.randn(NUMEL, generator=made) ** 3).to(device) for _ in range(STEPS)]
    return [reducer.all_reduce(grad).cpu() for grad in grads] + [reducer.residual.cpu()]


@contextmanager
def nothing_waits():
    """Let torch refuse every operation that would wait for the GPU."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def check_that_a_reducer_never_waits(device):
    magnitude = oktopk.OkTopk(density=0.01, ranking="magnitude")
    rows = [1000] * 1000
    for algorithm, segments in ((magnitude, None), (oktopk.OkTopk(), rows), (oktopk.OkTopk(wire="int8"), rows)):
        reducer = oktopk.Reducer(algorithm, oktopk.ProcessGroupComm(), segments=segments)
        grad = torch.randn(1_000_000, device=device)
        result = reducer.all_reduce(grad)
        before = torch.cuda.memory_allocated()
        with nothing_waits():
            for _ in range(70):
                result = reducer.all_reduce(grad)
        assert torch.cuda.memory_allocated() <= before + 4 * result.nbytes
        assert reducer.last.step == 70


def check_that_elements_need_not_lie_side_by_side(device):
    reducers = [oktopk.Reducer(oktopk.OkTopk(density=0.01), oktopk.ProcessGroupComm()) for _ in range(2)]
    for _ in range(6):  # the last ones are replayed
        grad = torch.randn(40_000, device=device)[::2]
        assert torch.equal(reducers[0].all_reduce(grad), reducers[1].all_reduce(grad.clone()))


def check_that_the_hook_never_waits(device):
    model = wrapped(two_layers(), device, bucket_cap_mb=0.5)
    handle = attached(model, dense_steps=2)
    x = torch.randn(8, 300, device=device)
    for waits, steps in ((nullcontext(), 4), (nothing_waits(), 20)):
        with waits:
            for _ in range(steps):
                model(x).square().mean().backward()
    assert (handle.last.step, handle.last.phase, handle.last.skipped) == (23, "sparse", False)
    handle.detach()


def check_that_a_state_on_the_host_goes_on(device):
    grads = [torch.randn(5000, device=device) for _ in range(6)]
    whole, again = (oktopk.Reducer(oktopk.OkTopk(), oktopk.ProcessGroupComm()) for _ in range(2))
    for grad in grads[:3]:
        whole.all_reduce(grad)
    saved = whole.state_dict()
    again.load_state_dict({**saved, "residual": saved["residual"].cpu()})
    for grad in grads[3:]:
        assert torch.equal(whole.all_reduce(grad), again.all_reduce(grad))


def two_layers():
    return nn.Sequential(nn.Linear(300, 500), nn.ReLU(), nn.Linear(500, 400))


class Recomputed(nn.Sequential):
    """Layers whose forward, dropout and all, is done again in backward."""

    def forward(self, x):
        for layer in self:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


def check_that_backward_may_draw_random_numbers(device):
    """While steps are captured and replayed, at several densities: torch allows no drawing during a capture."""
    layers = (nn.Sequential(nn.Linear(256, 256), nn.Dropout(0.2)) for _ in range(6))
    model, seen = wrapped(Recomputed(*layers), device, bucket_cap_mb=0.3), oktopk.MemorySink()
    algorithm, schedule = oktopk.OkTopk(density=0.02), [(12, 0.25), (18, 0.1)]
    handle = attached(model, algorithm, density_schedule=schedule, dense_steps=3, sinks=[seen])
    x = torch.randn(8, 256, device=device)
    for _ in range(48):
        model(x).square().mean().backward()
    handle.detach()
    assert [record.step for record in seen.records] == list(range(48))
    densities = [1.0] * 3 + [0.25] * 12 + [0.1] * 18 + [0.02] * 15
    for record, density in zip(seen.records, densities, strict=True):
        wanted = density * (record.numel - record.dense_tail_numel)
        assert not record.skipped
        assert density == 1.0 or 0.5 * wanted < record.nnz <= 1.5 * wanted, (record.step, record.nnz, wanted)


def check_that_density_one_is_plain_ddp(device):
    torch.manual_seed(0)
    net, grads = two_layers(), []
    x = torch.randn(32, 300, generator=torch.Generator().manual_seed(dist.get_rank())).to(device)
    for sparse in (False, True):
        model = wrapped(net, device)
        handle = attached(model, oktopk.OkTopk(density=1.0)) if sparse else None
        net.zero_grad()
        model(x).square().mean().backward()
        grads.append([parameter.grad.clone() for parameter in net.parameters()])
        if handle is not None:
            handle.detach()
    torch.testing.assert_close(*grads, rtol=1e-6, atol=1e-9)


def check_backward_waits_for_the_exchange(device):
    """Make the exchange's stream finish late: what backward() leaves must be the mean all the same."""
    model = wrapped(nn.Linear(400, 400), device)
    handle = attached(model, dense_steps=10)

    def finish_late(buffer):
        torch.cuda._sleep(1_000_000_000)  # about half a second
        buffer.fill_(7.0)

    with before_release(finish_late):
        model(torch.ones(4, 400, device=device)).sum().backward()
    assert all(bool((parameter.grad == 7.0).all()) for parameter in model.parameters())
    handle.detach()


def check_that_a_scaler_need_not_be_given(device):
    """Nothing else asks for the host here: steps would stay on the device, in scaled units."""
    ends = []
    for given in (True, False):
        torch.manual_seed(0)
        net = nn.Linear(400, 400)
        model = wrapped(net, device)
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10, growth_interval=2)
        handle = attached(model, dense_steps=1, scaler=scaler if given else None)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        for step in range(10):
            optimizer.zero_grad()
            x = torch.randn(8, 400, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
            with torch.autocast("cuda", torch.float16):
                out = model(x.to(device))
            scaler.scale(out.float().square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
        handle.detach()
        ends.append([net.weight.detach().clone(), handle.residual["weight"]])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))
    assert bool(ends[0][1].any())


def check_ddps_mixed_precision(device):
    """Against the same net in bfloat16: dense steps give the mean of the ranks' gradients, sparse ones lose nothing."""
    precision = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.bfloat16)
    for dense_steps in (20, 0):
        torch.manual_seed(0)
        net = two_layers().to(device)
        local = copy.deepcopy(net).bfloat16()
        model = wrapped(net, device, bucket_cap_mb=0.5, mixed_precision=precision)
        handle = attached(model, oktopk.OkTopk(density=0.05), dense_steps=dense_steps)
        applied = [torch.zeros_like(p, dtype=torch.float64) for p in net.parameters()]
        wanted = copy.deepcopy(applied)
        for step in range(12):
            generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
            x = torch.randn(8, 300, generator=generator).to(device)
            for each, books in ((model, applied), (local, wanted)):
                each.zero_grad()
                each(x if each is model else x.bfloat16()).float().square().mean().backward()
                for parameter, book in zip(each.parameters(), books, strict=True):
                    book += parameter.grad
            assert {(p.dtype, p.grad.dtype) for p in net.parameters()} == {(torch.float32, torch.float32)}
        handle.detach()
        for (name, _), came, own in zip(net.named_parameters(), applied, wanted, strict=True):
            total = torch.stack([own.view(-1), handle.residual[name].double()])
            dist.all_reduce(total)
            mean, held = total / dist.get_world_size()
            assert bool(held.any()) == (dense_steps == 0 and name.endswith("weight"))
            torch.testing.assert_close(came.view(-1) + held, mean, rtol=0, atol=2**-7 * float(mean.abs().max()))


def work(rank, size, backend, folder):
    device = f"cuda:{rank if backend == 'nccl' else 0}"
    torch.cuda.set_device(device)
    store = dist.FileStore(str(Path(folder) / "store"), size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=30))
    try:
        if backend == "nccl":  # gloo brings all to the host itself
            check_that_a_reducer_never_waits(device)
            check_that_elements_need_not_lie_side_by_side(device)
            check_that_the_hook_never_waits(device)
            check_that_backward_may_draw_random_numbers(device)
            check_that_a_state_on_the_host_goes_on(device)
        for algorithm in ALGORITHMS:
            on_gpu = reduce_steps(algorithm, oktopk.ProcessGroupComm(), device)
            with device_step(would_stay):
                on_cpu = oktopk.run_local(size, lambda comm, a=algorithm: reduce_steps(a, comm, "cpu"))[rank]
            assert all(torch.equal(a, b) for a, b in zip(on_gpu, on_cpu, strict=True)), algorithm
        check_that_a_scaler_need_not_be_given(device)
        check_ddps_mixed_precision(device)
        check_backward_waits_for_the_exchange(device)
        check_that_density_one_is_plain_ddp(device)
    finally:
        dist.destroy_process_group()


@pytest.mark.processes
@pytest.mark.timeout(180)
@pytest.mark.parametrize(("size", "backend"), [(1, "nccl"), (2, "gloo"), (4, "gloo"), (2, "nccl")])
def test_gpu_gives_the_bits_of_the_cpu(size, backend, tmp_path):
    if backend == "nccl" and torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} GPUs, and there is one here")
    mp.spawn(work, (size, backend, str(tmp_path)), size)

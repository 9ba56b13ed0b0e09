"""The same bits on a GPU as on the CPU: NCCL on one rank, gloo on two ranks that share the GPU."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision
from torch.utils.checkpoint import checkpoint

import oktopk
from oktopk.cuda.step import supports_device_step
from tests.cases import before_release, device_step

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU, and there is none here")

NUMEL, STEPS = 20_000, 4
ALGORITHMS = [
    oktopk.Dense(),
    oktopk.TopkA(density=0.05),
    oktopk.TopkDSA(density=0.05),
    oktopk.GTopk(density=0.05),
    oktopk.GaussianK(density=0.05),
    oktopk.OkTopk(density=0.05),
    oktopk.OkTopk(density=0.05, ranking="magnitude", wire="fp32"),
    oktopk.OkTopk(density=0.05, wire="bf16"),
    oktopk.OkTopkPaper(density=0.05),
]


def can_stay_anywhere(algorithm: Any, numel: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the step would stay on a GPU: the one on the CPU that it is compared with is to be the same."""
    del device
    return supports_device_step(algorithm, numel, dtype, torch.device("cuda"))


def reduce_steps(algorithm: oktopk.Algorithm, comm: oktopk.Comm, device: str) -> list[Tensor]:
    reducer, made = oktopk.Reducer(algorithm, comm), torch.Generator().manual_seed(comm.rank)
    grads = [(torch.randn(NUMEL, generator=made) ** 3).to(device) for _ in range(STEPS)]
    return [reducer.all_reduce(grad).cpu() for grad in grads] + [reducer.residual.cpu()]


@contextmanager
def nothing_waits() -> Iterator[None]:
    """Let torch refuse every operation that would wait for the GPU."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def check_that_a_reducer_never_waits(device: str) -> None:
    for algorithm, segments in (
        (oktopk.OkTopk(density=0.01, ranking="magnitude"), None),
        (oktopk.OkTopk(), [1000] * 1000),
    ):
        reducer = oktopk.Reducer(algorithm, oktopk.ProcessGroupComm(), segments=segments)
        grad = torch.randn(1_000_000, device=device)
        result = reducer.all_reduce(grad)
        before = torch.cuda.memory_allocated()
        with nothing_waits():
            for _ in range(70):
                result = reducer.all_reduce(grad)
        assert torch.cuda.memory_allocated() <= before + 4 * result.nbytes
        assert reducer.last is not None
        assert reducer.last.step == 70


def check_that_elements_need_not_lie_side_by_side(device: str) -> None:
    reducers = [oktopk.Reducer(oktopk.OkTopk(density=0.01), oktopk.ProcessGroupComm()) for _ in range(2)]
    for _ in range(6):  # the last ones are replayed
        grad = torch.randn(40_000, device=device)[::2]
        apart, together = (
            reducer.all_reduce(each) for reducer, each in zip(reducers, (grad, grad.clone()), strict=True)
        )
        assert torch.equal(apart, together)


def check_that_the_hook_never_waits(device: str) -> None:
    net = nn.Sequential(nn.Linear(300, 500), nn.ReLU(), nn.Linear(500, 400)).to(device)
    model = DistributedDataParallel(net, device_ids=[torch.device(device).index], bucket_cap_mb=0.5)
    handle = oktopk.attach(model, oktopk.OkTopk(), dense_steps=2, timeout=30)
    x = torch.randn(8, 300, device=device)
    for step in range(24):
        if step == 4:
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
        model(x).square().mean().backward()
    torch.cuda.set_sync_debug_mode("default")
    assert handle.last is not None
    assert (handle.last.step, handle.last.phase, handle.last.skipped) == (23, "sparse", False)
    handle.detach()


def check_that_a_nan_is_told_two_steps_later(device: str) -> None:
    model = DistributedDataParallel(nn.Linear(300, 400).to(device), device_ids=[torch.device(device).index])
    handle = oktopk.attach(model, oktopk.OkTopk(), dense_steps=0, timeout=30)
    for step in range(9):
        model.zero_grad()
        before = handle.residual
        x = torch.full((4, 300), float("nan") if step in (3, 4) else 1.0, device=device)
        telling = pytest.raises(Exception, match=f"step {step - 2}: a rank's gradient")
        with telling if step in (5, 6) else nullcontext():
            model(x).square().mean().backward()
        unchanged = [torch.equal(handle.residual[name], before[name]) for name in before]
        assert all(unchanged) == (step in (3, 4, 5, 6))
    handle.detach()


def check_that_a_state_on_the_host_goes_on(device: str) -> None:
    grads = [torch.randn(5000, device=device) for _ in range(6)]
    whole, again = (oktopk.Reducer(oktopk.OkTopk(), oktopk.ProcessGroupComm()) for _ in range(2))
    for grad in grads[:3]:
        whole.all_reduce(grad)
    saved = whole.state_dict()
    again.load_state_dict({**saved, "residual": saved["residual"].cpu()})
    for grad in grads[3:]:
        assert torch.equal(whole.all_reduce(grad), again.all_reduce(grad))


class Recomputed(nn.Module):
    """Layers whose forward, dropout and all, is done again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(256, 256), nn.Dropout(0.2)) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


def check_that_backward_may_draw_random_numbers(device: str) -> None:
    """While steps are captured and replayed, at several densities: torch allows no drawing during a capture."""
    model = DistributedDataParallel(Recomputed().to(device), device_ids=[torch.device(device).index], bucket_cap_mb=0.3)
    seen = oktopk.MemorySink()
    algorithm, schedule = oktopk.OkTopk(density=0.02), [(12, 0.25), (18, 0.1)]
    handle = oktopk.attach(model, algorithm, density_schedule=schedule, dense_steps=3, sinks=[seen], timeout=30)
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


def density_one_gradients(device: str) -> tuple[list[Tensor], list[Tensor]]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 300), nn.ReLU(), nn.Linear(300, 300)).to(device)
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(dist.get_rank())).to(device)
    grads = []
    for attached in (False, True):
        model = DistributedDataParallel(net, device_ids=[torch.device(device).index])
        handle = oktopk.attach(model, oktopk.OkTopk(density=1.0), dense_steps=0, timeout=30) if attached else None
        net.zero_grad()
        model(x).square().mean().backward()
        grads.append([parameter.grad.clone() for parameter in net.parameters()])
        if handle is not None:
            handle.detach()
    return grads[0], grads[1]


def check_backward_waits_for_the_exchange(device: str) -> None:
    """Make the exchange's stream finish late: what backward() leaves must be the mean all the same."""
    net = nn.Linear(400, 400).to(device)
    model = DistributedDataParallel(net, device_ids=[torch.device(device).index])
    handle = oktopk.attach(model, "oktopk", dense_steps=10, timeout=30)

    def finish_late(buffer: Tensor) -> None:
        torch.cuda._sleep(1_000_000_000)  # about half a second
        buffer.fill_(7.0)

    with before_release(finish_late):
        model(torch.ones(4, 400, device=device)).sum().backward()
    assert all(bool((parameter.grad == 7.0).all()) for parameter in net.parameters())
    handle.detach()


def check_that_a_scaler_need_not_be_given(device: str) -> None:
    """Nothing else asks for the host here: steps would stay on the device, in scaled units."""
    ends = []
    for given in (True, False):
        torch.manual_seed(0)
        net = nn.Linear(400, 400).to(device)
        model = DistributedDataParallel(net, device_ids=[torch.device(device).index])
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10, growth_interval=2)
        settings: dict[str, Any] = {"dense_steps": 1, "timeout": 30, "scaler": scaler if given else None}
        handle = oktopk.attach(model, oktopk.OkTopk(), **settings)
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


def check_ddps_mixed_precision(device: str) -> None:
    """Against the same net in bfloat16: dense steps give the mean of the ranks' gradients, sparse ones lose nothing."""
    precision = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.bfloat16)
    for dense_steps in (20, 0):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(300, 500), nn.ReLU(), nn.Linear(500, 400)).to(device)
        local = copy.deepcopy(net).bfloat16()
        model = DistributedDataParallel(
            net, device_ids=[torch.device(device).index], bucket_cap_mb=0.5, mixed_precision=precision
        )
        handle = oktopk.attach(model, oktopk.OkTopk(density=0.05), dense_steps=dense_steps, timeout=30)
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


def work(rank: int, size: int, backend: str, folder: str) -> None:
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
            check_that_a_nan_is_told_two_steps_later(device)
            check_that_a_state_on_the_host_goes_on(device)
        for algorithm in ALGORITHMS:
            on_gpu = reduce_steps(algorithm, oktopk.ProcessGroupComm(), device)
            with device_step(can_stay_anywhere):
                on_cpu = oktopk.run_local(size, lambda comm, a=algorithm: reduce_steps(a, comm, "cpu"))[rank]
            assert all(torch.equal(a, b) for a, b in zip(on_gpu, on_cpu, strict=True)), algorithm
        check_that_a_scaler_need_not_be_given(device)
        check_ddps_mixed_precision(device)
        check_backward_waits_for_the_exchange(device)
        plain, sparse = density_one_gradients(device)
        for a, b in zip(plain, sparse, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9)
    finally:
        dist.destroy_process_group()


@pytest.mark.processes
@pytest.mark.timeout(180)
@pytest.mark.parametrize(("size", "backend"), [(1, "nccl"), (2, "gloo"), (2, "nccl")])
def test_gpu_gives_the_bits_of_the_cpu(size: int, backend: str, tmp_path: Path) -> None:
    if backend == "nccl" and torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} GPUs, and there is one here")
    mp.spawn(work, (size, backend, str(tmp_path)), size)

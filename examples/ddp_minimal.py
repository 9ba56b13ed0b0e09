"""The README's lines, as a program: torchrun --nproc-per-node 2 examples/ddp_minimal.py

A small net learns a synthetic task on every rank's own samples. The lines with oktopk are the only ones that a DDP
script does not have already.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import oktopk

STEPS, DENSE_STEPS = 60, 20


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    model = DDP(net)
    sparse = oktopk.attach(model, oktopk.OkTopk(density=0.05), dense_steps=DENSE_STEPS)
    assert sparse.active
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    samples = torch.Generator().manual_seed(dist.get_rank())
    for step in range(STEPS):
        x = torch.randn(64, 64, generator=samples)
        loss = nn.functional.cross_entropy(model(x), x[:, :10].argmax(dim=1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0 and step % 10 == 9:
            record = sparse.last
            print(f"step {step + 1:3}  loss {loss:.3f}  {record.phase:6}  sparsity {record.sparsity:.3f}")
    if dist.get_rank() == 0:
        print(sparse.summary())
    sparse.detach()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Sharded inside a node, sparse between nodes: torchrun --nproc-per-node 4 examples/fsdp2_hsdp.py

Two replicas of two shards each. On a real cluster the shard dimension is the ranks of one node. The lines with oktopk
are the only ones that a script of native HSDP does not have already.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import oktopk

SHARDS, STEPS, DENSE_STEPS = 2, 60, 20


def main() -> None:
    dist.init_process_group("gloo")
    size = (dist.get_world_size() // SHARDS, SHARDS)
    mesh = init_device_mesh("cpu", size, mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    fully_shard(model[2], mesh=mesh)
    fully_shard(model, mesh=mesh)
    sparse = oktopk.attach(model, oktopk.OkTopk(density=0.05), dense_steps=DENSE_STEPS)
    assert sparse.active
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    samples = torch.Generator().manual_seed(dist.get_rank())
    for step in range(STEPS):
        x = torch.randn(64, 64, generator=samples)
        loss = nn.functional.cross_entropy(model(x), x[:, :10].argmax(dim=1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0 and step % 10 == 9:
            print(f"step {step + 1:3}  loss {loss:.3f}  {sparse.last.phase:6}  sparsity {sparse.last.sparsity:.3f}")
    if dist.get_rank() == 0:
        print(sparse.summary())
    sparse.detach()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Workers over a slow link: torchrun --nproc-per-node 2 examples/local_steps.py

Each worker trains alone for H steps. Then the workers exchange the 3 % of their movement that matter. A script without
DDP needs two lines: the one that makes `local`, and `local.step()` in the place of `optimizer.step()`.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import oktopk

STEPS, EVERY = 240, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, help="for records, and checkpoints to go on from")
    folder = parser.parse_args().folder
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)  # all workers start from the same weights
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    sinks = [oktopk.JsonlSink(folder / "metrics.jsonl")] if folder and not rank else []
    local = oktopk.LocalSteps(net, optimizer, oktopk.OkTopk(), every=EVERY, sinks=sinks)

    saved = folder / f"rank{rank}.pt" if folder else None
    if saved and saved.exists():  # the state has the weights, too
        state = torch.load(saved, weights_only=True)
        optimizer.load_state_dict(state["optimizer"])
        local.load_state_dict(state["local"])

    samples = torch.Generator().manual_seed(rank)
    for step in range(STEPS):
        x = torch.randn(64, 64, generator=samples)
        loss = nn.functional.cross_entropy(net(x), x[:, :10].argmax(dim=1))
        optimizer.zero_grad()
        loss.backward()
        local.step()
        if rank == 0 and step % 40 == 39:
            local.log(loss=loss)
            print(f"step {step + 1:3}  loss {loss:.3f}  exchanges {local.summary().steps}")
    if saved:
        torch.save({"optimizer": optimizer.state_dict(), "local": local.state_dict()}, saved)
    if rank == 0:
        print(local.summary())
    local.detach()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Ok-Topk under Hugging Face Accelerate: two CPU processes train a small net and print the traffic.

    torchrun --nproc-per-node 2 examples/accelerate_ddp.py

Accelerate's own way to a communication hook, `DistributedDataParallelKwargs(comm_hook=...)`, takes a member of the
closed enum `DDPCommunicationHookType` (fp16, bf16, PowerSGD) and ignores anything else without a word. So attach to the
DDP model that `prepare` returns.
"""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.nn.utils import parameters_to_vector
from torch.utils.data import DataLoader, TensorDataset

import oktopk
from oktopk.integrations.accelerate import attach

EPOCH_STEPS, BATCH = 20, 32
FEATURES, HIDDEN, CLASSES = 64, 256, 10


def main() -> None:
    args = parse()
    torch.set_num_threads(1)  # two processes on one machine
    set_seed(1)
    accelerator = Accelerator(cpu=True, log_with="tensorboard" if args.records else None, project_dir=args.records)
    accelerator.init_trackers("tensorboard")
    net = make_net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    model, optimizer, scheduler, loader = accelerator.prepare(
        net, optimizer, scheduler, DataLoader(make_data(), batch_size=BATCH)
    )

    # oktopk.attach(model, ...) would do; this one also hooks into save_state and load_state.
    records = [oktopk.JsonlSink(args.records / f"metrics-{accelerator.process_index}.jsonl")] if args.records else []
    sparse = attach(accelerator, model, oktopk.OkTopk(density=0.05), dense_steps=10, sinks=records)
    if args.checkpoint and args.checkpoint.exists():
        accelerator.load_state(str(args.checkpoint))

    losses = []
    for _ in range(sparse.step // EPOCH_STEPS, args.epochs):
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), labels)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            losses.append(loss.item())
            accelerator.log({"loss": losses[-1]}, step=sparse.step)  # and the figures of the exchange
    assert sparse.active
    if args.checkpoint:
        accelerator.save_state(str(args.checkpoint))

    weights = parameters_to_vector(net.parameters()).detach().numpy().tobytes()
    print(f"rank {accelerator.process_index}: weights {hashlib.sha256(weights).hexdigest()[:16]}", flush=True)
    accelerator.print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}\n{sparse.summary()}")
    sparse.detach()
    accelerator.end_training()


def make_net() -> nn.Module:
    return nn.Sequential(
        nn.Linear(FEATURES, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES)
    )


def make_data() -> TensorDataset:
    """Return random inputs with the classes that a fixed random net gives them; Accelerate shares them out."""
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(2 * EPOCH_STEPS * BATCH, FEATURES, generator=generator)
    teacher = torch.randn(FEATURES, CLASSES, generator=generator)
    return TensorDataset(inputs, (inputs @ teacher).argmax(1))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--epochs", type=int, default=4, help=f"of {EPOCH_STEPS} steps each")
    parser.add_argument(
        "--checkpoint", type=Path, help="save into this folder at the end; go on from it if it is there"
    )
    parser.add_argument("--records", type=Path, help="a folder for TensorBoard's files and for oktopk's records")
    return parser.parse_args()


if __name__ == "__main__":
    main()

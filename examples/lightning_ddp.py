"""Ok-Topk under PyTorch Lightning: two CPU processes train a small net and print the traffic.

    python examples/lightning_ddp.py

Lightning starts the second process itself, by running this file again. It would register a `ddp_comm_hook` on CUDA
only, and drop it without a word on a CPU; the callback attaches on both, and keeps the residuals in the checkpoints.
"""

from __future__ import annotations

import argparse
import hashlib
import os
from pathlib import Path

import lightning
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector
from torch.utils.data import DataLoader, TensorDataset

import oktopk
from oktopk.integrations.lightning import OktopkCallback

EPOCH_STEPS, BATCH = 20, 32
FEATURES, HIDDEN, CLASSES = 64, 256, 10


class Classifier(lightning.LightningModule):
    """Nothing here knows of oktopk."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(FEATURES, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES)
        )
        self.losses: list[float] = []

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        inputs, labels = batch
        loss = nn.functional.cross_entropy(self.net(inputs), labels)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> tuple[list[torch.optim.Optimizer], list[torch.optim.lr_scheduler.LRScheduler]]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)]


def main() -> None:
    args = parse()
    torch.set_num_threads(1)  # two processes on one machine
    lightning.seed_everything(1, verbose=False)
    records = (
        [oktopk.JsonlSink(args.records / f"metrics-{os.environ.get('LOCAL_RANK', 0)}.jsonl")] if args.records else []
    )
    compress = OktopkCallback(oktopk.OkTopk(density=0.05), dense_steps=10, sinks=records)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=args.epochs,
        callbacks=[compress, Check()],
        logger=TensorBoardLogger(args.records) if args.records else False,
        log_every_n_steps=10,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Classifier()
    saved = args.checkpoint if args.checkpoint and args.checkpoint.exists() else None
    trainer.fit(model, DataLoader(make_data(), batch_size=BATCH), ckpt_path=saved)
    report(trainer.global_rank, model, compress.sparse)


class Check(lightning.Callback):
    """Asserts, while the model is still in DDP, that gradients go through oktopk; saves, if asked to."""

    def on_train_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:  # noqa: ARG002
        compress = next(callback for callback in trainer.callbacks if isinstance(callback, OktopkCallback))
        assert compress.sparse is not None
        assert compress.sparse.active
        if parse().checkpoint:
            trainer.save_checkpoint(parse().checkpoint)


def make_data() -> TensorDataset:
    """Return random inputs with the classes that a fixed random net gives them; Lightning shares them out."""
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(2 * EPOCH_STEPS * BATCH, FEATURES, generator=generator)
    teacher = torch.randn(FEATURES, CLASSES, generator=generator)
    return TensorDataset(inputs, (inputs @ teacher).argmax(1))


def report(rank: int, model: Classifier, sparse: oktopk.Attached | None) -> None:
    assert sparse is not None
    weights = parameters_to_vector(model.parameters()).detach().numpy().tobytes()
    print(f"rank {rank}: weights {hashlib.sha256(weights).hexdigest()[:16]}", flush=True)
    if rank == 0:
        print(f"loss {model.losses[0]:.3f} -> {model.losses[-1]:.3f}\n{sparse.summary()}", flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--epochs", type=int, default=4, help=f"of {EPOCH_STEPS} steps each")
    parser.add_argument("--checkpoint", type=Path, help="save into this file at the end; go on from it if it is there")
    parser.add_argument("--records", type=Path, help="a folder for TensorBoard's files and for oktopk's records")
    return parser.parse_args()


if __name__ == "__main__":
    main()

"""Ok-Topk under Hugging Face's Trainer: two CPU processes train a tiny language model and print the traffic.

    torchrun --nproc-per-node 2 examples/transformers_trainer.py

`TrainingArguments` has no setting for a communication hook, and a `TrainerCallback` gets the bare model, never the DDP
one. `attach` adds a callback that takes the DDP model from the trainer before the first step, and keeps the residuals
in the trainer's checkpoints. Nothing is downloaded: the text is a random walk that the model has to learn.
"""

from __future__ import annotations

import argparse
import hashlib
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import parameters_to_vector
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed
from transformers.integrations import TensorBoardCallback
from transformers.trainer_utils import get_last_checkpoint

import oktopk
from oktopk.integrations.transformers import attach

STEPS, BATCH, LENGTH, VOCABULARY = 80, 8, 32, 256


def main() -> None:
    args = parse()
    torch.set_num_threads(1)  # two processes on one machine
    set_seed(1)
    with tempfile.TemporaryDirectory() as scratch:
        trainer = make_trainer(args.checkpoint or Path(scratch), args.steps, args.checkpoint is not None, args.records)
        records = [oktopk.JsonlSink(args.records / f"metrics-{dist.get_rank()}.jsonl")] if args.records else []
        compress = attach(trainer, oktopk.OkTopk(density=0.05), dense_steps=10, sinks=records)
        last = get_last_checkpoint(args.checkpoint) if args.checkpoint and args.checkpoint.exists() else None
        trainer.train(resume_from_checkpoint=last)
    report(trainer, compress.sparse)
    dist.destroy_process_group()


def make_trainer(folder: Path, steps: int, save: bool, logs: Path | None) -> Trainer:
    """Nothing here knows of oktopk."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
    )
    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        ddp_find_unused_parameters=False,  # the trainer's default is True: a collective more a step
        max_steps=steps,
        per_device_train_batch_size=BATCH,
        learning_rate=3e-3,
        lr_scheduler_type="constant",
        logging_steps=10,
        save_strategy="steps" if save else "no",
        save_steps=steps,
        report_to="none",
        disable_tqdm=True,
    )
    callbacks = None
    if logs:
        from torch.utils.tensorboard import SummaryWriter  # with --records alone: pip install tensorboard

        callbacks = [TensorBoardCallback(SummaryWriter(logs))]
    return Trainer(model=LlamaForCausalLM(config), args=arguments, train_dataset=Walks(), callbacks=callbacks)


class Walks(Dataset[dict[str, Tensor]]):
    """Sequences in which each token says which one comes next."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(2)
        successor = torch.randperm(VOCABULARY, generator=generator)
        tokens = [torch.randint(VOCABULARY, (512,), generator=generator)]
        for _ in range(LENGTH - 1):
            tokens.append(successor[tokens[-1]])
        self.tokens = torch.stack(tokens, 1)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def report(trainer: Trainer, sparse: oktopk.Attached | None) -> None:
    assert sparse is not None
    assert sparse.active
    weights = parameters_to_vector(trainer.model.parameters()).detach().numpy().tobytes()
    print(f"rank {dist.get_rank()}: weights {hashlib.sha256(weights).hexdigest()[:16]}", flush=True)
    if trainer.is_world_process_zero():
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        print(f"loss {float(losses[0]):.3f} -> {float(losses[-1]):.3f}\n{sparse.summary()}", flush=True)
    sparse.detach()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument(
        "--checkpoint", type=Path, help="save into this folder at the end; go on from it if it is there"
    )
    parser.add_argument("--records", type=Path, help="a folder for TensorBoard's files and for oktopk's records")
    return parser.parse_args()


if __name__ == "__main__":
    main()

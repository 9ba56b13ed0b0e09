"""How much does a tiny language model lose by local steps, at equal samples?

    python -m benchmarks.local_learning --steps 240 --every 8 --every 30

Four workers, as threads, train a GPT of 0.1 M parameters on the characters of this project's own pages with AdamW. DDP
is one net that gets all workers' samples in each step. Validation is on the last tenth of the text. Last line: JSON.
"""

from __future__ import annotations

import argparse
import copy
import io
import json
import sys
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

from oktopk import Dense, LocalSteps, OkTopk, run_local

PAGES = sorted((Path(__file__).parents[1] / "docs").glob("*.md"))
WORKERS, BATCH, LENGTH, WIDTH, LAYERS, HEADS = 4, 8, 64, 64, 2, 4
METHODS: dict[str, dict[str, Any]] = {
    "dense, nesterov (DiLoCo)": {"algorithm": Dense(), "outer": "nesterov"},
    "dense, sgd": {"algorithm": Dense()},
    "3 %, sgd": {"algorithm": OkTopk()},
    "3 %, sgd, decay 0.95 (as SparseLoCo)": {"algorithm": OkTopk(), "feedback_decay": 0.95},
    "3 %, nesterov": {"algorithm": OkTopk(), "outer": "nesterov"},
    "1 %, sgd": {"algorithm": OkTopk(density=0.01)},
}


class Block(nn.Module):
    """Attention and an MLP, each after a norm and beside a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norms[0](x)).view(*x.shape[:2], 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.mlp(self.norms[1](x))


class Gpt(nn.Module):
    """A language model of characters."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.tokens(x) + self.places.weight)))


def load_text() -> tuple[Tensor, Tensor, int]:
    """Return the characters to train on and to validate with, as numbers, and how many different ones there are."""
    text = "".join(page.read_text() for page in PAGES)
    known = {character: i for i, character in enumerate(sorted(set(text)))}
    numbers = torch.tensor([known[character] for character in text])
    cut = len(numbers) * 9 // 10
    return numbers[:cut], numbers[cut:], len(known)


def batch_of(text: Tensor, worker: int, step: int, size: int = BATCH) -> Tensor:
    starts = torch.randint(len(text) - LENGTH, (size,), generator=torch.Generator().manual_seed(9973 * step + worker))
    return text[starts[:, None] + torch.arange(LENGTH + 1)]


def loss_of(net: nn.Module, batch: Tensor) -> Tensor:
    return F.cross_entropy(net(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def train(net: nn.Module, text: Tensor, workers: list[int], steps: int, lr: float, local: dict[str, Any] | None) -> Any:
    """Train on the samples of these workers; return the handle of its local steps, if it makes any."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=lr)
    with redirect_stderr(io.StringIO()):
        handle = None if local is None else LocalSteps(net, optimizer, **local)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(net, torch.cat([batch_of(text, worker, step) for worker in workers])).backward()
        (optimizer if handle is None else handle).step()
    return handle


def measure(start: nn.Module, data: tuple[Tensor, Tensor], steps: int, lr: float, local: dict[str, Any] | None) -> Any:
    """Return the loss of a run on the validation text, and the bytes that a worker received in a step."""
    text, rest = data
    received = 0
    if local is None:
        net = copy.deepcopy(start)
        train(net, text, list(range(WORKERS)), steps, lr, None)
        received = 2 * 4 * sum(each.numel() for each in net.parameters()) * (WORKERS - 1) // WORKERS * steps
    else:

        def work(comm: Any) -> tuple[nn.Module, int]:
            net = copy.deepcopy(start)
            summary = train(net, text, [comm.rank], steps, lr, {**local, "group": comm}).summary()
            return net, summary.dense.received_bytes + summary.sparse.received_bytes

        net, received = run_local(WORKERS, work)[0]
    with torch.no_grad():
        loss = torch.stack([loss_of(net, batch_of(rest, 0, i, 64)) for i in range(8)]).mean()
    return {"loss": float(loss), "bytes_per_step": received / steps}


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--every", type=int, action="append")
    parser.add_argument("--lr", type=float, default=2e-3)
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    text, rest, vocabulary = load_text()
    torch.manual_seed(0)
    start = Gpt(vocabulary)
    runs = {"DDP": None} | {f"H = {every}: {name}": {**settings, "every": every}
        for every in args.every or [8, 30] for name, settings in METHODS.items()}  # fmt: skip
    rows: dict[str, Any] = {}
    table = Table("method", "validation loss", "of DDP's", "kB a step")
    for name, local in runs.items():
        rows[name] = measure(start, (text, rest), args.steps, args.lr, local)
        print(f"{name}: {rows[name]['loss']:.3f}", file=sys.stderr, flush=True)
    for name, row in rows.items():
        over = row["loss"] / rows["DDP"]["loss"]
        table.add_row(name, f"{row['loss']:.3f}", f"{over:.3f}", f"{row['bytes_per_step'] / 1e3:.2f}")
    Console(width=100).print(table)
    result = {"steps": args.steps, "lr": args.lr, "numel": sum(p.numel() for p in start.parameters()), "rows": rows}
    print(json.dumps(result))
    return result


if __name__ == "__main__":
    main()

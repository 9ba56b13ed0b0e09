"""Text, continued byte by byte by a decoder-only transformer: the recipe `gpt`, for Python sources.

The net is the trainer's, with a head of its own: 25.4 M parameters at the default size. On a GPU the passes are in
bfloat16 where autocast makes them so; weights, gradients and the optimizer are float32.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from oktopk.errors import SettingError, within
from oktopk.train.models.gpt import Gpt
from research.learning.workload import AdamW, FolderRecipe

METRIC = "nats"
WINDOW = 50
MAX_BYTES = 24_000_000
"""Of a corpus: more files than fit are left out."""

TRAIN_PART = 0.97
EVALUATED_BYTES = 1 << 19
EVALUATED_AT_ONCE = 1 << 15
ORDER_SEED = 0


@dataclass(frozen=True)
class Text:
    """The bytes of all files, one after the other; the first `num_train` are trained on, the others validated with."""

    content: Tensor
    num_train: int

    def save(self, path: Path) -> None:
        """Write one file, a quarter as large as the text: deflated."""
        packed = torch.frombuffer(bytearray(zlib.compress(self.content.numpy().tobytes(), 9)), dtype=torch.uint8)
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"text": packed, "train": self.num_train}, path)

    @staticmethod
    def load(path: Path) -> Text:
        """Read what `save` wrote; the same bytes."""
        saved = torch.load(path, weights_only=True)
        if not {"text", "train"} <= saved.keys():
            raise SettingError(f"{path} is no packed file of text; `--pack` writes one from --data-dir")
        raw = zlib.decompressobj().decompress(saved["text"].numpy().tobytes(), MAX_BYTES)
        return Text(torch.frombuffer(bytearray(raw), dtype=torch.uint8), saved["train"])

    @staticmethod
    def read(folder: Path) -> Text:
        """Read all *.py below a folder in an order that is always the same, as many as fit; files are not parted."""
        paths = sorted(folder.rglob("*.py"), key=lambda path: path.relative_to(folder).as_posix())
        order = np.random.default_rng(ORDER_SEED).permutation(len(paths))
        files = _fitting([paths[i] for i in order])
        ends = np.cumsum([len(each) for each in files])
        train = int(np.searchsorted(ends, TRAIN_PART * ends[-1])) if len(files) > 1 else 0
        if not train:
            raise SettingError(f"{folder} has {len(files)} files *.py that hold something: wanted two or more")
        train = min(train, len(files) - 1)
        return Text(torch.frombuffer(bytearray(b"".join(files)), dtype=torch.uint8), int(ends[train - 1]))


def _fitting(paths: Sequence[Path]) -> list[bytes]:
    """Return what the files hold, but for empty ones and those for which there is no room."""
    files, room = [], MAX_BYTES
    for path in paths:
        if path.is_file() and 0 < path.stat().st_size <= room:
            files.append(path.read_bytes())
            room -= len(files[-1])
    return files


@dataclass(frozen=True, kw_only=True)
class TextRecipe(FolderRecipe):
    """What `--set` can change.

    layers, width, heads    of the net
    context                 bytes that it sees
    batch_size              of so many texts of `context` bytes, of a worker in a step
    lr                      after `warmup` steps, over which it rises linearly; it falls linearly, to nothing after the
                            last of `steps`
    clip                    largest norm of the gradient; 0: no limit
    weight_decay            decoupled, of all matrices
    """

    layers: int = 8
    width: int = 512
    heads: int = 8
    context: int = 512
    batch_size: int = 16
    lr: float = 2e-3
    warmup: int = 20
    momentum: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.1
    clip: float = 1.0
    steps: int = 500

    source: ClassVar[type] = Text
    data: ClassVar[str] = "python"
    metric: ClassVar[str] = METRIC
    dense_steps: ClassVar[int] = 100

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "context", "batch_size", "steps", "workers"):
            within(name, getattr(self, name), 1)
        within("lr", self.lr, 0, open_low=True)
        if self.width % self.heads:
            raise SettingError(f"width {self.width} cannot be shared by {self.heads} heads: wanted a multiple")

    def open(self, corpus: Path | None, workers: int, device: torch.device) -> Continuation:  # noqa: ARG002
        """Return the workload; the text is read once in a process."""
        return Continuation(self, self.content(corpus), device)


class Continuation:
    """Text on the device, and the net that continues it."""

    metric = METRIC
    window = WINDOW

    def __init__(self, recipe: TextRecipe, text: Text, device: torch.device) -> None:
        self.recipe, self.device = recipe, device
        self.optimizer = AdamW(recipe.momentum, recipe.beta2, recipe.weight_decay, recipe.clip)
        content = text.content.to(device)
        self._train, self._val = content[: text.num_train], content[text.num_train :]
        self._span = torch.arange(recipe.context + 1, device=device)
        if min(len(self._train), len(self._val)) <= recipe.context:
            sizes = f"{len(self._train):,} bytes to train on and {len(self._val):,} to validate with"
            raise SettingError(f"{sizes} are too few for a context of {recipe.context}")

    def make_net(self) -> nn.Module:
        """Return the net."""
        torch.manual_seed(self.recipe.seed)
        size = (self.recipe.layers, self.recipe.width, self.recipe.heads, self.recipe.context)
        return Gpt(*size, tied=False).to(self.device)  # as all results in docs/learning.md were measured

    def lr_at(self, step: int) -> float:
        """Return the learning rate of a step: it rises for a while, and falls linearly to nothing."""
        rise = min(1.0, (step + 1) / self.recipe.warmup) if self.recipe.warmup else 1.0
        return self.recipe.lr * rise * max(0.0, 1 - step / self.recipe.steps)

    def starts(self, step: int, worker: int) -> Tensor:
        """Return where a worker's texts of a step begin: anywhere."""
        chance = np.random.default_rng((self.recipe.seed, step, worker))
        return torch.from_numpy(chance.integers(len(self._train) - self.recipe.context, size=self.recipe.batch_size))

    def loss(self, net: nn.Module, step: int, worker: int) -> Tensor:
        """Return the cross entropy of a batch, in nats a byte."""
        return self._loss(net, self._train, self.starts(step, worker))

    def evaluate(self, net: nn.Module) -> dict[str, float]:
        """Return the cross entropy on text that is not trained on, in nats a byte."""
        context = self.recipe.context
        starts = torch.arange(0, min(len(self._val) - context, EVALUATED_BYTES), context)
        parts = starts.split(max(1, EVALUATED_AT_ONCE // context))
        sums = [self._loss(net, self._val, part) * len(part) for part in parts]
        return {"nats": float(torch.stack(sums).sum()) / len(starts)}

    def _loss(self, net: nn.Module, content: Tensor, starts: Tensor) -> Tensor:
        texts = content[starts.to(self.device)[:, None] + self._span].long()
        # Uncached: workers share the weights, and one's copy of them is made on a stream that another does not wait for
        with torch.autocast("cuda", torch.bfloat16, enabled=self.device.type == "cuda", cache_enabled=False):
            scores = net(texts[:, :-1])
        return cross_entropy(scores.float().flatten(0, 1), texts[:, 1:].flatten())

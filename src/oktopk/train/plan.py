"""`Plan`: steps and bytes of a run, known before its first step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

import torch
from rich.table import Table
from torch import nn

from oktopk.algorithms import Algorithm, OkTopk
from oktopk.codec import WORD_BYTES
from oktopk.cost import predict
from oktopk.cuda.step import supports_device_step
from oktopk.ddp.attach import small_or_vector
from oktopk.selection import num_selected
from oktopk.telemetry.format import format_bytes
from oktopk.train.config import Config
from oktopk.train.models import make_model


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The plan; bytes are those that one worker sends in a step.

    sparse_numel    elements of the parameters that sparse steps send sparsely; the others always travel dense
    """

    config: Config
    workers: int
    utterances: int
    val_utterances: int
    numel: int
    sparse_numel: int
    device: str
    data_dir: Path

    @property
    def steps_per_epoch(self) -> int:
        """Steps of an epoch; the utterances after the last whole step are not used."""
        return self.utterances // (self.workers * self.config.batch_size) // self.config.nsteps_update

    @property
    def steps(self) -> int:
        """Steps in all."""
        steps = self.config.max_epochs * self.steps_per_epoch
        return min(steps, self.config.max_steps) if self.config.max_steps else steps

    @property
    def sparse_steps(self) -> int:
        """Steps that will be sparse."""
        return 0 if self.config.is_dense else max(0, self.steps - self.config.dense_steps)

    @property
    def dense_bytes(self) -> int:
        """Bytes that a worker sends in a dense step."""
        return 2 * WORD_BYTES * self.numel * (self.workers - 1) // self.workers

    def _algorithm(self) -> Algorithm:
        """Return the algorithm as it sends on this device: a step on the GPU sends float32."""
        algorithm = self.config.algorithm()
        if not isinstance(algorithm, OkTopk):
            return algorithm
        stays = supports_device_step(algorithm, self.sparse_numel, torch.float32, torch.device(self.device))
        return replace(algorithm, wire="fp32") if stays else algorithm

    @property
    def sparse_bytes(self) -> int:
        """Bytes that a worker typically sends in a sparse step, headers and agreements aside."""
        dense_tail = 2 * WORD_BYTES * (self.numel - self.sparse_numel) * (self.workers - 1) // self.workers
        return dense_tail + round(WORD_BYTES * predict(self._algorithm(), self.sparse_numel, self.workers).typical)

    @property
    def warning(self) -> str | None:
        """A warning if no step will be sparse."""
        if self.config.is_dense or self.sparse_steps:
            return None
        return (
            f"no step will be sparse: the run has {self.steps} steps, and the first {self.config.dense_steps} are "
            f"dense; --dense-steps {self.steps // 4} or more epochs would let {self.config.compressor} run"
        )

    def table(self) -> Table:
        """Return the plan as a table for the terminal."""
        config, table = self.config, Table(title="the plan", show_header=False, title_justify="left")
        table.add_column(style="bold")
        table.add_column()
        dense = self.steps - self.sparse_steps
        rows = {
            "net": f"{config.dnn}, {self.numel:,} parameters, {self.sparse_numel:,} of them sent sparsely",
            "data": f"{self.utterances:,} utterances to train on, {self.val_utterances:,} to validate with, "
            f"in {self.data_dir}",
            "workers": f"{self.workers} on {self.device}, {config.batch_size} utterances each, "
            f"{config.nsteps_update} forward pass{'es' * (config.nsteps_update > 1)} a step",
            "steps": f"{self.steps:,} in {config.max_epochs} epochs of {self.steps_per_epoch}: "
            f"{dense:,} dense, {self.sparse_steps:,} sparse",
            "exchange": self._exchange(),
            "learning": f"lr {config.lr:g}, divided by {config.lr_anneal:g} an epoch; "
            f"momentum {self._momentum()}, clip {config.clip:g} ({config.clip_place})",
        }
        for name, text in rows.items():
            table.add_row(name, text)
        return table

    def _momentum(self) -> str:
        dense, sparse = (self.config.rates_at(0, phase) for phase in ("dense", "sparse"))
        if self.config.is_dense or sparse == dense:
            return f"{self.config.momentum:g}"
        return f"{dense.momentum:g}, in sparse steps {sparse.momentum:g} at {sparse.lr / dense.lr:g} x lr"

    def _exchange(self) -> str:
        dense = f"a dense step sends {format_bytes(self.dense_bytes)} a worker"
        if self.config.is_dense:
            return dense
        wanted = num_selected(self.sparse_numel, self.config.density)
        return (
            f"{self.config.compressor}, density {self.config.density:g} ({wanted:,} of {self.sparse_numel:,}): "
            f"{dense}, a sparse one about {format_bytes(self.sparse_bytes)}"
        )


def make_plan(config: Config, workers: int, utterances: int, val_utterances: int, data_dir: Path, device: str) -> Plan:
    """Return the plan; the net is made without memory for its weights."""
    with torch.device("meta"):
        model = make_model(config.dnn)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    dense = [sizes[name] for name in travel_dense(model, config.density)]
    return Plan(
        config=config,
        workers=workers,
        utterances=utterances,
        val_utterances=val_utterances,
        numel=sum(sizes.values()),
        sparse_numel=sum(sizes.values()) - sum(dense),
        device=device,
        data_dir=data_dir,
    )


def travel_dense(model: nn.Module, density: float) -> list[str]:
    """Return the parameters that sparse steps send whole: the smallest tensors, such as biases.

    Together they are at most a tenth of the elements sent, so that a small net keeps about its density, too.
    """
    small = {name: p.numel() for name, p in model.named_parameters() if small_or_vector(name, p)}
    capacity = density * sum(parameter.numel() for parameter in model.parameters()) / 10
    names = sorted(small, key=lambda name: small[name])
    totals = accumulate(small[name] for name in names)
    return [name for name, total in zip(names, totals, strict=True) if total <= capacity]

"""`Plan`: steps and bytes of a run, known before its first step."""

from dataclasses import dataclass
from pathlib import Path

import torch
from rich.table import Table

from oktopk.algorithms import OkTopk
from oktopk.cost import predict
from oktopk.cuda.step import as_on_device, supports_device_step
from oktopk.ddp.exclude import smallest
from oktopk.selection import num_selected
from oktopk.telemetry.format import count, format_bytes
from oktopk.train.config import Config
from oktopk.train.models import make_model
from oktopk.words import WORD_BYTES


@dataclass(frozen=True)
class Plan:
    """The plan; bytes are those that one worker sends in a step."""

    config: Config
    workers: int
    utterances: int
    val_utterances: int
    data_dir: Path
    device: str
    numel: int
    sparse_numel: int  # of the parameters that sparse steps send sparsely; the others always travel dense

    @property
    def steps_per_epoch(self) -> int:
        """Steps of an epoch; the utterances after the last whole step are not used."""
        return self.utterances // (self.workers * self.config.batch_size) // self.config.nsteps_update

    @property
    def steps_of_epochs(self) -> int:
        """Steps of all epochs, whatever `max_steps` is."""
        return self.config.max_epochs * self.steps_per_epoch

    @property
    def is_cut_short(self) -> bool:
        """Whether `max_steps` ends the run before its epochs are over."""
        return self.steps < self.steps_of_epochs

    @property
    def steps(self) -> int:
        """Steps in all."""
        return min(self.steps_of_epochs, self.config.max_steps or self.steps_of_epochs)

    @property
    def sparse_steps(self) -> int:
        """Steps that will be sparse."""
        if self.config.is_dense:
            return 0
        return self.exchanges if self.config.local_steps else max(0, self.steps - self.config.dense_steps)

    @property
    def exchanges(self) -> int:
        """Steps that end with an exchange."""
        return self.steps // (self.config.local_steps or 1)

    @property
    def dense_bytes(self) -> int:
        """Bytes that a worker sends in a dense step."""
        return 2 * WORD_BYTES * self.numel * (self.workers - 1) // self.workers

    @property
    def sparse_bytes(self) -> int:
        """Bytes that a worker typically sends in a sparse step, headers and agreements aside."""
        algorithm, numel = self.config.algorithm(), self.sparse_numel
        on_device = supports_device_step(algorithm, numel, torch.float32, torch.device(self.device))
        if on_device and isinstance(algorithm, OkTopk):
            algorithm = as_on_device(algorithm)
        dense_tail = 2 * WORD_BYTES * (self.numel - numel) * (self.workers - 1) // self.workers
        return dense_tail + round(WORD_BYTES * predict(algorithm, numel, self.workers).typical)

    @property
    def warning(self) -> str | None:
        """A warning if nothing will be exchanged, or no step will be sparse."""
        if self.workers == 1:
            return "one worker has nobody to exchange gradients with: --nproc 2 trains on two"
        if not self.exchanges:
            return (
                f"no exchange: the run has {count(self.steps, 'step')}, and the first would be after "
                f"{self.config.local_steps} of them: take a smaller --local-steps"
            )
        if self.config.is_dense or self.sparse_steps:
            return None
        return (
            f"no step will be sparse: the run has {count(self.steps, 'step')}, and the first "
            f"{self.config.dense_steps} are dense; --dense-steps {self.steps // 4} "
            f"{'or more epochs ' * (not self.is_cut_short)}would let {self.config.compressor} run"
        )

    def table(self) -> Table:
        """Return the plan as a table for the terminal."""
        config = self.config
        dense, sparse = (config.rates_at(0, phase, workers=self.workers) for phase in ("dense", "sparse"))
        momentum = f"{dense.momentum:g}"
        if not config.is_dense and not config.local_steps and sparse != dense:
            momentum += f", in sparse steps {sparse.momentum:g} at {sparse.lr / dense.lr:.3g} x lr"
        rows = {
            "net": f"{config.dnn}, {self.numel:,} parameters"
            + ("" if config.is_dense else f", {self.sparse_numel:,} of them sent sparsely"),
            "data": f"{self.utterances:,} {config.unit}s to train on, {self.val_utterances:,} to validate with, "
            f"in {self.data_dir}",
            "workers": f"{self.workers} on {self.device}, {config.batch_size} {config.unit}s each, "
            f"{config.nsteps_update} forward pass{'es' * (config.nsteps_update > 1)} a step",
            "steps": f"{self.steps:,}{f' of the {self.steps_of_epochs:,}' * self.is_cut_short} in "
            f"{count(config.max_epochs, 'epoch')} of {self.steps_per_epoch:,}: " + self._phases,
            "exchange": f"a dense step sends {format_bytes(self.dense_bytes)} a worker",
            "learning": f"{config.optimizer}, lr {config.lr:g}, "
            + (f"divided by {config.lr_anneal:g} an epoch; " if config.optimizer == "sgd" else "falling to 0; ")
            + f"momentum {momentum}, clip {config.clip:g} ({config.clip_place})",
        }
        if not config.is_dense:
            wanted = num_selected(self.sparse_numel, config.density)
            chosen = f"{config.compressor}, density {config.density:g} ({wanted:,} of {self.sparse_numel:,})"
            rows["exchange"] = f"{chosen}: {rows['exchange']}, a sparse one about {format_bytes(self.sparse_bytes)}"
        return table_of("the plan", rows)

    @property
    def _phases(self) -> str:
        """Return which steps exchange what, as a part of a sentence."""
        if self.config.local_steps:
            return f"{count(self.exchanges, 'exchange')}, one after each {count(self.config.local_steps, 'step')}"
        if self.config.is_dense:
            return "all dense"
        return f"{self.steps - self.sparse_steps:,} dense, {self.sparse_steps:,} sparse"


def table_of(title: str, rows: dict[str, str]) -> Table:
    """Return a table for the terminal, of names and texts."""
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column(style="bold")
    for name, text in rows.items():
        table.add_row(name, text)
    return table


def make_plan(config: Config, workers: int, utterances: int, val_utterances: int, data_dir: Path, device: str) -> Plan:
    """Return the plan; the net is made without memory for its weights."""
    with torch.device("meta"):
        model = make_model(config.dnn)
    parameters = dict(model.named_parameters())
    numel = sum(parameter.numel() for parameter in parameters.values())
    dense_numel = sum(parameters[name].numel() for name in smallest(parameters, config.density))
    return Plan(config, workers, utterances, val_utterances, data_dir, device, numel, numel - dense_numel)

"""`Board`: a run's scalars in TensorBoard, under the names that the report uses, with a page laid out for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from oktopk.report.reader import Record
from oktopk.report.run import SPLIT
from oktopk.report.summary import quotient
from oktopk.telemetry import PHASES
from oktopk.train.rundir import writing

STEP_TAGS = {
    "loss/each_step": "loss",
    "learning/lr": "lr",
    "learning/momentum": "momentum",
    "norm/gradient_delivered": "grad_norm",
    "norm/residual": "residual_norm",
    "compression/sparsity": "sparsity",
    "compression/ratio": "compression_ratio",
    "compression/nnz": "nnz",
    "threshold/local": "threshold",
    "threshold/global": "global_threshold",
    "bytes/sent": "sent_bytes",
    "bytes/received": "received_bytes",
    "bytes/messages": "messages",
}
GROUPS = {"seconds_of_step": "split", "seconds_of_exchange": "seconds", "bytes_by_phase": "sent_by_phase"}
EPOCH_TAGS = {"loss/training": "train_loss", "loss/validation": "val_loss", "errors/WER": "wer", "errors/CER": "cer"}


def layout() -> dict[str, dict[str, list[Any]]]:
    """Return the charts of TensorBoard's Custom Scalars page, several scalars in each."""
    return {
        "Learning": {
            "loss": _lines("loss/each_step", "loss/training", "loss/validation"),
            "word and character errors": _lines("errors/WER", "errors/CER"),
            "residual against gradient": _lines("norm/gradient_delivered", "norm/residual"),
        },
        "Compression": {
            "sparsity": _lines("compression/sparsity"),
            "ratio": _lines("compression/ratio"),
            "selected of k": _lines("compression/selected_of_k"),
            "thresholds": _lines("threshold/local", "threshold/global"),
        },
        "Traffic": {
            "bytes a step": _lines("bytes/sent", "bytes/received"),
            "bytes by phase": _lines(*(f"bytes_by_phase/{name}" for name in PHASES)),
        },
        "Time": {
            "seconds of a step": _lines(*(f"seconds_of_step/{name}" for name in SPLIT)),
            "seconds of the exchange": _lines(*(f"seconds_of_exchange/{name}" for name in PHASES)),
        },
    }


def _lines(*tags: str) -> list[Any]:
    return ["Multiline", [f"^{tag}$" for tag in tags]]  # they are patterns


class Board:
    """Writes records as scalars."""

    def __init__(self, folder: Path, purge_step: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter  # here, since it takes a second to import

        self._folder = folder
        with writing(folder):
            self._writer: Any = SummaryWriter(str(folder), purge_step=purge_step)
            self._writer.add_custom_scalars(layout())

    def step(self, record: Record) -> None:
        """Write a step."""
        scalars = {tag: record.get(name) for tag, name in STEP_TAGS.items()}
        scalars["compression/selected_of_k"] = quotient(record.get("selected"), record.get("wanted"))
        for group, name in GROUPS.items():
            scalars |= {f"{group}/{part}": value for part, value in record.get(name, {}).items()}
        self._write(scalars, record["step"])

    def epoch(self, record: Record) -> None:
        """Write an epoch."""
        self._write({tag: record.get(name) for tag, name in EPOCH_TAGS.items()}, record["step"])

    def close(self) -> None:
        """Take no more."""
        with writing(self._folder):
            self._writer.close()

    def _write(self, scalars: dict[str, float | None], step: int) -> None:
        with writing(self._folder):
            for tag, value in scalars.items():
                if value is not None:
                    self._writer.add_scalar(tag, value, step)

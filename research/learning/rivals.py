"""Our exchange beside others, all on one net, one order of the data and the same dense steps, with the bytes of each.

    python -m research.learning.rivals CORPUS OUT --seeds 11,12,13                                   # on a GPU
    python -m research.learning.rivals CORPUS OUT --seeds 1,2,3 --net gpt-tiny --with "lr=4e-3 steps=240 dense=40"

CORPUS is a file that `--recipe gpt --pack` wrote. Each of `RIVALS` is trained with each seed, unless OUT/rivals.jsonl
has it. Then all that are there make a table, and a plot of the loss against steps and bytes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from oktopk.train.models.gpt import SIZES
from research.learning import sweep

RIVALS = {
    "dense": "dense",
    "bf16": "bf16",
    "`OkTopk()` with `optimizer=`: updates, 3 %": "updates b1=0.5 lrs=2",
    "`OkTopk()` on gradients, 3 %": "gradients b1=0.5",
    "PowerSGD, rank 2": "powersgd rank=2 b1=0.5",
    "PowerSGD, rank 4": "powersgd rank=4 b1=0.5",
    "PowerSGD, rank 8": "powersgd rank=8 b1=0.5",
    "PowerSGD, rank 16": "powersgd rank=16 b1=0.5",
    "DGC in int8": "dgc density=0.0175 bits=8 b1=0",
    "EF21-SGDM, 3 %": "ef21 b1=0",
    "DeMo in int8": "demo decay=0.999 density=0.0175 bits=8",
    "sign of all elements, error feedback": "ternary part=1 b1=0.7",
    "DiLoCo, H = 57": "updates inner=whole every=57 outer=0.9",
    "DiLoCo in int8, H = 14": "updates inner=whole every=14 bits=8 outer=0.9",
    "SparseLoCo, H = 4, 17 % in 2 bits": "updates inner=gather every=4 density=0.17 bits=2 decay=0.95",
    "SparseLoCo, H = 15, 3 % in 2 bits": "updates inner=gather every=15 bits=2 decay=0.95",
}
"""Schemes of `sweep.Line` by name. Most send about 1/57 of dense's bytes; those of PowerSGD depend on the net.

First betas are those that were best for the exchange on the GPT of docs/learning.md, or the papers'.
"""


def main(argv: Sequence[str] | None = None) -> None:
    """Train what is missing, and print the table."""
    args = _parse(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    runs = args.out / "rivals.jsonl"
    lines = [f"seed={seed} {args.more} scheme={each}" for seed in args.seeds for each in RIVALS.values()]
    sweep.train_all(args.corpus, [" ".join(line.split()) for line in lines], runs, args.limit_s, args.net)
    made = [json.loads(line) for line in runs.read_text(encoding="utf-8").splitlines()]
    print(table_of(made))
    if not args.no_plot:
        draw(made, args.out / "rivals.png")


def results_of(runs: Sequence[Mapping[str, Any]]) -> dict[str, dict[int, Mapping[str, Any]]]:
    """Return the trainings of each of `RIVALS` by seed."""
    names = {scheme: name for name, scheme in RIVALS.items()}
    found: dict[str, dict[int, Mapping[str, Any]]] = {name: {} for name in RIVALS}
    for run in runs:
        scheme = run["line"].partition("scheme=")[2]
        if scheme in names:
            found[names[scheme]][sweep.Line.parse(run["line"]).seed] = run
    return {name: dict(sorted(by_seed.items())) for name, by_seed in found.items() if by_seed}


def table_of(runs: Sequence[Mapping[str, Any]]) -> str:
    """Return the losses after the last step, as Markdown."""
    lines = ["| exchange | bytes, of dense | loss at the end | each seed |", "|---|---|---|---|"]
    for name, by_seed in results_of(runs).items():
        losses = [[*run["nats"].values()][-1] for run in by_seed.values()]
        part = 1 / next(iter(by_seed.values()))["bytes"]
        each = ", ".join(f"{seed}: {loss:.3f}" for seed, loss in zip(by_seed, losses, strict=True))
        lines.append(f"| {name} | {'1' if part == 1 else f'1/{part:.3g}'} | {fmean(losses):.3f} | {each} |")
    return "\n".join(lines)


def draw(runs: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw the mean loss over seeds against steps, and against bytes in units of a dense step's."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    by_steps, by_bytes = figure.subplots(1, 2, sharey=True)
    for i, (name, by_seed) in enumerate(results_of(runs).items()):
        run = next(iter(by_seed.values()))
        dense = sweep.Line.parse(run["line"]).dense
        steps = [int(step) for step in run["nats"]]
        losses = [fmean(each["nats"][f"{step}"] for each in by_seed.values()) for step in steps]
        style = {
            "color": "black" if name == "dense" else f"C{i % 10}",
            "ls": "-:"[i // 10],
            "label": name.replace("`", ""),
        }
        by_steps.plot(steps, losses, **style)
        by_bytes.plot([min(step, dense) + max(0, step - dense) * run["bytes"] for step in steps], losses, **style)
    by_steps.set(xlabel="steps", ylabel="validation loss, nats a byte")
    by_bytes.set(xlabel="bytes sent, over those of a dense step", xscale="log")
    figure.legend(*by_steps.get_legend_handles_labels(), loc="outside right upper", fontsize="small")
    for panel in (by_steps, by_bytes):
        panel.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m research.learning.rivals")
    parser.add_argument("corpus", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=lambda text: [int(each) for each in text.split(",")], default=[1])
    parser.add_argument("--with", dest="more", default="", help='fields of every line, such as "opt=muon lr=3e-3"')
    parser.add_argument("--net", choices=sorted(SIZES), help="a smaller net, for a CPU")
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="leave out what would begin later")
    parser.add_argument("--no-plot", action="store_true")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()

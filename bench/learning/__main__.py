"""Does sparse training learn as fast as dense?

    python -m bench.learning --recipe an4 --data-dir data/an4 --pack an4.pt
    python -m bench.learning --recipe an4 --corpus an4.pt --device cuda --jobs 8 --settings dense,ef21m --out DIR
    python -m bench.learning --report --out DIR

Trains with each setting on the same order of the data and from the same weights, and says what each took to reach given
training losses and WERs. Workers are virtual: their gradients are computed one after the other, the exchanges are the
library's, on threads. Every training is one line of DIR/runs.jsonl as soon as it ends; what is there already is not
made again, unless time was up.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bench.learning import plots, tables
from bench.learning.experiment import OUT_OF_TIME, Task, run_all
from bench.learning.settings import CATALOGUE, Setting, read_settings
from bench.learning.speech import Recordings
from oktopk.bench.provenance import provenance
from oktopk.train.config import Config, make_config, parse_pairs
from oktopk.train.recipes import load_recipe

RUNS = "runs.jsonl"
RECIPES: dict[str, tuple[str, dict[str, Any]]] = {
    "an4": ("lstman4", {"dataset": "an4", "batch_size": 16}),
    "an4-small": ("an4-small", {}),
}
"""The trainer's recipes, and what is other here."""


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Train, print the table and the JSON line, and return what it holds."""
    args = _parse(argv)
    if args.list:
        return _list()
    config = _config(args)
    if args.pack:
        Recordings.of(args.corpus, config).save(args.pack)
        print(f"{args.pack}: {args.pack.stat().st_size / 1e6:.1f} MB")
        return {}
    args.out.mkdir(parents=True, exist_ok=True)
    if not args.report:
        _train(args, config)
    return {} if args.no_report else _report(args)


def _train(args: argparse.Namespace, config: Config) -> None:
    """Make every training that is not there yet, and write each down as it ends."""
    runs = args.out / RUNS
    made = {(run["setting"]["name"], run["seed"]) for run in _read(runs) if not run["ended"].startswith(OUT_OF_TIME)}
    told = {"data": args.corpus.name if args.corpus else config.dataset, "device": _device(args.device), **provenance()}
    with tempfile.TemporaryDirectory() as folder, runs.open("a", encoding="utf-8") as file:
        tasks = [
            _task(args, replace(config, seed=seed), setting, Path(folder))
            for seed in args.seeds
            for setting in read_settings(args.settings)
            if (setting.name, seed) not in made
        ]
        for result in run_all(tasks, args.jobs, lambda line: print(line, file=sys.stderr, flush=True)):
            file.write(json.dumps(result | told, allow_nan=False) + "\n")
            file.flush()


def _task(args: argparse.Namespace, config: Config, setting: Setting, folder: Path) -> Task:
    if args.dense_steps is not None and setting.dense_steps == Setting.dense_steps:
        setting = replace(setting, dense_steps=args.dense_steps)
    return Task(
        config=config,
        setting=setting,
        steps=args.steps,
        workers=args.workers,
        device=args.device,
        evaluate_every=args.evaluate_every,
        corpus=args.corpus,
        scratch=args.scratch or folder,
        until=time.time() + args.limit_s if args.limit_s else 0.0,
        threads=args.threads,
    )


def _report(args: argparse.Namespace) -> dict[str, Any]:
    """Print the table, draw the plots and write the summary of everything in the folder."""
    from rich.console import Console

    runs = _read(args.out / RUNS)
    if not runs:
        raise SystemExit(f"{args.out / RUNS} has no training")
    compute_s = args.compute_s or min(run["compute_s"] for run in runs if run["compute_s"])
    rows = tables.summarise(runs, args.losses, args.wers, compute_s)
    Console(width=180).print(tables.table_of(rows))
    if not args.no_plots:
        plots.draw(runs, compute_s, args.out)
    kept = ("workers", "steps_per_epoch", "data", "device", "versions", "hardware", "date")
    result = {"bench": "learning", "compute_s": compute_s, **{key: runs[0].get(key) for key in kept}, "rows": rows}
    line = json.dumps(result, allow_nan=False)
    (args.out / "summary.json").write_text(line + "\n", encoding="utf-8")
    print(line)
    return result


def _read(path: Path) -> list[dict[str, Any]]:
    """Return the trainings of a file; of two with the same setting and seed the later one."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return list({(run["setting"]["name"], run["seed"]): run for run in map(json.loads, lines)}.values())


def _device(name: str) -> str:
    return torch.cuda.get_device_name(name) if name.startswith("cuda") else name


def _list() -> dict[str, Any]:
    for name, spec in CATALOGUE.items():
        print(f"{name:20} {spec}")
    return dict(CATALOGUE)


def _config(args: argparse.Namespace) -> Config:
    name, ours = RECIPES[args.recipe]
    recipe = load_recipe(name)
    given = {"data_dir": str(args.data_dir)} if args.data_dir else {}
    given |= {"batch_size": args.batch} if args.batch else {}
    if args.corpus or not args.data_dir:  # with a packed corpus no folder is looked at
        ours = {key: value for key, value in ours.items() if key != "dataset"}
    config = make_config(recipe.settings | ours | given | parse_pairs(args.set) | {"recipe": name})
    args.workers = args.workers or (4 if recipe.nproc == 1 else recipe.nproc)
    return config


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.learning", description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--recipe", choices=sorted(RECIPES), default="an4-small")
    add("--settings", default="dense,scaled-1", help="specs NAME[+field=value...], by comma; or a file, one a line")
    add("--list", action="store_true", help="show the catalogue of settings")
    add("--seeds", type=_integers, default=[1], help="1,2: each setting with each")
    add("--steps", type=int, default=560)
    add("--dense-steps", type=int, help="before the switch, where a setting does not say otherwise")
    add("--workers", type=int, help="default: 4, or the recipe's")
    add("--batch", type=int, help="utterances of a worker in a step; default: the recipe's, 16 for an4")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="of the trainer's settings; repeatable")
    add("--device", default="cpu")
    add("--jobs", type=int, default=1, help="trainings beside each other, each in its own process")
    add("--threads", type=int, default=1, help="of torch, in each")
    add("--limit-s", type=float, default=0.0, help="trainings that run then end with what they have")
    add("--evaluate-every", type=int, default=2, help="epochs")
    add("--corpus", type=Path, help="a packed corpus")
    add("--data-dir", type=Path, help="a folder with manifests")
    add("--pack", type=Path, help="write the corpus to this file, and nothing else")
    add("--scratch", type=Path, help="where the dense steps that settings share are kept; default: forgotten")
    add("--out", type=Path, default=Path("runs/learning"))
    add("--losses", type=_numbers, default=[10.0, 5.0])
    add("--wers", type=_numbers, default=[0.8, 0.7])
    add("--compute-s", type=float, default=0.0, help="of a worker's step, for simulated times; default: measured")
    add("--report", action="store_true", help="train nothing, report what is in the folder")
    add("--no-report", action="store_true", help="train only: neither rich nor matplotlib is wanted")
    add("--no-plots", action="store_true")
    return parser.parse_args(argv)


def _integers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def _numbers(text: str) -> list[float]:
    return [float(each) for each in text.split(",")]


if __name__ == "__main__":
    main()

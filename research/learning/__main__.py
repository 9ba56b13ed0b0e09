"""Does sparse training learn as fast as dense?

    python -m research.learning --recipe an4 --data-dir data/an4 --pack an4.pt
    python -m research.learning --recipe an4 --corpus an4.pt --device cuda --jobs 8 --settings dense,ef21m --out DIR
    python -m research.learning --recipe fashion --data-dir /usr/share/datasets/fashion-mnist --settings dense,scaled-1
    python -m research.learning --recipe gpt --corpus python.pt --device cuda --settings dense,library
    python -m research.learning --report --out DIR

Trains with each setting on the same order of the data and from the same weights, and says what each took to reach given
training losses and WERs, errors, or nats a byte. Workers are virtual: their gradients are computed one after the other,
the exchanges are the library's, on threads. Every training is one line of DIR/runs.jsonl as soon as it ends; what is
there already is not made again, unless time was up.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from oktopk.bench.machine import provenance
from oktopk.train.config import parse_pairs
from research.learning import plots, tables
from research.learning.classification import ImageRecipe
from research.learning.experiment import OUT_OF_TIME, Task, run_all
from research.learning.language import TextRecipe
from research.learning.settings import CATALOGUE, Setting, read_settings
from research.learning.workload import METRICS, Asked, Recipe

RUNS = "runs.jsonl"


def _speech(name: str, **ours: Any) -> Callable[[Asked], Recipe]:
    def make(asked: Asked) -> Recipe:
        from research.learning.recognition import recipe_of  # wants jiwer and soundfile, as no other recipe does

        return recipe_of(name, **ours)(asked)

    return make


RECIPES: dict[str, Callable[[Asked], Recipe]] = {
    "an4": _speech("lstman4", dataset="an4", batch_size=16),
    "an4-small": _speech("an4-small"),
    "fashion": ImageRecipe.asked,
    "gpt": TextRecipe.asked,
}


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Train, print the table and the JSON line, and return what it holds."""
    args = _parse(argv)
    if args.list:
        return _list()
    recipe = _recipe(args)
    if args.pack:
        recipe.pack(args.pack)
        print(f"{args.pack}: {args.pack.stat().st_size / 1e6:.1f} MB")
        return {}
    args.out.mkdir(parents=True, exist_ok=True)
    if not args.report:
        _train(args, recipe)
    return {} if args.no_report else _report(args)


def _train(args: argparse.Namespace, recipe: Recipe) -> None:
    """Make every training that is not there yet, and write each down as it ends."""
    runs = args.out / RUNS
    there = _read(runs)
    tables.metric_of([*there, {"metric": recipe.metric}])  # refuses a folder of another workload
    made = {(run["setting"]["name"], run["seed"]) for run in there if not run["ended"].startswith(OUT_OF_TIME)}
    told = {"data": args.corpus.name if args.corpus else recipe.data, "device": _device(args.device), **provenance()}
    with tempfile.TemporaryDirectory() as folder, runs.open("a", encoding="utf-8") as file:
        tasks = [
            _task(args, recipe.with_seed(seed), setting, Path(folder))
            for seed in args.seeds
            for setting in read_settings(args.settings)
            if (setting.name, seed) not in made
        ]
        for result in run_all(tasks, args.jobs, lambda line: print(line, file=sys.stderr, flush=True)):
            file.write(json.dumps(result | told, allow_nan=False) + "\n")
            file.flush()


def _task(args: argparse.Namespace, recipe: Recipe, setting: Setting, folder: Path) -> Task:
    if setting.dense_steps == Setting.dense_steps:
        dense_steps = recipe.dense_steps if args.dense_steps is None else args.dense_steps
        setting = replace(setting, dense_steps=dense_steps)
    return Task(
        recipe=recipe,
        setting=setting,
        steps=recipe.steps,
        workers=args.workers or recipe.workers,
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
    name = tables.metric_of(runs)
    metric = METRICS[name]
    rows = tables.summarise(runs, args.losses or metric.losses, args.goals or metric.goals, compute_s)
    Console(width=180).print(tables.table_of(rows, name))
    if not args.no_plots:
        plots.draw(runs, compute_s, args.out)
    kept = ("workers", "metric", "window", "data", "device", "versions", "hardware", "date")
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


def _recipe(args: argparse.Namespace) -> Recipe:
    pairs = tuple(parse_pairs(args.set).items())
    asked = Asked(data_dir=args.data_dir, corpus=args.corpus, batch=args.batch, steps=args.steps, pairs=pairs)
    return RECIPES[args.recipe](asked)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m research.learning", description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--recipe", choices=sorted(RECIPES), default="an4-small")
    add("--settings", default="dense,scaled-1", help="specs NAME[+field=value...], by comma; or a file, one a line")
    add("--list", action="store_true", help="show the catalogue of settings")
    add("--seeds", type=_integers, default=[1], help="1,2: each setting with each")
    add("--steps", type=int, help="default: the recipe's, 560 for speech, 1500 for fashion, 500 for gpt")
    add(
        "--dense-steps",
        type=int,
        help="before the switch, where a setting does not say otherwise; default: 128, 100 for gpt",
    )
    add("--workers", type=int, help="default: 4, or the recipe's")
    add("--batch", type=int, help="of a worker in a step; default: the recipe's, 16 for an4 and gpt, 32 for fashion")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="of the recipe's settings; repeatable")
    add("--device", default="cpu")
    add("--jobs", type=int, default=1, help="trainings beside each other, each in its own process")
    add("--threads", type=int, default=1, help="of torch, in each")
    add("--limit-s", type=float, default=0.0, help="trainings that run then end with what they have")
    add("--evaluate-every", type=int, default=2, help="epochs; for fashion and gpt, times 50 steps")
    add("--corpus", type=Path, help="a packed corpus")
    add("--data-dir", type=Path, help="a folder with manifests, with idx files, or with *.py")
    add("--pack", type=Path, help="write the corpus to this file, and nothing else")
    add("--scratch", type=Path, help="where the dense steps that settings share are kept; default: forgotten")
    add("--out", type=Path, default=Path("runs/learning"))
    add(
        "--losses",
        type=_numbers,
        help="of training, to reach; default: 10,5 for speech, 0.3,0.15 for fashion, 1.6,1.3 for gpt",
    )
    add(
        "--wers",
        "--errors",
        "--nats",
        type=_numbers,
        dest="goals",
        help="default: WERs 0.8,0.7; errors 0.1,0.07; nats 1.6,1.3",
    )
    add("--compute-s", type=float, default=0.0, help="of a worker's step, for simulated times; default: measured")
    add("--report", action="store_true", help="train nothing, report what is in the folder")
    add("--no-report", action="store_true", help="train only: neither rich nor matplotlib is wanted")
    add("--no-plots", action="store_true")
    args = parser.parse_args(argv)
    if args.pack and args.corpus:
        parser.error("--pack reads --data-dir, and --corpus is packed already")
    return args


def _integers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def _numbers(text: str) -> list[float]:
    return [float(each) for each in text.split(",")]


if __name__ == "__main__":
    main()

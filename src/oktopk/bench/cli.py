"""`oktopk bench`: the cost of each method of exchange, on networks of any speed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress

from oktopk.bench import report, tables
from oktopk.bench.breakeven import sentences_of, verdicts_of
from oktopk.bench.exchange import time_exchange
from oktopk.bench.forecast import error_percent
from oktopk.bench.machine import provenance
from oktopk.bench.methods import DEFAULT, GROUPS, METHODS, Entry, entries_of, parse_methods
from oktopk.bench.models import check_model
from oktopk.bench.settings import Setting, make_settings
from oktopk.bench.step import BOUND, time_step
from oktopk.bench.suite import bar, measure, probe
from oktopk.cli.errors import exit_on_error
from oktopk.errors import SettingError, within

LSTM_NUMEL = 27_569_568
"""Number of parameters of the paper's speech recogniser."""

PLAIN_WIDTH = 120
"""Columns of the output if it is no terminal."""

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    add_completion=False,
    help="Measure the cost of each method of exchange, side by side, on networks of any speed.\n\n"
    "Each rank is a host of its own inside this machine, with links of the speed you name: that needs Linux and root. "
    "Without, everything goes over the loopback.",
)

Ranks = Annotated[str, typer.Option(help="Ranks, each a host of its own: a number, or several: 2,4.")]
Mbit = Annotated[str, typer.Option(help="Mbit/s of each link: a number, or several: 100,1000. 0: unlimited.")]
Delay = Annotated[float, typer.Option("--delay-ms", help="Milliseconds of a packet from host to host, one way.")]
Density = Annotated[str, typer.Option(help="The part of the gradient that a sparse method sends: 0.01 or 0.01,0.02.")]
Methods = Annotated[str, typer.Option(help=f"Of {', '.join(METHODS)}; or groups: {', '.join(GROUPS)}.")]
Rounds = Annotated[int, typer.Option(min=1, help="Rounds that count.")]
Out = Annotated[Path | None, typer.Option(help="Folder for results.json, results.csv, plots and index.html.")]
Numel = Annotated[int, typer.Option(min=1, help="Elements of the gradient.")]
Work = Callable[[Setting, list[Entry], Progress], dict[str, Any]]


@app.command()
def exchange(
    numel: Numel = LSTM_NUMEL,
    density: Density = "0.01",
    ranks: Ranks = "4",
    mbit: Mbit = "",
    delay_ms: Delay = 0.0,
    methods: Methods = DEFAULT,
    rounds: Rounds = 7,
    out: Out = None,
) -> None:
    """Time one exchange of a flat gradient, by each method in turn.

    A probe of the same network comes first. Its prediction stands beside each measurement.

    Example: sudo oktopk bench exchange --ranks 4 --mbit 100,1000,0 --out results
    """

    def work(setting: Setting, entries: list[Entry], progress: Progress) -> dict[str, Any]:
        forecast = probe(numel, entries, setting, progress)
        measured = measure(time_exchange, (numel,), entries, setting, rounds, progress)
        for entry, row in zip(entries, measured["rows"], strict=True):
            row["predicted_s"] = forecast.seconds(entry, numel, setting.ranks)
            row["error_percent"] = error_percent(row["predicted_s"], row["seconds"]["median"])
        return {**measured, "probe": forecast.to_json()}

    with exit_on_error():
        network = _network(ranks, mbit, delay_ms)
        _run({"bench": "exchange", "numel": numel}, density, methods, network, work, out)


@app.command()
def step(
    model: Annotated[
        str, typer.Option(help="lstman4 (27.6 M parameters), an4-small (1 M), wide (27 M, cheap), or module:factory.")
    ] = "lstman4",
    batch: Annotated[int, typer.Option(min=1, help="Examples of each rank.")] = 2,
    density: Density = "0.01",
    ranks: Ranks = "4",
    mbit: Mbit = "",
    delay_ms: Delay = 0.0,
    methods: Methods = DEFAULT,
    rounds: Rounds = 7,
    out: Out = None,
) -> None:
    """Time a whole DDP step of a model, forward, backward and exchange, by each method in turn.

    The row "no exchange" is the same step under no_sync(), which no method can beat.

    A model of yours is module:factory. The factory takes no arguments and returns (net, batch, loss): an nn.Module,
    batch(size, seed) -> (inputs, targets), and loss(net(*inputs), targets) -> scalar tensor. Inputs: a tensor, or a
    tuple.

    Example: sudo oktopk bench step --model wide --mbit 1000 --methods default,powersgd-1 --out results
    """

    def work(setting: Setting, entries: list[Entry], progress: Progress) -> dict[str, Any]:
        return measure(time_step, (model, batch), [BOUND, *entries], setting, rounds, progress)

    with exit_on_error():
        network = _network(ranks, mbit, delay_ms)
        about = {"bench": "step", "model": model, "batch": batch, "numel": check_model(model, batch)}
        _run(about, density, methods, network, work, out)


@app.command("probe")
def probe_command(
    numel: Numel = LSTM_NUMEL,
    density: Density = "0.01",
    ranks: Ranks = "4",
    mbit: Mbit = "",
    delay_ms: Delay = 0.0,
    methods: Methods = DEFAULT,
    out: Out = None,
) -> None:
    """Measure the seconds of a call, of a word and of the computing, from which an exchange is predicted.

    Example: sudo oktopk bench probe --ranks 4 --mbit 100
    """

    def work(setting: Setting, entries: list[Entry], progress: Progress) -> dict[str, Any]:
        return {**asdict(setting), "probe": probe(numel, entries, setting, progress).to_json()}

    with exit_on_error():
        network = _network(ranks, mbit, delay_ms)
        _run({"bench": "probe", "numel": numel}, density, methods, network, work, out)


def _run(
    about: dict[str, Any],
    density: str,
    methods: str,
    network: tuple[list[Setting], list[str]],
    work: Work,
    out: Path | None,
) -> None:
    """Do the work in every setting, and show or write its results."""
    densities = _numbers("density", density, 0, 1, open_low=True)
    entries = entries_of(parse_methods(methods), densities)
    settings, notes = network
    if out is not None:
        report.check_possible(out)
    result = {**about, "densities": densities, **provenance(), "notes": notes, "settings": []}
    with bar(Console(stderr=True, highlight=False)) as progress:
        for setting in settings:
            result["settings"].append(work(setting, entries, progress))
            if out is not None:
                report.write_json(result, out)  # a later setting may fail
    if about["bench"] != "probe":
        result["pays"] = verdicts_of(result["settings"])
        if out is not None:
            report.write_report(result, out)
    _show(result, out)


def _show(result: dict[str, Any], out: Path | None) -> None:
    console = Console(highlight=False)
    console = console if console.is_terminal else Console(highlight=False, width=PLAIN_WIDTH)
    for note in result["notes"]:
        console.print(f"[bold yellow]note[/] {escape(note)}")
    for setting in result["settings"]:
        title = f"{Setting.of(setting)}, n = {result['numel']:,}, density {', '.join(map(str, result['densities']))}"
        if result["bench"] == "probe":
            console.print(tables.terminal_table(tables.PROBED, tables.probe_cells(setting["probe"]), title))
            continue
        cells = [tables.cells_of(row) for row in setting["rows"]]
        title += f", {setting['rounds']} round{'s' * (setting['rounds'] > 1)}"
        console.print(tables.terminal_table(tables.columns_of(setting), cells, title))
        if result["bench"] == "step":
            console.print("\n".join(escape(tables.split_of(row)) for row in setting["rows"]))
    for sentence in sentences_of(result.get("pays", ())):
        console.print(escape(sentence))
    if out is not None:
        console.print(f"wrote {escape(str(out / (report.JSON if result['bench'] == 'probe' else report.PAGE)))}")


def _network(ranks: str, mbit: str, delay_ms: float) -> tuple[list[Setting], list[str]]:
    sizes = [int(size) for size in _numbers("ranks", ranks, 2)]
    return make_settings(sizes, _numbers("mbit", mbit, 0) if mbit else None, delay_ms)


def _numbers(kind: str, text: str, low: float, high: float = float("inf"), *, open_low: bool = False) -> list[float]:
    """Return the numbers of a list, each within bounds, each once."""
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        raise SettingError(f"--{kind} wants a number, or several with commas between them, not {text!r}") from None
    return list(dict.fromkeys(within(f"--{kind}", number, low, high, open_low=open_low) for number in numbers))

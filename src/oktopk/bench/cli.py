"""`oktopk bench`: what each method of exchange costs, on networks as slow as you like."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress

from oktopk.bench.exchange import time_exchange
from oktopk.bench.forecast import error_percent
from oktopk.bench.methods import DEFAULT, GROUPS, METHODS, Entry, entries_of, parse_methods
from oktopk.bench.models import check_model
from oktopk.bench.provenance import provenance
from oktopk.bench.step import BOUND, time_step
from oktopk.bench.suite import Setting, bar, choose_links, measure, probe
from oktopk.bench.tables import probe_table, split_of, table_of
from oktopk.errors import SettingError, within
from oktopk.oneline import errors_in_a_line

LSTM_NUMEL = 27_569_568
"""The parameters of the paper's speech recogniser."""

PLAIN_WIDTH = 120
"""Of what is printed where there is no terminal."""

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="Measure what each method of exchange costs, side by side, on networks as slow as you like.",
)

Ranks = Annotated[str, typer.Option(help="Processes, each a host of its own: a number, or several: 2,4.")]
Mbit = Annotated[
    str | None,
    typer.Option(help="Speed of each link, each way: a number, or several: 100,1000; 0 is unlimited. Needs root."),
]
Density = Annotated[str, typer.Option(help="The part of the gradient that a sparse method sends: 0.01 or 0.01,0.02.")]
Methods = Annotated[str, typer.Option(help=f"Of {', '.join(METHODS)}; or groups: {', '.join(GROUPS)}.")]
Rounds = Annotated[int, typer.Option(min=1, help="Laps of each method that count.")]
Seconds = Annotated[float, typer.Option(min=0, help="In each setting no further lap is begun after so many seconds.")]
Json = Annotated[bool, typer.Option("--json", help="Print the results as one JSON object, and nothing else.")]


@app.command()
def exchange(
    numel: Annotated[int, typer.Option(min=1, help="Elements of the gradient.")] = LSTM_NUMEL,
    density: Density = "0.01",
    ranks: Ranks = "4",
    mbit: Mbit = None,
    methods: Methods = DEFAULT,
    rounds: Rounds = 7,
    seconds: Seconds = 300.0,
    json_: Json = False,
) -> None:
    """Time one exchange of a flat gradient, by each method in turn.

    Example: sudo oktopk bench exchange --ranks 4 --mbit 100,1000 --out results
    """
    with errors_in_a_line():
        entries = entries_of(parse_methods(methods), _numbers("density", density, 0, 1, open_low=True))
        settings, notes = _settings(ranks, mbit)
        with bar(_stderr()) as progress:
            measured = [_predicted_and_measured(numel, entries, s, rounds, seconds, progress) for s in settings]
        result = {"bench": "exchange", **provenance(), "notes": notes, "numel": numel, "settings": measured}
        _show(result, json_)


def _predicted_and_measured(
    numel: int, entries: list[Entry], setting: Setting, rounds: int, seconds: float, progress: Progress
) -> dict[str, Any]:
    """Return what was measured, each row with what the probe, run before, had predicted."""
    forecast = probe(numel, entries, setting, progress)
    measured = measure(time_exchange, (numel,), entries, setting, rounds, seconds, progress)
    for entry, row in zip(entries, measured["rows"], strict=True):
        predicted_s = forecast.seconds(entry, numel, setting.ranks)
        row["predicted_s"] = predicted_s
        row["error_percent"] = error_percent(predicted_s, row["seconds"]["median"])
    return {**measured, "probe": forecast.to_json()}


@app.command()
def step(
    model: Annotated[
        str, typer.Option(help="lstman4 (27.6 M parameters), an4-small (1 M), wide (27 M, cheap), or module:factory.")
    ] = "lstman4",
    batch: Annotated[int, typer.Option(min=1, help="Examples of each rank.")] = 2,
    density: Density = "0.01",
    ranks: Ranks = "4",
    mbit: Mbit = None,
    methods: Methods = DEFAULT,
    rounds: Rounds = 7,
    seconds: Seconds = 300.0,
    json_: Json = False,
) -> None:
    """Time a whole DDP step of a model, forward, backward and exchange, by each method in turn.

    The row "no exchange" is the same step under no_sync(): what no method can beat.

    A model of yours is module:factory. The factory takes no arguments and returns (net, batch, loss): an nn.Module,
    batch(size, seed) -> (inputs, targets), and loss(net(*inputs), targets) -> scalar tensor. Inputs: a tensor, or a
    tuple.

    Example: sudo oktopk bench step --model wide --mbit 1000 --methods default,powersgd-1 --out results
    """
    with errors_in_a_line():
        entries = [BOUND, *entries_of(parse_methods(methods), _numbers("density", density, 0, 1, open_low=True))]
        settings, notes = _settings(ranks, mbit)
        numel = check_model(model, batch)
        with bar(_stderr()) as progress:
            measured = [measure(time_step, (model, batch), entries, s, rounds, seconds, progress) for s in settings]
        about = {"model": model, "batch": batch, "numel": numel}
        _show({"bench": "step", **provenance(), "notes": notes, **about, "settings": measured}, json_)


@app.command("probe")
def probe_command(
    numel: Annotated[int, typer.Option(min=1, help="Elements of the gradient that is to be predicted.")] = LSTM_NUMEL,
    density: Density = "0.01",
    ranks: Ranks = "4",
    mbit: Mbit = None,
    methods: Methods = DEFAULT,
    json_: Json = False,
) -> None:
    """Measure what a call, a word and the computing take here: what an exchange is predicted from.

    Example: sudo oktopk bench probe --ranks 4 --mbit 100
    """
    with errors_in_a_line():
        entries = entries_of(parse_methods(methods), _numbers("density", density, 0, 1, open_low=True))
        settings, notes = _settings(ranks, mbit)
        with bar(_stderr()) as progress:
            probed = [
                {"ranks": s.ranks, "mbit": s.mbit, "probe": probe(numel, entries, s, progress).to_json()}
                for s in settings
            ]
        _show({"bench": "probe", **provenance(), "notes": notes, "numel": numel, "settings": probed}, json_)


def _settings(ranks: str, mbit: str | None) -> tuple[list[Setting], list[str]]:
    """Return the settings, and what the user should know about them."""
    sizes = [int(size) for size in _numbers("ranks", ranks, 2)]
    links, notes = choose_links(None if mbit is None else _numbers("mbit", mbit, 0))
    return [Setting(size, link) for size in sizes for link in links], notes


def _numbers(kind: str, text: str, low: float, high: float = float("inf"), *, open_low: bool = False) -> list[float]:
    """Return the numbers of a list, each within bounds, each once."""
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        raise SettingError(f"--{kind} wants a number, or several with commas between them, not {text!r}") from None
    return list(dict.fromkeys(within(f"--{kind}", number, low, high, open_low=open_low) for number in numbers))


def _show(result: dict[str, Any], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(result, allow_nan=False))
        return
    console = _stdout()
    for note in result["notes"]:
        console.print(f"[bold yellow]note[/] {escape(note)}")
    for setting in result["settings"]:
        if result["bench"] == "probe":
            console.print(probe_table(setting["probe"], str(Setting(setting["ranks"], setting["mbit"]))))
            continue
        title = f"{Setting(setting['ranks'], setting['mbit'])}, n = {result['numel']:,}, {setting['rounds']} laps"
        console.print(table_of(setting, title))
        if result["bench"] == "step":
            console.print("Median ms:\n" + "\n".join(escape(split_of(row)) for row in setting["rows"]))


def _stdout() -> Console:
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=PLAIN_WIDTH)


def _stderr() -> Console:
    return Console(stderr=True, highlight=False)

"""`oktopk bench`: the cost of each method of exchange, on networks of any speed."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from oktopk.bench import report
from oktopk.bench.candidates import BOUND, time_exchange, time_step
from oktopk.bench.chaos import FAULTS, ChaosSettings, faults_of, run_chaos
from oktopk.bench.chaos_figures import tables_of, write_page
from oktopk.bench.local import METHODS as LOCAL_METHODS
from oktopk.bench.local import Work, measure_local
from oktopk.bench.machine import provenance
from oktopk.bench.methods import DEFAULT, GROUPS, METHODS, Entry, entries_of, parse_methods
from oktopk.bench.models import check_model
from oktopk.bench.probe import predict_seconds, probe_setting
from oktopk.bench.processes import Network, Setting, make_settings
from oktopk.bench.rounds import measure
from oktopk.bench.sharded import check_sharded
from oktopk.bench.summary import verdicts_of
from oktopk.cli.errors import exit_on_error
from oktopk.errors import SettingError, one_of, within

LSTM_NUMEL = 27_569_568
"""Number of parameters of the paper's speech recogniser."""

PLAIN_WIDTH = 120
"""Columns of the output if it is no terminal."""

ABOUT = """Measure the cost of each method of exchange, side by side, on networks of any speed.

Each rank is a host of its own inside this machine, with links of the speed you name: that needs Linux and root.
Without, everything goes over the loopback."""

Ranks = Annotated[str, typer.Option(help="Ranks, each a host of its own: a number, or several: 2,4.")]
Mbit = Annotated[str, typer.Option(help="Mbit/s of each link: a number, or several: 100,1000. 0: unlimited.")]
Delay = Annotated[float, typer.Option("--delay-ms", help="Milliseconds of a packet from host to host, one way.")]
Density = Annotated[str, typer.Option(help="The part of the gradient that a sparse method sends: 0.01 or 0.01,0.02.")]
Methods = Annotated[str, typer.Option(help=f"Of {', '.join(METHODS)}; or groups: {', '.join(GROUPS)}.")]
Rounds = Annotated[int, typer.Option(min=1, help="Rounds that count.")]
Out = Annotated[Path | None, typer.Option(help="Folder for results.json, results.csv, plots and index.html.")]
Numel = Annotated[int, typer.Option(min=1, help="Elements of the gradient.")]
Batch = Annotated[int, typer.Option(min=1, help="Examples of each rank.")]
Model = Annotated[
    str, typer.Option(help="lstman4 (27.6 M), an4-small (1 M), gpt-tiny (0.4 M), wide (27 M), or module:factory.")
]
Measure = Callable[[Setting, list[Entry]], dict[str, Any]]
Shard = Annotated[int, typer.Option(min=1, help="Ranks of a node, over which FSDP shards the model. 1: DDP.")]


@exit_on_error()
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

    sudo oktopk bench exchange --ranks 4 --mbit 100,1000,0 --out results
    """

    def work(setting: Setting, entries: list[Entry]) -> dict[str, Any]:
        probed = probe_setting(numel, entries, setting)
        measured = measure(time_exchange, (numel,), entries, setting, rounds)
        for entry, row in zip(entries, measured["rows"], strict=True):
            seconds = predict_seconds(probed, entry, numel, setting.ranks)
            row["predicted_s"] = seconds
            row["error_percent"] = None if seconds is None else 100 * (seconds / row["seconds"]["median"] - 1)
        return {**measured, "probe": probed}

    _run({"bench": "exchange", "numel": numel}, density, methods, _network(ranks, mbit, delay_ms), work, out)


@exit_on_error()
def step(
    model: Model = "lstman4",
    batch: Batch = 2,
    density: Density = "0.01",
    ranks: Ranks = "4",
    mbit: Mbit = "",
    delay_ms: Delay = 0.0,
    shard: Shard = 1,
    methods: Methods = DEFAULT,
    rounds: Rounds = 7,
    out: Out = None,
) -> None:
    """Time a step of a DDP or FSDP model, by each method in turn.

    A step is forward, backward and exchange. The row "no exchange" is the same step under no_sync(): the lower bound.

    With --shard 2 each two ranks are a node, with a fast network inside and one link to the others. FSDP shards the
    model inside a node. Dense is native HSDP, and "no exchange" sums inside the nodes only.

    A model of yours is module:factory. The factory takes no arguments and returns (net, batch, loss): an nn.Module,
    batch(size, seed) -> (inputs, targets), and loss(net(*inputs), targets) -> scalar tensor.

    sudo oktopk bench step --model wide --mbit 1000 --out results
    """

    def work(setting: Setting, entries: list[Entry]) -> dict[str, Any]:
        return measure(time_step, (model, batch, shard), [BOUND, *entries], setting, rounds)

    if shard > 1:
        check_sharded(parse_methods(methods))
    network = _network(ranks, mbit, delay_ms, shard)
    about = {"bench": "step", "model": model, "batch": batch, "numel": check_model(model, batch)}
    _run(about, density, methods, network, work, out)


@exit_on_error()
def probe(
    numel: Numel = LSTM_NUMEL,
    density: Density = "0.01",
    ranks: Ranks = "4",
    mbit: Mbit = "",
    delay_ms: Delay = 0.0,
    methods: Methods = DEFAULT,
    out: Out = None,
) -> None:
    """Measure calls, words and computing, to predict an exchange.

    sudo oktopk bench probe --ranks 4 --mbit 100
    """

    def work(setting: Setting, entries: list[Entry]) -> dict[str, Any]:
        return {**asdict(setting), "probe": probe_setting(numel, entries, setting)}

    _run({"bench": "probe", "numel": numel}, density, methods, _network(ranks, mbit, delay_ms), work, out)


@exit_on_error()
def local(
    numel: Numel = 30_000_000,
    density: Density = "0.03",
    ranks: Ranks = "4",
    mbit: Mbit = "",
    delay_ms: Delay = 20.0,
    every: Annotated[int, typer.Option(min=1, help="H: steps from one exchange to the next.")] = 30,
    compute_s: Annotated[float, typer.Option("--compute-s", min=0, help="Seconds of computing a step: a sleep.")] = 0.5,
    methods: Annotated[str, typer.Option(help=f"Of {', '.join(LOCAL_METHODS)}.")] = ",".join(LOCAL_METHODS),
    rounds: Rounds = 2,
    out: Out = None,
) -> None:
    """Measure how much of the time workers of local steps compute.

    DDP makes one step, with its exchange all behind the computing. The others make rounds of H steps.

    sudo oktopk bench local --ranks 8 --mbit 50 --every 30
    """
    chosen = [one_of("method", name.strip(), LOCAL_METHODS) for name in methods.split(",")]
    (settings, notes), works = _network(ranks, mbit, delay_ms), list[Work]()
    for each in _numbers("density", density, 0, 1, open_low=True):
        works.append(Work(numel, every, compute_s, each, rounds))
    result: dict[str, Any] = {"bench": "local", **provenance(), "notes": notes, "settings": []}
    for setting in settings:
        for work in works:
            result["settings"].append({**vars(work), **measure_local(setting, work, chosen)})
            if out is not None:
                out.mkdir(parents=True, exist_ok=True)
                report.write_json(result, out)  # a later setting may fail
    _show(result, out)


@exit_on_error()
def chaos(
    minutes: Annotated[float, typer.Option(min=0.1, help="Minutes in which faults come.")] = 10.0,
    faults: Annotated[str, typer.Option(help=f"Of {', '.join(FAULTS)}.")] = ",".join(FAULTS),
    ranks: Annotated[int, typer.Option(min=3, help="Members, each a host of its own.")] = 4,
    compute_s: Annotated[float, typer.Option("--compute-s", min=0, help="Seconds of computing a step: a sleep.")] = 0.1,
    out: Out = None,
) -> None:
    """Kill, freeze and cut off members, beside a run without faults.

    The members are torchft's: pip install 'oktopk[torchft]'. Then as many steps are made without faults.

    sudo oktopk bench chaos --minutes 30 --ranks 8 --faults kill,stop,partition --out results
    """
    if find_spec("torchft") is None:
        raise SettingError("the members of this run are torchft's: pip install 'oktopk[torchft]'")
    if out is not None:
        report.check_possible(out)
    settings = ChaosSettings(members=ranks, minutes=minutes, faults=faults_of(faults), compute_s=compute_s)
    console = Console(highlight=False, stderr=True)
    result = {"bench": "chaos", **provenance(), "notes": [], **run_chaos(settings, lambda line: console.print(line))}
    if out is not None:
        write_page(result, out)
    _print_tables(tables_of(result))
    if out is not None:
        console.print(f"wrote {escape(str(out / report.PAGE))}")


def _network(ranks: str, mbit: str, delay_ms: float, shard: int = 1) -> Network:
    sizes = [int(size) for size in _numbers("ranks", ranks, 2)]
    return make_settings(sizes, _numbers("mbit", mbit, 0) if mbit else None, delay_ms, shard)


def _numbers(kind: str, text: str, low: float, high: float = float("inf"), *, open_low: bool = False) -> list[float]:
    """Return the numbers of a list, each within bounds, each once."""
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        raise SettingError(f"--{kind} wants a number, or several with commas between them, not {text!r}") from None
    return list(dict.fromkeys(within(f"--{kind}", number, low, high, open_low=open_low) for number in numbers))


def _run(about: dict[str, Any], density: str, methods: str, network: Network, work: Measure, out: Path | None) -> None:
    """Do the work in every setting, and show or write its results."""
    densities = _numbers("density", density, 0, 1, open_low=True)
    entries = entries_of(parse_methods(methods), densities)
    settings, notes = network
    if out is not None:
        report.check_possible(out)
    result = {**about, "densities": densities, **provenance(), "notes": notes, "settings": []}
    for setting in settings:
        result["settings"].append(work(setting, entries))
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
    _print_tables(report.tables_of(result))
    for verdict in result.get("pays", ()):
        console.print(escape(verdict["sentence"]))
    if out is not None:
        console.print(f"wrote {escape(str(out / (report.PAGE if 'pays' in result else report.JSON)))}")


def _print_tables(tables: Sequence[dict[str, Any]]) -> None:
    console = Console(highlight=False)
    console = console if console.is_terminal else Console(highlight=False, width=PLAIN_WIDTH)
    for table in tables:
        shown = Table(title=table["title"], title_justify="left")
        for i, column in enumerate(table["columns"]):
            shown.add_column(column, justify="right" if i else "left", no_wrap=not i, overflow="fold")
        for cells in table["rows"]:
            shown.add_row(*cells)
        console.print(shown, *map(escape, table["lines"]), sep="\n")

"""The figures of a chaos run, from the events of its members, and its page."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from oktopk.bench import report

Event = dict[str, Any]
HANG_S = 30.0
"""Seconds without a committed step that count as a hang, because every wait ends long before."""
GO_ON_WITHIN_S = 30.0
LEAST_LAST = 5
"""Evaluations whose mean is the final loss, because one alone has the noise of a few batches."""
LAST_PART = 0.1


def figures_of(
    events: Sequence[Event], calm: Sequence[Event], faults: Sequence[Event], span: tuple[float, float], compute_s: float
) -> dict[str, Any]:
    """Return the figures of a run with these faults between two times, and of one without."""
    start, end = span
    within = [each for each in events if start <= each["t"] <= end]
    commits = [each for each in within if each["event"] == "commit"]
    steps = sorted({each["step"]: each["t"] for each in reversed(commits)}.items())
    times = [t for _, t in steps]
    gaps = [after - before for before, after in zip([start, *times], [*times, end], strict=False)]
    failed = sum(each["event"] == "uncommitted" for each in within)
    undisturbed = _seconds_of_a_step(commits)
    laws = [each["law"] for each in events if each["event"] == "members"]
    losses, calm_losses = _losses(events), _losses(calm)
    final, calm_final = _final(losses), _final(calm_losses)
    recoveries = [each for fault in faults if (each := _recovery(fault, events)) is not None]
    return {
        "faults_made": [{**fault, "t": fault["t"] - start} for fault in faults],
        "faults_by_kind": {kind: sum(each["kind"] == kind for each in faults) for kind in {f["kind"] for f in faults}},
        "steps": len(steps),
        "hangs": sum(gap > HANG_S for gap in gaps),
        "longest_gap_s": max(gaps, default=0.0),
        "divergences": _divergences(events),
        "attempts_committed": len(commits) / max(len(commits) + failed, 1),
        "time_committed": len(steps) * undisturbed / (end - start) if undisturbed else None,
        "step_s": undisturbed,
        "compute_s": compute_s,
        "go_on_s": recoveries,
        "go_on_median_s": median(each["seconds"] for each in recoveries) if recoveries else None,
        "go_on_worst_s": max((each["seconds"] for each in recoveries), default=None),
        "memberships": len({(each["step"], tuple(each["uids"])) for each in events if each["event"] == "members"}),
        "law_worst": max(laws, default=0.0),
        "errors": [f"member {each['member']}: {each['error']}" for each in events if each["event"] == "error"],
        "loss": final,
        "calm_loss": calm_final,
        "loss_percent": 100 * (final / calm_final - 1) if final and calm_final else None,
        "curves": {
            "size": _thin([(each["t"] - start, each["size"]) for each in commits]),
            "steps": _thin([(t - start, step) for step, t in steps]),
            "loss": losses,
            "calm_loss": calm_losses,
        },
    }


def _seconds_of_a_step(commits: Sequence[Event]) -> float | None:
    """Return the median time between two committed steps of one life of a member."""
    lives: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for each in commits:
        lives[each["member"], each["life"]].append(each)
    pairs = [(a, b) for life in lives.values() for a, b in pairwise(life)]
    seconds = [b["t"] - a["t"] for a, b in pairs if b["step"] == a["step"] + 1]
    return median(seconds) if seconds else None


def _recovery(fault: Event, events: Sequence[Event]) -> dict[str, Any] | None:
    """Return when the others committed a step after a fault, in a quorum without its victims if it was a long one."""
    victims = set(fault["victims"])
    others = [e for e in events if e["member"] not in victims and fault["t"] < e["t"] < fault["t"] + GO_ON_WITHIN_S]
    excludes = fault["kind"] != "stop-below"
    met = not excludes
    for each in others:
        met = met or each["event"] == "members"
        if met and each["event"] == "commit":
            return {"kind": fault["kind"], "seconds": each["t"] - fault["t"]}
    return None


def _divergences(events: Sequence[Event]) -> int:
    """Return the number of steps after which two members had other weights."""
    digests: dict[int, set[str]] = defaultdict(set)
    for each in events:
        if each["event"] == "commit":
            digests[each["step"]].add(each["digest"])
    return sum(len(every) > 1 for every in digests.values())


def _losses(events: Sequence[Event]) -> list[tuple[int, float]]:
    return sorted({each["step"]: each["loss"] for each in events if each["event"] == "eval"}.items())


def _final(losses: Sequence[tuple[int, float]]) -> float | None:
    """Return the mean of the last tenth of the losses, or of a few."""
    last = [loss for _, loss in losses][-max(LEAST_LAST, round(LAST_PART * len(losses))) :]
    return sum(last) / len(last) if last else None


def _thin(points: list[tuple[float, float]], most: int = 1500) -> list[tuple[float, float]]:
    return points[:: max(1, len(points) // most)]


def tables_of(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the table of a run, as `report.tables_of` has one for each setting."""
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(result["faults_by_kind"].items()))
    rows = [
        ["faults", f"{len(result['faults_made'])}: {kinds}", "60"],
        ["committed steps", f"{result['steps']:,}", ""],
        ["hangs (30 s without a step)", str(result["hangs"]), "0"],
        ["steps after which members differ", str(result["divergences"]), "0"],
        ["committed of attempted steps", _percent(result["attempts_committed"]), "90 %"],
        ["share of the time in committed steps", _percent(result["time_committed"]), "90 %"],
        ["others go on, median", _seconds(result["go_on_median_s"]), "2 s"],
        ["others go on, worst", _seconds(result["go_on_worst_s"]), ""],
        ["quorums", str(result["memberships"]), ""],
        ["residual law, worst relative error", f"{result['law_worst']:.1e}", "1e-6"],
        ["final loss, and without faults", f"{_number(result['loss'])}, {_number(result['calm_loss'])}", ""],
        ["difference", _percent(None if result["loss_percent"] is None else result["loss_percent"] / 100), "0.6 %"],
    ]
    title = f"{result['members']} members, {result['minutes']:.1f} minutes, timeout {result['timeout_s']:g} s"
    lines = [f"a step takes {_seconds(result['step_s'])}", *_by_kind(result), *result["errors"][:10]]
    return [{"title": title, "columns": ("figure", "measured", "wanted"), "rows": rows, "lines": lines}]


def _by_kind(result: dict[str, Any]) -> list[str]:
    """Return a line on how soon the others went on, for each kind of fault."""
    kinds: dict[str, list[float]] = defaultdict(list)
    for each in result["go_on_s"]:
        kinds[each["kind"]].append(each["seconds"])
    return [
        f"{kind}: others go on after {_seconds(median(seconds))} in the median, {_seconds(max(seconds))} at worst, "
        f"in {len(seconds)} faults"
        for kind, seconds in sorted(kinds.items())
    ]


def write_page(result: dict[str, Any], folder: Path) -> None:
    """Write results.json, plots and index.html."""
    report.write_json(result, folder)
    svgs = [
        ("members over time", report.save("members", folder, lambda axes, palette: _draw_size(axes, palette, result))),
        ("steps over time", report.save("steps", folder, lambda axes, palette: _draw_steps(axes, palette, result))),
        ("time to go on", report.save("go-on", folder, lambda axes, palette: _draw_go_on(axes, palette, result))),
        ("loss", report.save("loss", folder, lambda axes, palette: _draw_loss(axes, palette, result))),
    ]
    report.write_html(result, folder, tables_of(result), svgs, "A run whose members come and go")


def _draw_size(axes: Any, palette: dict[str, str], result: dict[str, Any]) -> None:
    points = result["curves"]["size"]
    axes.step([t for t, _ in points], [size for _, size in points], where="post", color=palette["blue"])
    _mark_faults(axes, palette, result)
    axes.set(title="members of each committed step", xlabel="seconds", ylabel="members", ylim=(0, None))


def _draw_steps(axes: Any, palette: dict[str, str], result: dict[str, Any]) -> None:
    points = result["curves"]["steps"]
    axes.plot([t for t, _ in points], [step for _, step in points], color=palette["blue"])
    _mark_faults(axes, palette, result)
    axes.set(title="committed steps", xlabel="seconds", ylabel="steps")


def _mark_faults(axes: Any, palette: dict[str, str], result: dict[str, Any]) -> None:
    for fault in result["faults_made"]:
        axes.axvline(fault["t"], color=palette["red"], alpha=0.25, linewidth=0.8)


def _draw_go_on(axes: Any, palette: dict[str, str], result: dict[str, Any]) -> None:
    kinds = sorted({each["kind"] for each in result["go_on_s"]})
    for place, kind in enumerate(kinds):
        seconds = [each["seconds"] for each in result["go_on_s"] if each["kind"] == kind]
        axes.plot([place] * len(seconds), seconds, "o", alpha=0.5, color=palette["blue"])
    axes.set_xticks(range(len(kinds)), kinds)
    axes.set(title="others go on after a fault", ylabel="seconds", ylim=(0, None))


def _draw_loss(axes: Any, palette: dict[str, str], result: dict[str, Any]) -> None:
    for name, colour, label in (("loss", "orange", "with faults"), ("calm_loss", "blue", "without")):
        points = result["curves"][name]
        axes.plot([step for step, _ in points], [loss for _, loss in points], color=palette[colour], label=label)
    axes.set(title="loss of held-out data", xlabel="committed steps", ylabel="loss (nats)")
    axes.legend(frameon=False)


def _percent(part: float | None) -> str:
    return report.UNKNOWN if part is None else f"{100 * part:.2f} %"


def _seconds(seconds: float | None) -> str:
    return report.UNKNOWN if seconds is None else f"{seconds:.3g} s"


def _number(value: float | None) -> str:
    return report.UNKNOWN if value is None else f"{value:.4f}"

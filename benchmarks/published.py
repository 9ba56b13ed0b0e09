"""Does `oktopk plan` reproduce what others published, and does SimGrid agree with it at many ranks?

    python -m benchmarks.published
    python -m benchmarks.published --simgrid 32,64,256 --message-us 20   # needs python3-simgrid; 256 ranks take minutes

Home lab: DiLoCo of 30.8 M parameters, 205 MB a sync, by a ring of 6 workers over links of 50 Mbit/s and 1 Gbit/s
(https://nicholi.ai/2026/06/13/training-a-language-model-on-machines-that-keep-dying.html). One row, H = 32 at 1 Gbit/s,
gives the seconds of a step's computing. The others are predicted.

1-bit Adam: Table 1 of arXiv 2102.02888 has the milliseconds of BERT-Large's step with Adam, in float16, on nodes of
four V100 behind Ethernet, whose iperf gives 4.1 Gbit/s. The one node without Ethernet gives the computing.

BERT: 133.5 M parameters at 1 % on 256 ranks (arXiv 2201.07598), whose links and host are assumed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from oktopk import Dense, GaussianK, GTopk, OkTopk, OkTopkPaper, TopkA, TopkDSA
from oktopk.plan.methods import DENSE, methods
from oktopk.plan.model import exchange_of, predict_step, round_seconds
from oktopk.plan.profile import Host, from_numbers
from oktopk.plan.simulate import simulate
from oktopk.plan.topology import PAYLOAD, Level, Topology, flat

LAB_NUMEL, LAB_RANKS, LAB_LATENCY_S = 30_800_000, 6, 1e-3
PUBLISHED = {(50, 1): 0.0004, (50, 8): 0.0055, (50, 32): 0.024, (50, 128): 0.116,
             (1000, 8): 0.12, (1000, 32): 0.36, (1000, 128): 0.72}  # fmt: skip
"""Part of the time that the workers of the home lab compute, by Mbit/s and H; H = 1 is DDP."""
CALIBRATES = (1000, 32)

ADAM_NUMEL, ADAM_GPUS, ADAM_MBIT, NVLINK_MBIT = 340_000_000, 4, 4100, 1_000_000
"""BERT-Large's parameters, GPUs of a node, the payload that a node's link carries, and a link that takes no time."""
ADAM_COMPUTING_S = 0.03599 + 0.05995 + 0.07421
ADAM_STEPS_S = {2: 0.03495 + 1.89721 + 0.06123 + 0.07526, 4: 0.03694 + 2.13324 + 0.06282 + 0.07685,
                8: 0.03791 + 2.17335 + 0.06071 + 0.07563, 16: 0.03571 + 2.27543 + 0.06081 + 0.07559}  # fmt: skip
"""Forward, backward's sum, the rest of backward, and the optimizer's step, by the number of nodes, at batch 16."""

BERT_NUMEL, BERT_RANKS = 133_547_324, 256
BERT_MBIT, BERT_LATENCY_S, BERT_MESSAGE_S, BERT_WORD_S = 80_000, 2e-6, 5e-6, 1e-9
"""Assumed of a Cray Aries link, and of a host that copies words through its memory."""

SIMULATED_NUMEL, SIMULATED_MBIT, SIMULATED_LATENCY_S = 27_569_568, 1000, 5e-5


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Predict, print the tables and the JSON line, and return what it holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simgrid", default="", help="numbers of ranks by comma")
    parser.add_argument("--message-us", type=float, default=0.0, help="a host's time for a message, with --simgrid")
    args = parser.parse_args(argv)
    ranks = [int(each) for each in args.simgrid.split(",") if each]
    result = {
        "home_lab": home_lab(),
        "adam": adam(),
        "bert": bert(),
        "simgrid": [simulated(size, 1e-6 * args.message_us) for size in ranks],
    }
    for name, rows in result.items():
        _print(name, rows)
    print(json.dumps(result, allow_nan=False))
    return result


def home_lab() -> list[dict[str, Any]]:
    """Return the published and the predicted part of the time that workers compute."""
    low, high = 1e-4, 1.0  # seconds of computing, between which the calibrating row lies
    while high / low > 1.0001:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if _computing(*CALIBRATES, middle) < PUBLISHED[CALIBRATES] else (low, middle)
    rows = []
    for (mbit, every), published in PUBLISHED.items():
        predicted = _computing(mbit, every, low)
        rows.append(
            _row(mbit=mbit, every=every, published=published, predicted=predicted, error=predicted / published - 1)
        )
    return rows


def _computing(mbit: float, every: int, compute_s: float) -> float:
    found = {method.name: method for method in methods(every=max(every, 2))}
    method = found[DENSE if every == 1 else f"local steps, H = {every}, Dense()"]
    made = predict_step(method, from_numbers(LAB_NUMEL, compute_s), flat(LAB_RANKS, mbit, LAB_LATENCY_S))
    return compute_s / made.step_s


def adam() -> list[dict[str, Any]]:
    """Return the published and the predicted seconds of a step: computing, then a ring of half the words."""
    rows = []
    for nodes, published in ADAM_STEPS_S.items():
        topology = Topology((
            Level(name="GPU", size=ADAM_GPUS, mbit=NVLINK_MBIT),
            Level(name="node", size=nodes, mbit=ADAM_MBIT / PAYLOAD),
        ))  # fmt: skip
        ring, _ = round_seconds(exchange_of(Dense(), ADAM_NUMEL // 2, topology.size), topology, Host(word_s={"": 0.0}))
        predicted = ADAM_COMPUTING_S + ring
        rows.append(_row(nodes=nodes, published=published, predicted=predicted, error=predicted / published - 1))
    return rows


def bert() -> list[dict[str, Any]]:
    """Return the seconds of an exchange by each algorithm, and how many times the paper's that is."""
    host = Host(message_s={"": BERT_MESSAGE_S}, word_s={"": BERT_WORD_S})
    paper = OkTopkPaper(density=0.01, wire="fp32")
    others = (kind(density=0.01) for kind in (TopkA, TopkDSA, GTopk, GaussianK))
    seconds = {
        type(each).__name__: round_seconds(
            exchange_of(each, BERT_NUMEL, BERT_RANKS), flat(BERT_RANKS, BERT_MBIT, BERT_LATENCY_S), host
        )[0]
        for each in (Dense(), *others, paper, OkTopk(density=0.01, wire="fp32"))
    }
    return [_row(name=name, seconds=each, times=each / seconds["OkTopkPaper"]) for name, each in seconds.items()]


def simulated(size: int, message_s: float) -> dict[str, Any]:
    """Return the seconds of one exchange of `OkTopk()` by the model and by SimGrid."""
    plan, topology = exchange_of(OkTopk(), SIMULATED_NUMEL, size), flat(size, SIMULATED_MBIT, SIMULATED_LATENCY_S)
    modelled, _ = round_seconds(plan, topology, Host(message_s={"": message_s}, word_s={"": 0.0}))
    seconds = simulate([plan], topology, message_s)
    return _row(ranks=size, modelled=modelled, simulated=seconds, error=modelled / seconds - 1)


def _row(**figures: Any) -> dict[str, Any]:
    return figures


def _print(name: str, rows: Sequence[dict[str, Any]]) -> None:
    if rows:
        table = Table(*rows[0], title=name, title_justify="left")
        for row in rows:
            table.add_row(*(f"{value:.4g}" if isinstance(value, float) else str(value) for value in row.values()))
        Console(width=120).print(table)


if __name__ == "__main__":
    main()

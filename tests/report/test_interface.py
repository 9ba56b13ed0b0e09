"""Between hosts of its own: what the report says each rank sent and received is what the kernel counted."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.netlab import run
from oktopk.bench.netlab import Lab, LabError, check_possible
from oktopk.report.report import make_report
from oktopk.telemetry.run import load_run
from oktopk.train.data.synth import make_speech

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
RANKS, WITHIN = 3, 0.05


def _why_not() -> str:
    try:
        check_possible()
    except LabError as error:
        return str(error)
    made = shutil.which("ip") and subprocess.run(["ip", "netns", "list"], capture_output=True, check=False)
    return "" if made and not made.returncode else "network namespaces cannot be made here"


TRAIN = """
import json, os, sys
from pathlib import Path
from oktopk.cli.root import main
from oktopk.train.loop import Trainer

def counted():
    folder = Path("/sys/class/net/eth0/statistics")
    return {name: int((folder / f"{name}_bytes").read_text()) for name in ("tx", "rx")}

def run(trainer, of=Trainer.run):
    before = counted()
    summary = of(trainer)
    after = counted()
    told = {name: after[name] - before[name] for name in after}
    Path(sys.argv[1], f"rank{os.environ['RANK']}.json").write_text(json.dumps(told))
    return summary

Trainer.run = run
main(sys.argv[2:])
"""


def _command(folder: Path) -> list[str]:
    return [
        "train", "--data-dir", str(folder / "corpus"), "--batch-size", "2", "--max-epochs", "3", "--dense-steps", "4",
        "--set", "threads=1", "--set", "device=cpu", "--runs", str(folder), "--name", "run",
    ]  # fmt: skip


@pytest.mark.skipif(bool(_why_not()), reason=_why_not())
def test_bytes_by_rank_are_those_of_the_kernels_counters(tmp_path: Path) -> None:
    make_speech(tmp_path / "corpus", 48, val_utterances=6, grammar="commands", jobs=1)
    (tmp_path / "driver.py").write_text(TRAIN)
    with Lab(RANKS) as lab:
        run(lab, [sys.executable, str(tmp_path / "driver.py"), str(tmp_path), *_command(tmp_path)], timeout_s=300)
    report = make_report([load_run(tmp_path / "run")]).runs[0]
    assert report.run.num_steps == 24
    names = [column.name for column in report.table("ranks").columns]
    for rank, row in enumerate(report.table("ranks").rows):
        figures = dict(zip(names, row, strict=True))
        counted = json.loads((tmp_path / f"rank{rank}.json").read_text())
        print(f"rank {rank}: sent {figures['sent']:,} (kernel {counted['tx']:,}), "
              f"received {figures['received']:,} (kernel {counted['rx']:,})")  # fmt: skip
        assert counted["tx"] == pytest.approx(figures["sent"], rel=WITHIN)
        assert counted["rx"] == pytest.approx(figures["received"], rel=WITHIN)

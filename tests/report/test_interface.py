"""Between hosts of its own: what the report says each rank sent and received is what the kernel counted."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks.netlab import run
from oktopk.bench.netlab import Lab
from oktopk.report.report import make_report
from oktopk.telemetry.run import load_run
from oktopk.train.data.synth import make_speech

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
RANKS, WITHIN = 3, 0.05


TRAIN = """
import json, os, sys
from pathlib import Path
from oktopk.__main__ import main
from oktopk.train.loop import Trainer

def counted():
    return [int(Path(f"/sys/class/net/eth0/statistics/{name}_bytes").read_text()) for name in ("tx", "rx")]

def run(trainer, of=Trainer.run):
    before = counted()
    summary = of(trainer)
    told = [after - start for after, start in zip(counted(), before)]
    Path(sys.argv[1], f"rank{os.environ['RANK']}.json").write_text(json.dumps(told))
    return summary

Trainer.run = run
main(sys.argv[2:])
"""


@pytest.mark.usefixtures("lab_works")
def test_bytes_by_rank_are_those_of_the_kernels_counters(tmp_path: Path) -> None:
    make_speech(tmp_path / "corpus", 48, val_utterances=6, grammar="commands", jobs=1)
    (tmp_path / "driver.py").write_text(TRAIN)
    command = [
        sys.executable, tmp_path / "driver.py", tmp_path, "train", "--data-dir", tmp_path / "corpus", "--batch-size=2",
        "--max-epochs=3", "--dense-steps=4", "--set=threads=1", "--set=device=cpu", "--runs", tmp_path, "--name=run",
    ]  # fmt: skip
    with Lab(RANKS) as lab:
        run(lab, [str(word) for word in command], timeout_s=300)
    report = make_report([load_run(tmp_path / "run")]).runs[0]
    assert report.run.num_steps == 24
    table = report.table("ranks")
    for rank, row in enumerate(table.rows):
        figures = dict(zip(table.columns, row, strict=True))
        counted = json.loads((tmp_path / f"rank{rank}.json").read_text())
        print(f"rank {rank}: sent {figures['sent']:,}, received {figures['received']:,}, kernel {counted}")
        assert counted == pytest.approx([figures["sent"], figures["received"]], rel=WITHIN)

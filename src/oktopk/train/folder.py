"""`FolderRecords`: the records of a run's folder, which one of its members writes; when it is gone, another goes on."""

from __future__ import annotations

import json
import random
from collections import deque

from oktopk.telemetry.reader import Record, read_records
from oktopk.telemetry.schema import AnyRecord, to_json
from oktopk.train.rundir import RunDir, is_before, write_text, writing

KEPT = 8
"""Records that a member keeps, because the writer may die between a step and its record."""
NUMBER = "folder.txt"


def give_number(run: RunDir) -> None:
    """Number the folder of a run, before its members start; a run that goes on keeps its number."""
    if not (run.path / NUMBER).exists():
        write_text(run.path / NUMBER, str(random.SystemRandom().randrange(2**53)))


class FolderRecords:
    """metrics.jsonl of a folder.

    number    of the folder: members tell it each other, and the first of each folder in a quorum writes its records
    """

    def __init__(self, run: RunDir) -> None:
        self._path = run.metrics
        self.number = float((run.path / NUMBER).read_text())
        self._latest = deque[Record](maxlen=KEPT)
        self._writes = False

    def add(self, record: AnyRecord, *, writes: bool) -> None:
        """Take a record of this member, and write it if this member writes."""
        line = to_json(record)
        self._latest.append(json.loads(line))
        if writes and not self._writes:
            self._take_over()
        elif writes:
            with writing(self._path), self._path.open("a", encoding="utf-8") as file:
                file.write(f"{line}\n")
        self._writes = writes

    def _take_over(self) -> None:
        """Write the latest records in the place of those there: the writer may have died before it wrote one.

        Those of later steps are from before members went on from a checkpoint.
        """
        step, epoch = (min(each[name] for each in self._latest if name in each) for name in ("step", "epoch"))
        there = read_records(self._path) if self._path.exists() else []
        kept = [each for each in there if each["kind"] == "run" or is_before(each, step, epoch)]
        write_text(self._path, "".join(f"{to_json(each)}\n" for each in (*kept, *self._latest)))

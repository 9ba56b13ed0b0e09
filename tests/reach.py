"""Which test gets to which place: a plugin of pytest for `tests.mutate`, and the call that it puts at the places.

Two runs use it. One writes each test's time and, from all of its threads and processes, which places it got to. The
other runs only the tests of a file, in its order, each with a limit that goes by the time that it took.
"""

import json
import mmap
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FOLDER, CHOSEN = "OKTOPK_REACH", "OKTOPK_CHOSEN"
AFTER = bytes(8 * [255])
_here: mmap.mmap | None = None
_written: set[str] = set()


def reached(place: int) -> None:
    """Write down that the test which runs now, of whatever process, got to a place."""
    global _here
    if _here is None:
        with (Path(os.environ[FOLDER]) / "now").open("r+b") as file:
            _here = mmap.mmap(file.fileno(), 8)
    line = f"{int.from_bytes(_here[:8], 'little')} {place}\n"
    if line not in _written:
        _written.add(line)
        with (Path(os.environ[FOLDER]) / "reached").open("a") as file:
            file.write(line)


def make_folder(folder: Path) -> None:
    """Make a folder that says that no test runs yet."""
    folder.mkdir(exist_ok=True)
    for name, content in (("now", bytes(8)), ("tests", b""), ("reached", b"")):
        (folder / name).write_bytes(content)


def limit_s(seconds: float) -> float:
    """Return how long a test may take that took so long before; the first of a session starts its processes, too."""
    return 60 + 10 * seconds


def pytest_configure() -> None:
    """Make a folder of this worker's own, which its processes find. What was imported before wrote to that above it."""
    global _here
    if FOLDER in os.environ:
        folder = Path(os.environ[FOLDER]) / os.environ.get("PYTEST_XDIST_WORKER", "main")
        make_folder(folder)
        os.environ[FOLDER], _here = str(folder), None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Number the test, and write its name and time. The number before the first is 0, and AFTER between tests."""
    if FOLDER not in os.environ:
        return (yield)
    folder, begin = Path(os.environ[FOLDER]), time.monotonic()
    with (folder / "tests").open("a") as tests, (folder / "now").open("r+b") as now:
        number = tests.tell() + 1
        now.write(number.to_bytes(8, "little"))
        now.flush()
        result: Any = yield
        now.seek(0)
        now.write(AFTER)
        tests.write(json.dumps([number, item.nodeid, time.monotonic() - begin, item.stash.get(FAILED, False)]) + "\n")
    return result


FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Keep that a phase of the test failed."""
    report: Any = yield
    item.stash[FAILED] = item.stash.get(FAILED, False) or report.failed
    return report


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the chosen tests, in the file's order."""
    if CHOSEN in os.environ:
        chosen = dict(json.loads(Path(os.environ[CHOSEN]).read_text()))
        order = {name: number for number, name in enumerate(chosen)}
        items[:] = sorted((item for item in items if item.nodeid in order), key=lambda item: order[item.nodeid])
        for item in items:
            item.add_marker(pytest.mark.timeout(limit_s(chosen[item.nodeid])), append=False)

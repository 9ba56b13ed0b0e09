import gc
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, settings
from torch.multiprocessing.spawn import start_processes

from tests.ddp.harness import Worlds
from tests.harness import Processes, forking, on_threads

# `laws`: the same examples on every run, so that what lands does not depend on luck. `long` (make test-long passes
# --hypothesis-profile=long): new examples on every run, and those that failed are kept in .hypothesis and tried first.
COMMON: dict[str, Any] = {
    "deadline": None,  # it measures the machine, not the code
    "print_blob": True,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
}
settings.register_profile("laws", derandomize=True, database=None, max_examples=25, **COMMON)
settings.register_profile("long", derandomize=False, max_examples=250, **COMMON)
settings.load_profile("laws")

# Ranks are threads or processes here: eight of them with a pool of threads each would only wait for each other.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_finish() -> None:
    """Take all that was imported out of the garbage collector, which would look through it again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _forked() -> Iterator[None]:
    """Fork the ranks of benchmarks, too, where users start each from nothing: seconds of imports."""
    forked = partial(start_processes, start_method=forking().get_start_method())
    with mock.patch("oktopk.bench.processes.start_processes", forked):
        yield


@pytest.fixture(scope="session")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worlds]:
    """Four processes for the whole session, of which every job makes a world."""
    pool = Worlds(4, tmp_path_factory.mktemp("worlds"))
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def processes(worlds: Worlds) -> Processes:
    """Gloo processes of which a job may use one, two, three or all."""
    return Processes(worlds, most=4)


@pytest.fixture(scope="session")
def lab_works() -> None:
    """Skip the test where no network can be made."""
    from oktopk.bench.netlab import Lab, LabError

    try:
        with Lab(1, mbit=100):
            pass
    except LabError as error:
        pytest.skip(str(error))


@pytest.fixture(params=["threads", pytest.param("gloo", marks=pytest.mark.processes)])
def run(request: pytest.FixtureRequest) -> Callable[..., list[Any]]:
    """Return `run(size, fn, *args)`, once for each way in which ranks can exist."""
    return on_threads if request.param == "threads" else request.getfixturevalue("processes").run

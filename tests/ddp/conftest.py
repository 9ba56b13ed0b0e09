from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ddp.harness import Worlds


@pytest.fixture(scope="session")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worlds]:
    """Four processes for the whole session, of which every job makes a world."""
    pool = Worlds(4, tmp_path_factory.mktemp("worlds"))
    yield pool
    pool.close()

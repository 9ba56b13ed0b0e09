import pytest

from oktopk.bench import processes
from oktopk.bench.netlab import LabError


@pytest.fixture
def no_lab(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise LabError("only root may: use sudo")

    monkeypatch.setattr(processes, "check_possible", refuse)

"""The settings of a benchmark: the number of ranks, and the links between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from oktopk.bench.netlab import LabError, check_possible
from oktopk.errors import SettingError, within

DEFAULT_MBIT = 1000.0


@dataclass(frozen=True)
class Setting:
    """P ranks, and the network between them.

    mbit        speed of each link (0: unlimited; None: the loopback, without a lab)
    delay_ms    milliseconds that a packet takes, one way
    """

    ranks: int
    mbit: float | None
    delay_ms: float = 0.0

    @classmethod
    def of(cls, measured: Mapping[str, Any]) -> Setting:
        """Return the setting of some results."""
        return cls(**{field.name: measured[field.name] for field in fields(cls)})

    def __str__(self) -> str:
        return f"P = {self.ranks}, {link_name(self.mbit)}" + (f", {self.delay_ms:g} ms away" if self.delay_ms else "")


def make_settings(
    ranks: Sequence[int], mbit: Sequence[float] | None, delay_ms: float
) -> tuple[list[Setting], list[str]]:
    """Return a setting for each number of ranks and each link, and notes for the user."""
    within("--delay-ms", delay_ms, 0)
    try:
        check_possible()
    except LabError as error:
        shaped = [f"links of {link:g} Mbit/s" for link in mbit or () if link]
        wanted = [*shaped, *(["delay"] if delay_ms else [])]
        if wanted:
            advice = "--mbit 0 alone measures over the loopback"
            raise SettingError(f"wanted {', '.join(wanted)}, but {error}; {advice}") from None
        note = f"over the loopback of this machine, and no bytes counted by an interface: {error}"
        return [Setting(size, None) for size in ranks], [note]
    return [Setting(size, link, delay_ms) for size in ranks for link in mbit or [DEFAULT_MBIT]], []


def link_name(mbit: float | None) -> str:
    """Return the name of a link.

    >>> link_name(1000), link_name(0), link_name(None)
    ('1000 Mbit/s', 'unlimited link', 'loopback')
    """
    return "loopback" if mbit is None else f"{mbit:g} Mbit/s" if mbit else "unlimited link"

"""The settings of a benchmark: how many ranks, on which links."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from oktopk.bench.netlab import LabError, check_possible
from oktopk.errors import SettingError

DEFAULT_MBIT = 1000.0


@dataclass(frozen=True)
class Setting:
    """P ranks, on links of so many Mbit/s (0: as fast as it goes; None: the loopback, without a lab)."""

    ranks: int
    mbit: float | None

    def __str__(self) -> str:
        return f"P = {self.ranks}, {link_name(self.mbit)}"


def link_name(mbit: float | None) -> str:
    """Return what a link is called.

    >>> link_name(1000), link_name(0), link_name(None)
    ('1000 Mbit/s', 'unlimited link', 'loopback')
    """
    return "loopback" if mbit is None else f"{mbit:g} Mbit/s" if mbit else "unlimited link"


def choose_links(asked: Sequence[float] | None) -> tuple[list[float | None], list[str]]:
    """Return the links to measure on, and what the user should know about them."""
    try:
        check_possible()
    except LabError as error:
        shaped = [f"{mbit:g}" for mbit in asked or () if mbit]
        if shaped:
            raise SettingError(
                f"links of {', '.join(shaped)} Mbit/s were asked for, but {error}; --mbit 0 measures over the loopback"
            ) from None
        return [None], [f"over the loopback of this machine, and no bytes counted by an interface: {error}"]
    return list(asked or [DEFAULT_MBIT]), []

"""Bounds of what can be set of a lane: one table for options, queue arguments, commands and scripts.

The scripts get it as ``BOUNDS`` and ``CHOICES`` (see `fairlanes_transport.scripts`), so that a value that one of them
stores can be used by every other.
"""

from __future__ import annotations

from typing import Final, NamedTuple

YEAR_SECONDS: Final = 366 * 86_400


class Bounds(NamedTuple):
    """Least and most of a number, both included, and whether it is whole."""

    low: float
    high: float
    whole: bool = False

    def hold(self, value: object) -> bool:
        """Return whether *value* is a number within these bounds."""
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return False
        # False for NaN too.
        return self.low <= value <= self.high and (not self.whole or value == int(value))

    def __str__(self) -> str:
        return f"a{' whole' if self.whole else ''} number from {self.low:.12g} to {self.high:.12g}"


NUMBERS: Final = {
    "weight": Bounds(0.001, 1000),
    "limit": Bounds(1, 10**9, whole=True),
    "burst": Bounds(1, 10**6),
    "max_size": Bounds(1, 10**9, whole=True),
    "paused": Bounds(1, 1),
    # Starts per millisecond: from one in a year to a million in a second.
    "rate": Bounds(1 / (YEAR_SECONDS * 1000), 1000),
}
CHOICES: Final = {"fairness": ("count", "time")}
#: Settings that may be ``"none"``: no such bound, whatever the default.
MAY_BE_NONE: Final = ("limit", "rate", "max_size")
#: What can be set of one lane, and what a queue may say of all its lanes.
OF_A_LANE: Final = ("weight", "limit", "rate", "burst", "max_size", "paused")
OF_A_QUEUE: Final = ("weight", "limit", "rate", "burst", "max_size", "fairness")

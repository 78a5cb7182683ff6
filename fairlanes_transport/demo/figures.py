"""What ``fairlanes demo`` computes from its records: waits, percentiles, and fairness."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from typing import NamedTuple


class Start(NamedTuple):
    """One task that was started; times in seconds since the epoch."""

    tenant: str
    number: int
    sent: float
    started: float

    @property
    def wait(self) -> float:
        """Seconds between sending and start."""
        return self.started - self.sent


def waits(starts: Collection[Start], tenants: Collection[str]) -> list[float]:
    """Return the waits of these tenants' tasks in seconds, shortest first."""
    return sorted(start.wait for start in starts if start.tenant in tenants)


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Return the smallest value that at least ``percent`` of the values do not exceed (nearest rank).

    Raises:
        ValueError: there are no values.
    """
    if not ordered:
        raise ValueError("a percentile of nothing")
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def jain(values: Collection[float]) -> float:
    """Return Jain's index of the values: (sum x)^2 / (n * sum x^2).

    1 when all are equal; 1/n when one has everything.

    Raises:
        ValueError: there are no values, or none above 0.
    """
    if not any(values):
        raise ValueError("Jain's index of nothing")
    return sum(values) ** 2 / (len(values) * sum(value * value for value in values))


def contested_service(starts: Collection[Start], tenants: Collection[str]) -> Counter[str]:
    """Return how many tasks of each tenant were started while every tenant had a task waiting.

    That is when a scheduler decides who gets a worker, and the only time in which equal service is owed: a
    tenant without waiting tasks is served less because it asks for less. The flood's tasks from before the
    others came, and what remains when the first tenant has run dry, are therefore left out.
    """
    events = sorted([(s.sent, 0, s.tenant) for s in starts] + [(s.started, 1, s.tenant) for s in starts])
    waiting: Counter[str] = Counter()
    served = Counter(dict.fromkeys(tenants, 0))
    for _, is_start, tenant in events:
        if not is_start:
            waiting[tenant] += 1
            continue
        if all(waiting[other] > 0 for other in tenants):
            served[tenant] += 1
        waiting[tenant] -= 1
    return served


def fairness(starts: Collection[Start], tenants: Collection[str]) -> float | None:
    """Return Jain's index of :func:`contested_service`, or None if the tenants never all waited at once."""
    served = contested_service(starts, tenants)
    return jain(served.values()) if any(served.values()) else None

"""How a queue's lanes are served over time, from looks at it: what ``fairlanes top`` shows.

The server keeps no count per lane, so that nothing of a lane stays behind.  What a lane was served since the
last look is read from its order: the message that was its last one has moved up by as many places.  A lane
that was emptied in between was served at least all that it had; what came and went between is not seen.
"""

from __future__ import annotations

import dataclasses
import math
import time
from dataclasses import dataclass
from typing import Any, Final

from .api import Lanes, shared
from .reach import checked
from .replies import raw
from .views import LaneStats, QueueStats

#: Lanes that one look reads; of more, each look reads the next so many.
LANES_PER_LOOK: Final = 1000
#: Seconds over which rates and shares are averaged; older looks fade.
MEMORY_SECONDS: Final = 10.0


@dataclass(frozen=True)
class Row:
    """A lane and how it is served."""

    stats: LaneStats
    #: messages per second
    rate: float
    #: part of all that the queue served; None: it served nothing
    served: float | None


@dataclass(frozen=True)
class Look:
    """One look at a queue."""

    queue: QueueStats
    rows: tuple[Row, ...]
    #: messages per second, of the whole queue
    rate: float


@dataclass
class _Average:
    """A rate that forgets."""

    count: float = 0.0
    seconds: float = 0.0

    def add(self, count: float, seconds: float) -> None:
        fade = math.exp(-seconds / MEMORY_SECONDS)
        self.count = self.count * fade + count
        self.seconds = self.seconds * fade + seconds

    @property
    def rate(self) -> float:
        return self.count / self.seconds if self.seconds else 0.0


@dataclass
class _Lane:
    stats: LaneStats
    seen: float
    average: _Average


class Watch:
    """Looks at one queue again and again; each look is bounded."""

    def __init__(self, lanes: Lanes, queue: str, *, lanes_per_look: int = LANES_PER_LOOK) -> None:
        self.lanes, self.queue, self.lanes_per_look = lanes, queue, lanes_per_look
        self._known: dict[str, _Lane] = {}
        self._after = ""
        self._round: set[str] = set()
        self._total = _Average()
        self._claimed: tuple[float, int] | None = None

    def look(self, also: tuple[str, ...] = ()) -> Look:
        """Look now.

        Args:
            also: lanes to read in any case: those on the screen.

        Raises:
            QueueAbsent: the queue was deleted.
        """
        queue = self.lanes.snapshot(self.queue)
        self._count(queue)
        names, more = self.lanes.browser.names(self.queue, self._after, self.lanes_per_look, ("lanes",))
        self._round.update(names)
        self._read([*names, *(name for name in also if name in self._known and name not in names)])
        self._after = names[-1] if more else ""
        if not more:
            self._known = {name: lane for name, lane in self._known.items() if name in self._round}
            self._round = set()
        return self._judged(queue)

    def _count(self, queue: QueueStats) -> None:
        """What the queue served in all: claims that were not taken back."""
        now, totals = time.monotonic(), queue.totals
        count = totals.get("claimed", 0) - totals.get("released", 0) - totals.get("expired", 0)
        if self._claimed is not None:
            self._total.add(max(0, count - self._claimed[1]), now - self._claimed[0])
        self._claimed = (now, count)

    def _read(self, names: list[str]) -> None:
        browser = self.lanes.browser
        marked = [name for name in names if name in self._known and self._known[name].stats.last_tag]
        commands = [
            ("ZRANK", key, raw(self._known[name].stats.last_tag))
            for name, key in zip(marked, browser.lane_keys(self.queue, "ready", marked), strict=True)
        ]
        ranks: dict[str, Any] = dict(zip(marked, checked(browser.commands.pipeline(commands)), strict=True))
        now = time.monotonic()
        for stats in browser.lanes(self.queue, names):
            known = self._known.get(stats.lane)
            if known is None:
                self._known[stats.lane] = _Lane(stats, now, _Average())
                continue
            served = 0
            if stats.lane in ranks:
                rank = ranks[stats.lane]
                served = known.stats.ready - (0 if rank is None else rank + 1)
            known.average.add(max(0, served), now - known.seen)
            known.stats, known.seen = stats, now

    def _judged(self, queue: QueueStats) -> Look:
        known = list(self._known.values())
        # Lanes are measured one by one; together they cannot have got more than the queue gave.
        total = max(self._total.rate, sum(lane.average.rate for lane in known))
        rows = tuple(
            Row(stats, lane.average.rate, lane.average.rate / total if total else None)
            for stats, lane in zip(shared([lane.stats for lane in known]), known, strict=True)
        )
        return Look(queue, rows, self._total.rate)


def as_json(look: Look) -> dict[str, Any]:
    """A look as JSON shows it."""
    return {
        "queue": dataclasses.asdict(look.queue),
        "rate": look.rate,
        "lanes": [
            {
                **dataclasses.asdict(row.stats),
                "state": row.stats.state,
                "rate": row.rate,
                "served": row.served,
            }
            for row in look.rows
        ],
    }

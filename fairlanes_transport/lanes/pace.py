"""How fast a queue and its lanes are served, from looks at them.

The server keeps no count per lane, so that nothing of a lane stays behind.  So what a lane was served is measured
between two looks: the message that was its last one has moved up by as many places.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from .browse import Browser
from .reach import checked
from .views import QueueStats

#: Seconds of claiming over which the pace is averaged; what is older fades.
PACE_SECONDS: Final = 600.0


class Pace:
    """How fast a queue is claimed from while there is something to claim."""

    def __init__(self) -> None:
        self._claims = self._seconds = 0.0
        self._before: tuple[float, int, bool] | None = None

    def note(self, queue: QueueStats, now: float) -> None:
        """Take in the queue as it is at `now` (monotonic seconds)."""
        claimed, busy = queue.totals.get("claimed", 0), queue.lanes_servable > 0 and not queue.paused
        if self._before is not None:
            then, before, was_busy = self._before
            if busy and was_busy and claimed >= before and now > then:
                fade = math.exp((then - now) / PACE_SECONDS)
                self._claims = self._claims * fade + claimed - before
                self._seconds = self._seconds * fade + now - then
        self._before = (now, claimed, busy)

    @property
    def rate(self) -> float | None:
        """Claims per second; None: not known."""
        return self._claims / self._seconds if self._claims else None


@dataclass
class _Mark:
    """The message that was a lane's last one, how many there were up to it, and what was served until then."""

    tag: bytes
    place: int
    served: int


class Progress:
    """Counts what the lanes that are looked at were served; forgets one that is not looked at."""

    def __init__(self, browser: Browser, queue: str) -> None:
        self.browser, self.queue = browser, queue
        self._marks: dict[str, _Mark] = {}

    def look(self, names: Sequence[str]) -> dict[str, int]:
        """Look at these lanes: messages that have left each since it was first looked at.

        Of a lane that was emptied in between at least those that it had; what came and went is not seen.
        """
        commands: list[tuple[Any, ...]] = []
        for name, ready in zip(names, self.browser.lane_keys(self.queue, "ready", names), strict=True):
            tag = self._marks[name].tag if name in self._marks else b""
            commands += [("ZRANK", ready, tag), ("ZREVRANGE", ready, 0, 0), ("ZCARD", ready)]
        replies = iter(checked(self.browser.commands.pipeline(commands)))
        marks: dict[str, _Mark] = {}
        for name, rank, last, ready in zip(names, replies, replies, replies, strict=True):
            mark, served = self._marks.get(name), 0
            if mark is not None:
                served = mark.served + max(0, mark.place - (0 if rank is None else rank + 1))
            marks[name] = _Mark(last[0] if last else b"", ready, served)
        self._marks = marks
        return {name: mark.served for name, mark in marks.items()}

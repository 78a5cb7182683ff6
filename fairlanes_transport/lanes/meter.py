"""What there is to measure of a queue, in bounded work: the figures behind the metrics."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any, Final

from ..errors import QueueAbsent
from .api import Lanes, shared
from .pace import Pace, Progress
from .reach import checked
from .replies import queue_stats, text
from .survey import LANES_PER_STEP, Round, Survey
from .views import LaneStats, QueueStats

#: Upper bounds (ms) of the histogram of waits, as in ``lua/include/waits.lua``; one more bucket has no bound.
WAIT_BOUNDS: Final = (50, 100, 250, 500, 1000, 2500, 5000, 10_000, 30_000, 60_000, 300_000, 1_800_000)
#: Delayed messages, and dead letters, whose lanes one reading looks at.
MESSAGES_PER_READING: Final = 5000
_MESSAGES_AT_ONCE: Final = 1000


@dataclass(frozen=True)
class LaneReading:
    """One of a queue's longest lanes."""

    stats: LaneStats
    #: messages that have left it since it became one of the longest, at least
    served: int
    #: s, see `Meter.worst_wait`
    worst_wait: float | None


@dataclass(frozen=True)
class Reading:
    """A queue at one moment, and its longest lanes."""

    queue: QueueStats
    lanes: tuple[LaneReading, ...]
    #: delayed messages and dead letters by lane: those of the lanes that have most
    delayed: Mapping[str, int]
    dead: Mapping[str, int]
    #: s, the longest wait of any unpaused lane's next message, and of those not in `lanes`; 0: none waits
    oldest_wait: float
    rest_oldest_wait: float
    #: s, of a message in a lane that has none yet, with the queue's default weight
    worst_wait: float | None

    def shortened(self, most: int) -> Reading:
        """Return the reading with at most so many lanes named."""
        if len(self.lanes) <= most and max(len(self.delayed), len(self.dead)) <= most:
            return self
        oldest = max([self.rest_oldest_wait, *(lane.stats.oldest_wait or 0.0 for lane in self.lanes[most:])])
        return replace(
            self,
            lanes=self.lanes[:most],
            delayed=dict(list(self.delayed.items())[:most]),
            dead=dict(list(self.dead.items())[:most]),
            rest_oldest_wait=oldest,
        )


class Meter:
    """Reads one queue again and again.

    Args:
        lanes: of the broker.
        top: lanes to name.
    """

    def __init__(self, lanes: Lanes, queue: str, top: int, *, lanes_per_reading: int = LANES_PER_STEP) -> None:
        self.lanes, self.queue, self.top = lanes, queue, top
        # One more, so that the rest's oldest lane is known too.
        self._survey = Survey(lanes.store, queue, top + 1, lanes_per_step=lanes_per_reading)
        self._pace = Pace()
        self._progress = Progress(lanes.browser, queue)
        self._dead: tuple[Any, Counter[str]] = (None, Counter())

    def read(self, until: float = math.inf) -> Reading:
        """Read now.

        Args:
            until: when to cut the walk through the lanes short (monotonic seconds).

        Raises:
            QueueAbsent: the queue was deleted, or never declared.
            redis.exceptions.RedisError: the broker cannot be reached.
        """
        if not self.lanes.store.exists(self.queue):
            raise QueueAbsent(f"queue {self.queue!r} does not exist")
        pulse = self.lanes.store.pulse(self.queue)
        queue = queue_stats(self.queue, pulse)
        self._pace.note(queue, monotonic())
        found = self._survey.step(until)
        lanes = self._longest(queue, found)
        named = {lane.stats.lane for lane in lanes}
        waits = [(name, max(0.0, (int(pulse[0]) - since) / 1000)) for name, since in found.by_age()]
        return Reading(
            queue=queue,
            lanes=lanes,
            delayed=self._most(self._by_lane("ZRANGE", "delayed") if queue.delayed else Counter()),
            dead=self._most(self._dead_by_lane(queue)),
            oldest_wait=waits[0][1] if waits else 0.0,
            rest_oldest_wait=next((wait for name, wait in waits if name not in named), 0.0),
            worst_wait=self.worst_wait(queue, found, queue.defaults.weight or 1.0),
        )

    def worst_wait(
        self, queue: QueueStats, found: Round, weight: float, backlog: int = 0, *, contends: bool = False
    ) -> float | None:
        """Seconds until a message is claimed that is published now, at the queue's pace, if all lanes that contend
        now go on doing so: the most messages that are claimed before it, and itself, over claims per second.

        What the lane's own limit, rate, throttle or pause add is not in it.  None: the pace is not known yet, or
        lanes are charged by time, not by messages.

        Args:
            weight, backlog: of the lane that it is published into.
            contends: whether that lane is among those that contend.
        """
        rate = self._pace.rate
        if rate is None or queue.fairness == "time":
            return None
        return (found.served_before(weight, backlog, contends=contends) + 1) / rate

    def _longest(self, queue: QueueStats, found: Round) -> tuple[LaneReading, ...]:
        names = [name for name, _ in found.by_length()[: self.top]]
        served = self._progress.look(names)
        stats = self.lanes.browser.lanes(self.queue, names)
        # Lanes that have joined since they were surveyed count too.
        weight = max(found.weight, sum(lane.weight for lane in stats if lane.ready and not lane.paused))
        return tuple(
            LaneReading(
                lane,
                served[lane.lane],
                self.worst_wait(queue, found, lane.weight, lane.ready, contends=lane.ready > 0)
                if not lane.paused
                else None,
            )
            for lane in shared(stats, weight)
        )

    def _most(self, by_lane: Counter[str]) -> dict[str, int]:
        return dict(sorted(by_lane.items(), key=lambda item: (-item[1], item[0]))[: self.top])

    def _dead_by_lane(self, queue: QueueStats) -> Counter[str]:
        """The lanes of the newest dead letters; read again only when there are others."""
        state = (queue.dead, queue.totals.get("died"))
        if state != self._dead[0]:
            self._dead = (state, self._by_lane("ZREVRANGE", "dead") if queue.dead else Counter())
        return self._dead[1]

    def _by_lane(self, command: str, part: str) -> Counter[str]:
        """How many of a sorted set's first messages each lane has."""
        browser, found = self.lanes.browser, Counter[str]()
        for start in range(0, MESSAGES_PER_READING, _MESSAGES_AT_ONCE):
            key, stop = browser.key(self.queue, part), start + _MESSAGES_AT_ONCE - 1
            tags = browser.commands.call(command, key, start, stop)
            if tags:
                (records,) = checked(browser.commands.pipeline([("HMGET", browser.key(self.queue, "message"), *tags)]))
                found.update(text(record.split(b" ", 8)[-1]) for record in records if record is not None)
            if len(tags) < _MESSAGES_AT_ONCE:
                break
        return found

"""A walk through a queue's lanes in bounded steps: the longest, those that wait longest, and how heavy all are.

A step reads at most `LANES_PER_STEP` lanes.  A queue with fewer is seen whole in each step; of more, each step
reads the next so many, and what is said of the queue is what the last whole round found, with what the round
under way has found since.  What is remembered does not grow with the number of lanes.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Final

from ..envelope import eta_ms
from ..store import Store
from .replies import text

#: Lanes that one step reads.
LANES_PER_STEP: Final = 5_000
#: Lanes that one script run reads: one or two milliseconds of the server's time.
LANES_AT_ONCE: Final = 100


@dataclass
class Round:
    """What a walk has found, whole or not.

    Attributes:
        keep: of so many lanes at least `longest` and `oldest` know.
        weights: weight -> number of lanes that have it and contend: with ready messages, and not paused.
        longest: lane -> ready messages, of the longest and some others.
        oldest: lane -> ms since the epoch from which on its next message waits, of the unpaused ones that have
            waited longest and some others.
    """

    keep: int
    weights: Counter[float] = field(default_factory=Counter)
    longest: dict[str, int] = field(default_factory=dict)
    oldest: dict[str, int] = field(default_factory=dict)

    def add(self, lane: str, ready: int, weight: float, since: int | None, *, paused: bool) -> None:
        """Take in a lane that has ready messages."""
        self.longest[lane] = ready
        if not paused:
            self.weights[weight] += 1
            if since is not None:
                self.oldest[lane] = since
        if len(self.longest) > 4 * self.keep:
            self.longest = dict(self.by_length())
        if len(self.oldest) > 4 * self.keep:
            self.oldest = dict(self.by_age())

    def by_length(self) -> list[tuple[str, int]]:
        """The longest lanes, the longest first, then by name."""
        return sorted(self.longest.items(), key=lambda item: (-item[1], item[0]))[: self.keep]

    def by_age(self) -> list[tuple[str, int]]:
        """The lanes that have waited longest, the first of them first."""
        return sorted(self.oldest.items(), key=lambda item: (item[1], item[0]))[: self.keep]

    def then(self, newer: Round) -> Round:
        """This round, brought up to date by what another has found since."""
        return replace(self, longest={**self.longest, **newer.longest}, oldest={**self.oldest, **newer.oldest})

    @property
    def weight(self) -> float:
        """Of all lanes that contend, together."""
        return sum(weight * lanes for weight, lanes in self.weights.items())

    def served_before(self, weight: float, backlog: int, *, contends: bool) -> int:
        """The most messages that are claimed before one that is published now into a lane.

        The lane's own backlog is served before it, and until a lane has had ``backlog + 1`` turns another of
        weight v has at most ``ceil((backlog + 1) * v / weight)``.

        Args:
            weight, backlog: of the lane.
            contends: the lane is itself among those of `weights`.
        """
        turns = backlog + 1
        all_lanes = sum(lanes * math.ceil(turns * v / weight) for v, lanes in self.weights.items())
        return backlog + all_lanes - (turns if contends else 0)


class Survey:
    """Walks through one queue's lanes.

    Args:
        keep: of how many of the longest lanes, and of those that wait longest, to know the names.
        lanes_per_step: see the module.
    """

    def __init__(self, store: Store, queue: str, keep: int, *, lanes_per_step: int = LANES_PER_STEP) -> None:
        self.store, self.queue, self.keep, self.lanes_per_step = store, queue, keep, lanes_per_step
        self._after = b""
        self._round = Round(keep)
        self._whole: Round | None = None

    def step(self, until: float = math.inf) -> Round:
        """Go on, perhaps to the end of the round; returns what is known now.

        Args:
            until: when to stop in any case (monotonic seconds), after one page at least.
        """
        left = self.lanes_per_step
        while True:
            left -= self._read(min(left, LANES_AT_ONCE))
            if not self._after:
                self._whole, self._round = self._round, Round(self.keep)
                return self._whole
            if left <= 0 or monotonic() > until:
                return self._whole.then(self._round) if self._whole else self._round

    def _read(self, limit: int) -> int:
        _, self._after, lanes = self.store.survey(self.queue, self._after, limit)
        for name, ready, weight, paused, born, eta in lanes:
            since = max(int(born), eta_ms({"eta": text(eta)})) if born else None
            self._round.add(text(name), ready, float(weight), since, paused=paused == 1)
        return limit

"""The ring in plain Python: self-clocked fair queueing, charged before service, on a circle of whole ticks.

It is told from the design and not from the scripts.  Exact fractions stand for what the scripts do in doubles.
"""

from __future__ import annotations

from fractions import Fraction
from math import ceil

#: Ticks of a turn of cost 1 at weight 1, of the circle, and the most that a lane stands ahead.
UNIT, CIRCLE, LEAD = 2**28, 2**52, 2**51


def step(cost: float, weight: float) -> int:
    """Return the ticks that a turn costs."""
    return max(1, min(LEAD, ceil(Fraction(cost) * UNIT / Fraction(weight))))


class Turns:
    """Which lane is next.  Virtual time is counted without an end here; `tags` are what the store has."""

    def __init__(self, time: int = 0) -> None:
        #: virtual time: the tag that was served last; the base that was given last
        self.time = self.last = time
        #: lane -> virtual time of its turn, and the cost that it has paid for it
        self.at = dict[str, int]()
        self.paid = dict[str, float]()
        #: lanes that left with work -> their place and what they had paid
        self.kept = dict[str, tuple[int, float]]()

    @property
    def tags(self) -> dict[str, int]:
        """Lanes on the ring, as the store has them."""
        return {lane: at % CIRCLE for lane, at in self.at.items()}

    def base(self) -> int:
        """Return a start that is later than every one before it."""
        self.last = max(self.time, self.last + 1)
        return self.last

    def join(self, lane: str, cost: float, weight: float) -> None:
        """Put a lane on the ring: a turn from now, or where it was when it left with work."""
        base = self.base()
        at = base + step(cost, weight)
        if lane in self.kept:
            place, paid = self.kept.pop(lane)
            at = max(base, min(base + LEAD, place + step(cost, weight) - step(paid, weight)))
        self.at[lane], self.paid[lane] = at, cost

    def leave(self, lane: str, *, works: bool) -> None:
        """Take a lane off the ring; one that has work keeps its place, any other is forgotten."""
        if lane in self.at:
            self.kept[lane] = (self.at.pop(lane), self.paid.pop(lane))
        if not works:
            self.kept.pop(lane, None)

    def head(self) -> str:
        """Return the lane whose turn it is."""
        return min(self.at, key=lambda lane: (self.at[lane], lane))

    def pay_more(self, lane: str, cost: float, weight: float) -> bool:
        """Charge a lane for a message that is dearer than the one it paid for; False: it is not."""
        paid = self.paid[lane]
        if cost <= paid:
            return False
        self.at[lane] = self.time + min(LEAD, self.at[lane] - self.time + step(cost, weight) - step(paid, weight))
        self.paid[lane] = cost
        return True

    def serve(self, lane: str, cost: float, following: float | None, weight: float) -> None:
        """Serve a message of that cost; the lane pays for the `following` one, or is forgotten."""
        self.time, credit = self.at.pop(lane), self.paid.pop(lane) - cost
        if following is not None:
            back = step(credit, weight) if credit > 0 else 0
            self.at[lane] = self.base() + max(0, step(following, weight) - back)
            self.paid[lane] = following

    def weigh(self, lane: str, old: float, new: float) -> None:
        """Stretch the rest of a lane's way after its weight has changed."""
        if lane in self.at:
            rest = ceil(Fraction(self.at[lane] - self.time) * Fraction(old) / Fraction(new))
            self.at[lane] = self.time + min(LEAD, rest)
        elif lane in self.kept:
            place, paid = self.kept[lane]
            if place > self.time:
                rest = ceil(Fraction(place - self.time) * Fraction(old) / Fraction(new))
                self.kept[lane] = (self.time + min(LEAD, rest), paid)

    def rewind(self, lane: str, weight: float) -> None:
        """A default has changed: the lane waits one turn at most of what a turn costs now."""
        if lane in self.at:
            self.at[lane] = min(self.at[lane], self.time + step(self.paid[lane], weight))
        elif lane in self.kept:
            place, paid = self.kept[lane]
            self.kept[lane] = (min(place, self.time + step(paid, weight)), paid)

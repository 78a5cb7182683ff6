"""What is sound and what is not: pure judgements over what the scripts lanes, messages and pulse saw.

Each of these replies is one moment of the server, so a judgement holds under load too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from .replies import pairs, text

#: A whole record; its groups are slot and lane.
RECORD = re.compile(rb"\d+ \d+ \d+ \d+ \S+ \d+ ([01]) \S+ (.+)", re.DOTALL)
#: What time alone may put off: a lane in `waiting` is fetched by the next claim.
_SLACK_MS = 1000
#: A keeper that is later than this is dead, and so is whoever should have noticed: longer than any park.
_KEEPER_MS = 60_000
#: Totals of messages that came, and of those that left.
_CAME, _LEFT = ("enqueued", "moved_in"), ("acked", "trimmed", "purged", "cancelled", "moved_out")


class Kind(str, Enum):
    """What can be wrong.  The value is what the doctor calls it."""

    LANE_STRANDED = "lane off the ring"
    """It has messages that can be served, but neither ring nor `waiting` has it: nobody will serve it."""
    LANE_MISPLACED = "lane misplaced"
    """It is on the ring, or in `waiting`, though it must not be there, or for too long."""
    LANE_INDEX = "lane index wrong"
    """The index of lanes with messages, or of those with settings, does not say what is there."""
    LANE_ENDLESS = "state without an end"
    """The end of a throttle, a rate's next start or a time debt that would stay for ever."""
    UNKNOWN_KEY = "unknown key"
    """A key under the queue's base that is none of its parts.  Not repaired: it is not ours."""
    NO_RECORD = "no record"
    """Something of a message is there, but not its record."""
    BAD_RECORD = "damaged record"
    """A record that cannot be read."""
    IN_NO_SET = "message in no set"
    """A message that is neither ready, leased, delayed nor dead: nobody will serve it."""
    IN_TWO_SETS = "message in two sets"
    """A message that is in more than one of ready, leased, delayed, dead."""
    WRONG_LANE = "message in a foreign lane"
    """A message that is ready, or in flight, in a lane that is not its own."""
    PAYLOAD_LOST = "payload lost"
    """A message without envelope or body: it cannot be served, and the repair removes it."""
    UNTOLD = "told of no dead letter"
    """Somebody is to be told of a dead letter that is none."""
    FLIGHT = "in flight wrong"
    """A lease that its lane does not count, or a lane that counts a lease that is not there."""
    TOKEN_MISSING = "wake token missing"
    """There is work, and nobody will be woken for it."""
    TOKEN_SUPERFLUOUS = "wake token superfluous"
    """A token without need, or more than one."""
    KEEPER_GONE = "timekeeper gone"
    """Who should have seen to what is due has not for a minute; any other consumer would after one park."""
    BOOKS = "books do not balance"
    """Messages enqueued are not those gone and those here: some were lost or made by somebody else."""


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong."""

    queue: str
    kind: Kind
    #: in words, with the numbers
    what: str
    lane: str | None = None
    tag: str | None = None
    repaired: bool = False


@dataclass(frozen=True)
class _Lane:
    """What ``lanes.lua`` states, as far as it is judged here."""

    ready: int
    flight: int
    ring: bool
    #: ms; None: not in `waiting`
    waiting: float | None
    indexed: bool
    configured: bool
    settings: bool
    limit: float | None
    paused: bool
    blocked: float | None
    ttls: tuple[int, ...]

    @classmethod
    def of(cls, seen: list[Any]) -> _Lane:
        def number(value: bytes) -> float | None:
            return float(value) if value else None

        return cls(
            ready=seen[0], flight=seen[1], ring=seen[2] != b"", waiting=number(seen[3]), indexed=seen[4] == 1,
            configured=seen[5] == 1, settings=bool(seen[6]), limit=number(seen[8]), paused=seen[12] == 1,
            blocked=number(seen[13]), ttls=tuple(seen[18]),
        )  # fmt: skip

    @property
    def held(self) -> str:
        """Why the lane cannot be served, time apart; '' if it can."""
        if not self.ready:
            return "it is empty"
        if self.paused:
            return "it is paused"
        if self.limit is not None and self.flight >= self.limit:
            return f"{self.flight} are in flight, its limit is {self.limit:g}"
        return ""


def judge_lane(now: int, seen: list[Any]) -> Iterator[tuple[Kind, str]]:
    """What is wrong with a lane, from its part of the reply of ``lanes.lua``."""
    lane = _Lane.of(seen)
    yield from _judge_place(now, lane)
    if lane.indexed != (lane.ready + lane.flight > 0):
        yield Kind.LANE_INDEX, f"{lane.ready} ready, {lane.flight} in flight, in the index: {lane.indexed}"
    if lane.configured != lane.settings:
        yield Kind.LANE_INDEX, f"settings of its own: {lane.settings}, in their index: {lane.configured}"
    for name, ttl in zip(("throttle", "allowed", "work"), lane.ttls, strict=True):
        if ttl == -1:
            yield Kind.LANE_ENDLESS, f"its {name} has no end"


def _judge_place(now: int, lane: _Lane) -> Iterator[tuple[Kind, str]]:
    if lane.held:
        if lane.ring or lane.waiting is not None:
            yield Kind.LANE_MISPLACED, f"on the {'ring' if lane.ring else 'waiting list'}, but {lane.held}"
    elif lane.ring and lane.blocked is not None:
        yield (
            Kind.LANE_MISPLACED,
            f"on the ring, but throttle or rate hold it for {lane.blocked - now:.0f} ms",
        )
    elif not lane.ring and lane.waiting is None:
        yield Kind.LANE_STRANDED, f"{lane.ready} ready, and neither on the ring nor waiting"
    elif lane.waiting is not None and lane.waiting > max(now, lane.blocked or 0) + _SLACK_MS:
        until = lane.waiting - max(now, lane.blocked or 0)
        yield Kind.LANE_MISPLACED, f"waits {until:.0f} ms longer than throttle and rate ask for"


def judge_message(given: str, seen: list[Any]) -> Iterator[tuple[Kind, str]]:
    """What is wrong with a message found in lane `given`, from its part of the reply of ``messages.lua``."""
    record, own, found, lease, delayed, dead, flight_own, flight_found, envelope, body = seen
    sets = [
        name
        for name, score in (("ready", own), ("leased", lease), ("delayed", delayed), ("dead", dead))
        if score != b""
    ]
    rest = [name for name, there in (("envelope", envelope), ("body", body), ("flight", flight_own)) if there]
    if not record:
        if sets or rest:
            yield Kind.NO_RECORD, f"no record, but there is: {', '.join(sets + rest)}"
        return
    whole = RECORD.fullmatch(record)
    if not whole:
        yield Kind.BAD_RECORD, f"the record cannot be read: {record[:80]!r}"
        return
    slot, lane = whole.groups()
    if text(lane) != given and (found != b"" or flight_found):
        yield Kind.WRONG_LANE, f"its lane is {text(lane)!r}"
    if not sets:
        yield Kind.IN_NO_SET, "neither ready, leased, delayed nor dead"
    elif len(sets) > 1:
        yield Kind.IN_TWO_SETS, f"it is {' and '.join(sets)}"
    if slot == b"0" and not (envelope and body):
        yield Kind.PAYLOAD_LOST, f"no {'envelope' if not envelope else 'body'}"
    if (lease != b"") != bool(flight_own):
        yield Kind.FLIGHT, "leased, but not counted as in flight" if lease else "in flight, but not leased"


def need(pulse: list[Any]) -> bool:
    """Whether a wake token has to be there."""
    state, timed = pairs(pulse[13]), pulse[9] + pulse[2] > 0
    return state.get("paused") != "1" and ("walk" in state or pulse[1] > 0 or (timed and "keeper" not in state))


def judge_token(pulse: list[Any]) -> Iterator[tuple[Kind, str]]:
    """What is wrong with the wake token and the timekeeper, from the reply of ``pulse.lua``."""
    tokens, needed = pulse[12], need(pulse)
    until = pairs(pulse[13]).get("keeper_until")
    if until and (late := int(pulse[0]) - float(until)) > _KEEPER_MS:
        yield Kind.KEEPER_GONE, f"what was due {late / 1000:.0f} s ago has not been seen to"
    if needed and not tokens:
        yield Kind.TOKEN_MISSING, f"{pulse[1]} lanes on the ring, {pulse[9]} messages delayed, no token"
    elif tokens > 1 or (tokens and not needed):
        yield Kind.TOKEN_SUPERFLUOUS, f"{tokens} tokens, needed: {int(needed)}"


def imbalance(pulse: list[Any]) -> int:
    """Messages that should be here but are not; negative: that are here but should not be.

    A running slot has no body any more, so the bodies count the messages.
    """
    totals = {name: int(value) for name, value in pairs(pulse[14]).items()}
    came, left = (sum(totals.get(name, 0) for name in names) for names in (_CAME, _LEFT))
    return int(came - left - pulse[7])

"""The invariants of a queue, checked on its whole state: conservation, ring, in flight, wake, keeper, no leak.

``dump`` reads everything that a queue has on the server, in one atomic step, and never writes; ``check`` asserts
what must hold between any two scripts.  Both work on fakeredis and on a live server under load, from a redis-py
client that does not decode responses.  Share and fence are properties of histories, not of a state: the model
(``tests/model``) and the script tests look after them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import redis

from fairlanes_transport import keys

#: Totals of messages that have left a queue.  With those that are in it they make up ``enqueued``.
LEFT = ("acked", "trimmed", "purged", "cancelled", "moved_out")
#: Totals of messages that have entered a queue.
ENTERED = ("enqueued", "moved_in")

_ORDER_BITS = 2**49
#: What the queue notes of its use; `State.flat` leaves it out.
NOTES = ("queue/seen", "queue/finished_since")
#: Ticks of a turn of cost 1 at weight 1, of the circle, and the furthest that a lane stands ahead of the virtual time
#: (lua/include/ring.lua); the shortest time (ms) that a rate holds a lane.
UNIT, CIRCLE, LEAD = 2**28, 2**52, 2**51
NAP = 20

# Everything under a base, as one list: time, then per key its name, kind, ms to live and content.
_DUMP = """
local readers = {
  hash = function(key) return redis.call('HGETALL', key) end,
  zset = function(key) return redis.call('ZRANGE', key, 0, -1, 'WITHSCORES') end,
  set = function(key) return redis.call('SMEMBERS', key) end,
  list = function(key) return redis.call('LRANGE', key, 0, -1) end,
  string = function(key) return { redis.call('GET', key) } end,
}
local kinds = {
  queue = 'hash', totals = 'hash', message = 'hash', envelope = 'hash', body = 'hash', reasons = 'hash',
  settings = 'hash', kept = 'hash', reserved = 'hash', work = 'hash', flight = 'set', wake = 'list',
  throttle = 'string', allowed = 'string', finished = 'set', previous = 'set', ruin = 'string',
}
local time = redis.call('TIME')
local out = { time[1] * 1000 + math.floor(time[2] / 1000) }
for _, key in ipairs(redis.call('KEYS', ARGV[1])) do
  local kind = kinds[string.match(string.sub(key, #ARGV[2] + 1), '^[a-z]+')] or 'zset'
  out[#out + 1] = { key, kind, redis.call('PTTL', key), readers[kind](key) }
end
return out
"""


@dataclass(frozen=True)
class Record:
    """A message's record, as ``lua/include/record.lua`` packs it."""

    lane: str = "a"
    attempt: int = 0
    failures: int = 0
    priority: int = 0
    score: int = 0
    cost: float = 1.0
    born: int = 0
    slot: bool = False
    token: str = "-"

    @classmethod
    def parse(cls, raw: bytes) -> Record:
        """Unpack; the lane is last, as it may hold blanks."""
        attempt, failures, priority, score, cost, born, slot, token, lane = raw.split(b" ", 8)
        return cls(
            _text(lane), int(attempt), int(failures), int(priority), int(score), float(cost), int(born),
            slot == b"1", _text(token),
        )  # fmt: skip


@dataclass
class State:
    """All that a queue has on the server.  Times are ms since the epoch, `ttl` ms to live by key (without base)."""

    #: the server's time at the snapshot
    time: int = 0
    queue: dict[str, str] = field(default_factory=dict)
    totals: dict[str, int] = field(default_factory=dict)
    ring: dict[str, float] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)
    reserved: dict[str, str] = field(default_factory=dict)
    waiting: dict[str, float] = field(default_factory=dict)
    lanes: dict[str, float] = field(default_factory=dict)
    configured: dict[str, float] = field(default_factory=dict)
    message: dict[str, Record] = field(default_factory=dict)
    envelope: dict[str, bytes] = field(default_factory=dict)
    body: dict[str, bytes] = field(default_factory=dict)
    leases: dict[str, float] = field(default_factory=dict)
    delayed: dict[str, float] = field(default_factory=dict)
    dead: dict[str, float] = field(default_factory=dict)
    untold: dict[str, float] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    finished: set[str] = field(default_factory=set)
    previous: set[str] = field(default_factory=set)
    ends: dict[str, float] = field(default_factory=dict)
    throttled: dict[str, float] = field(default_factory=dict)
    ruin: dict[str, str] = field(default_factory=dict)
    ruinlanes: dict[str, float] = field(default_factory=dict)
    ruinconfigured: dict[str, float] = field(default_factory=dict)
    ruinthrottled: dict[str, float] = field(default_factory=dict)
    wake: list[bytes] = field(default_factory=list)
    ready: dict[str, dict[str, float]] = field(default_factory=dict)
    flight: dict[str, set[str]] = field(default_factory=dict)
    settings: dict[str, dict[str, str]] = field(default_factory=dict)
    throttle: dict[str, int] = field(default_factory=dict)
    allowed: dict[str, float] = field(default_factory=dict)
    work: dict[str, dict[str, str]] = field(default_factory=dict)
    ttl: dict[str, int] = field(default_factory=dict)
    #: keys of lanes of an earlier life: their names without the base -> ms to live, -1 for ever
    earlier: dict[str, int] = field(default_factory=dict)
    #: keys under the base that are none of ours
    unknown: list[str] = field(default_factory=list)

    def setting(self, lane: str, name: str) -> str | None:
        """What is in force for `lane`: its own value, or the queue's default."""
        return self.settings.get(lane, {}).get(name, self.queue.get(name))

    def number(self, lane: str, name: str) -> float | None:
        """A setting as a number; None: there is no such bound."""
        try:
            return float(self.setting(lane, name) or "")
        except ValueError:
            return None

    def paused(self, lane: str) -> bool:
        """Whether the lane itself is paused."""
        return self.settings.get(lane, {}).get("paused") == "1"

    def blocked_until(self, lane: str, now: float) -> float | None:
        """When throttle and rate let the lane back, if that is later than `now`."""
        at: float = self.throttle.get(lane, 0)
        tokens, _, period = (self.setting(lane, "rate") or "").partition("/")
        if period:
            rate, burst = float(tokens) / float(period), self.number(lane, "burst") or 1.0
            paid = min(self.allowed.get(lane, 0), now + burst / rate)
            free = math.ceil(paid - (burst - 1) / rate - 0.01)
            if free > now:
                at = max(at, free, now + NAP if rate * NAP >= 1 else 0)
        return at if at > now else None

    def places(self) -> dict[str, list[str]]:
        """Round, tag and paid cost of the lanes that left the ring with work."""
        return {lane: text.split() for lane, text in self.kept.items()}

    def running_slots(self) -> set[str]:
        """Tags of tasks that still run after an early ack."""
        return {tag for tag, record in self.message.items() if record.slot}

    def need(self) -> bool:
        """Whether a token has to be there (design section 6)."""
        timed = bool(self.delayed or self.waiting) and "keeper" not in self.queue
        return self.queue.get("paused") != "1" and (bool(self.ring) or timed or "walk" in self.queue)

    def flat(self) -> dict[str, Any]:
        """The state as one dictionary, ``part[:lane]/member`` -> value, to compare two of them."""
        flat: dict[str, Any] = {"wake": len(self.wake)} if self.wake else {}
        for part in keys.QUEUE_PARTS:
            if part != "wake":
                found = getattr(self, part)
                members = dict.fromkeys(found, True) if isinstance(found, set) else found
                flat.update({f"{part}/{member}": value for member, value in members.items()})
        for part in keys.LANE_PARTS:
            for lane, value in getattr(self, part).items():
                if part in ("throttle", "allowed"):
                    flat[f"{part}:{lane}"] = value
                else:
                    members = dict.fromkeys(value, True) if isinstance(value, set) else value
                    flat.update({f"{part}:{lane}/{member}": v for member, v in members.items()})
        return {name: value for name, value in flat.items() if name not in NOTES}


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")


def _pairs(content: list[bytes]) -> dict[str, bytes]:
    flat = iter(content)
    return {_text(name): value for name, value in zip(flat, flat, strict=True)}


def _value(part: str, kind: str, content: Any) -> Any:
    """One key's content, in the type that `State` gives its part."""
    if kind == "zset":
        return {name: float(score) for name, score in _pairs(content).items()}
    if kind == "set":
        return {_text(member) for member in content}
    if part == "ruin":
        return {"life": _text(content[0])}
    if kind == "string":
        return float(content[0]) if part == "allowed" else int(content[0])
    if kind == "list":
        return content
    pairs = _pairs(content)
    if part == "message":
        return {tag: Record.parse(raw) for tag, raw in pairs.items()}
    if part in ("envelope", "body"):
        return pairs
    return {name: int(v) if part == "totals" else _text(v) for name, v in pairs.items()}


def dump(client: redis.Redis, queue: str, prefix: str = "") -> State:
    """Read the whole state of `queue`, in one atomic step."""
    base = keys.base(queue, prefix)
    pattern = "".join(f"\\{c}" if c in "*?[]^\\" else c for c in base) + "*"
    reply = client.eval(_DUMP, 0, pattern, base)
    state = State(time=int(reply[0]))
    found = {_text(key).removeprefix(base): rest for key, *rest in reply[1:]}
    life = _pairs(found["queue"][2]).get("life", b"").decode() if "queue" in found else ""
    ruin = _text(found["ruin"][2][0]) if "ruin" in found else None
    for name, (kind, ttl, content) in found.items():
        split = keys.split(name)
        if split is None:
            state.unknown.append(name)
            continue
        part, of, lane = split
        if lane is not None and (of != life or of == ruin):
            state.earlier[name] = ttl
            continue
        value = _value(part, _text(kind), content)
        if lane is not None:
            getattr(state, part)[lane] = value
        else:
            setattr(state, part, value)
        if ttl >= 0:
            state.ttl[part if lane is None else f"{part}:{lane}"] = ttl
    return state


def check(
    client: redis.Redis, queue: str, prefix: str = "", *, now: float | None = None, token_out: bool = False
) -> State:
    """Assert all invariants of `queue` and return the state that was checked.

    Args:
        now: ms since the epoch, where the tests pass their own time to the scripts.
        token_out: a consumer may be between popping the token and its claim, or died there.

    Raises:
        AssertionError: names the invariant that is broken, and what breaks it.
    """
    state = dump(client, queue, prefix)
    at = state.time if now is None else now
    check_conservation(state)
    check_payloads(state)
    check_order(state)
    check_in_flight(state)
    check_ring(state, at)
    check_turns(state)
    check_wake(state, token_out=token_out)
    check_keeper(state, at)
    check_leaks(state)
    return state


def check_conservation(state: State) -> None:
    """Every message is in exactly one of ready, leased, delayed, dead; and the totals add up."""
    places: dict[str, list[str]] = {tag: [] for tag in state.message}
    for part in ("leases", "delayed", "dead"):
        for tag in getattr(state, part):
            places.setdefault(tag, []).append(part)
    for lane, tags in state.ready.items():
        for tag in tags:
            places.setdefault(tag, []).append(f"ready:{lane}")
    for tag, found in places.items():
        assert tag in state.message, f"conservation: {tag!r} is in {found} but has no record"
        assert len(found) == 1, f"conservation: {tag!r} is in {found or 'no'} place: {state.message[tag]}"
        lane = found[0].partition(":")[2]
        assert not lane or lane == state.message[tag].lane, f"conservation: {tag!r} is ready in {lane!r}"
    alive = len(state.message) - len(state.running_slots())
    entered, left = (sum(state.totals.get(name, 0) for name in names) for names in (ENTERED, LEFT))
    assert entered == left + alive, f"conservation: {entered} came, {left} left, {alive} are here: {state.totals}"


def check_payloads(state: State) -> None:
    """Envelope and body are there for every message and for nothing else; reasons for the dead."""
    payload = set(state.message) - state.running_slots()
    for part in ("envelope", "body"):
        odd = payload ^ set(getattr(state, part))
        assert not odd, f"conservation: {part} and messages differ in {sorted(odd)}"
    odd = set(state.dead) ^ set(state.reasons)
    assert not odd, f"conservation: reasons and dead letters differ in {sorted(odd)}"
    odd = set(state.untold) - set(state.dead)
    assert not odd, f"untold: no dead letters: {sorted(odd)}"
    odd = state.running_slots() - set(state.leases)
    assert not odd, f"conservation: running slots without a lease: {sorted(odd)}"


def check_order(state: State) -> None:
    """A message keeps the place in its lane that it was given once: its priority, then its arrival number."""
    arrivals = int(state.queue.get("arrivals", 0))
    numbers: set[int] = set()
    for tag, record in state.message.items():
        if record.score:
            priority, number = divmod(record.score, _ORDER_BITS)
            assert priority == record.priority, f"order: {tag!r} has priority {priority}: {record}"
            assert 0 < number <= arrivals, f"order: {tag!r} has arrival {number} of {arrivals}"
            assert number not in numbers, f"order: arrival {number} was given twice, again to {tag!r}"
            numbers.add(number)
    for lane, tags in state.ready.items():
        for tag, score in tags.items():
            assert score == state.message[tag].score, f"order: {tag!r} in {lane!r} at {score}: {state.message[tag]}"


def check_in_flight(state: State) -> None:
    """A lane's count is the size of its lease set; leased messages carry a claim."""
    expected: dict[str, set[str]] = {}
    for tag in state.leases:
        record = state.message[tag]
        assert record.attempt > 0, f"fence: {tag!r} is leased but was never claimed"
        assert record.token != "-", f"fence: {tag!r} is leased without a token"
        expected.setdefault(record.lane, set()).add(tag)
    assert state.flight == expected, f"in flight: {state.flight} but the leases are {expected}"


def check_ring(state: State, now: float) -> None:
    """A lane is on the ring if and only if it can be served; `waiting` holds those that only time keeps off it."""
    if "walk" in state.queue:
        return  # A changed default is on its way to the lanes.
    for lane in {*state.ready, *state.flight, *state.ring, *state.waiting, *state.lanes}:
        ready, flight = len(state.ready.get(lane, ())), len(state.flight.get(lane, ()))
        limit = state.number(lane, "limit")
        able = ready > 0 and not state.paused(lane) and not (limit is not None and flight >= limit)
        where = [part for part in ("ring", "waiting") if lane in getattr(state, part)]
        why = f"lane {lane!r} has {ready} ready, {flight} in flight, limit {limit}, paused {state.paused(lane)}"
        assert (len(where) == 1) == able, f"ring: {why}; it is on {where or 'neither ring nor waiting'}"
        blocked = state.blocked_until(lane, now)
        if where == ["ring"]:
            assert blocked is None, f"ring: lane {lane!r} is on the ring but blocked until {blocked} (now {now})"
        elif where == ["waiting"] and state.waiting[lane] > now:
            # Time is in whole ms, a bucket's content is not.
            off = state.waiting[lane] - (blocked or now)
            assert abs(off) <= NAP + 2, f"ring: {lane!r} waits until {state.waiting[lane]}, should until {blocked}"
        indexed = lane in state.lanes
        assert indexed == (ready + flight > 0), f"lanes: {why}; in the index: {indexed}"


def check_turns(state: State) -> None:
    """No lane is further ahead than half the circle; what is kept and reserved has its lane; the weights add up."""
    vt = int(state.queue.get("vt", 0))
    far = {lane: at for lane, at in state.ring.items() if (at - vt) % CIRCLE > LEAD + 2**32 or at != int(at)}
    assert not far, f"turns: virtual time is {vt}, but lanes stand too far ahead: {far}"
    own = [state.settings[lane]["weight"] for lane in state.ring if "weight" in state.settings.get(lane, {})]
    weights = sum(round(float(weight) * 1000) for weight in own)
    known = tuple(int(state.queue.get(name, 0)) for name in ("own_lanes", "own_weight"))
    assert known == (len(own), weights), f"turns: own weights on the ring are {len(own), weights}, noted {known}"
    for lane in state.kept:
        assert lane not in state.ring, f"turns: {lane!r} keeps a place and has one"
        assert lane in state.ready, f"turns: {lane!r} is empty and keeps a place"
    odd = set(state.reserved) - set(state.ring)
    assert not odd, f"turns: reserved for lanes that are not on the ring: {sorted(odd)}"


def check_wake(state: State, *, token_out: bool = False) -> None:
    """Need implies a token (or a consumer that has just popped it); no need, no token."""
    tokens, need = len(state.wake), state.need()
    what = f"ring {len(state.ring)}, delayed {len(state.delayed)}, waiting {len(state.waiting)}, {state.queue}"
    assert tokens <= 1, f"wake: {tokens} tokens; {what}"
    assert need or not tokens, f"wake: a token without need; {what}"
    assert tokens or token_out or not need, f"wake: need without a token; {what}"


def check_keeper(state: State, now: float) -> None:
    """Who keeps the time wakes no later than the first thing that is due."""
    assert ("keeper" in state.queue) == ("keeper_until" in state.queue), f"keeper: half a role in {state.queue}"
    if "keeper" not in state.queue:
        return
    until = float(state.queue["keeper_until"])
    for part in ("delayed", "waiting"):
        for name, at in getattr(state, part).items():
            assert until <= max(at, now), f"keeper: it sleeps until {until}, but {part} {name!r} is due at {at}"


def check_leaks(state: State) -> None:
    """Of a lane without messages only settings remain, and state that carries its own end."""
    assert not state.unknown, f"leak: keys that no part of a queue has: {sorted(state.unknown)}"
    for part in ("throttle", "allowed", "work"):
        for lane in getattr(state, part):
            assert f"{part}:{lane}" in state.ttl, f"leak: {part} of lane {lane!r} has no end"
    odd = set(state.settings) ^ set(state.configured)
    assert not odd, f"leak: settings and their index differ in {sorted(odd)}"
    assert not state.finished or "finished" in state.ttl, "leak: the finished messages have no end"

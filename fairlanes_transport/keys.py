"""The only place that spells a Redis key.

Everything of one queue lives under one base, ``<prefix>fairlanes:<layout>:{<queue>}:``.  The braces are the
Redis Cluster hash tag, so a queue is one slot and a script may touch all of it.  The layout number is part of
the key: two versions with different layouts never read each other's data.

========== ====== ================================================================================
part       type   meaning
========== ====== ================================================================================
queue      hash   the queue's state and its lanes' defaults: ``vt`` + ``lap`` (virtual time: ticks
                  on a circle of 2^52, rounds), ``last`` (base given last), ``own_lanes`` + ``own_weight`` (lanes on
                  the ring with a weight of their own: number, sum in thousandths), ``costs`` (1: some message
                  costs other than 1), ``walk`` (a changed default on its way), ``arrivals`` (counter),
                  ``paused``, ``keeper`` + ``keeper_until`` (timekeeper), ``deputy`` + ``deputy_until``,
                  ``expires`` (ms), ``weight``, ``limit``, ``rate``, ``burst``, ``max_size``,
                  ``fairness``, ``mean`` (seconds), ``life`` (see below), ``finished_since``, ``seen`` (ms; last
                  claim or renewal, about), ``grace`` (ms until which no lease is taken)
totals     hash   counters since the queue began: enqueued, claimed, acked, released, expired, rejected, ...; a
                  histogram of waits: ``wait_le_<ms>``, ``wait_ms``
ring       zset   lane -> virtual time of its next turn; exactly the lanes that can be served now
kept       hash   lane -> round, tag and paid cost: it left the ring with work, and comes back there
reserved   hash   lane on the ring -> cost that it has paid for its next message, if that is not 1
waiting    zset   lane -> time (ms) at which its throttle or rate lets it back on the ring
lanes      zset   lane -> 0; lanes with ready or leased messages (an index to page through)
configured zset   lane -> 0; lanes with settings of their own (an index to page through)
message    hash   tag -> record (lua/include/record.lua)
envelope   hash   tag -> JSON: content type, content encoding, headers, properties
body       hash   tag -> the body's bytes
leases     zset   tag -> deadline (ms); claimed messages and running slots
delayed    zset   tag -> due time (ms)
dead       zset   tag -> time of death (ms)
untold     zset   tag -> time (ms) from which a worker may tell its sender; dead messages whose failures were
                  used up
reasons    hash   tag -> why a dead message died
finished   set    tags acked in the last minutes, so that a retried publish does not run twice
previous   set    the same of the five minutes before
ends       zset   in a queue with an end: lane -> time (ms) at which its keys end if they are not used
throttled  zset   lane -> time (ms) at which its throttle ends; expires with the last one
ruin       string life of a deleted queue whose lanes' keys are being removed
ruinlanes  zset   the names of its lanes
ruinconfigured zset its lanes that had settings
ruinthrottled zset its lanes that were throttled
wake       list   at most one token; parked consumers block on it
---------- ------ ------------------------------------------------------------ one key per lane:
ready:     zset   tag -> order (priority * 2^49 + arrival)
flight:    set    tags leased from the lane
settings:  hash   what an operator configured: weight, limit, rate, burst, max_size, paused
throttle:  string time (ms) until which the lane is off the ring; expires then
allowed:   string rate: time (ms) by which all starts so far are paid for; expires when it has passed
work:      hash   fairness by time: mean (s), ``lap`` + ``tag`` (an empty lane's place); expires after an hour
========== ====== ================================================================================

A queue with an end, and one that is declared while a deleted one of its name is being removed, has a life: its
lanes' keys are ``ready@<life>:<lane>`` and so on.  Nothing of an earlier life is found by their names.
"""

from __future__ import annotations

from typing import Final

#: Version of the key layout and of the scripts' data formats.
LAYOUT: Final = 2

#: Parts that exist once per queue.
QUEUE_PARTS: Final = (
    "queue", "totals", "ring", "kept", "reserved", "waiting", "lanes", "configured", "message", "envelope", "body",
    "leases", "delayed", "dead", "untold", "reasons", "finished", "previous", "wake", "ends", "throttled",
    "ruin", "ruinlanes", "ruinconfigured", "ruinthrottled",
)  # fmt: skip

#: Parts that exist once per lane; the lane's name follows.
LANE_PARTS: Final = ("ready", "flight", "settings", "throttle", "allowed", "work")

#: Part name -> what stands behind the base.
PARTS: Final = {**{p: p for p in QUEUE_PARTS}, **{p: f"{p}:" for p in LANE_PARTS}}


def check_prefix(prefix: str) -> str:
    """Return `prefix` (``global_keyprefix``), or raise `ValueError`: braces would move the hash tag."""
    if "{" in prefix or "}" in prefix:
        raise ValueError(
            f"global_keyprefix {prefix!r} contains a brace: '{{' and '}}' mark the Redis Cluster hash tag; "
            "choose a prefix without braces"
        )
    return prefix


def base(queue: str, prefix: str = "") -> str:
    """The key base of `queue`: what every key of it starts with."""
    escaped = queue.replace("%", "%25").replace("{", "%7B").replace("}", "%7D")
    return f"{prefix}fairlanes:{LAYOUT}:{{{escaped}}}:"


def queues(prefix: str = "", layout: int = LAYOUT) -> str:
    """Set of the names of all durable queues (not those with ``x-expires`` or auto-delete)."""
    return f"{prefix}fairlanes:{layout}:queues"


def endings(exchange: str, prefix: str = "") -> str:
    """Sorted set: bindings of an exchange to queues that end -> ms at which to see whether the queue is there."""
    return f"{prefix}fairlanes:{LAYOUT}:endings:{exchange}"


def part(queue_base: str, name: str, lane: str = "", life: str = "") -> str:
    """The key of part `name` (one of `PARTS`) under `queue_base`; a lane's in this life of the queue."""
    if life and name in LANE_PARTS:
        return f"{queue_base}{name}@{life}:{lane}"
    return f"{queue_base}{PARTS[name]}{lane}"


def split(rest: str) -> tuple[str, str, str | None] | None:
    """(Part, life, lane or None) of what stands behind the base of a key; None: no key of ours."""
    head, colon, lane = rest.partition(":")
    name, _, life = head.partition("@")
    if PARTS.get(name) != name + colon or (life and not colon):
        return None
    return name, life, lane if colon else None

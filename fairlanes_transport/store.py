"""One typed method per script: a message's life on the server.  No kombu, no celery.

The server decides everything by its own clock; `Store.now` is for tests that pass a time instead.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import random
import uuid
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

from . import keys, scripts
from .errors import AccessDenied, LaneFull, QueueAbsent

logger = logging.getLogger(__name__)


class WillPark(IntEnum):
    """Whether a consumer parks after a claim, if there is no need."""

    NO = 0
    YES = 1
    #: its credit is as large as the claim: only if it gets less
    IF_NOT_FULL = 2


class Answer(IntEnum):
    """What a fenced operation says of one message."""

    #: it happened, and the message is a dead letter: its failures are used up, and its sender is to be told
    DIED = 3
    #: it happened, and the running slot is kept until `Store.finish`
    SLOT = 2
    #: it happened
    DONE = 1
    #: somebody else holds the message now, or nobody: nothing was changed
    STALE = 0
    #: the message is finished; nothing to do
    GONE = -1


class Fence(NamedTuple):
    """What must be current for an ack, extend, release or reject to count."""

    tag: str
    attempt: int
    token: str


@dataclass(frozen=True)
class Claimed:
    """One claimed message."""

    fence: Fence
    failures: int
    lane: str
    #: ms since the epoch, when it was enqueued
    born: int
    envelope: bytes
    body: bytes


@dataclass(frozen=True)
class Dead:
    """A message whose failures were used up, and whose sender is to be told."""

    tag: bytes
    lane: str
    failures: int
    reason: str
    envelope: bytes
    body: bytes


@dataclass(frozen=True)
class Turn:
    """What a consumer learns from a claim or an ack."""

    #: the queue has something to serve, or its time is not kept: claim before you park
    need: bool
    #: ms until this consumer, as timekeeper, has to claim again; None: it is not the keeper
    due_in: int | None
    claimed: tuple[Claimed, ...] = ()
    answers: tuple[Answer, ...] = ()
    #: nobody has declared the queue, or the server has forgotten it
    forgotten: bool = False
    #: senders of dead letters are to be told: see `Store.untold`
    untold: bool = False


@dataclass(frozen=True)
class Request:
    """A script call that is made, but not yet sent: it can be run at once, or go out with others."""

    script: scripts.Script
    base: str
    args: tuple[Any, ...]
    #: makes the result of the script's reply
    read: Callable[[Any], Turn]

    def command(self) -> tuple[Any, ...]:
        """The Redis command; NOSCRIPT may be the answer."""
        return ("EVALSHA", self.script.digest, 1, self.base, *self.args)

    def run(self, caller: scripts.Caller) -> Turn:
        """Run it and wait for the result."""
        return self.read(self.script.run(caller, self.base, *self.args))


@dataclass(frozen=True)
class Sizes:
    """How many messages a queue holds, by state; `leased` counts running slots too."""

    ready: int
    leased: int
    delayed: int
    dead: int


@dataclass(frozen=True)
class FailurePolicy:
    """What happens to a message that failed; times in seconds, 0 failures = never dead."""

    backoff_base: float = 1.0
    backoff_factor: float = 2.0
    backoff_max: float = 300.0
    max_failures: int = 25
    dead_letter_max: int = 10_000
    dead_letter_ttl: float = 604_800.0

    @cached_property
    def _numbers(self) -> str:
        return (
            f"{self.backoff_base * 1000:.0f} {self.backoff_factor} {self.backoff_max * 1000:.0f} "
            f"{self.max_failures} {self.dead_letter_max} {self.dead_letter_ttl * 1000:.0f}"
        )

    def argument(self) -> str:
        """The script argument `policy`; carries the random number for the jitter."""
        return f"{self._numbers} {random.random()}"


class Tokens:
    """Strings that no other process makes, nor this one twice: somebody waits for a claim, and the system's random
    numbers cost a call each.
    """

    def __init__(self) -> None:
        self._renew()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        self._process = uuid.uuid4().hex
        self._numbers = itertools.count()

    def next(self) -> str:
        """Another one; from any thread."""
        return f"{self._process}-{next(self._numbers):x}"


_tokens = Tokens()

#: What `declare` answers where `adopt` has to come first.
_ADOPT = 2
#: Characters of a dead letter's reason that are kept.
MAX_REASON = 1000
#: Fences in one call at most: a longer one would keep the server from others.
MAX_FENCES = 500


def _readable(text: bytes) -> str:
    return text.decode("utf-8", "backslashreplace")


def _due(reply: int) -> int | None:
    return None if reply < 0 else int(reply)


#: No task's worker time is known.
NOTHING: Mapping[Fence, int] = MappingProxyType({})


def _read_acks(reply: Any) -> Turn:
    return Turn(bool(reply[0] & 1), _due(reply[1]), answers=tuple(map(Answer, reply[2:])), forgotten=reply[0] > 1)


def _flat(fences: Iterable[Fence]) -> list[Any]:
    return [part for fence in fences for part in fence]


class Store:
    """One server's queues.

    Args:
        caller: runs commands (`connections.Link`).
        prefix: ``global_keyprefix``.
        policy: what happens to failures, also to those of others that this store's claims find.
        now: ms since the epoch instead of the server's clock; tests only.
    """

    def __init__(
        self,
        caller: scripts.Caller,
        prefix: str = "",
        policy: FailurePolicy | None = None,
        now: int | None = None,
    ) -> None:
        self.caller = caller
        self.prefix = keys.check_prefix(prefix)
        self.policy = policy or FailurePolicy()
        self.now = now

    def _base(self, queue: str) -> str:
        # Not kept: an application may send to a reply queue per caller.
        return keys.base(queue, self.prefix)

    def _run(self, script: str, queue: str, *args: Any) -> Any:
        return scripts.load(script).run(self.caller, self._base(queue), *args)

    def _request(self, script: str, queue: str, read: Callable[[Any], Turn], *args: Any) -> Request:
        return Request(scripts.load(script), self._base(queue), args, read)

    def _now(self) -> Any:
        return "" if self.now is None else self.now

    def declare(self, queue: str, expires_ms: int = 0, **defaults: Any) -> bool:
        """Make the queue exist, with its end and its lanes' defaults; True if it is new.

        Args:
            expires_ms: the queue is gone after that long without use; 0 = never.
            defaults: ``weight``, ``limit``, ``rate`` (``"tokens/period_ms"``), ``burst``, ``max_size``,
                ``fairness`` (``"count"`` or ``"time"``); None unsets one.
        """
        pairs = [x for name, v in defaults.items() for x in (name, "" if v is None else v)]
        new, left = False, 1
        while left:
            was_new, left, refused, ruins = self._run("declare", queue, expires_ms, *pairs)
            new = new or bool(was_new)
            if left == _ADOPT:
                self._run("adopt", queue, expires_ms)
        if ruins:
            with contextlib.suppress(AccessDenied):  # who only publishes leaves it to a worker
                self.clear_ruins(queue)
        if refused:
            logger.warning("queue %r holds too many lanes to be given an end; it stays without one", queue)
        return new

    def enqueue(
        self,
        queue: str,
        tag: str,
        lane: str,
        envelope: str | bytes,
        body: bytes,
        *,
        priority: int = 0,
        due_ms: int = 0,
        cost: float = 1.0,
        must_exist: bool = False,
        admit: bool = False,
        ends_ms: int = 0,
    ) -> bool:
        """Store a message; False: its tag is known, nothing was done.

        Args:
            admit: let it in though the lane is full.
            ends_ms: a queue that is not there ends after so long without use; 0 = never.

        Raises:
            LaneFull: the lane holds ``max_size`` ready messages.
            QueueAbsent: with `must_exist`, the queue is not there.
            ServerFull: the server has no memory left.  In each case nothing was stored.
        """
        numbers = (priority, due_ms, cost, int(must_exist), int(admit))
        try:
            return bool(self._run("enqueue", queue, self._now(), tag, lane, *numbers, envelope, body, ends_ms))
        except LaneFull as exc:
            raise LaneFull(lane=lane, queue=queue, size=exc.size, max_size=exc.max_size) from exc.__cause__
        except QueueAbsent as exc:
            raise QueueAbsent(f"queue {queue!r} does not exist") from exc.__cause__

    def claim(
        self,
        queue: str,
        max_messages: int,
        lease_ms: int,
        *,
        consumer: str = "",
        will_park: WillPark | bool = WillPark.NO,
    ) -> Turn:
        """Claim up to `max_messages`, each lane in its turn; each is leased for `lease_ms`.

        Args:
            consumer: id of the claimer, for the timekeeper's role.
            will_park: the consumer will park after this call if there is no need.
        """
        request = self.claim_request(queue, max_messages, lease_ms, consumer=consumer, will_park=will_park)
        return request.run(self.caller)

    def claim_request(
        self, queue: str, max_messages: int, lease_ms: int, *, consumer: str, will_park: WillPark | bool
    ) -> Request:
        """`claim`, not yet sent."""
        token = _tokens.next()

        def read(reply: Any) -> Turn:
            claimed = tuple(
                Claimed(
                    Fence(tag.decode(), int(attempt), token),
                    int(failures), lane.decode(), int(born), envelope, body,
                )
                for tag, attempt, failures, lane, born, envelope, body in zip(*[iter(reply[2:])] * 7)
            )  # fmt: skip
            return Turn(
                bool(reply[0] & 1), _due(reply[1]), claimed=claimed,
                forgotten=bool(reply[0] & 2), untold=bool(reply[0] & 4),
            )  # fmt: skip

        return self._request(
            "claim", queue, read,
            self._now(), max_messages, lease_ms, token, consumer, int(will_park), self.policy.argument(),
        )  # fmt: skip

    def ack(
        self,
        queue: str,
        fences: Sequence[Fence],
        *,
        keep_slot: bool | Container[Fence] = False,
        spent_ms: Mapping[Fence, int] = NOTHING,
        consumer: str = "",
        will_park: bool = False,
    ) -> Turn:
        """Finish messages.

        Args:
            fences: at most `MAX_FENCES`.
            keep_slot: the tasks, or those of these fences, still run: keep their slots in lanes that have a
                limit or are charged by time.
            spent_ms: worker time that the others took, where it is known: what a lane is charged by time.
        """
        kept = fences if keep_slot is True else keep_slot or ()
        request = self.ack_request(
            queue, fences, keep_slot=kept, spent_ms=spent_ms, consumer=consumer, will_park=will_park
        )
        return request.run(self.caller)

    def ack_request(
        self,
        queue: str,
        fences: Sequence[Fence],
        *,
        keep_slot: Container[Fence],
        spent_ms: Mapping[Fence, int],
        consumer: str,
        will_park: bool,
    ) -> Request:
        """`ack`, not yet sent."""
        args = [part for fence in fences for part in (*fence, int(fence in keep_slot), spent_ms.get(fence, 0))]
        return self._request("ack", queue, _read_acks, self._now(), consumer, int(will_park), *args)

    def release(self, queue: str, fences: Sequence[Fence]) -> tuple[Answer, ...]:
        """Hand back messages that were not started, to the place they had."""
        if not fences:
            return ()
        return tuple(map(Answer, self._run("release", queue, self._now(), *_flat(fences))))

    def reject(self, queue: str, fence: Fence, *, requeue: bool, reason: str) -> Answer:
        """Count a failure and let the message come back after its backoff; or bury it at once.

        Args:
            reason: any text, also one that is no UTF-8; the first `MAX_REASON` characters are kept.
        """
        text = reason[:MAX_REASON].encode("utf-8", "replace")
        return Answer(self._run("reject", queue, self._now(), *fence, int(requeue), text, self.policy.argument()))

    def extend(self, queue: str, fences: Sequence[Fence], lease_ms: int) -> tuple[Answer, ...]:
        """Move the deadlines of leases and running slots to `lease_ms` from now."""
        if not fences:
            return ()
        return tuple(map(Answer, self._run("extend", queue, self._now(), lease_ms, *_flat(fences))))

    def finish(self, queue: str, fences: Sequence[Fence], *, spent_ms: Mapping[Fence, int] = NOTHING) -> bool:
        """Tasks whose messages were acked early have ended: free their running slots; True if there is need."""
        args = [part for fence in fences for part in (*fence, spent_ms.get(fence, 0))]
        return bool(self._run("finish", queue, self._now(), *args))

    def untold(self, queue: str, lease_ms: int, told: bytes = b"") -> Dead | None:
        """Take a dead letter whose sender is to be told, for `lease_ms` at least; None: there is none.

        Args:
            told: tag of the one taken before; its sender has been told.
        """
        reply = self._run("untold", queue, self._now(), lease_ms, told)
        if not reply:
            return None
        tag, lane, failures, reason, envelope, body = reply
        return Dead(tag, _readable(lane), int(failures), _readable(reason), envelope, body)

    def expire(self, queue: str) -> tuple[int, int]:
        """Sweep once: (expired leases, due messages).  Every claim does it too."""
        expired, due = self._run("expire", queue, self._now(), self.policy.argument())
        return int(expired), int(due)

    def rearm(self, queue: str, consumer: str = "") -> bool:
        """Leave: give back the timekeeper's role and an unused token; True if there is need."""
        return bool(self._run("rearm", queue, consumer))

    def awake(self, queues: Sequence[str]) -> list[str]:
        """Those of `queues` that have a token: somebody should claim from them."""
        wakes = [keys.part(keys.base(queue, self.prefix), "wake") for queue in queues]
        replies = self.caller.pipeline([("EXISTS", wake) for wake in wakes], raise_on_error=True) if wakes else []
        return [queue for queue, there in zip(queues, replies) if there]

    def size(self, queue: str) -> Sizes:
        """How many messages the queue holds, by state."""
        return Sizes(*map(int, self._run("size", queue)))

    def purge(self, queue: str, lane: str = "", *, step: int = 1000) -> int:
        """Remove ready and delayed messages that were there when this began; returns how many.

        Args:
            lane: only this lane's.
            step: messages per call; a larger one blocks the server longer.
        """
        before: Any = ""
        born: Any = ""
        after: Any = ""
        passed, total, done = 0, 0, False
        while not done:
            removed, before, born, after, passed, done = self._run(
                "purge", queue, self._now(), lane, before, born, after, passed, step
            )
            total += removed
        return total

    def delete(self, queue: str, *, if_empty: bool = False) -> bool:
        """Delete the queue with everything in it; False: it was not empty (`if_empty`)."""
        taken = 0
        while (reply := self._run("delete", queue, int(if_empty), taken)) not in (1, -1):
            taken = int(taken or reply == 2)
        return bool(reply == 1)

    def clear_ruins(self, queue: str) -> None:
        """Remove what is left of a deleted queue, where that was interrupted."""
        while self._run("delete", queue, 0, 1) != 1:
            pass

    def life(self, queue: str) -> str:
        """What the names of the lanes' keys carry in this life of the queue; mostly nothing."""
        life = self.caller.call("HGET", keys.part(keys.base(queue, self.prefix), "queue"), "life")
        return (life or b"").decode()

    def expires(self, queue: str) -> int:
        """Ms without use after which the queue is gone; 0: never."""
        return int(self.caller.call("HGET", keys.part(keys.base(queue, self.prefix), "queue"), "expires") or 0)

    def is_declared(self, queue: str) -> bool:
        """Whether somebody has declared the queue, and it is still there."""
        return bool(self.caller.call("HEXISTS", keys.part(keys.base(queue, self.prefix), "queue"), "expires"))

    def exists(self, queue: str) -> bool:
        """Whether the queue was declared, or holds anything."""
        base = keys.base(queue, self.prefix)
        return bool(self.caller.call("EXISTS", keys.part(base, "queue"), keys.part(base, "message")))

    # what an operator does: settings, pause, throttle, dead letters

    def configure(self, queue: str, lane: str, **settings: Any) -> int:
        """Set (None: unset) what an operator configures of one lane; returns how many settings it has now.

        It acts on the backlog at once, and may come before the first message.

        Args:
            settings: ``weight`` (0.001 to 1000), ``limit`` and ``max_size`` (whole), ``rate``
                (``"tokens/period_ms"``), ``burst`` (tokens), ``paused``.  ``"none"`` as limit, rate or
                max_size: no such bound here, whatever the queue's default.

        Raises:
            ScriptError: ``FLARG``: a setting is unknown or out of range; nothing was changed.
        """
        pairs = [x for name, value in settings.items() for x in (name, _setting(value))]
        return int(self._run("configure", queue, self._now(), lane, *pairs))

    def pause(self, queue: str, *, paused: bool = True) -> bool:
        """Stop claims from the queue, or let them go on; True if there is need."""
        return bool(self._run("pause", queue, int(paused)))

    def throttle(self, queue: str, lane: str, ms: int, *, shorten: bool = False) -> int:
        """Take the lane off the ring for `ms` from now; returns the ms that are now left.

        Args:
            shorten: an end that lies later moves to this one; with 0 ms the throttle ends.
        """
        return int(self._run("throttle", queue, self._now(), lane, ms, int(shorten)))

    def cancel(self, queue: str, tags: Sequence[str]) -> tuple[bool | None, ...]:
        """Remove ready and delayed messages; per tag True, False (leased or dead: left), None (unknown)."""
        if not tags:
            return ()
        answers = {1: True, 0: False, -1: None}
        return tuple(answers[a] for a in self._run("cancel", queue, self._now(), *tags))

    def redrive(self, queue: str, tags: Sequence[str]) -> int:
        """Make dead letters ready again, with failures 0 and attempt + 1; returns how many were dead."""
        return int(self._run("redrive", queue, self._now(), *tags)) if tags else 0

    def drop_dead(self, queue: str, tags: Sequence[str]) -> int:
        """Drop dead letters for good; returns how many were dead."""
        return int(self._run("drop_dead", queue, *tags)) if tags else 0

    def reschedule(self, queue: str, due: Iterable[tuple[str, int]]) -> int:
        """Give delayed messages (tag, due: ms since the epoch; 0: at once) another time; returns how many."""
        args = [x for pair in due for x in pair]
        return int(self._run("reschedule", queue, self._now(), *args)) if args else 0

    # looking, and mending: bounded by what is asked for

    def pulse(self, queue: str) -> list[Any]:
        """The queue as a whole at one moment, as ``pulse.lua`` states it."""
        return list(self._run("pulse", queue, self._now()))

    def lanes(self, queue: str, lanes: Sequence[str | bytes]) -> tuple[int, list[list[Any]]]:
        """(Ms since the epoch, what ``lanes.lua`` states per lane), at one moment: some hundred at most."""
        now, *seen = self._run("lanes", queue, self._now(), *lanes)
        return int(now), [list(lane) for lane in zip(*[iter(seen)] * 19, strict=True)]

    def survey(self, queue: str, after: str | bytes, limit: int) -> tuple[int, bytes, list[list[Any]]]:
        """(Ms since the epoch, where the page ended or ``b""``, what ``survey.lua`` states per lane with ready
        messages), at one moment: some hundred lanes at most.
        """
        now, end, *seen = self._run("survey", queue, self._now(), after, limit)
        return int(now), end, [list(lane) for lane in zip(*[iter(seen)] * 6, strict=True)]

    def messages(self, queue: str, found: Iterable[tuple[str, str]]) -> list[list[Any]]:
        """Per (tag, lane in which it was found) what ``messages.lua`` states, at one moment."""
        args = [x for pair in found for x in pair]
        reply = self._run("messages", queue, *args) if args else []
        return [list(m) for m in zip(*[iter(reply)] * 10, strict=True)]

    def repair_lanes(self, queue: str, lanes: Sequence[str]) -> bool:
        """Put lanes, and the wake token, where they belong; right on sound data too.  True: there is need."""
        return bool(self._run("repair_lanes", queue, self._now(), *lanes))

    def repair_messages(self, queue: str, found: Iterable[tuple[str, str]]) -> tuple[bool, ...]:
        """Put each (tag, lane) into exactly one set; False: its payload was lost, and now it is gone."""
        args = [x for pair in found for x in pair]
        return tuple(map(bool, self._run("repair_messages", queue, self._now(), *args))) if args else ()


def _setting(value: Any) -> str:
    """A lane's setting as the script takes it; None and False unset it."""
    if value is None or value is False:
        return ""
    return "1" if value is True else str(value)

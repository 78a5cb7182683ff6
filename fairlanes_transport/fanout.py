"""Fanout exchanges: broadcast over pub/sub, for remote control and events.

Topics and binding sets are those of kombu's own Redis transport, so that control commands and events pass between
its workers and ours.  Binding sets are also the routing tables of direct and topic exchanges.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from time import monotonic, time
from typing import Any

from kombu.utils.json import loads
from redis.exceptions import ConnectionError as DriverConnectionError
from redis.exceptions import TimeoutError as DriverTimeoutError

from . import keys
from .connections import Connection, Link, connect
from .errors import ServerFull, unreachable
from .options import Options

logger = logging.getLogger(__name__)

#: Seconds within which a PING on the subscribed connection must be answered.
PONG_SECONDS = 5.0

#: How long a try to connect may take while the broker answers nobody.
TRY_SECONDS = 2.0
#: A connection on which messages come steadily is checked after so long a silence.
STEADY_SECONDS = 10.0
#: How long nothing is published after a command was not answered.
QUIET_SECONDS = 3.0

#: Messages read at a time, so that a flood of events does not keep tasks from being served.
RECEIVE_BATCH = 100

#: Bindings looked at when another one is made.
SWEEP_BATCH = 20

Deliver = Callable[[dict[str, Any]], None]


class Fanout:
    """One subscribed connection per transport, shared by its channels."""

    def __init__(self, link: Link, options: Options, db: int) -> None:
        self.link = link
        self.options = options
        self._topic_prefix = options.global_keyprefix + options.fanout_keyprefix(db)
        self.connection: Connection | None = None
        self._subscribers: dict[str, list[Deliver]] = {}
        #: when (monotonic) something came last, and how long after what came before
        self._heard = 0.0
        self._gap = math.inf
        self._pinged: float | None = None

    def topic(self, exchange: str, routing_key: str | None) -> str:
        """The topic of an exchange; with a routing key (or its pattern), a part of it."""
        tail = f"/{routing_key}" if routing_key and self.options.fanout_patterns else ""
        return f"{self._topic_prefix}{exchange}{tail}"

    @property
    def active(self) -> bool:
        """Whether anything is subscribed."""
        return bool(self._subscribers)

    def publish(self, exchange: str, routing_key: str | None, payload: str) -> None:
        """Send to everybody who listens now.

        Raises:
            redis.exceptions.RedisError, OSError: the server cannot be reached; it is not asked if it did not answer
                a moment ago, as whoever shuts down sends several.
        """
        if self.link.silent_at and monotonic() - self.link.silent_at < QUIET_SECONDS:
            raise DriverTimeoutError("the broker did not answer a moment ago")
        self.link.call("PUBLISH", self.topic(exchange, routing_key), payload)

    def subscribe(self, pattern: str, deliver: Deliver) -> None:
        """Call `deliver` with each message on topics that match `pattern`."""
        subscribers = self._subscribers.setdefault(pattern, [])
        subscribers.append(deliver)
        if len(subscribers) == 1:
            if self.sock is None:
                self.connect()
            else:
                self._send("PSUBSCRIBE", pattern)

    def unsubscribe(self, pattern: str, deliver: Deliver) -> None:
        """Undo `subscribe`."""
        subscribers = self._subscribers.get(pattern, [])
        if deliver in subscribers:
            subscribers.remove(deliver)
        if not subscribers and self._subscribers.pop(pattern, None) is not None and self.sock is not None:
            try:
                self._send("PUNSUBSCRIBE", pattern)
            except unreachable:
                self.close()

    @property
    def sock(self) -> Any:
        """The connected socket, if there is one."""
        return getattr(self.connection, "_sock", None)

    def connect(self) -> None:
        """(Re)connect and subscribe to everything.

        Raises:
            redis.exceptions.RedisError, OSError: the server cannot be reached.
        """
        self.close()
        # The socket timeout bounds reads of a message that has begun to come.  Where nobody is answered, not much
        # time is spent on a try: there will be others.
        silent = self.link.silent_at > 0
        limits = {"socket_timeout": TRY_SECONDS, "socket_connect_timeout": TRY_SECONDS} if silent else {}
        connection = self.link.dedicated(**limits)
        connect(connection)
        if silent:
            connection._sock.settimeout(self.options.socket_timeout)  # type: ignore[attr-defined]
        self.connection = connection
        self._heard, self._gap = monotonic(), math.inf
        if self._subscribers:
            self._send("PSUBSCRIBE", *self._subscribers)

    def receive(self) -> int:
        """Read and deliver what has come; returns the number of messages.  A lost connection is made anew, once.

        Raises:
            redis.exceptions.RedisError, OSError: the server cannot be reached.
        """
        delivered = 0
        while delivered < RECEIVE_BATCH:
            reply = self._read()
            if reply is None:
                break
            if reply[0] == b"pmessage":
                delivered += self._deliver(reply[1].decode(), reply[2], reply[3])
        return delivered

    def _read(self) -> Any:
        """What has come next, or None."""
        try:
            if self.connection is None or not self.connection.can_read(0):
                return None
            reply = self.connection.read_response()
        except unreachable as exc:
            logger.info("lost the fanout connection (%s); subscribing anew", exc)
            self.connect()
            return None
        now = monotonic()
        self._heard, self._gap, self._pinged = now, now - self._heard, None
        return reply

    def check(self) -> None:
        """Called on each turn of a loop: a half-open connection accepts a PING, but does not answer it.

        Raises:
            redis.exceptions.RedisError, OSError: the server cannot be reached.
        """
        if self.sock is None:
            if self.active:
                self.connect()
        elif self._pinged is not None:
            if monotonic() - self._pinged > PONG_SECONDS:
                logger.warning("the fanout connection does not answer; subscribing anew")
                self.link.note_silence()
                self.connect()
        elif self.options.health_check_interval and monotonic() - self._heard > self._patience():
            self._pinged = monotonic()
            self._send("PING")

    def _patience(self) -> float:
        """How long a silence is not remarkable.  A worker hears heartbeats every two seconds, its own at least; then
        a path that has died shows sooner, and an idle one is not asked more often for it.
        """
        return min(float(self.options.health_check_interval), max(STEADY_SECONDS, 3 * self._gap))

    def close(self) -> None:
        """Drop the connection."""
        self._pinged = None
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.disconnect()

    def _send(self, *command: str) -> None:
        if self.connection is None:
            raise DriverConnectionError("the fanout connection is closed")
        self.connection.send_command(*command, check_health=False)

    def _deliver(self, pattern: str, topic: bytes, data: bytes) -> int:
        try:
            message = loads(data)
        except ValueError as exc:
            logger.warning("fanout topic %r: dropped a message that is not JSON: %s", topic, exc)
            return 0
        subscribers = list(self._subscribers.get(pattern, ()))
        for deliver in subscribers:
            deliver(message)
        return len(subscribers)


#: Adding to a set by a script that deletes first: a server that is full lets that pass (see ``lua/include/clock.lua``).
_ADD_TO_FULL = "redis.call(ARGV[1], KEYS[1], '') return redis.call(ARGV[2], KEYS[1], unpack(ARGV, 3))"
_DELETE = {"SADD": "SREM", "ZADD": "ZREM"}


def add(link: Link, commands: Sequence[tuple[Any, ...]]) -> None:
    """Run commands that add a few bytes without which a worker cannot start, also on a server that is full.

    Raises:
        as `Link.pipeline`.
    """
    try:
        link.pipeline(commands, raise_on_error=True)
    except ServerFull:
        forced = [
            ("EVAL", _ADD_TO_FULL, 1, key, _DELETE[name], name, *args) if name in _DELETE else (name, key, *args)
            for name, key, *args in commands
        ]
        link.pipeline(forced, raise_on_error=True)


class Bindings:
    """Which queues an exchange routes to: a set per exchange, shared by all processes."""

    def __init__(self, link: Link, options: Options) -> None:
        self.link = link
        self.separator = options.sep
        self._prefix = options.global_keyprefix

    def _key(self, exchange: str) -> str:
        return f"{self._prefix}_kombu.binding.{exchange}"

    def _permanent(self, exchange: str) -> str:
        # kombu 5.7 sweeps the table of an exchange that has no permanent member and no recent use.
        return f"{self._prefix}_kombu.binding_permanent.{exchange}"

    def _member(self, routing_key: str | None, pattern: str | None, queue: str | None) -> str:
        return self.separator.join([routing_key or "", pattern or "", queue or ""])

    def add(self, exchange: str, routing_key: str, pattern: str | None, queue: str, expires_ms: int = 0) -> None:
        """Bind `queue`; one that ends (`expires_ms`) is looked after, so that its binding ends too."""
        member = self._member(routing_key, pattern, queue)
        commands: list[tuple[Any, ...]] = [("SADD", self._key(exchange), member)]
        if expires_ms:
            self._sweep(exchange)
            commands.append(("ZADD", keys.endings(exchange, self._prefix), _now_ms() + expires_ms, member))
        else:
            commands.append(("SADD", self._permanent(exchange), member))
            commands.append(("ZREM", keys.endings(exchange, self._prefix), member))
        add(self.link, commands)

    def remove(self, exchange: str, routing_key: str, pattern: str | None, queue: str) -> None:
        """Unbind `queue`."""
        self._remove(exchange, [self._member(routing_key, pattern, queue)])

    def forget(self, exchange: str, queue: str) -> None:
        """`queue` is not there: drop its bindings, if they are of a queue that ends.  Others stay: a queue of
        kombu's own transport is never there for us.
        """
        members = [self._member(*row) for row in self.table(exchange) if row[2] == queue]
        endings = keys.endings(exchange, self._prefix)
        scores = self.link.pipeline([("ZSCORE", endings, member) for member in members], raise_on_error=True)
        self._remove(exchange, [member for member, score in zip(members, scores, strict=True) if score is not None])

    def _remove(self, exchange: str, members: list[Any]) -> None:
        if members:
            endings = keys.endings(exchange, self._prefix)
            commands = [("SREM", key, *members) for key in (self._key(exchange), self._permanent(exchange))]
            self.link.pipeline([*commands, ("ZREM", endings, *members)], raise_on_error=True)

    def _sweep(self, exchange: str) -> None:
        """Of queues whose owner died, the bindings end when the next one is made; some per call."""
        endings, now = keys.endings(exchange, self._prefix), _now_ms()
        members = self.link.call("ZRANGEBYSCORE", endings, "-inf", now, "LIMIT", 0, SWEEP_BATCH)
        queues = [member.decode().split(self.separator)[-1] for member in members]
        bases = [keys.part(keys.base(queue, self._prefix), "queue") for queue in queues]
        lives = self.link.pipeline([("PTTL", base) for base in bases], raise_on_error=True)
        self._remove(exchange, [member for member, left in zip(members, lives, strict=True) if left == -2])
        later = [
            x
            for member, left in zip(members, lives, strict=True)
            if left != -2
            for x in (now + max(left, 1000), member)
        ]
        if later:
            self.link.call("ZADD", endings, *later)

    def table(self, exchange: str) -> list[tuple[str, str, str]]:
        """The bindings of an exchange: (routing key, pattern, queue)."""
        members = self.link.call("SMEMBERS", self._key(exchange))
        rows = (member.decode().split(self.separator) for member in members)
        return [(row[0], row[1], row[2]) for row in rows if len(row) == 3]


def _now_ms() -> int:
    """Our clock: it says only when to look, and never what is there."""
    return int(time() * 1000)

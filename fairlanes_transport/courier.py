"""Commands that are sent without waiting: the replies come to callbacks when they are there.

While the server works, so do we.  What is put before one post goes out in one packet, and its replies are read
together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import Any

from redis.exceptions import ConnectionError as DriverConnectionError
from redis.exceptions import NoScriptError, RedisError, ResponseError

from .connections import Connection, Link, connect, readable
from .errors import BrokerUnavailable, translate
from .store import Request


@dataclass(frozen=True)
class Letter:
    """A request on its way."""

    request: Request
    #: called with what the request's method would have returned
    done: Callable[[Any], None]
    #: called if the connection is lost before the reply: whether the request was carried out is not known
    lost: Callable[[], None]


class Courier:
    """One connection of one transport.  For one thread."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.connection: Connection | None = None
        self._generation = link.generation
        self._outbox: list[Letter] = []
        self._sent: deque[list[Letter]] = deque()
        self._since = 0.0

    @property
    def sock(self) -> Any:
        """The connected socket, if there is one."""
        return getattr(self.connection, "_sock", None)

    @property
    def waiting(self) -> bool:
        """Whether a reply is to come."""
        return bool(self._sent)

    def put(self, request: Request, done: Callable[[Any], None], lost: Callable[[], None]) -> None:
        """Send a request with the next `post`."""
        self._outbox.append(Letter(request, done, lost))

    def post(self) -> None:
        """Send what was put.

        Raises:
            redis.exceptions.RedisError, OSError: the server cannot be reached; every letter is lost.
        """
        if not self._outbox:
            return
        letters, self._outbox = self._outbox, []
        if not self._sent:
            self._since = monotonic()
        self._sent.append(letters)
        try:
            connection = self._connected()
            packed = connection.pack_commands([letter.request.command() for letter in letters])
            connection.send_packed_command(packed, check_health=False)
        except BaseException:
            self.close()
            raise

    def receive(self) -> None:
        """Read the replies that are there.  Call it when the socket is readable.

        Raises:
            redis.exceptions.RedisError, OSError: the connection is lost, or the server cannot serve now.
        """
        if not self._sent:
            # Nothing was asked, so nothing is to come: the server has closed the idle connection.
            self._hang_up()
            return
        self._receive_packet()
        # What came together is in the parser's buffer: the loop would not hear of it again.
        while self._sent and self._has_more():
            self._receive_packet()

    def refresh(self) -> None:
        """`receive` if there is something to read, for who has no loop that says so.

        Raises:
            as `receive` and `check`.
        """
        self.check()
        while self._has_more():
            self.receive()

    def settle(self) -> None:
        """Wait for every reply that is to come.

        Raises:
            as `receive`.
        """
        while self._sent:
            self._receive_packet()

    def check(self) -> None:
        """That no reply is so late that the connection must be dead; we may be late to read it, because a task ran
        on the loop.

        Raises:
            redis.exceptions.ConnectionError: it is; what was sent is lost.
        """
        if not self.waiting or monotonic() - self._since <= self.link.options.socket_timeout:
            return
        if self.sock is None or not readable(self.sock, 0):
            self.close()
            raise DriverConnectionError("no reply to a claim or an ack: the connection is dead")

    def close(self) -> None:
        """Drop the connection; what waits for a reply is lost."""
        self._hang_up()
        letters = [letter for packet in self._sent for letter in packet] + self._outbox
        self._sent.clear()
        self._outbox = []
        for letter in letters:
            letter.lost()

    def _hang_up(self) -> None:
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.disconnect()

    def _connected(self) -> Connection:
        """The connection to send on; a new one in the place of one that came before a failover, or new credentials,
        if nothing is under way on it.
        """
        if len(self._sent) == 1 and self._generation != self.link.generation:
            self._hang_up()
        if self.sock is None:
            self._generation = self.link.generation
            self.connection = self.link.dedicated()
            connect(self.connection)
        assert self.connection is not None
        return self.connection

    def _has_more(self) -> bool:
        if self.sock is None:
            return False
        assert self.connection is not None
        try:
            return bool(self.connection.can_read(0))
        except (RedisError, OSError):
            if self._sent:
                self.close()
                raise
            self._hang_up()
            return False

    def _receive_packet(self) -> None:
        """Read the replies of the oldest packet, waiting for those that are to come."""
        letters = self._sent[0]
        try:
            replies = [self._read(letter) for letter in letters]
        except BaseException:
            self.close()
            raise
        self._sent.popleft()
        self._since = monotonic()
        failure: Exception | None = None
        for letter, reply in zip(letters, replies):
            try:
                if isinstance(reply, Exception):
                    letter.lost()
                    raise reply
                letter.done(reply)
            except Exception as exc:
                # The others were carried out, and are told so all the same.
                failure = failure or exc
        if isinstance(failure, BrokerUnavailable):
            # After a failover the address may lead to another server: every connection must look it up again.
            self.close()
            self.link.disconnect()
        if failure is not None:
            raise failure

    def _read(self, letter: Letter) -> Any:
        """What the request returns, or the error of its own reply."""
        if self.connection is None or self.sock is None:
            raise DriverConnectionError("the connection was closed before the reply to a claim or an ack")
        try:
            reply = self.connection.read_response()
        except NoScriptError:
            # The server has forgotten its scripts; this one way is slow, and loads it.
            try:
                return letter.request.run(self.link)
            except Exception as exc:  # it is this letter's fate: the others have replies of their own
                return exc
        except ResponseError as exc:
            error = translate(exc)
            return letter.request.script.located(exc) if error is exc else error
        return letter.request.read(reply)

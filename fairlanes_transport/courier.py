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
from redis.exceptions import NoScriptError, ResponseError

from .connections import Connection, Link, readable
from .errors import translate
from .store import Request

#: A connection that was not used for so long may have been closed meanwhile.
IDLE_SECONDS = 1.0


@dataclass(frozen=True)
class Letter:
    """A request on its way."""

    request: Request
    #: called with what the request's method would have returned
    done: Callable[[Any], None]
    #: called if the connection is lost before the reply: whether the request was carried out is not known
    lost: Callable[[], None]


class Courier:
    """One connection of one transport."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.connection: Connection | None = None
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
            self._drop_if_closed()
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
            self.close()
            return
        self._receive_packet()
        # What came together is in the parser's buffer: the loop would not hear of it again.
        while self._sent and self._has_more():
            self._receive_packet()

    def _has_more(self) -> bool:
        try:
            return self.connection is not None and bool(self.connection.can_read(0))
        except BaseException:
            self.close()
            raise

    def settle(self) -> None:
        """Wait for every reply that is to come.

        Raises:
            as `receive`.
        """
        while self._sent:
            self._receive_packet()

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
        if failure is not None:
            raise failure

    def overdue(self) -> bool:
        """Whether a reply is so late that the connection must be dead; not if we are late to read it, because a
        task ran on the loop.
        """
        if not self.waiting or monotonic() - self._since <= self.link.options.socket_timeout:
            return False
        return self.sock is None or not readable(self.sock, 0)

    def close(self) -> None:
        """Drop the connection; what waits for a reply is lost."""
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.disconnect()
        letters = [letter for packet in self._sent for letter in packet] + self._outbox
        self._sent.clear()
        self._outbox = []
        for letter in letters:
            letter.lost()

    def _drop_if_closed(self) -> None:
        """What is readable though nothing was asked is the end: a server closes connections that idle."""
        if monotonic() - self._since > IDLE_SECONDS and self.sock is not None and readable(self.sock, 0):
            assert self.connection is not None
            self.connection.disconnect()

    def _connected(self) -> Connection:
        if self.sock is None:
            self.connection = self.link.dedicated()
            self.connection.connect()
        assert self.connection is not None
        return self.connection

    def _read(self, letter: Letter) -> Any:
        """What the request returns, or the error of its own reply."""
        if self.connection is None:
            raise DriverConnectionError("the loop's connection is closed")
        try:
            reply = self.connection.read_response()
        except NoScriptError:
            # The server has forgotten its scripts; this one way is slow, and loads it.
            try:
                return letter.request.run(self.link)
            except Exception as exc:  # it is this letter's fate: the others have replies of their own
                return exc
        except ResponseError as exc:
            return translate(letter.request.script.located(exc))
        return letter.request.read(reply)

"""One connection parked in one blocking pop on the wake tokens of many queues."""

from __future__ import annotations

import logging
import socket
from time import monotonic
from typing import Any

from redis.exceptions import NoPermissionError, RedisError, ResponseError

from . import keys
from .connections import Connection, Link, connect, readable
from .errors import translate
from .store import Store

logger = logging.getLogger(__name__)

#: Seconds by which a reply to the pop may be late before the connection counts as dead.
GRACE_SECONDS = 5.0
#: Seconds to wait for the reply of a pop that was asked to end, before asking again.
UNBLOCK_SECONDS = 0.05


class Park:
    """The parked socket.

    It is read only when it is readable, or after the server was told to end the pop; so its socket timeout bounds
    every read and never the wait itself, which has its own deadline (`overdue`).
    """

    def __init__(self, link: Link, store: Store) -> None:
        self.link = link
        self.store = store
        self.connection: Connection | None = None
        self._generation = link.generation
        self.queues: tuple[str, ...] = ()
        self._queue_of: dict[bytes, str] = {}
        self._client_id: int | None = None
        self._deadline = 0.0

    @property
    def parked(self) -> bool:
        """Whether a pop is under way."""
        return bool(self.queues)

    @property
    def sock(self) -> socket.socket | None:
        """The connected socket, if there is one."""
        return getattr(self.connection, "_sock", None)

    def start(self, queues: tuple[str, ...], seconds: float) -> None:
        """Park on the tokens of `queues`, in this order, for at most `seconds`.

        Raises:
            redis.exceptions.RedisError, OSError: the server cannot be reached.
        """
        connection = self._connected()
        names = [keys.part(keys.base(queue, self.store.prefix), "wake") for queue in queues]
        self._queue_of = dict(zip((name.encode() for name in names), queues))
        self._deadline = monotonic() + seconds + GRACE_SECONDS
        try:
            # Redis before 7.0.8 takes a timeout below a millisecond for "for ever".
            connection.send_command("BLPOP", *names, f"{max(seconds, 0.001):.3f}", check_health=False)
        except BaseException:
            self.close()
            raise
        self.queues = queues

    def read(self) -> str | None:
        """The queue whose token was popped; None: the park timed out.  Call it when the socket is readable.

        Raises:
            redis.exceptions.RedisError, OSError: the connection is lost, or the server ended the pop because it
                became a replica.
        """
        assert self.connection is not None
        self.queues = ()
        try:
            reply: Any = self.connection.read_response()
        except ResponseError as exc:
            self.close()
            raise translate(exc) from exc
        except BaseException:
            self.close()
            raise
        return self._queue_of[reply[0]] if reply else None

    def stop(self) -> str | None:
        """End the pop; returns the queue whose token it had popped already, or None."""
        if not self.parked:
            return None
        if self.link.down:
            # A token may be lost with the connection; the next park end finds the work.
            self.close()
            return None
        try:
            self._unblock()
            return self.read()
        except NoPermissionError:
            return self._hang_up()
        except (RedisError, OSError):
            # A token may be lost with the connection; the next park end finds the work.
            self.close()
            return None

    def overdue(self) -> bool:
        """Whether the reply is so late that the connection must be dead; not if we are late to read it."""
        return self.parked and monotonic() > self._deadline and not self._readable(0)

    def close(self) -> None:
        """Drop the connection."""
        self.queues = ()
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.disconnect()

    def _connected(self) -> Connection:
        if self._generation != self.link.generation:
            self.close()
        if self.connection is None or self.sock is None:
            self._generation = self.link.generation
            # The socket timeout bounds reads of a reply that has begun to come.
            connection = self.connection = self.link.dedicated()
            try:
                connect(connection)
                connection.send_command("CLIENT", "ID", check_health=False)
                self._client_id = int(connection.read_response())
            except NoPermissionError:
                self._client_id = None
            except BaseException:
                self.close()
                raise
        return self.connection

    def _unblock(self) -> None:
        """Ask the server to end the pop until the reply comes: the pop may reach it after the request."""
        give_up = monotonic() + GRACE_SECONDS
        if self._client_id is None:
            raise NoPermissionError("CLIENT ID is not permitted")
        while not self._readable(0):
            self.link.call("CLIENT", "UNBLOCK", self._client_id)
            if self._readable(UNBLOCK_SECONDS):
                return
            if monotonic() > give_up:
                raise TimeoutError("the server does not end the blocking pop")

    def _hang_up(self) -> str | None:
        """Where the ACL forbids CLIENT UNBLOCK: close our half, and read what was popped before the end."""
        sock = self.sock
        queue = None
        try:
            if sock is not None:
                sock.shutdown(socket.SHUT_WR)
                if self._readable(GRACE_SECONDS):
                    queue = self.read()
        except (RedisError, OSError):
            pass
        self.close()
        return queue

    def _readable(self, seconds: float) -> bool:
        sock = self.sock
        if sock is None:
            raise ConnectionError("the parked connection is closed")
        return readable(sock, seconds)

"""How commands get to the broker: :class:`Link`.

A :class:`Link` is the one pool of command connections that a process has to one broker; every channel and
every producer of the process shares it. redis-py makes the connections; commands are sent from here, without
its client objects, because this is the hot path.

Rules that the rest of the package relies on:

* Nothing is retried. The caller is told of a lost connection, and knows whether a command may be sent twice.
* A connection that failed between a command and its reply is closed. None is ever reused with a reply unread.
* Every wait ends: for a connection, for a reply, for a free slot in the pool.
* After a fork the child closes its copies of the parent's sockets and makes its own. It never writes to them.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import weakref
from collections import deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from time import monotonic
from typing import Any, NoReturn

from redis.exceptions import ConnectionError as DriverConnectionError
from redis.exceptions import RedisError, ResponseError
from redis.exceptions import TimeoutError as DriverTimeoutError

from .addresses import Address
from .connectors import Connection, Connector
from .errors import BrokerUnavailable, NoFreeConnection, OptionError, translate
from .options import Options

__all__ = ["Address", "Connection", "Link", "connect", "readable"]

#: Seconds after which an idle connection is looked at before it is used: the server or a firewall may have
#: closed it.
IDLE_CHECK_SECONDS = 1.0

#: Links of this process by address and settings.
_links: dict[tuple[Address, Hashable], Link] = {}
_links_lock = threading.Lock()
#: Every link, shared or not, for the child of a fork.
_all_links: weakref.WeakSet[Link] = weakref.WeakSet()

#: The options that shape a link. Channels that differ in another one still share it.
_SHAPING = (
    "socket_timeout",
    "socket_connect_timeout",
    "socket_keepalive",
    "socket_keepalive_options",
    "max_connections",
    "client_name",
    "min_other_sentinels",
    "sentinel_kwargs",
)


class Link:
    """The command connections of this process to one broker. Safe for threads and, when patched, for
    greenlets.
    """

    def __init__(self, address: Address, options: Options | None = None) -> None:
        self.address = address
        self.options = options or Options()
        self._connector = Connector(address, self.options)
        self._connector.check()
        self._made: weakref.WeakSet[Connection] = weakref.WeakSet()
        self._master: tuple[str, int] | None = None
        self.generation = 0
        """Goes up when connections made before are to be replaced: a failover, new credentials, a disconnect.
        Whoever
        holds a dedicated connection from an older generation should replace it when it is idle."""
        self.down = False
        """The last command met a lost connection, or no answer: who only cleans up need not wait for another."""
        self.silent_at = 0.0
        """When (monotonic) the last command was not answered in time, if no other was answered since."""
        self.silences = 0
        """How often a command was not answered in time."""
        self._start_empty()
        self._follow_credentials()
        _all_links.add(self)

    def _start_empty(self) -> None:
        #: Idle connections, last used last, with the time since when they are idle.
        self._idle: deque[tuple[Connection, float]] = deque()
        #: Idle and in use.
        self._open = 0
        self._waiting = 0
        self._freed = threading.Condition()

    @classmethod
    def shared(cls, address: Address, options: Options | None = None) -> Link:
        """Return the process's link to *address*, which is made on first use and never closed by its
        users.
        """
        options = options or Options()
        key = (address, tuple(_frozen(getattr(options, name)) for name in _SHAPING))
        with _links_lock:
            link = _links.get(key)
            if link is None:
                link = _links[key] = cls(address, options)
            return link

    @classmethod
    def first(cls, addresses: Iterable[Address], options: Options | None = None) -> Link:
        """Return the shared link to the first of *addresses* that answers.

        Raises:
            redis.exceptions.RedisError: none did; the error of the last.
        """
        failure: Exception = OptionError("the broker URL is empty")
        for address in addresses:
            link = cls.shared(address, options)
            try:
                link.connect()
            except (RedisError, OSError) as exc:
                failure = exc
            else:
                return link
        raise failure

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.address}: {self._open} open, {len(self._idle)} idle>"

    # commands

    def call(self, *args: Any) -> Any:
        """Send one command and return its reply, as bytes, int, None or a list of these.

        Raises:
            redis.exceptions.ConnectionError, redis.exceptions.TimeoutError: the connection was lost; whether
                the server has carried out the command is unknown.
            BrokerUnavailable: the server refused it because it cannot serve now.
            NoFreeConnection: all connections were in use for ``socket_timeout`` seconds.
            FairlanesError: see :func:`fairlanes_transport.errors.translate`.
        """
        generation = self.generation
        connection = self._take()
        try:
            connection.send_packed_command(connection.pack_command(*args), check_health=False)
            reply = connection.read_response(disconnect_on_error=True)
        except ResponseError as exc:
            # A whole reply was read: the connection is sound, unless the error says otherwise.
            raise self._refused(connection, generation, exc) from exc
        except BaseException as exc:
            self._fail(connection, exc)
        self.down, self.silent_at = False, 0.0
        self._give_back(connection, generation)
        if type(reply) is list:
            _raise_nested(reply)
        return reply

    def pipeline(self, commands: Sequence[Sequence[Any]], *, raise_on_error: bool = False) -> list[Any]:
        """Send *commands* in one go, without MULTI, and return a reply for each.

        An error reply stands in the place of the reply, translated; with *raise_on_error* the first one is
        raised, after all replies were read.

        Raises:
            as :meth:`call`, for what befalls the connection.
        """
        if not commands:
            return []
        generation = self.generation
        connection = self._take()
        try:
            for chunk in connection.pack_commands(commands):
                connection.send_packed_command((chunk,), check_health=False)
            # One by one: what was read before a failure is of no use, the caller must ask again.
            replies = [_read_in_place(connection) for _ in commands]
        except BaseException as exc:
            self._fail(connection, exc)
        self.down, self.silent_at = False, 0.0
        replies = [_translated(reply) for reply in replies]
        failures = [reply for reply in replies if isinstance(reply, Exception)]
        if any(isinstance(failure, BrokerUnavailable) for failure in failures):
            self._discard(connection)
            self.disconnect()
        else:
            self._give_back(connection, generation)
        if failures and raise_on_error:
            raise failures[0]
        return replies

    def connect(self) -> None:
        """Make sure that the broker answers.

        Raises:
            as :meth:`call`.
        """
        self.call("PING")

    def answers(self, seconds: float) -> bool:
        """Whether the broker answers now, within so many seconds; not asked again where the last command failed."""
        if self.down:
            return False
        generation = self.generation
        try:
            connection = self._take()
        except (RedisError, OSError):
            return False
        sock = getattr(connection, "_sock", None)
        try:
            if sock is not None:
                sock.settimeout(seconds)
            connection.send_packed_command(connection.pack_command("PING"), check_health=False)
            connection.read_response(disconnect_on_error=True)
            if sock is not None:
                sock.settimeout(self.options.socket_timeout)
        except ResponseError:
            self._discard(connection)
        except (RedisError, OSError) as exc:
            self._discard(connection)
            self.note_failure(exc)
            return False
        else:
            self._give_back(connection, generation)
        return True

    def dedicated(self, **overrides: Any) -> Connection:
        """Return a new connection outside the pool, not yet connected, for a socket that lives long.

        The caller connects and disconnects it. It does not retry, checks no health, speaks RESP2 and does not
        count against ``max_connections``.

        Arguments:
            overrides: arguments of redis-py's connections, such as ``socket_timeout`` in seconds. None there
                lets reads wait without an end, but not the handshake.
        """
        connection = self._connector.make(**overrides)
        self._made.add(connection)
        return connection

    def disconnect(self) -> None:
        """Close every idle connection, and those in use as soon as they come back. The next command
        connects anew.
        """
        self.generation += 1
        while True:
            try:
                connection, _ = self._idle.pop()
            except IndexError:
                return
            self._discard(connection)

    def close(self) -> None:
        """Disconnect, and let the next :meth:`shared` make a new link."""
        with _links_lock:
            for key in [key for key, link in _links.items() if link is self]:
                del _links[key]
        self.disconnect()

    # taking and giving back

    def _take(self) -> Connection:
        """Return a connected connection that nobody else uses."""
        while True:
            try:
                connection, since = self._idle.pop()
            except IndexError:
                return self._take_new()
            if monotonic() - since <= IDLE_CHECK_SECONDS or _is_quiet(connection):
                return connection
            self._discard(connection)

    def _take_new(self) -> Connection:
        """Make a connection if there may be one more, or wait for one to come back."""
        deadline = monotonic() + self.options.socket_timeout
        with self._freed:
            # Announced before looking: who gives one back looks for us only after that.
            self._waiting += 1
            try:
                while True:
                    try:
                        return self._idle.pop()[0]
                    except IndexError:
                        pass
                    if self._open < self.options.max_connections:
                        self._open += 1
                        break
                    if not self._freed.wait(deadline - monotonic()) and monotonic() >= deadline:
                        raise NoFreeConnection(
                            f"all {self._open} connections to {self.address} were in use for "
                            f"{self.options.socket_timeout:g} s: raise max_connections"
                        )
            finally:
                self._waiting -= 1
        return self._connected()

    def _connected(self) -> Connection:
        """Return a new connection, connected. Its slot is taken already."""
        connection: Connection | None = None
        try:
            connection = self._connector.make()
            self._made.add(connection)
            connection.connect()
        except BaseException as exc:
            self._fail(connection, exc)
        if self.address.kind == "sentinel":
            self._follow_master(connection)
        return connection

    def _give_back(self, connection: Connection, generation: int) -> None:
        if generation != self.generation:
            self._discard(connection)
            return
        self._idle.append((connection, monotonic()))
        if self._waiting:
            with self._freed:
                self._freed.notify()

    def _discard(self, connection: Connection | None) -> None:
        """Close a connection and free its slot."""
        if connection is not None:
            connection.disconnect()
        with self._freed:
            # Below zero only for what was in use when the process forked.
            self._open = max(0, self._open - 1)
            if self._waiting:
                self._freed.notify()

    # failures

    def _refused(self, connection: Connection, generation: int, exc: ResponseError) -> Exception:
        """Handle an error reply. Returns the error to raise."""
        error = translate(exc)
        if isinstance(error, BrokerUnavailable):
            # After a failover the address may lead to another server: every connection must look it up again.
            self._discard(connection)
            self.disconnect()
        else:
            self._give_back(connection, generation)
        return error

    def _fail(self, connection: Connection | None, exc: BaseException) -> NoReturn:
        """Handle a failure after which a reply may still be unread, and raise it."""
        self._discard(connection)
        if isinstance(exc, (DriverConnectionError, DriverTimeoutError, OSError)):
            # What took one connection has most likely taken the others.
            self.note_failure(exc)
            self.disconnect()
        error = translate(exc) if isinstance(exc, Exception) else exc
        if error is exc:
            raise exc
        raise error from exc

    def note_failure(self, exc: Exception) -> None:
        """Note that one of these connections, or a dedicated one, was lost or got no answer in time."""
        self.down = True
        if isinstance(exc, (DriverTimeoutError, TimeoutError)):
            self.note_silence()

    def note_silence(self) -> None:
        """Note that the broker did not answer in time: connections that wait for something may be dead as well."""
        self.down, self.silent_at = True, monotonic()
        self.silences += 1

    def _follow_master(self, connection: Any) -> None:
        """Drop the connections to an old master once the sentinels have named another."""
        master = (connection.host, connection.port)
        if self._master is not None and master != self._master:
            self.disconnect()
        self._master = master

    def _follow_credentials(self) -> None:
        """Let connections log in again when a streaming provider has a new token."""
        credentials = self.address.credentials
        subscribe = getattr(credentials, "on_next", None)
        if subscribe is None:
            return
        # The provider outlives the link, and calls from a thread of its own.
        link = weakref.ref(self)

        def renewed(_token: object) -> None:
            alive = link()
            if alive is not None:
                alive.disconnect()

        subscribe(renewed)

    def _after_fork(self) -> None:
        """Forget, in the child, what belongs to the parent. redis-py closes without shutdown in another
        process.
        """
        self._start_empty()
        self.generation += 1
        for connection in list(self._made):
            connection.disconnect()
        self._made = weakref.WeakSet()
        # Its lock may be held by a thread that the child does not have.
        self._connector = Connector(self.address, self.options)


def _frozen(value: Any) -> Hashable:
    """Return *value* as a part of a key: equal settings share one link."""
    if isinstance(value, Mapping):
        return tuple(sorted((name, _frozen(item)) for name, item in value.items()))
    if isinstance(value, (list, tuple)):
        return tuple(map(_frozen, value))
    return value if isinstance(value, Hashable) else id(value)


def _read_in_place(connection: Connection) -> Any:
    try:
        return connection.read_response(disconnect_on_error=True)
    except ResponseError as exc:
        return exc


def _translated(reply: Any) -> Any:
    """Return *reply*, or the error to raise for it."""
    if not isinstance(reply, Exception):
        return reply
    error = translate(reply)
    if error is not reply:
        error.__cause__ = reply
    return error


def _raise_nested(reply: list[Any]) -> None:
    """Raise the first error inside a reply: a script may answer with a list of replies."""
    for item in reply:
        if type(item) is list:
            _raise_nested(item)
        elif isinstance(item, Exception):
            raise translate(item) from item


def connect(connection: Connection) -> None:
    """Connect a dedicated connection; its socket is closed with it, also if it is dropped without a word.

    Raises:
        redis.exceptions.RedisError, OSError: the server cannot be reached.
    """
    connection.connect()
    finalizer = weakref.finalize(connection, connection._sock.close)  # type: ignore[attr-defined]
    finalizer.atexit = False


def readable(sock: socket.socket, seconds: float) -> bool:
    """Whether something can be read from a socket within so many seconds."""
    if not hasattr(select, "poll"):
        return bool(select.select([sock], [], [], seconds)[0])
    poller = select.poll()
    poller.register(sock, select.POLLIN)
    return bool(poller.poll(seconds * 1000))


def _is_quiet(connection: Connection) -> bool:
    """Whether an idle connection is open with nothing to read. Anything to read means that it was closed,
    or is dirty.
    """
    try:
        return not connection.can_read(0)
    except (RedisError, OSError):
        return False


def _after_fork_in_child() -> None:
    # The parent's lock may be held by a thread that the child does not have.
    global _links_lock  # noqa: PLW0603
    _links_lock = threading.Lock()
    for link in list(_all_links):
        link._after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)

"""Raw kombu on real servers.

What kombu's own Redis transport can do as well is tested by its words only: ``FAIRLANES_TEST_SCHEME=redis``
runs those tests on it, as the baseline.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kombu import Connection, Consumer, Exchange, Queue

from fairlanes_transport import scripts
from tests.harness import SCHEME, Server, wait_for

ours = pytest.mark.skipif(SCHEME != "fairlanes", reason="not so on kombu's Redis transport")
"""Marks what is promised by this transport alone."""


@pytest.fixture
def connect_to() -> Iterator[Callable[..., Connection]]:
    """A function that connects to a URL with transport options; closed after the test."""
    opened: list[Connection] = []

    def connect_to(url: str, **options: Any) -> Connection:
        connection = Connection(url, transport_options=options)
        opened.append(connection)
        return connection

    yield connect_to
    for connection in opened:
        connection.close()


@pytest.fixture
def connect(server: Server, connect_to: Callable[..., Connection]) -> Callable[..., Connection]:
    """A function that connects to ``server`` with transport options; closed after the test."""

    def connect(db: int = 0, **options: Any) -> Connection:
        return connect_to(server.url(db=db), **options)

    return connect


@pytest.fixture
def connection(connect: Callable[..., Connection]) -> Connection:
    """A connection to ``server``."""
    return connect()


def send(connection: Connection, queue: str, *bodies: Any, **options: Any) -> None:
    """Publish bodies straight to a queue."""
    producer = connection.Producer()
    for body in bodies:
        producer.publish(body, routing_key=queue, **options)


def take(connection: Connection, n: int, timeout: float = 10.0) -> int:
    """Drain until `n` more events were delivered, or until `timeout`; returns how many were."""
    deadline = time.monotonic() + timeout
    taken = 0
    while taken < n and time.monotonic() < deadline:
        with contextlib.suppress(TimeoutError):
            connection.drain_events(timeout=0.2)
            taken += 1
    return taken


def until(connection: Connection, condition: Callable[[], Any], timeout: float = 10.0) -> bool:
    """Drain until `condition` holds; for fanout, which may deliver several messages at a time."""
    deadline = time.monotonic() + timeout
    while not condition() and time.monotonic() < deadline:
        with contextlib.suppress(TimeoutError):
            connection.drain_events(timeout=0.1)
    return bool(condition())


def quiet(connection: Connection, seconds: float = 0.3) -> bool:
    """Whether nothing is delivered for so long."""
    try:
        connection.drain_events(timeout=seconds)
    except TimeoutError:
        return True
    return False


class Inbox:
    """A consumer that notes what it gets.

    Args:
        channel: a kombu channel.
        queues: names, or queues.
        prefetch: of the channel; 0 = no limit.
        ack: acknowledge at once.
        options: of the ``Consumer``.
    """

    def __init__(self, channel: Any, *queues: str | Queue, prefetch: int = 0, ack: bool = True, **options: Any) -> None:
        self.bodies: list[Any] = []
        self.messages: list[Any] = []
        self._ack = ack
        self.consumer = Consumer(
            channel,
            [queue if isinstance(queue, Queue) else Queue(queue) for queue in queues],
            callbacks=[self._note],
            **options,
        )
        if prefetch:
            self.consumer.qos(prefetch_count=prefetch)
        self.consumer.consume()

    def _note(self, body: Any, message: Any) -> None:
        self.bodies.append(body)
        self.messages.append(message)
        if self._ack and not self.consumer.no_ack:
            message.ack()

    def ack_all(self) -> None:
        """Acknowledge everything that was not yet."""
        for message in self.messages:
            if not message.acknowledged:
                message.ack()

    def __len__(self) -> int:
        return len(self.bodies)


def works(connection: Connection) -> None:
    """Publish, consume, acknowledge, broadcast."""
    exchange = Exchange("shout", "fanout")
    inbox = Inbox(connection.default_channel, "q", Queue("ear", exchange))
    until(connection, lambda: False, timeout=0.2)
    send(connection, "q", 1, 2, headers={"tenant": "a"})
    assert take(connection, 2) == 2
    connection.Producer(exchange=exchange).publish("hear")
    assert until(connection, lambda: "hear" in inbox.bodies)
    assert connection.default_channel.queue_declare("q", passive=True).message_count == 0


class Drainer:
    """A thread that drains a connection of its own into an inbox, as an idle consumer does."""

    def __init__(self, connection: Connection, *queues: str | Queue, **options: Any) -> None:
        self.connection = connection
        self.inbox = Inbox(connection.default_channel, *queues, **options)
        self.errors: list[BaseException] = []
        self.turns = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                with contextlib.suppress(TimeoutError):
                    self.connection.drain_events(timeout=0.1)
                self.turns += 1
        except BaseException as error:
            self.errors.append(error)

    def stop(self) -> None:
        """End the thread; what went wrong in it is raised here."""
        self._stop.set()
        self._thread.join(10)
        assert not self._thread.is_alive()
        if self.errors:
            raise self.errors[0]

    def __enter__(self) -> Drainer:
        return self

    def __exit__(self, *args: object) -> None:
        self.stop()


class Monitor:
    """What clients send to a server: MONITOR, without what scripts call.

    ``commands`` holds (database, address of the client, command with its arguments).
    """

    def __init__(self, server: Server, db: int = 0) -> None:
        self.db = db
        self._server = server
        self._lines: list[str] = []
        self._sock = socket.create_connection(("127.0.0.1", server.port))
        self._sock.sendall(b"MONITOR\r\n")
        self._reader = self._sock.makefile("r", encoding="latin-1", newline="\r\n")
        assert self._reader.readline().strip() == "+OK"
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            for line in self._reader:
                self._lines.append(line.strip())
        except (OSError, ValueError):
            pass

    def _mark(self) -> int:
        """The number of lines up to now: a command of our own tells when all have been read."""
        word = f"mark-{time.monotonic_ns()}"
        seen = len(self._lines)
        self._server.client(self.db).echo(word)
        wait_for(lambda: any(word in line for line in self._lines[seen:]), 10, "MONITOR")
        return len(self._lines)

    def start(self) -> None:
        """Forget what was seen so far."""
        del self._lines[: self._mark()]

    def commands(self) -> list[str]:
        """What clients have sent since ``start``: names in upper case, scripts as ``EVALSHA``."""
        return [words[0].upper() for words in self._sent()]

    def calls(self, script: str) -> int:
        """How often clients have called a script since ``start``."""
        digest = scripts.load(script).digest
        return sum(words[0].upper() == "EVALSHA" and words[1] == digest for words in self._sent())

    def _sent(self) -> list[list[str]]:
        end = self._mark()
        seen = []
        for line in self._lines[:end]:
            # +1700000000.123456 [0 127.0.0.1:41234] "BLPOP" "key" "30.000"
            head, _, rest = line.partition("] ")
            if f"[{self.db} " in head and " lua" not in head and "mark-" not in rest:
                seen.append([word.strip('"') for word in rest.split(" ")])
        return seen

    def close(self) -> None:
        """Stop."""
        self._sock.shutdown(socket.SHUT_RDWR)
        self._thread.join(5)
        self._reader.close()
        self._sock.close()


@pytest.fixture
def monitor(server: Server) -> Iterator[Monitor]:
    """The commands that clients send to ``server``."""
    monitor = Monitor(server)
    yield monitor
    monitor.close()


def parked(server: Server) -> int:
    """How many consumers are parked in a blocking pop."""
    clients = server.client().client_list()
    return sum(client["cmd"] in ("blpop", "brpop") and "b" in client["flags"] for client in clients)

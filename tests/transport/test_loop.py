"""The transport on kombu's event loop, as a Celery worker uses it, but without Celery."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from kombu import Connection, Exchange, Queue
from kombu.asynchronous import Hub, get_event_loop, set_event_loop

from fairlanes_transport.metronome import Doorbell
from tests.harness import Server, wait_for
from tests.invariants import check
from tests.transport.conftest import Inbox, Monitor, ours, parked, send, take

pytestmark = ours


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_ring_while_the_bell_is_heard(moment: str) -> None:
    """From another thread, just when the loop reads: the bell must not fall silent for ever."""
    bell = Doorbell()

    class Reader:
        def __init__(self, sock: socket.socket) -> None:
            self.sock = sock

        def recv(self, size: int) -> bytes:
            if moment == "before":
                bell.ring()
            data = self.sock.recv(size)
            if moment == "after":
                bell.ring()
            return data

    reader = bell.reader
    for _ in range(3):
        bell.ring()
        assert select.select([reader], [], [], 1)[0], "rung, and nobody hears it"
        bell.reader = Reader(reader)  # type: ignore[assignment]
        bell.quiet()
        bell.reader = reader
        with contextlib.suppress(BlockingIOError):
            reader.recv(1)
    bell.close()


class Loop:
    """A hub, and what a worker does with it."""

    def __init__(self) -> None:
        self.hub = Hub()
        set_event_loop(self.hub)
        self.turns = 0

    def register(self, connection: Connection) -> None:
        """Let the hub serve a connection."""
        connection.register_with_event_loop(self.hub)

    def run(self, condition: Callable[[], Any], timeout: float = 10.0) -> bool:
        """Turn until `condition` holds, and at most until `timeout` (looked at after each turn)."""
        deadline = time.monotonic() + timeout
        loop = self.hub.create_loop()
        while not condition() and time.monotonic() < deadline:
            next(loop)
            self.turns += 1
        return bool(condition())

    def idle(self, seconds: float) -> int:
        """Turn for some time; returns the number of turns."""
        before = self.turns
        self.hub.call_later(seconds, lambda: None)
        self.run(lambda: False, seconds)
        return self.turns - before


@pytest.fixture
def loop() -> Iterator[Loop]:
    """An event loop, which becomes the current one for the test."""
    before = get_event_loop()
    loop = Loop()
    yield loop
    loop.hub.close()
    set_event_loop(before)


@pytest.fixture
def served(connection: Connection, loop: Loop) -> Connection:
    """A connection that the loop serves."""
    connection.connect()
    loop.register(connection)
    return connection


@pytest.mark.parametrize("prefetch", [1, 4, 16, 0])
def test_messages_arrive_in_order(
    served: Connection, loop: Loop, connect: Callable[..., Connection], prefetch: int, server: Server
) -> None:
    inbox = Inbox(served.default_channel, "q", prefetch=prefetch)
    send(connect(), "q", *range(300))
    assert loop.run(lambda: len(inbox) == 300)
    assert inbox.bodies == list(range(300))
    loop.idle(0.1)
    assert check(server.client(), "q", token_out=True).message == {}


def test_who_drains_after_a_loop_loses_nothing(
    served: Connection, loop: Loop, connect: Callable[..., Connection], server: Server
) -> None:
    """Acks that wait for the loop's next turn go out with the drain."""
    inbox = Inbox(served.default_channel, "q", prefetch=4)
    send(connect(), "q", *range(40))
    assert loop.run(lambda: len(inbox) >= 10)
    started = time.monotonic()
    take(served, 40 - len(inbox))
    assert (inbox.bodies, time.monotonic() - started < 2) == (list(range(40)), True)
    assert check(server.client(), "q", token_out=True).message == {}


def test_a_message_to_a_parked_loop(served: Connection, loop: Loop, connect: Callable[..., Connection]) -> None:
    inbox = Inbox(served.default_channel, "q")
    sender = connect()
    for n in range(1, 6):
        timer = threading.Timer(0.1, send, (sender, "q", n))
        timer.start()
        assert loop.run(lambda n=n: len(inbox) == n, 5)
        timer.join()


def test_an_idle_loop_sends_nothing(
    served: Connection, loop: Loop, connect: Callable[..., Connection], monitor: Monitor, server: Server
) -> None:
    inbox = Inbox(served.default_channel, "q", Queue("ear", Exchange("shout", "fanout")))
    send(connect(), "q", 1)
    assert loop.run(lambda: len(inbox) == 1)
    loop.idle(0.5)
    assert parked(server) == 1
    monitor.start()
    turns = loop.idle(3)
    assert monitor.commands() == []
    assert turns < 10


def test_acks_from_other_threads_wake_the_loop(
    served: Connection, loop: Loop, connect: Callable[..., Connection]
) -> None:
    """With a prefetch of one every message needs the ack of the one before."""
    inbox = Inbox(served.default_channel, "q", prefetch=1, ack=False)
    send(connect(), "q", *range(20))
    stop = threading.Event()

    def acknowledge() -> None:
        while not stop.is_set():
            inbox.ack_all()
            time.sleep(0.002)

    thread = threading.Thread(target=acknowledge)
    thread.start()
    started = time.monotonic()
    assert loop.run(lambda: len(inbox) == 20, 30)
    took = time.monotonic() - started
    stop.set()
    thread.join()
    inbox.ack_all()
    assert took < 5  # it would be a second each if the loop slept through its poll


@pytest.mark.parametrize("others", [0.0, 60.0])
def test_a_delayed_message_is_on_time(
    served: Connection, loop: Loop, connect: Callable[..., Connection], others: float
) -> None:
    """Whatever other timers the loop has: it chooses the length of its poll before it calls us."""
    if others:
        loop.hub.call_later(others, lambda: None)
    inbox = Inbox(served.default_channel, "q")
    sender = connect()
    loop.idle(0.2)
    for n in range(1, 5):
        due = datetime.now(timezone.utc) + timedelta(seconds=0.3)
        send(sender, "q", n, headers={"eta": due.isoformat()})
        assert loop.run(lambda n=n: len(inbox) == n, 5)
        late = time.time() - due.timestamp()
        assert 0 <= late < 0.3


def test_timers_do_not_pile_up(served: Connection, loop: Loop, connect: Callable[..., Connection]) -> None:
    """A cancelled timer stays in the loop's heap until its time: that is a lease away."""
    inbox = Inbox(served.default_channel, "q", prefetch=2)
    send(connect(), "q", *range(400))
    assert loop.run(lambda: len(inbox) == 400)
    assert len(loop.hub.timer.queue) < 10


def test_the_loop_is_reset(served: Connection, loop: Loop, connect: Callable[..., Connection]) -> None:
    """As Celery does on an error: a new poller, and all readers are gone."""
    inbox = Inbox(served.default_channel, "q", Queue("ear", Exchange("shout", "fanout")))
    sender = connect()
    loop.idle(0.2)
    for n in range(1, 4):
        loop.hub.reset()
        set_event_loop(loop.hub)
        send(sender, "q", n)
        assert loop.run(lambda n=n: len(inbox) == n, 5)
    sender.Producer(exchange=Exchange("shout", "fanout")).publish("hear")
    assert loop.run(lambda: "hear" in inbox.bodies, 5)


def test_closing_leaves_the_loop_clean(served: Connection, loop: Loop, server: Server) -> None:
    Inbox(served.default_channel, "q", Queue("ear", Exchange("shout", "fanout")))
    loop.idle(0.2)
    assert loop.hub.on_tick
    served.close()
    assert not loop.hub.on_tick
    waker = {loop.hub._waker.fileno()} if loop.hub._waker else set()
    assert set(loop.hub.readers) <= waker
    wait_for(lambda: parked(server) == 0, 5, "nobody parked")
    loop.idle(0.2)


def test_a_new_connection_takes_over(loop: Loop, connect: Callable[..., Connection]) -> None:
    sender = connect()
    for n in range(3):
        connection = connect()
        connection.connect()
        loop.register(connection)
        inbox = Inbox(connection.default_channel, "q", prefetch=2, ack=False)
        send(sender, "q", n, n, n)
        assert loop.run(lambda inbox=inbox: len(inbox) == 2)
        inbox.ack_all()
        connection.collect()
    assert len(loop.hub.on_tick) == 0


def test_credit_of_a_nearly_full_channel(
    served: Connection, loop: Loop, connect: Callable[..., Connection], server: Server
) -> None:
    """It may settle for a moment, and then it is used, though nothing else stirs the loop."""
    loop.hub.call_later(60, lambda: None)
    inbox = Inbox(served.default_channel, "q", prefetch=20, ack=False)
    sender = connect()
    send(sender, "q", *range(18))
    assert loop.run(lambda: len(inbox) == 18)
    loop.idle(0.2)
    for n in (19, 20):
        started = time.monotonic()
        send(sender, "q", n)
        assert loop.run(lambda n=n: len(inbox) == n, 8)
        assert time.monotonic() - started < 3
    inbox.ack_all()


def test_cancel_and_consume_on_the_loop(served: Connection, loop: Loop, connect: Callable[..., Connection]) -> None:
    sender = connect()
    one = Inbox(served.default_channel, "a")
    loop.idle(0.2)
    two = Inbox(served.default_channel, "b")
    send(sender, "b", 1)
    assert loop.run(lambda: len(two) == 1, 5)
    two.consumer.cancel()
    send(sender, "b", 2)
    send(sender, "a", 3)
    assert loop.run(lambda: len(one) == 1, 5)
    loop.idle(0.3)
    assert len(two) == 1
    two.consumer.consume()
    assert loop.run(lambda: len(two) == 2, 5)


def test_cancel_inside_of_a_delivery(served: Connection, loop: Loop, connect: Callable[..., Connection]) -> None:
    """The rest of what was claimed goes back; nothing is delivered twice."""
    sender = connect()
    send(sender, "q", *range(40))
    seen: list[Any] = []

    def note(body: Any, message: Any) -> None:
        seen.append(body)
        message.ack()
        if len(seen) == 10:
            consumer.cancel()

    inbox = Inbox(served.default_channel, "q", prefetch=16)
    consumer = inbox.consumer
    consumer.callbacks[:] = [note]
    assert loop.run(lambda: len(seen) >= 10)
    loop.idle(0.3)
    assert seen == list(range(10))
    consumer.consume()
    assert loop.run(lambda: len(seen) == 40)
    assert seen == list(range(40))


def test_a_consumer_raises_on_the_loop(served: Connection, loop: Loop, connect: Callable[..., Connection]) -> None:
    seen: list[Any] = []

    def note(body: Any, message: Any) -> None:
        message.ack()
        seen.append(body)
        if body == 0:
            raise RuntimeError("a bug of the program")

    inbox = Inbox(served.default_channel, "q")
    inbox.consumer.callbacks[:] = [note]
    send(connect(), "q", 0, 1, 2)
    with pytest.raises(RuntimeError):
        loop.run(lambda: len(seen) == 3)
    assert loop.run(lambda: len(seen) == 3)


def test_two_queues_on_the_loop(served: Connection, loop: Loop, connect: Callable[..., Connection]) -> None:
    """A queue that is never empty does not starve the other one."""
    sender = connect()
    inbox = Inbox(served.default_channel, "a", "b", prefetch=1)
    send(sender, "a", *["a"] * 200)
    assert loop.run(lambda: len(inbox) >= 20)
    send(sender, "b", "b")
    seen = len(inbox)
    assert loop.run(lambda: "b" in inbox.bodies)
    assert len(inbox) - seen <= 6

"""What was reported of other transports, and is not shown by a test of its own elsewhere."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kombu import Connection, Exchange, Queue
from kombu.asynchronous import get_event_loop, set_event_loop
from kombu.utils.eventio import READ
from redis import exceptions as driver

from fairlanes_transport.errors import FairlanesError, translate
from fairlanes_transport.metronome import Metronome
from fairlanes_transport.transport import Transport
from tests.faults.conftest import Site
from tests.harness import wait_for
from tests.transport.conftest import Inbox
from tests.transport.test_loop import Loop

pytestmark = pytest.mark.faults


def test_a_deadline_is_that_of_the_claimer(site: Callable[..., Site]) -> None:
    """celery#2599: the shortest visibility of any client won."""
    here = site()
    here.store.enqueue("celery", "1", "a", "{}", b"")
    claimed = here.store.claim("celery", 1, 60_000).claimed[0]
    until = time.monotonic() + 1.5
    while time.monotonic() < until:
        assert here.store.claim("celery", 1, 100).claimed == ()
        time.sleep(0.05)
    assert here.store.extend("celery", [claimed.fence], 60_000) == (1,)


def test_the_lease_shows_in_stats(site: Callable[..., Site]) -> None:
    """celery#9339: set in one of several places, without effect."""
    here = site(lease_seconds=7)
    here.worker(concurrency=1)
    stats = wait_for(lambda: here.sender.app.control.inspect(timeout=1).stats(), 10, "stats")
    assert stats["w0@here"]["broker"]["transport_options"]["lease_seconds"] == 7


def test_twenty_thousand_through_a_simple_queue(site: Callable[..., Site]) -> None:
    """kombu#593: some were missing, and the order was odd."""
    here = site()
    n = 20_000
    with Connection(here.server.url("fairlanes")) as connection, connection.SimpleQueue("simple") as queue:
        for i in range(n):
            queue.put(i, headers={"tenant": f"t{i % 3}"})
        got: dict[int, list[int]] = {0: [], 1: [], 2: []}
        for _ in range(n):
            message = queue.get(timeout=5)
            got[message.payload % 3].append(message.payload)
            message.ack()
        with pytest.raises(queue.Empty):
            queue.get(block=False)
    assert got == {lane: list(range(lane, n, 3)) for lane in range(3)}


@pytest.mark.parametrize(
    "error",
    [each for each in vars(driver).values() if isinstance(each, type) and issubclass(each, Exception)],
    ids=lambda each: each.__name__,
)
def test_no_error_of_the_driver_ends_a_worker(error: type[Exception]) -> None:
    """celery#3046: a TimeoutError was "unrecoverable"."""
    assert issubclass(error, Transport.connection_errors)


class _Served:
    """A connection that a loop serves, with an inbox, a fanout queue, and somebody who sends to them."""

    def __init__(self, here: Site, loop: Loop) -> None:
        self.here, self.loop = here, loop
        self.connection = Connection(here.server.url("fairlanes"), transport_options=here.options)
        self.connection.connect()
        loop.register(self.connection)
        self.inbox = Inbox(self.connection.default_channel, "q", Queue("ear", Exchange("shout", "fanout")))
        self.metronome: Metronome = self.connection.transport.metronome

    def settled(self) -> None:
        """Turn until it is parked and knows of no work."""
        for _ in range(50):
            self.loop.idle(0.05)
            if self.metronome.park.parked and not self.metronome.courier.waiting:
                return
        raise AssertionError("not parked")

    def send(self, body: Any) -> None:
        """Send a message, and a broadcast."""
        with Connection(self.here.server.url("fairlanes")) as sender:
            sender.Producer().publish(body, routing_key="q")
            sender.Producer(exchange=Exchange("shout", "fanout")).publish(body)

    def works(self, body: Any) -> bool:
        """Whether both arrive."""
        self.send(body)
        return self.loop.run(lambda: self.inbox.bodies.count(body) == 2, 5)


@pytest.fixture
def served(site: Callable[..., Site]) -> Iterator[Callable[[], _Served]]:
    """A function that connects anew, on the same loop."""
    before = get_event_loop()
    here, loop = site(lease_seconds=20), Loop()
    made: list[_Served] = []

    def serve() -> _Served:
        made.append(_Served(here, loop))
        return made[-1]

    yield serve
    for each in made:
        each.connection.collect()
    loop.hub.close()
    set_event_loop(before)


def _raised() -> list[Exception]:
    """One of each class of the driver that is a RedisError, and of those of a socket."""
    kinds = [each for each in vars(driver).values() if isinstance(each, type) and issubclass(each, driver.RedisError)]
    # Two of them read what a server has said: a slot and a node.
    return [each("1 127.0.0.1:7001") for each in kinds] + [TimeoutError("x"), OSError("x"), ConnectionResetError("x")]


class _Fail:
    """Does what it stands for, and raises an error for it; counts."""

    def __init__(self, error: Exception, instead_of: Callable[..., Any]) -> None:
        self.error, self.instead_of, self.calls = error, instead_of, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        self.instead_of(*args, **kwargs)
        raise self.error


@pytest.mark.parametrize("where", ["park", "courier", "fanout", "tick"])
def test_what_the_driver_raises_on_the_loop(served: Callable[[], _Served], where: str) -> None:
    """celery#3046, kombu#449: it reaches Celery as an error on which it connects anew, or the loop goes on.

    But for what no try to reconnect would mend: a node of a cluster, and a memory limit that refuses what our scripts
    are always allowed.
    """
    fatal: set[str] = set()
    now = served()
    for n, error in enumerate(_raised()):
        assert now.works(-n - 1)
        now.settled()
        try:
            with pytest.MonkeyPatch.context() as patch:
                if where == "tick":
                    fail = _Fail(error, now.metronome.park.start)
                    patch.setattr(now.metronome.park, "start", fail)
                    now.metronome.park.close()
                else:
                    connection = getattr(now.metronome, where).connection
                    fail = _Fail(error, connection.read_response)
                    patch.setattr(connection, "read_response", fail)
                now.send(n)
                now.loop.run(lambda fail=fail: fail.calls, 5)
            # Contained: the loop goes on with the same connection.
            assert fail.calls, f"{error!r} was not raised"
            assert now.works(1000 + n), f"{error!r}: the loop stands still"
            continue
        except Transport.connection_errors:
            pass
        except FairlanesError:
            fatal.add(type(error).__name__)
        assert fail.calls, f"{error!r} was not raised"
        now.connection.collect()
        now = served()
    assert now.works("the end")
    refused = {"AskError", "MovedError", "ClusterCrossSlotError", "OutOfMemoryError"}
    assert fatal == (refused if where in ("park", "courier") else set())


@pytest.mark.parametrize("where", ["park", "courier", "fanout"])
def test_a_socket_that_goes_between_two_turns(served: Callable[[], _Served], where: str) -> None:
    """kombu#2582, kombu#2561: the loop goes on with another one, and an event that is nobody's is ignored."""
    now = served()
    assert now.works("before")
    now.settled()
    hub, owner = now.loop.hub, getattr(now.metronome, where)
    gone = owner.sock.fileno()
    assert gone in hub.readers
    hole, stray = os.pipe()
    hub.poller.register(hole, READ)
    os.write(stray, b"x")
    owner.close()
    os.dup2(hole, gone)  # its number is taken
    now.settled()
    for n in range(3):
        assert now.works(n)
    now.settled()
    assert gone not in hub.readers
    assert owner.sock.fileno() in hub.readers
    assert now.loop.idle(1) < 20
    for each in (hole, stray, gone):
        os.close(each)


def test_what_a_server_may_say_ends_no_worker() -> None:
    """kombu#449, celery#10096: UNBLOCKED, READONLY and the like were fatal."""
    for word in ("UNBLOCKED", "READONLY", "LOADING", "MASTERDOWN", "CLUSTERDOWN", "MISCONF", "BUSY", "NOREPLICAS"):
        assert isinstance(translate(driver.ResponseError(f"{word} text")), Transport.connection_errors)
    # And what concerns one message only is no lost connection.
    full = translate(driver.ResponseError("OOM command not allowed"))
    assert isinstance(full, FairlanesError)
    assert not isinstance(full, Transport.connection_errors)


def test_a_wait_longer_than_the_socket_timeout_is_no_loss(site: Callable[..., Site]) -> None:
    """redis-py#583, rq#2120: a socket timeout below the blocking one made false errors."""
    here = site(lease_seconds=20, socket_timeout=1, park_seconds=8)
    worker = here.worker("--without-mingle", concurrency=1)
    time.sleep(1)
    before = {each["id"] for each in here.clients() if each["cmd"] == "blpop" or int(each["psub"])}
    assert len(before) == 2
    time.sleep(20)
    assert before <= {each["id"] for each in here.clients()}
    assert "re-establish" not in worker.text()

"""What it costs to hold messages: one call per queue and third of a lease, and nothing when nothing is held."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable

import pytest
from kombu import Connection, Queue

from tests.harness import Server, wait_for
from tests.invariants import check
from tests.transport.conftest import Inbox, Monitor, ours, send, take

pytestmark = ours


def test_one_extend_per_queue_and_third_of_a_lease(
    connect: Callable[..., Connection], server: Server, monitor: Monitor
) -> None:
    """However many are held, and by however many channels; when nothing is held, nothing is sent."""
    lease, thirds = 1.5, 6
    connection = connect(lease_seconds=lease)
    for queue in ("one", "two"):
        send(connection, queue, *range(10))
    inboxes = [Inbox(connection.channel(), "one", "two", prefetch=10, ack=False) for _ in range(2)]
    assert take(connection, 20) == 20
    wait_for(lambda: monitor.calls("extend") >= 2, 5, "the first renewal")
    monitor.start()
    time.sleep(lease / 3 * thirds)
    assert 2 * (thirds - 1) <= monitor.calls("extend") <= 2 * (thirds + 1)
    assert set(monitor.commands()) == {"EVALSHA"}
    for name in ("one", "two"):
        assert {record.attempt for record in check(server.client(), name).message.values()} == {1}

    for inbox in inboxes:
        inbox.ack_all()
    for name in ("one", "two"):
        assert check(server.client(), name, token_out=True).leases == {}
    monitor.start()
    time.sleep(2 * lease / 3)
    assert monitor.commands() == []


#: Sockets that nobody closed are closed by the garbage collector too, with a warning.
unclosed = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")


@unclosed
def test_a_connection_that_is_dropped_without_a_close_lets_go(server: Server) -> None:
    """Nobody closes it: what it holds goes back when the garbage collector finds it."""
    dropped = Connection(server.url())
    send(dropped, "celery", 1)
    message = dropped.default_channel.basic_get("celery")
    assert message is not None
    del message, dropped
    gc.collect()
    wait_for(lambda: check(server.client(), "celery").ready, 5, "the message in its lane")
    (record,) = check(server.client(), "celery").message.values()
    assert (record.attempt, record.failures) == (1, 0)


@unclosed
def test_a_consumer_that_is_dropped_does_not_keep_its_queue(server: Server) -> None:
    dropped = Connection(server.url())
    inbox = Inbox(dropped.default_channel, Queue("passing", expires=1), ack=False)
    send(dropped, "passing", 1)
    take(dropped, 1)
    del inbox, dropped
    gc.collect()
    wait_for(lambda: not server.client().exists("fairlanes:2:{passing}:queue"), 10, "the end of the queue")


def test_a_connection_that_is_dropped_while_it_waits_closes_its_sockets(connect: Callable[..., Connection]) -> None:
    """A warning of a socket that was left open is an error in these tests."""
    dropped = Connection(connect().as_uri(include_password=True))
    inbox = Inbox(dropped.default_channel, "q")
    with pytest.raises(TimeoutError):
        dropped.drain_events(timeout=0.2)
    with pytest.raises(TimeoutError):
        dropped.drain_events(timeout=0.2)
    gone = weakref.ref(dropped.transport)
    del dropped, inbox
    gc.collect()
    assert gone() is None

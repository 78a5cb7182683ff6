"""Send, get, count, purge: what a queue is for."""

from __future__ import annotations

import pytest
from kombu import Connection, Queue
from kombu.exceptions import ChannelError
from kombu.simple import SimpleBuffer, SimpleQueue

from tests.harness import Server
from tests.invariants import check
from tests.transport.conftest import Inbox, ours, quiet, send, take


def test_get(connection: Connection) -> None:
    channel = connection.default_channel
    channel.queue_declare("q")
    send(connection, "q", {"n": 1}, {"n": 2})

    message = channel.basic_get("q")
    assert message.payload == {"n": 1}
    message.ack()
    assert channel.basic_get("q", no_ack=True).payload == {"n": 2}
    assert channel.basic_get("q") is None
    assert channel.basic_get("nobody declared it") is None


@ours
def test_get_leaves_nothing_behind(connection: Connection, server: Server) -> None:
    send(connection, "q", *range(3))
    channel = connection.default_channel
    channel.basic_get("q", no_ack=True)
    channel.basic_get("q").ack()
    channel.basic_get("q").reject(requeue=False)
    state = check(server.client(), "q")
    assert len(state.dead) == 1
    assert state.leases == {}
    assert state.totals["acked"] == 2


def test_get_of_an_unacked_message_returns_the_next(connection: Connection) -> None:
    channel = connection.default_channel
    send(connection, "q", "a", "b")
    first, second = channel.basic_get("q"), channel.basic_get("q")
    assert (first.payload, second.payload) == ("a", "b")
    first.ack()
    second.ack()


@ours
def test_simple_queue_keeps_order_and_count(connection: Connection) -> None:
    n = 2000
    with SimpleQueue(connection, "simple") as queue:
        for i in range(n):
            queue.put(i)
        assert queue.qsize() == n
        seen = []
        for _ in range(n):
            message = queue.get(timeout=10)
            seen.append(message.payload)
            message.ack()
        assert seen == list(range(n))
        assert queue.qsize() == 0
        with pytest.raises(queue.Empty):
            queue.get_nowait()
        with pytest.raises(queue.Empty):
            queue.get(timeout=0.1)


@ours
def test_simple_queue_clear(connection: Connection) -> None:
    with SimpleQueue(connection, "simple") as queue:
        for i in range(10):
            queue.put(i)
        assert queue.clear() == 10
        assert len(queue) == 0


def test_simple_buffer(connection: Connection) -> None:
    with SimpleBuffer(connection, "buffer") as queue:
        for i in range(200):
            queue.put({"i": i})
        assert [queue.get(timeout=5).payload["i"] for _ in range(200)] == list(range(200))
        with pytest.raises(queue.Empty):
            queue.get_nowait()


@ours
def test_no_ack_consumer(connection: Connection) -> None:
    inbox = Inbox(connection.default_channel, "q", no_ack=True)
    send(connection, "q", *range(50))
    assert take(connection, 50) == 50
    assert inbox.bodies == list(range(50))
    assert quiet(connection)
    connection.close()
    assert connection.default_channel.queue_declare("q", passive=True).message_count == 0


def test_purge_counts(connection: Connection) -> None:
    channel = connection.default_channel
    channel.queue_declare("q")
    assert channel.queue_purge("q") == 0
    send(connection, "q", *range(1234))
    assert channel.queue_purge("q") == 1234
    assert channel.queue_purge("q") == 0
    assert channel.basic_get("q") is None


@ours
def test_purge_takes_every_lane_and_leaves_what_is_held(connection: Connection, server: Server) -> None:
    channel = connection.default_channel
    for tenant in ("a", "b", None):
        send(connection, "q", 1, 2, headers={"tenant": tenant} if tenant else {})
    held = channel.basic_get("q")
    assert channel.queue_purge("q") == 5
    held.ack()
    state = check(server.client(), "q")
    assert state.message == {}
    assert state.lanes == {}


def test_passive_declare(connection: Connection) -> None:
    channel = connection.default_channel
    with pytest.raises(ChannelError, match="NOT_FOUND"):
        channel.queue_declare("q", passive=True)
    channel.queue_declare("q")
    send(connection, "q", *range(7))
    declared = channel.queue_declare("q", passive=True)
    assert (declared.queue, declared.message_count) == ("q", 7)
    assert channel.queue_declare("q").message_count == 7
    assert Queue("q", channel=channel).queue_declare(passive=True).message_count == 7


@ours
def test_an_empty_queue_still_exists(connection: Connection) -> None:
    """On kombu's Redis transport a queue without messages is not there."""
    connection.default_channel.queue_declare("q")
    assert connection.default_channel.queue_declare("q", passive=True).message_count == 0


def test_anonymous_queue(connection: Connection) -> None:
    name = connection.default_channel.queue_declare().queue
    assert name.startswith("amq.gen-")
    send(connection, name, 1)
    assert connection.default_channel.basic_get(name, no_ack=True).payload == 1


@ours
def test_delete_takes_the_messages_along(connection: Connection, server: Server) -> None:
    channel = connection.default_channel
    queue = Queue("q", channel=channel)
    queue.declare()
    send(connection, "q", *range(5))
    queue.delete()
    assert channel.basic_get("q") is None
    assert server.client().keys("*{q}*") == []


def test_delete_if_empty(connection: Connection) -> None:
    channel = connection.default_channel
    queue = Queue("q", channel=channel)
    queue.declare()
    send(connection, "q", 1)
    queue.delete(if_empty=True)
    assert channel.basic_get("q", no_ack=True).payload == 1

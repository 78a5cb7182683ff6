"""Routing: direct, topic and fanout exchanges, and what ends a binding."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import pytest
from kombu import Connection, Exchange, Queue
from kombu.common import Broadcast
from kombu.exceptions import ChannelError
from kombu.transport.virtual import UndeliverableWarning
from kombu.transport.virtual.base import NotEquivalentError

from tests.harness import Server
from tests.transport.conftest import Inbox, ours, quiet, send, take, until


def count(connection: Connection, queue: str) -> int:
    try:
        return int(connection.default_channel.queue_declare(queue, passive=True).message_count)
    except ChannelError:
        return 0  # on kombu's Redis transport an empty queue is not there


def test_direct(connection: Connection) -> None:
    exchange = Exchange("orders", "direct")
    for queue, key in (("paid", "paid"), ("both", "paid"), ("both", "open"), ("open", "open")):
        Queue(queue, exchange, routing_key=key, channel=connection.default_channel).declare()
    producer = connection.Producer(exchange=exchange)
    producer.publish(1, routing_key="paid")
    producer.publish(2, routing_key="open")
    producer.publish(3, routing_key="nobody")
    assert [count(connection, queue) for queue in ("paid", "both", "open")] == [1, 2, 1]


def test_topic(connection: Connection) -> None:
    exchange = Exchange("news", "topic")
    patterns = {"all": "#", "sport": "sport.*", "deep": "sport.#", "exact": "sport.football", "dots": "a+b.*"}
    for queue, pattern in patterns.items():
        Queue(queue, exchange, routing_key=pattern, channel=connection.default_channel).declare()
    producer = connection.Producer(exchange=exchange)
    for key in ("sport.football", "sport.football.live", "weather", "aab.c"):
        producer.publish(key, routing_key=key)
    counts = {queue: count(connection, queue) for queue in patterns}
    assert counts == {"all": 4, "sport": 1, "deep": 2, "exact": 1, "dots": 0}


def test_a_process_that_has_not_bound_a_queue_routes_to_it(connect: Callable[..., Connection]) -> None:
    """The table is on the server."""
    exchange = Exchange("news", "topic")
    Queue("q", exchange, routing_key="a.*", channel=connect().default_channel).declare()
    other = connect()
    other.Producer(exchange=exchange).publish(1, routing_key="a.b")
    assert count(other, "q") == 1


@ours
def test_unbind(connection: Connection) -> None:
    exchange = Exchange("news", "topic", channel=connection.default_channel)
    queue = Queue("q", exchange, routing_key="a.*", channel=connection.default_channel)
    queue.declare()
    queue.unbind_from(exchange, routing_key="a.*")
    connection.Producer(exchange=exchange).publish(1, routing_key="a.b")
    assert count(connection, "q") == 0
    queue.bind_to(exchange, routing_key="a.*")
    connection.Producer(exchange=exchange).publish(1, routing_key="a.b")
    assert count(connection, "q") == 1


def test_a_deleted_queue_gets_nothing(connection: Connection, server: Server) -> None:
    exchange = Exchange("news", "topic")
    queue = Queue("q", exchange, routing_key="a.*", channel=connection.default_channel)
    queue.declare()
    queue.delete()
    connection.Producer(exchange=exchange).publish(1, routing_key="a.b")
    assert connection.default_channel.basic_get("q") is None
    queue.declare()
    connection.Producer(exchange=exchange).publish(2, routing_key="a.b")
    assert connection.default_channel.basic_get("q", no_ack=True).payload == 2


def test_deleting_an_exchange_spares_queues_with_messages(connection: Connection) -> None:
    exchange = Exchange("gone", "direct", channel=connection.default_channel)
    Queue("full", exchange, routing_key="full", channel=connection.default_channel).declare()
    Queue("empty", exchange, routing_key="empty", channel=connection.default_channel).declare()
    connection.Producer(exchange=exchange).publish(1, routing_key="full")
    exchange.delete()
    assert count(connection, "full") == 1
    with pytest.raises(ChannelError):
        connection.default_channel.queue_declare("empty", passive=True)


def test_redeclaring_an_exchange_as_another_type_is_refused(connection: Connection) -> None:
    channel = connection.default_channel
    channel.exchange_declare("news", "topic")
    channel.exchange_declare("news", "topic")
    channel.exchange_declare("news", passive=True)
    with pytest.raises(NotEquivalentError):
        channel.exchange_declare("news", "direct")
    with pytest.raises(ChannelError):
        channel.exchange_declare("nobody declared it", passive=True)


def test_a_queue_for_what_has_no_route(connect: Callable[..., Connection]) -> None:
    connection = connect(deadletter_queue="lost")
    exchange = Exchange("orders", "direct")
    Queue("q", exchange, routing_key="known", channel=connection.default_channel).declare()
    producer = connection.Producer(exchange=exchange)
    producer.publish(1, routing_key="known")
    with pytest.warns(UndeliverableWarning):
        producer.publish(2, routing_key="unknown")
    assert (count(connection, "q"), count(connection, "lost")) == (1, 1)


# ------------------------------------------------------------------- fanout


def test_fanout_reaches_everybody(connect: Callable[..., Connection]) -> None:
    exchange = Exchange("shout", "fanout")
    inboxes = []
    for i in range(3):
        connection = connect()
        inboxes.append((connection, Inbox(connection.default_channel, Queue(f"ear{i}", exchange))))
    for connection, _ in inboxes:
        quiet(connection, 0.1)
    sender = connect()
    sender.Producer(exchange=exchange).publish({"hear": "me"})
    for connection, inbox in inboxes:
        take(connection, 1)
        assert inbox.bodies == [{"hear": "me"}]
        assert inbox.messages[0].delivery_info["exchange"] == "shout"


def test_broadcast(connect: Callable[..., Connection]) -> None:
    inboxes = []
    for _ in range(2):
        connection = connect()
        inboxes.append((connection, Inbox(connection.default_channel, Broadcast("everyone"))))
        quiet(connection, 0.1)
    connect().Producer(exchange=Exchange("everyone", "fanout")).publish("news")
    for connection, inbox in inboxes:
        take(connection, 1)
        assert inbox.bodies == ["news"]


@pytest.mark.parametrize(
    ("pattern", "heard"),
    [("#", ["task.sent", "worker.beat"]), ("task.#", ["task.sent"]), ("task.*", ["task.sent"]), ("other.#", [])],
)
def test_fanout_by_routing_key(connect: Callable[..., Connection], pattern: str, heard: list[str]) -> None:
    """Events are sent this way: ``task-sent`` to whoever listens to ``task.#``."""
    connection = connect()
    exchange = Exchange("events", "fanout")
    inbox = Inbox(connection.default_channel, Queue("ear", exchange, routing_key=pattern))
    quiet(connection, 0.1)
    producer = connect().Producer(exchange=exchange)
    for key in ("task.sent", "worker.beat"):
        producer.publish(key, routing_key=key)
    until(connection, lambda: len(inbox) == len(heard))
    assert quiet(connection)
    assert inbox.bodies == heard


@ours
def test_one_exchange_with_several_patterns(connection: Connection, connect: Callable[..., Connection]) -> None:
    exchange = Exchange("events", "fanout")
    channel = connection.default_channel
    tasks = Inbox(channel, Queue("t", exchange, routing_key="task.#"))
    everything = Inbox(channel, Queue("e", exchange, routing_key="#"))
    quiet(connection, 0.1)
    producer = connect().Producer(exchange=exchange)
    for key in ("task.sent", "worker.beat"):
        producer.publish(key, routing_key=key)
    until(connection, lambda: len(everything) == 2)
    assert tasks.bodies == ["task.sent"]
    assert everything.bodies == ["task.sent", "worker.beat"]


def test_two_fanout_consumers_on_two_channels(connection: Connection, connect: Callable[..., Connection]) -> None:
    exchange = Exchange("shout", "fanout")
    one = Inbox(connection.channel(), Queue("one", exchange))
    two = Inbox(connection.channel(), Queue("two", exchange))
    quiet(connection, 0.1)
    connect().Producer(exchange=exchange).publish(1)
    until(connection, lambda: len(one) == len(two) == 1)
    assert one.bodies == two.bodies == [1]
    one.consumer.cancel()
    connect().Producer(exchange=exchange).publish(2)
    take(connection, 1)
    assert (one.bodies, two.bodies) == ([1], [1, 2])


@ours
def test_fanout_beside_a_busy_queue(connection: Connection, connect: Callable[..., Connection]) -> None:
    """Control commands are heard while there is a backlog."""
    ear = Inbox(connection.channel(), Queue("ear", Exchange("shout", "fanout")))
    work = Inbox(connection.channel(), "q", prefetch=1)
    send(connect(), "q", *range(200))
    take(connection, 20)
    connect().Producer(exchange=Exchange("shout", "fanout")).publish("stop")
    take(connection, 10)
    assert ear.bodies == ["stop"]
    assert len(work) >= 20


def test_fanout_is_not_stored(connect: Callable[..., Connection], server: Server) -> None:
    exchange = Exchange("shout", "fanout")
    connection = connect()
    Queue("ear", exchange, channel=connection.default_channel).declare()
    connect().Producer(exchange=exchange).publish("nobody listens")
    inbox = Inbox(connection.default_channel, Queue("ear", exchange))
    until(connection, lambda: False, timeout=0.3)
    assert inbox.bodies == []
    assert count(connection, "ear") == 0


def test_a_binary_fanout_message(connect: Callable[..., Connection]) -> None:
    exchange = Exchange("shout", "fanout")
    connection = connect()
    inbox = Inbox(connection.default_channel, Queue("ear", exchange), accept=["pickle", "application/data"])
    quiet(connection, 0.1)
    body = bytes(range(256))
    connect().Producer(exchange=exchange).publish(body, content_type="application/data", content_encoding="binary")
    take(connection, 1)
    assert bytes(inbox.bodies[0]) == body


@ours
@pytest.mark.parametrize("junk", [b"no json", b"[]", b"{}", b'"text"', b'{"properties": 3}', b"\xff"])
def test_junk_on_a_fanout_topic(connection: Connection, server: Server, junk: bytes) -> None:
    """Anybody may publish there; it must not end a worker."""
    exchange = Exchange("shout", "fanout")
    inbox = Inbox(connection.default_channel, Queue("ear", exchange))
    quiet(connection, 0.1)
    server.client().publish("/0.shout", junk)
    connection.Producer(exchange=exchange).publish("sound")
    assert until(connection, lambda: "sound" in inbox.bodies)


# ------------------------------------------------------------------- what ends by itself


def keys(server: Server) -> list[str]:
    return sorted(key.decode() for key in server.client().keys("*"))


@ours
def test_an_auto_delete_queue_goes_with_its_consumer(connect: Callable[..., Connection], server: Server) -> None:
    exchange = Exchange("news", "topic")
    connection = connect()
    queue = Queue("passing", exchange, routing_key="a.#", auto_delete=True)
    inbox = Inbox(connection.default_channel, queue)
    connect().Producer(exchange=exchange).publish(1, routing_key="a.b")
    take(connection, 1)
    assert inbox.bodies == [1]
    connection.close()
    assert keys(server) == []


@ours
def test_an_auto_delete_queue_that_was_cancelled_before(connect: Callable[..., Connection], server: Server) -> None:
    connection = connect()
    inbox = Inbox(connection.default_channel, Queue("passing", auto_delete=True))
    inbox.consumer.cancel()
    connection.close()
    assert keys(server) == []


@ours
def test_an_auto_delete_queue_with_messages_stays(connect: Callable[..., Connection], server: Server) -> None:
    connection = connect()
    Inbox(connection.default_channel, Queue("passing", auto_delete=True))
    send(connect(), "passing", 1)
    connection.close()
    assert count(connect(), "passing") == 1
    ttl = server.client().pttl("fairlanes:2:{passing}:queue")
    assert 23 * 3600_000 < ttl < 26 * 3600_000


@ours
def test_an_auto_delete_queue_that_nobody_consumed_has_an_end(connection: Connection, server: Server) -> None:
    Queue("passing", auto_delete=True, channel=connection.default_channel).declare()
    assert server.client().pttl("fairlanes:2:{passing}:queue") > 0


@ours
def test_a_broadcast_leaves_nothing(connect: Callable[..., Connection], server: Server) -> None:
    connection = connect()
    inbox = Inbox(connection.default_channel, Broadcast("everyone"))
    quiet(connection, 0.1)
    connect().Producer(exchange=Exchange("everyone", "fanout")).publish("news")
    assert until(connection, lambda: len(inbox) == 1)
    connection.close()
    assert keys(server) == []


@ours
def test_a_queue_can_come_back_after_its_end(connection: Connection, server: Server) -> None:
    """Its bindings too, though this process has declared them before."""
    name = f"reply.{uuid.uuid4()}"
    exchange = Exchange("replies", "direct")
    queue = Queue(name, exchange, routing_key=name, expires=60, channel=connection.default_channel)
    queue.declare()
    for key in server.client().keys("fairlanes:2:{*"):
        server.client().delete(key)  # as its end does
    producer = connection.Producer(exchange=exchange)
    producer.publish("into the void", routing_key=name)
    assert keys(server) == []
    queue.declare()
    producer.publish("heard", routing_key=name)
    assert connection.default_channel.basic_get(name, no_ack=True).payload == "heard"


@ours
def test_bindings_of_others_are_left_alone(connection: Connection, server: Server) -> None:
    """A queue of kombu's Redis transport is not there for us, but alive for its owner."""
    member = b"key\x06\x16\x06\x16a queue of theirs"
    server.client().sadd("_kombu.binding.replies", member)
    connection.Producer(exchange=Exchange("replies", "direct")).publish(1, routing_key="key")
    assert server.client().smembers("_kombu.binding.replies") == {member}


@ours
@pytest.mark.parametrize(
    "arguments",
    [{"x-expires": 0}, {"x-expires": "soon"}, {"x-expires": True}, {"x-expires": 0.5}, {"x-expires": float("inf")}],
)
def test_an_end_that_is_no_time_is_refused(connection: Connection, arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="x-expires"):
        connection.default_channel.queue_declare("q", arguments=arguments)

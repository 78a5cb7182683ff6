"""Queues with an end (``x-expires``): gone when nobody uses them, and never while somebody does."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from kombu import Connection, Consumer, Exchange, Queue

from tests.harness import Server, wait_for
from tests.invariants import check
from tests.transport.conftest import Drainer, Inbox, ours, parked, send, take, until

pytestmark = ours
END = 1.0  # seconds; the promise is "not before, and not much later"


def ours_on(server: Server) -> list[str]:
    return sorted(key.decode() for key in server.client().keys("fairlanes:2:{*"))


def passing(name: str = "passing", **options: Any) -> Queue:
    return Queue(name, expires=END, **options)


def test_idle_it_goes_with_all_its_keys(connection: Connection, server: Server) -> None:
    queue = passing(channel=connection.default_channel)
    queue.declare()
    send(connection, "passing", *range(5), headers={"tenant": "a"})
    send(connection, "passing", 1, headers={"tenant": "b"})
    connection.default_channel.basic_get("passing").ack()
    connection.default_channel.basic_get("passing").reject()
    check(server.client(), "passing")
    wait_for(lambda: not ours_on(server), 10, "the end of the queue")


def test_consumed_while_parked_it_stays(connect: Callable[..., Connection], server: Server) -> None:
    with Drainer(connect(), passing()) as drainer:
        wait_for(lambda: parked(server) == 1, 5, "a parked consumer")
        deadline = time.monotonic() + 3 * END
        while time.monotonic() < deadline:
            assert "fairlanes:2:{passing}:queue" in ours_on(server)
            time.sleep(0.1)
        send(connect(), "passing", "still here")
        wait_for(lambda: drainer.inbox.bodies, 5, "the message")
    drainer.connection.close()
    wait_for(lambda: not ours_on(server), 10, "the end of the queue")


def test_consumed_by_a_process_that_has_not_declared_it(connect: Callable[..., Connection], server: Server) -> None:
    passing(channel=connect().default_channel).declare()
    connection = connect()
    consumer = Consumer(connection.default_channel, [Queue("passing")], auto_declare=False)
    consumer.consume()
    until(connection, lambda: False, timeout=3 * END)
    assert "fairlanes:2:{passing}:queue" in ours_on(server)


def test_consumed_on_another_channel_than_declared(connection: Connection, server: Server) -> None:
    passing(channel=connection.channel()).declare()
    consumer = Consumer(connection.channel(), [Queue("passing")], auto_declare=False)
    consumer.consume()
    until(connection, lambda: False, timeout=3 * END)
    assert "fairlanes:2:{passing}:queue" in ours_on(server)


def test_consumed_beside_a_queue_that_is_always_busy(connection: Connection, server: Server) -> None:
    """Its consumer never parks, and yet uses it."""
    Inbox(connection.default_channel, "busy", passing(), prefetch=1)
    deadline = time.monotonic() + 3 * END
    while time.monotonic() < deadline:
        send(connection, "busy", *range(20))
        take(connection, 10)
        assert "fairlanes:2:{passing}:queue" in ours_on(server)


def test_consumed_by_somebody_who_is_busy_it_stays(connection: Connection, server: Server) -> None:
    """Its consumer has no credit, and works for longer than the queue would last."""
    inbox = Inbox(connection.default_channel, passing(), prefetch=1, ack=False)
    send(connection, "passing", *range(3))
    for i in range(3):
        until(connection, lambda i=i: len(inbox.bodies) > i)
        time.sleep(2.5 * END)
        inbox.messages[-1].ack()
    assert inbox.bodies == [0, 1, 2]


def test_a_consumer_that_left_does_not_keep_it(connection: Connection, server: Server) -> None:
    inbox = Inbox(connection.default_channel, passing())
    inbox.consumer.cancel()
    wait_for(lambda: not ours_on(server), 10, "the end of the queue")


def test_published_to_it_stays(connection: Connection, server: Server) -> None:
    passing(channel=connection.default_channel).declare()
    for i in range(30):
        send(connection, "passing", i)
        time.sleep(END / 10)
    assert len(check(server.client(), "passing").message) == 30


def test_a_held_message_keeps_it(connect: Callable[..., Connection], server: Server) -> None:
    """The keeper renews the lease, and so the queue."""
    connection = connect()  # a lease is far longer than the end of the queue
    passing(channel=connection.default_channel).declare()
    send(connection, "passing", 1)
    message = connection.default_channel.basic_get("passing")
    time.sleep(3 * END)
    assert len(check(server.client(), "passing").leases) == 1
    message.ack()
    assert check(server.client(), "passing").totals["acked"] == 1


def test_a_message_to_a_queue_that_has_ended_is_dropped(connection: Connection, server: Server) -> None:
    exchange = Exchange("replies", "direct")
    passing(exchange=exchange, routing_key="key", channel=connection.default_channel).declare()
    wait_for(lambda: not ours_on(server), 10, "the end of the queue")
    connection.Producer(exchange=exchange).publish("too late", routing_key="key")
    assert server.client().keys("*") == []


def test_bindings_of_the_dead_go_when_the_next_one_comes(connection: Connection, server: Server) -> None:
    """Whoever asked and died has left its reply queue's binding."""
    exchange = Exchange("replies", "direct")
    channel = connection.default_channel
    for i in range(5):
        passing(f"dead{i}", exchange=exchange, routing_key=f"dead{i}", channel=channel).declare()
    wait_for(lambda: not ours_on(server), 10, "the end of the queues")
    assert server.client().scard("_kombu.binding.replies") == 5
    passing("alive", exchange=exchange, routing_key="alive", channel=channel).declare()
    assert server.client().scard("_kombu.binding.replies") == 1
    connection.Producer(exchange=exchange).publish("heard", routing_key="alive")
    assert channel.basic_get("alive", no_ack=True).payload == "heard"


def test_a_queue_that_is_declared_without_an_end_stays(connection: Connection, server: Server) -> None:
    passing(channel=connection.default_channel).declare()
    Queue("passing", channel=connection.default_channel).declare()
    assert server.client().pttl("fairlanes:2:{passing}:queue") == -1
    send(connection, "passing", 1)
    assert check(server.client(), "passing").ttl == {}


@pytest.mark.parametrize("times", [1, 3])
def test_its_end_may_be_declared_again(connection: Connection, server: Server, times: int) -> None:
    for i in range(times):
        Queue("passing", expires=END * (i + 2), channel=connection.default_channel).declare()
    left = server.client().pttl("fairlanes:2:{passing}:queue")
    assert END * 1000 * times < left <= END * 1000 * (times + 1) * 1.05 + 1

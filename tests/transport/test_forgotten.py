"""A broker that was flushed has forgotten the queues: what a connection declared is declared again."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
from kombu import Connection, Exchange, Queue

from tests.harness import Server, wait_for
from tests.invariants import dump
from tests.transport.conftest import Drainer, Inbox, ours, send, take, until

pytestmark = ours

TASKS = Exchange("tasks", "direct")


def tasks(**arguments: int) -> Queue:
    return Queue("tasks", TASKS, routing_key="tasks", queue_arguments=arguments)


@pytest.mark.parametrize("exchange", [TASKS, Exchange("topics", "topic")], ids=["direct", "topic"])
def test_a_producer_with_a_named_exchange(
    connection: Connection, server: Server, caplog: pytest.LogCaptureFixture, exchange: Exchange
) -> None:
    queue = Queue("tasks", exchange, routing_key="tasks", queue_arguments={"x-lane-limit": 3})
    producer = connection.Producer()
    publish = {"exchange": exchange, "routing_key": "tasks", "declare": [queue]}
    producer.publish("before", **publish)
    server.client().flushall()
    with caplog.at_level(logging.WARNING):
        for i in range(3):
            producer.publish(i, **publish)
    state = dump(server.client(), "tasks")
    assert (len(state.message), state.queue["limit"]) == (3, "3")
    assert server.client().smembers("fairlanes:2:queues") == {b"tasks"}
    assert [r.getMessage() for r in caplog.records if "forgotten" in r.getMessage()] == [
        "the broker has forgotten queue 'tasks'; it is declared again, with its bindings"
    ]


def test_somebody_has_published_to_it_directly_meanwhile(connection: Connection, server: Server) -> None:
    """The queue is there, and yet nobody has declared it."""
    producer = connection.Producer()
    producer.publish("before", exchange=TASKS, routing_key="tasks", declare=[tasks()])
    server.client().flushall()
    send(connection, "tasks", 1)
    producer.publish(2, exchange=TASKS, routing_key="tasks")
    assert len(dump(server.client(), "tasks").message) == 2


def test_what_another_process_has_unbound_stays_so(connect: Callable[..., Connection], server: Server) -> None:
    connection, other = connect(), connect()
    producer = connection.Producer()
    producer.publish(1, exchange=TASKS, routing_key="tasks", declare=[tasks()])
    tasks()(other.default_channel).unbind_from(TASKS, routing_key="tasks")
    producer.publish(2, exchange=TASKS, routing_key="tasks")
    assert len(dump(server.client(), "tasks").message) == 1


def test_what_was_deleted_here_stays_so(connection: Connection, server: Server) -> None:
    producer = connection.Producer()
    producer.publish(1, exchange=TASKS, routing_key="tasks", declare=[tasks()])
    tasks()(connection.default_channel).delete()
    producer.publish(2, exchange=TASKS, routing_key="tasks")
    assert not dump(server.client(), "tasks").message


def test_an_idle_consumer_declares_it_again(connect: Callable[..., Connection], server: Server) -> None:
    with Drainer(connect(park_seconds=1), tasks(**{"x-lane-limit": 1})):
        wait_for(lambda: "limit" in dump(server.client(), "tasks").queue, 5, "the queue")
        server.client().flushall()
        wait_for(lambda: dump(server.client(), "tasks").queue.get("limit") == "1", 10, "its limit")
    assert server.client().smembers("fairlanes:2:queues") == {b"tasks"}


def test_a_busy_consumer_declares_it_again(connection: Connection, server: Server) -> None:
    """Its limit is in force for what comes after the first."""
    inbox = Inbox(connection.default_channel, tasks(**{"x-lane-limit": 1}), prefetch=4, ack=False)
    send(connection, "tasks", 0)
    until(connection, lambda: inbox.bodies)
    server.client().flushall()
    send(connection, "tasks", 1, 2, 3)
    until(connection, lambda: len(inbox.bodies) > 1)
    take(connection, 1)
    state = dump(server.client(), "tasks")
    assert state.queue["limit"] == "1"
    assert len(state.leases) == 1


def test_an_answer_to_somebody_who_has_left_ends(connection: Connection, server: Server) -> None:
    """The reply queue went with its owner; what comes too late makes a queue that ends, as results of rpc do."""
    connection.Producer().publish("too late", routing_key="reply-queue", correlation_id="x")
    client = server.client()
    assert client.keys()
    assert all(0 < client.pttl(key) <= 3 * 24 * 3600 * 1000 for key in client.keys())
    assert connection.default_channel.basic_get("reply-queue").payload == "too late"


def test_a_task_waits_for_its_worker_for_ever(connection: Connection, server: Server) -> None:
    connection.Producer().publish(
        "patient", routing_key="celery", correlation_id="x", reply_to="me", headers={"task": "t"}
    )
    client = server.client()
    assert {client.pttl(key) for key in client.keys()} == {-1}

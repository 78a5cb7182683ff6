"""Prefetch, several channels, cancelling, recovering, closing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from kombu import Connection, Consumer, Exchange, Queue

from tests.harness import Server, wait_for
from tests.invariants import check
from tests.transport.conftest import Drainer, Inbox, ours, parked, quiet, send, take


def test_prefetch_is_a_limit(connection: Connection) -> None:
    send(connection, "q", *range(10))
    inbox = Inbox(connection.default_channel, "q", prefetch=4, ack=False)
    assert take(connection, 5, timeout=0.5) == 4
    inbox.messages[0].ack()
    assert take(connection, 2, timeout=0.5) == 1
    inbox.ack_all()
    assert take(connection, 4) == 4
    inbox.ack_all()
    assert take(connection, 1) == 1
    inbox.ack_all()
    assert inbox.bodies == list(range(10))


def test_prefetch_zero_has_no_limit(connection: Connection) -> None:
    send(connection, "q", *range(100))
    inbox = Inbox(connection.default_channel, "q", ack=False)
    assert take(connection, 100) == 100
    inbox.ack_all()


def test_raising_the_prefetch_while_full(connection: Connection) -> None:
    send(connection, "q", *range(10))
    inbox = Inbox(connection.default_channel, "q", prefetch=2, ack=False)
    assert take(connection, 3, timeout=0.5) == 2
    inbox.consumer.qos(prefetch_count=5)
    assert take(connection, 4, timeout=0.5) == 3
    inbox.consumer.qos(prefetch_count=0)
    assert take(connection, 5) == 5
    inbox.ack_all()


@ours
def test_raising_the_prefetch_from_another_thread(connect: Callable[..., Connection], server: Server) -> None:
    connection = connect()
    send(connection, "q", *range(3))
    with Drainer(connect(), "q", prefetch=1, ack=False) as drainer:
        wait_for(lambda: len(drainer.inbox) == 1, 5, "the first message")
        drainer.inbox.consumer.qos(prefetch_count=2)
        wait_for(lambda: len(drainer.inbox) == 2, 5, "the second message")
        drainer.inbox.ack_all()
        wait_for(lambda: len(drainer.inbox) == 3, 5, "the third message")
        drainer.inbox.ack_all()
    assert check(server.client(), "q").message == {}


def test_acks_from_other_threads(connect: Callable[..., Connection], server: Server) -> None:
    n = 200
    sender = connect()
    send(sender, "q", *range(n))
    with Drainer(connect(), "q", prefetch=8, ack=False) as drainer:
        acked = 0
        lock = threading.Lock()

        def message(i: int) -> Any:
            return wait_for(lambda: drainer.inbox.messages[i : i + 1], 20, f"message {i}")[0]

        def ack_from(start: int) -> None:
            nonlocal acked
            for i in range(start, n, 4):
                message(i).ack()
                with lock:
                    acked += 1

        threads = [threading.Thread(target=ack_from, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert acked == n
    assert drainer.inbox.bodies == list(range(n))
    assert sender.default_channel.queue_declare("q").message_count == 0


def test_a_second_ack_is_an_error_of_the_caller(connection: Connection) -> None:
    send(connection, "q", 1)
    message = connection.default_channel.basic_get("q")
    message.ack()
    with pytest.raises(message.MessageStateError):
        message.ack()


@ours
def test_reject_buries(connection: Connection, server: Server) -> None:
    send(connection, "q", 1)
    connection.default_channel.basic_get("q").reject()
    state = check(server.client(), "q")
    assert len(state.dead) == 1
    assert list(state.reasons.values()) == ["rejected"]


@ours
def test_requeue_comes_back_after_its_backoff(connect: Callable[..., Connection], server: Server) -> None:
    connection = connect(backoff_base=0.3, backoff_max=1)
    send(connection, "q", 1)
    connection.default_channel.basic_get("q").requeue()
    state = check(server.client(), "q")
    assert len(state.delayed) == 1
    assert [record.failures for record in state.message.values()] == [1]
    inbox = Inbox(connection.default_channel, "q")
    assert take(connection, 1) == 1
    assert inbox.messages[0].properties["fairlanes"]["attempt"] == 2
    assert inbox.messages[0].delivery_info["redelivered"] is True


@ours
def test_requeued_too_often_is_buried(connect: Callable[..., Connection], server: Server) -> None:
    connection = connect(backoff_base=0.01, backoff_max=0.02, max_failures=3)
    send(connection, "q", 1)
    attempts = []

    def refuse(body: Any, message: Any) -> None:
        attempts.append(message.properties["fairlanes"]["attempt"])
        message.requeue()

    with Consumer(connection.default_channel, [Queue("q")], callbacks=[refuse]):
        take(connection, 3)
        assert quiet(connection)
    assert attempts == [1, 2, 3]
    assert len(check(server.client(), "q").dead) == 1


# ------------------------------------------------------------------- several channels


def test_channels_share_a_queue_in_turns(connection: Connection) -> None:
    """kombu's Redis transport has one callback per queue and connection, whatever channel it came from."""
    send(connection, "q", *range(40))
    one, two = Inbox(connection.channel(), "q", prefetch=2), Inbox(connection.channel(), "q", prefetch=2)
    take(connection, 40)
    assert sorted(one.bodies + two.bodies) == list(range(40))


@ours
def test_channels_that_share_a_queue_share_one_park(connect: Callable[..., Connection], server: Server) -> None:
    """However many there are, one connection waits, and each of them is served in its turn."""
    connection = connect()
    inboxes = [Inbox(connection.channel(), "q", prefetch=2) for _ in range(4)]
    for _ in range(2):  # who drains once only does not stay parked
        assert quiet(connection, 0.1)
    assert parked(server) == 1
    send(connect(), "q", *range(40))
    assert take(connection, 40) == 40
    assert sorted(body for inbox in inboxes for body in inbox.bodies) == list(range(40))
    assert [len(inbox) for inbox in inboxes] == [10] * 4
    assert quiet(connection, 0.1)
    assert parked(server) == 1


@ours
def test_channels_with_different_prefetch(connection: Connection) -> None:
    send(connection, "q", *range(40))
    small = Inbox(connection.channel(), "q", prefetch=1, ack=False)
    large = Inbox(connection.channel(), "q", prefetch=5, ack=False)
    assert take(connection, 7, timeout=0.5) == 6
    assert (len(small), len(large)) == (1, 5)
    small.ack_all()
    assert take(connection, 2, timeout=0.5) == 1
    assert (len(small), len(large)) == (2, 5)
    large.ack_all()
    assert take(connection, 6, timeout=0.5) == 5
    assert (len(small), len(large)) == (2, 10)
    for inbox in (small, large):
        inbox.ack_all()


@ours
def test_two_consumers_of_one_channel_take_turns(connection: Connection) -> None:
    send(connection, "q", *range(20))
    channel = connection.channel()
    one, two = Inbox(channel, "q", prefetch=4), Inbox(channel, "q")
    take(connection, 20)
    assert len(one) == len(two) == 10


@ours
def test_topic_messages_in_two_queues_of_one_channel(connection: Connection, server: Server) -> None:
    """One publish, one tag, two messages: each is acknowledged on its own."""
    exchange = Exchange("news", "topic")
    queues = [Queue("all", exchange, routing_key="#"), Queue("sport", exchange, routing_key="sport.*")]
    channel = connection.channel()
    inbox = Inbox(channel, *queues, ack=False)
    connection.Producer(exchange=exchange).publish("goal", routing_key="sport.football")
    assert take(connection, 2) == 2
    assert inbox.bodies == ["goal", "goal"]
    tags = {message.delivery_tag for message in inbox.messages}
    assert len(tags) == 2
    inbox.messages[0].ack()
    sizes = [len(check(server.client(), queue).message) for queue in ("all", "sport")]
    assert sorted(sizes) == [0, 1]
    inbox.messages[1].ack()
    assert [check(server.client(), queue).message for queue in ("all", "sport")] == [{}, {}]


# ------------------------------------------------------------------- cancel, recover, close


def test_cancel_stops_delivery(connection: Connection) -> None:
    inbox = Inbox(connection.default_channel, "q")
    send(connection, "q", 1)
    take(connection, 1)
    inbox.consumer.cancel()
    send(connection, "q", 2)
    assert quiet(connection)
    inbox.consumer.consume()
    take(connection, 1)
    assert inbox.bodies == [1, 2]


def test_cancel_inside_of_a_callback(connection: Connection, server: Server) -> None:
    send(connection, "q", *range(20))
    seen = []

    def note(body: Any, message: Any) -> None:
        seen.append(body)
        message.ack()
        if len(seen) == 5:
            consumer.cancel()

    consumer = Consumer(connection.default_channel, [Queue("q")], callbacks=[note])
    consumer.consume()
    take(connection, 20, timeout=0.5)
    assert seen == list(range(5))
    assert connection.default_channel.queue_declare("q").message_count == 15
    consumer.consume()
    take(connection, 15)
    assert seen == list(range(20))


@ours
def test_cancel_hands_back_what_was_not_delivered(connection: Connection, server: Server) -> None:
    send(connection, "q", *range(20))
    inbox = Inbox(connection.default_channel, "q", prefetch=10, ack=False)
    take(connection, 4)
    inbox.consumer.cancel()
    state = check(server.client(), "q")
    assert len(state.leases) == 4  # delivered: the consumer still may ack them
    assert len(state.ready["default"]) == 16
    assert {record.failures for record in state.message.values()} == {0}
    inbox.ack_all()
    assert check(server.client(), "q").leases == {}


def test_consume_again_inside_of_a_callback(connection: Connection) -> None:
    """Another queue is consumed from because of a message."""
    seen = []

    def note(body: Any, message: Any) -> None:
        seen.append(body)
        message.ack()
        if body == "more":
            consumer.add_queue(Queue("second"))
            consumer.consume()

    consumer = Consumer(connection.default_channel, [Queue("first")], callbacks=[note])
    consumer.consume()
    Queue("second", channel=connection.default_channel).declare()
    send(connection, "second", "hidden")
    send(connection, "first", "more")
    take(connection, 2)
    assert seen == ["more", "hidden"]


@ours
def test_recover_puts_messages_into_their_places(connection: Connection, server: Server) -> None:
    send(connection, "q", *range(6))
    inbox = Inbox(connection.default_channel, "q", prefetch=3, ack=False)
    take(connection, 3)
    connection.default_channel.basic_recover(requeue=True)
    assert {r.failures for r in check(server.client(), "q").message.values()} == {0}
    take(connection, 3)
    assert inbox.bodies == [0, 1, 2, 0, 1, 2]
    for message in inbox.messages[3:]:
        message.ack()
    take(connection, 3)
    assert inbox.bodies[6:] == [3, 4, 5]
    inbox.messages[0].ack()  # of a delivery that was recovered: it changes nothing


@ours
def test_closing_with_a_full_prefetch(connect: Callable[..., Connection], server: Server) -> None:
    """Everything is back in its place, and no failure is counted."""
    sender, client = connect(), server.client()
    for tenant in ("a", "b"):
        send(sender, "q", *[f"{tenant}{i}" for i in range(20)], headers={"tenant": tenant})
    before = check(client, "q").ready
    connection = connect()
    inbox = Inbox(connection.default_channel, "q", prefetch=16, ack=False)
    take(connection, 10)
    assert len(check(client, "q").leases) == 15  # claimed in steps of 1, 2, 4, 8
    connection.close()
    state = check(client, "q")
    assert state.ready == before
    assert state.leases == {}
    assert {record.failures for record in state.message.values()} == {0}
    assert len(inbox) == 10

    with pytest.raises(NotImplementedError):
        sender.default_channel.basic_recover(requeue=False)


@ours
def test_closing_one_channel_leaves_the_others(connection: Connection) -> None:
    send(connection, "q", *range(10))
    closing, staying = connection.channel(), connection.channel()
    Inbox(closing, "q", prefetch=2, ack=False)
    take(connection, 2)
    inbox = Inbox(staying, "q", prefetch=1)
    closing.close()
    closing.close()
    take(connection, 10)
    assert sorted(inbox.bodies) == list(range(10))


@ours
def test_closing_leaves_nobody_parked(connect: Callable[..., Connection], server: Server) -> None:
    connection = connect()
    drainer = Drainer(connection, "q")
    wait_for(lambda: parked(server) == 1, 5, "a parked consumer")
    drainer.stop()
    connection.close()
    wait_for(lambda: parked(server) == 0, 5, "nobody parked")


def test_an_ack_on_a_closed_channel(connection: Connection, server: Server) -> None:
    """A task outlives its channel: the message was handed back, and the ack is refused without an error."""
    send(connection, "q", 1)
    channel = connection.channel()
    message = channel.basic_get("q")
    channel.close()
    message.ack_log_error(None, (OSError,))
    assert connection.default_channel.basic_get("q", no_ack=True).payload == 1


@ours
def test_closing_without_a_server(fresh_server: Callable[..., Server], connect_to: Callable[..., Connection]) -> None:
    """Nothing raises, and nothing is renewed any more."""
    server = fresh_server()
    connection = connect_to(server.url(), socket_timeout=1, lease_seconds=2)
    send(connection, "q", *range(20))
    inbox = Inbox(connection.default_channel, "q", prefetch=10, ack=False)
    take(connection, 4)
    transport = connection.transport
    assert len(transport.keeper._held) == 7
    server.kill()
    connection.default_channel.close()
    connection.collect()
    assert transport.metronome.closed
    assert not transport.keeper._held
    assert len(inbox) == 4


@ours
@pytest.mark.parametrize("end", ["close", "collect"])
def test_the_timekeeper_leaves_without_a_server(
    fresh_server: Callable[..., Server], connect_to: Callable[..., Connection], end: str
) -> None:
    """It cannot give its role back, and is gone all the same."""
    server = fresh_server()
    connection = connect_to(server.url(), socket_timeout=0.5)
    inbox = Inbox(connection.default_channel, "q", Queue("r", expires=60))
    later = (datetime.now(timezone.utc) + timedelta(hours=1)).isoformat()
    send(connection, "q", "later", headers={"eta": later})
    for _ in range(3):
        quiet(connection, 0.05)
    transport = connection.transport
    assert transport.metronome._due
    server.kill()
    getattr(connection, end)()
    assert transport.metronome.closed
    assert transport.channels == []
    assert len(inbox) == 0

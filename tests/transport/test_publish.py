"""What one publish is: exactly one message, whatever happens to the reply."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone

import pytest
from kombu import Connection, Exchange, Queue
from kombu.exceptions import OperationalError

from fairlanes_transport.errors import LaneFull, ServerFull
from tests.faults.proxy import Proxy
from tests.harness import Server
from tests.invariants import check, dump
from tests.transport.conftest import Inbox, ours, quiet, send, take

pytestmark = ours
RETRY = {"max_retries": 5, "interval_start": 0, "interval_step": 0.1, "interval_max": 0.2}


@pytest.fixture
def proxy(server: Server) -> Iterator[Proxy]:
    """Between the client and the server."""
    with Proxy(server.port) as proxy:
        yield proxy


@pytest.fixture
def far(proxy: Proxy, connect_to: Callable[..., Connection]) -> Connection:
    """A connection through the proxy."""
    connection = connect_to(f"fairlanes://127.0.0.1:{proxy.port}/0")
    connection.ensure_connection(max_retries=3)
    return connection


def test_a_retry_after_a_lost_reply_publishes_once(far: Connection, proxy: Proxy, server: Server) -> None:
    proxy.cut_reply(b"the body")
    far.Producer().publish("the body", routing_key="q", retry=True, retry_policy=RETRY)
    assert proxy.cuts == 1
    state = check(server.client(), "q")
    assert len(state.message) == 1
    assert state.totals["enqueued"] == 1


def test_also_to_an_exchange(far: Connection, proxy: Proxy, server: Server) -> None:
    exchange = Exchange("news", "topic")
    for name in ("one", "two"):
        Queue(name, exchange, routing_key="#", channel=far.default_channel).declare()
    proxy.cut_reply(b"the body")
    far.Producer(exchange=exchange).publish(
        "the body", routing_key="a.b", retry=True, retry_policy=RETRY, declare=[exchange]
    )
    assert proxy.cuts == 1
    assert [len(check(server.client(), name).message) for name in ("one", "two")] == [1, 1]


def test_also_if_it_was_done_meanwhile(far: Connection, proxy: Proxy, server: Server) -> None:
    """A fast worker has acked the message before the retry."""
    connection = Connection(server.url("fairlanes"))
    producer = far.Producer()
    original = producer._publish

    def slowly(*args: object, **kwargs: object) -> object:
        message = connection.default_channel.basic_get("q")
        if message is not None:
            message.ack()
        return original(*args, **kwargs)

    producer._publish = slowly
    proxy.cut_reply(b"the body")
    producer.publish("the body", routing_key="q", retry=True, retry_policy=RETRY)
    assert proxy.cuts == 1
    connection.close()
    state = check(server.client(), "q")
    assert state.message == {}
    assert state.totals["enqueued"] == 1


def test_also_on_the_connection_that_replaces_it(far: Connection, proxy: Proxy, server: Server) -> None:
    far.Producer().publish("first", routing_key="q")
    proxy.cut()
    for i in range(20):
        far.Producer().publish(i, routing_key="q", retry=True, retry_policy=RETRY)
    assert len(check(server.client(), "q").message) == 21


def test_without_retry_the_caller_is_told(far: Connection, proxy: Proxy) -> None:
    proxy.refuse()
    with pytest.raises(far.connection_errors):
        far.Producer().publish(1, routing_key="q")
    with pytest.raises(OperationalError):
        far.Producer().publish(1, routing_key="q", retry=True, retry_policy={"max_retries": 1, "interval_start": 0})
    proxy.forward()


def test_publishing_a_received_message_again_is_a_new_message(connection: Connection, server: Server) -> None:
    send(connection, "q", "once", correlation_id="c")
    message = connection.default_channel.basic_get("q")
    properties = {k: v for k, v in message.properties.items() if k not in ("delivery_info", "priority")}
    for _ in range(2):
        connection.Producer().publish(message.payload, routing_key="q", **properties)
    message.ack()
    state = check(server.client(), "q")
    assert len(state.message) == 2
    assert message.delivery_tag not in state.message


def test_the_same_dict_twice_is_two_messages(connection: Connection, server: Server) -> None:
    """What one publish writes into the caller's properties must not bind the next one."""
    properties = {"correlation_id": "c"}
    headers = {"tenant": "a"}
    for _ in range(2):
        connection.Producer().publish(1, routing_key="q", headers=headers, **properties)
    assert len(check(server.client(), "q").message) == 2
    assert headers == {"tenant": "a"}


def test_a_message_to_a_later_time_waits_in_the_broker(connection: Connection, server: Server) -> None:
    soon = (datetime.now(timezone.utc) + timedelta(seconds=0.7)).isoformat()
    inbox = Inbox(connection.default_channel, "q")
    send(connection, "q", "later", headers={"eta": soon})
    send(connection, "q", "now")
    take(connection, 1)
    assert quiet(connection, 0.2)
    assert inbox.bodies == ["now"]
    assert len(check(server.client(), "q").delayed) == 1
    take(connection, 1)
    assert inbox.bodies == ["now", "later"]
    message = inbox.messages[1]
    assert message.headers["eta"] is None
    assert message.properties["eta"] == soon
    assert datetime.now(timezone.utc) >= datetime.fromisoformat(soon)


@pytest.mark.parametrize("eta", ["", "tomorrow", 17, "2999-99-99", None, "1999-01-01T00:00:00", "1999-01-01T00:00:00Z"])
def test_an_eta_that_is_past_or_none_does_not_wait(connection: Connection, eta: object) -> None:
    send(connection, "q", 1, headers={"eta": eta})
    assert connection.default_channel.basic_get("q", no_ack=True).payload == 1


def test_eta_in_the_worker(connect: Callable[..., Connection]) -> None:
    connection = connect(eta_in_broker=False)
    later = (datetime.now(timezone.utc) + timedelta(hours=1)).isoformat()
    send(connection, "q", 1, headers={"eta": later})
    message = connection.default_channel.basic_get("q", no_ack=True)
    assert message.headers["eta"] == later


def test_a_full_lane_is_told_and_is_no_connection_error(connect: Callable[..., Connection]) -> None:
    connection = connect(lane_max_size=2)
    Queue("q", channel=connection.default_channel).declare()
    send(connection, "q", 1, 2, headers={"tenant": "a"})
    with pytest.raises(LaneFull) as caught:
        connection.Producer().publish(3, routing_key="q", headers={"tenant": "a"}, retry=True, retry_policy=RETRY)
    assert not isinstance(caught.value, connection.connection_errors + connection.channel_errors)
    send(connection, "q", 1, headers={"tenant": "b"})


def test_a_full_server_is_told(fresh_server: Callable[..., Server], connect_to: Callable[..., Connection]) -> None:
    """What is there can still be consumed."""
    server = fresh_server("--maxmemory", "6mb", "--maxmemory-policy", "noeviction")
    connection = connect_to(server.url("fairlanes"))
    sent = 0
    with pytest.raises(ServerFull):
        while sent < 100:
            send(connection, "q", "x" * 200_000)
            sent += 1
    assert sent > 2
    inbox = Inbox(connection.default_channel, "q", prefetch=4)
    assert take(connection, sent) == sent
    assert len(inbox) == sent
    send(connection, "q", "room again")


def test_the_header_that_cost_header_names_is_checked(connect: Callable[..., Connection], server: Server) -> None:
    connection = connect(cost_header="cost")
    for cost in ("x", 0, 0.009, -1, True, 1001, float("nan")):
        with pytest.raises(ValueError, match="cost"):
            send(connection, "q", 1, headers={"cost": cost})
    send(connection, "q", 1, headers={"cost": 2.5})
    send(connection, "q", 1)
    assert sorted(record.cost for record in dump(server.client(), "q").message.values()) == [1, 2.5]


def test_an_application_s_own_cost_header_is_not_read(connection: Connection, server: Server) -> None:
    send(connection, "q", 1, headers={"cost": "12.50 EUR"})
    send(connection, "q", 1, headers={"cost": 0})
    assert [record.cost for record in dump(server.client(), "q").message.values()] == [1, 1]

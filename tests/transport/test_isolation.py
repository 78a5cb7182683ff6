"""Who shares a server: databases, prefixes, and kombu's own Redis transport."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery
from kombu import Connection, Exchange, Queue
from kombu.pidbox import Mailbox

from tests.harness import SCHEME, Sender, Server, Worker, wait_for
from tests.invariants import check
from tests.transport.conftest import Inbox, ours, quiet, send, take, until


def test_databases_are_apart(connect: Callable[..., Connection]) -> None:
    zero, one = connect(db=0), connect(db=1)
    exchange = Exchange("shout", "fanout")
    inboxes = [Inbox(c.default_channel, "q", Queue("ear", exchange)) for c in (zero, one)]
    for connection in (zero, one):
        quiet(connection, 0.1)
    send(zero, "q", "zero")
    send(one, "q", "one")
    zero.Producer(exchange=exchange).publish("to zero")
    for connection in (zero, one):
        until(connection, lambda: False, timeout=0.5)
    assert sorted(inboxes[0].bodies) == ["to zero", "zero"]
    assert inboxes[1].bodies == ["one"]


def test_prefixes_are_apart(connect: Callable[..., Connection], server: Server) -> None:
    a, b = connect(global_keyprefix="a:"), connect(global_keyprefix="b:")
    exchange = Exchange("shout", "fanout")
    topic = Exchange("news", "topic")
    inboxes = [
        Inbox(c.default_channel, "q", Queue("ear", exchange), Queue("read", topic, routing_key="#")) for c in (a, b)
    ]
    for connection in (a, b):
        quiet(connection, 0.1)
    send(a, "q", "a's")
    a.Producer(exchange=exchange).publish("shouted")
    a.Producer(exchange=topic).publish("printed", routing_key="x")
    for connection in (a, b):
        until(connection, lambda: False, timeout=0.5)
    assert sorted(inboxes[0].bodies) == ["a's", "printed", "shouted"]
    assert inboxes[1].bodies == []
    assert a.default_channel.queue_purge("q") == 0
    keys = {key.decode()[:2] for key in server.client().keys("*")}
    assert keys == {"a:", "b:"}


@ours
def test_a_prefix_with_braces_is_refused(connect: Callable[..., Connection]) -> None:
    with pytest.raises(ValueError, match="brace"):
        connect(global_keyprefix="{a}:").connect()


@ours
@pytest.mark.parametrize("name", ["{curly}", "a%b", "sp ace", "\u00fc", "a:b", "x" * 200, "*?[", "\x06\x16"])
def test_odd_queue_names(connection: Connection, server: Server, name: str) -> None:
    send(connection, name, 1)
    inbox = Inbox(connection.default_channel, name)
    take(connection, 1)
    assert inbox.bodies == [1]
    assert check(server.client(), name).totals["acked"] == 1


# ------------------------------------------------------------------- beside kombu's redis://


@ours
@pytest.mark.parametrize("direction", ["to them", "from them"])
@pytest.mark.parametrize(
    "options", [{}, {"fanout_prefix": "/x{db}."}, {"global_keyprefix": "p:"}, {"fanout_patterns": True}]
)
def test_fanout_passes_between_the_transports(
    connect_to: Callable[..., Connection], server: Server, direction: str, options: dict[str, Any]
) -> None:
    mine = connect_to(server.url("fairlanes"), **options)
    theirs = connect_to(server.url("redis"), **options)
    sender, receiver = (mine, theirs) if direction == "to them" else (theirs, mine)
    exchange = Exchange("shout", "fanout")
    inbox = Inbox(receiver.default_channel, Queue("ear", exchange, routing_key="task.#"))
    until(receiver, lambda: False, timeout=0.3)
    producer = sender.Producer(exchange=exchange)
    producer.publish({"n": 1}, routing_key="task.sent", headers={"h": 1})
    producer.publish(b"\x00\xff", routing_key="task.done", content_type="application/data", content_encoding="binary")
    until(receiver, lambda: len(inbox) == 2)
    assert inbox.bodies[0] == {"n": 1}
    assert bytes(inbox.bodies[1]) == b"\x00\xff"
    assert inbox.messages[0].headers["h"] == 1


@ours
def test_a_queue_of_theirs_is_no_queue_of_ours(connect_to: Callable[..., Connection], server: Server) -> None:
    mine, theirs = connect_to(server.url("fairlanes")), connect_to(server.url("redis"))
    send(theirs, "q", "theirs")
    send(mine, "q", "mine")
    assert mine.default_channel.basic_get("q", no_ack=True).payload == "mine"
    assert theirs.default_channel.basic_get("q", no_ack=True).payload == "theirs"


# ------------------------------------------------------------------- remote control


def test_pidbox(connect: Callable[..., Connection]) -> None:
    connection, client = connect(), connect()
    mailbox = Mailbox("test", type="fanout")
    node = mailbox(connection).Node("node@here", channel=connection.channel())
    asked = []

    @node.handler
    def echo(state: Any, text: str) -> dict[str, str]:
        asked.append(text)
        return {"echo": text}

    consumer = node.listen()
    quiet(connection, 0.1)
    box = mailbox(client)
    box._broadcast("echo", {"text": "one-way"}, reply=False)
    assert until(connection, lambda: asked == ["one-way"])

    answers: list[Any] = []

    def ask() -> None:
        answers.extend(box.multi_call("echo", {"text": "hello"}, timeout=5, limit=1))

    thread = threading.Thread(target=ask)
    thread.start()
    until(connection, lambda: not thread.is_alive(), timeout=10)
    thread.join(10)
    assert answers == [{"node@here": {"echo": "hello"}}]
    consumer.cancel()


@pytest.fixture
def fleet(server: Server) -> Iterator[dict[str, Worker]]:
    """One worker on this transport and one on kombu's, on the same database."""
    workers = {
        scheme: Worker(server, "-n", f"{scheme}@here", "-Q", scheme, scheme=scheme, pool="solo", concurrency=1)
        for scheme in ("fairlanes", "redis")
    }
    for worker in workers.values():
        worker.wait_ready()
    yield workers
    for worker in workers.values():
        worker.close()


def heard_of(app: Celery, n: int) -> set[str]:
    """The workers whose heartbeats a receiver hears, up to `n`."""
    heard: set[str] = set()
    with app.connection_for_read() as connection:

        def note(event: dict[str, Any]) -> None:
            heard.add(event["hostname"])
            receiver.should_stop = len(heard) >= n

        receiver = app.events.Receiver(connection, handlers={"worker-heartbeat": note})
        with contextlib.suppress(TimeoutError):
            receiver.capture(limit=100, timeout=15, wakeup=False)
    return heard


@ours
@pytest.mark.slow
def test_a_mixed_fleet(fleet: dict[str, Worker], server: Server) -> None:
    """Control commands and events reach both; replies come to whoever asked on the worker's own transport."""
    senders = {scheme: Sender(server, scheme=scheme) for scheme in ("fairlanes", "redis")}
    try:
        for scheme, sender in senders.items():
            app: Celery = sender.app
            assert wait_for(lambda app=app: app.control.ping(timeout=1), 20, "an answer") == [
                {f"{scheme}@here": {"ok": "pong"}}
            ]
        # A command without a reply, from either side, reaches both workers.
        for scheme, sender in senders.items():
            sender.app.control.add_consumer(f"new-{scheme}")
            for worker in fleet.values():
                worker.wait_for_log(f"new-{scheme}", 20)
        # They have seen each other: gossip and mingle.
        fleet["fairlanes"].wait_for_log("mingle: ", 20)

        # Events of both arrive at a receiver on either transport.
        for sender in senders.values():
            assert heard_of(sender.app, 2) == {"fairlanes@here", "redis@here"}
    finally:
        for sender in senders.values():
            sender.close()


@ours
@pytest.mark.slow
def test_inspect_leaves_nothing(server: Server) -> None:
    """A worker that has come, answered, worked and gone: only what is durable stays."""
    with Worker(server, "-n", "one@here", scheme=SCHEME, pool="solo", concurrency=1) as worker:
        worker.wait_ready()
        with Sender(server) as sender:
            for _ in range(3):
                assert sender.app.control.inspect(timeout=2).ping() == {"one@here": {"ok": "pong"}}
            assert sender.app.control.inspect(timeout=2).stats()["one@here"]["broker"]["transport"] == "fairlanes"
            sender.send("mark", "t", 1, tenant="t")
            worker.wait_for_log("succeeded", 20)
        assert worker.stop() == 0
    expected = {"fairlanes:2:queues", "_kombu.binding.celery", "_kombu.binding_permanent.celery"}

    def odd() -> set[str]:
        keys = {key.decode() for key in server.client().keys("*")}
        return {key for key in keys - expected if not key.startswith("fairlanes:2:{celery}")}

    wait_for(lambda: not odd(), 25, "only what is durable")
    assert check(server.client(), "celery").message == {}

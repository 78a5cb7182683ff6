"""Draining: timeouts, threads, and kombu's own programs around it."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from kombu import Connection, Consumer, Exchange, Producer, Queue
from kombu.common import collect_replies, eventloop, send_reply, uuid
from kombu.mixins import ConsumerMixin, ConsumerProducerMixin
from kombu.pools import connections, producers

from fairlanes_transport.connections import readable
from tests.harness import Server, wait_for
from tests.invariants import check
from tests.transport.conftest import Drainer, Inbox, ours, parked, quiet, send, take


@pytest.mark.parametrize("timeout", [0, 0.001, 0.05, 0.3])
def test_a_timeout_is_kept(connection: Connection, timeout: float) -> None:
    Inbox(connection.default_channel, "q")
    started = time.monotonic()
    with pytest.raises(TimeoutError):
        connection.drain_events(timeout=timeout)
    assert timeout - 0.01 <= time.monotonic() - started < timeout + 5


@ours
def test_timeout_zero_delivers_what_is_there(connection: Connection) -> None:
    inbox = Inbox(connection.default_channel, "q")
    send(connection, "q", 1, 2)
    for _ in range(2):
        connection.drain_events(timeout=0)
    assert inbox.bodies == [1, 2]
    with pytest.raises(TimeoutError):
        connection.drain_events(timeout=0)
    send(connection, "q", 3)
    connection.drain_events(timeout=0)
    assert inbox.bodies == [1, 2, 3]


def test_without_a_timeout_it_waits(connect: Callable[..., Connection]) -> None:
    connection, sender = connect(), connect()
    inbox = Inbox(connection.default_channel, "q")
    timer = threading.Timer(0.5, send, (sender, "q", "at last"))
    timer.start()
    connection.drain_events()
    timer.join()
    assert inbox.bodies == ["at last"]


@ours
def test_one_delivery_per_call(connection: Connection) -> None:
    inbox = Inbox(connection.default_channel, "q")
    send(connection, "q", *range(5))
    for n in range(1, 6):
        connection.drain_events(timeout=1)
        assert len(inbox) == n


@ours
def test_without_consumers_it_only_waits(connection: Connection) -> None:
    """kombu's Redis transport waits for ever here, too, but asks the server all the time."""
    connection.connect()
    with pytest.raises(TimeoutError):
        connection.drain_events(timeout=0.2)


@ours
def test_whoever_stops_draining_leaves_the_message_to_others(
    connect: Callable[..., Connection], server: Server
) -> None:
    """After a drain that timed out nobody is parked who does not come back."""
    lazy = connect()
    Inbox(lazy.default_channel, "q")
    with pytest.raises(TimeoutError):
        lazy.drain_events(timeout=0.05)
    wait_for(lambda: parked(server) == 0, 5, "nobody parked")
    busy = connect()
    inbox = Inbox(busy.default_channel, "q")
    send(busy, "q", 1)
    assert take(busy, 1) == 1
    assert inbox.bodies == [1]


def test_an_exception_in_a_callback_leaves_the_drain(connection: Connection) -> None:
    send(connection, "q", "bad", "good")
    seen = []

    def note(body: Any, message: Any) -> None:
        message.ack()
        seen.append(body)
        if body == "bad":
            raise RuntimeError("a bug of the program")

    with Consumer(connection.default_channel, [Queue("q")], callbacks=[note]):
        with pytest.raises(RuntimeError):
            take(connection, 1)
        take(connection, 1)
    assert seen == ["bad", "good"]


def test_each_thread_with_its_own_connection(connect: Callable[..., Connection]) -> None:
    n, threads = 400, 8
    drainers = [Drainer(connect(), "q", prefetch=4) for _ in range(threads)]
    senders = [connect() for _ in range(4)]
    sending = [
        threading.Thread(target=send, args=(sender, "q", *range(i * n // 4, (i + 1) * n // 4)))
        for i, sender in enumerate(senders)
    ]
    for thread in sending:
        thread.start()
    for thread in sending:
        thread.join(30)
    wait_for(lambda: sum(len(drainer.inbox) for drainer in drainers) >= n, 30, "all messages")
    for drainer in drainers:
        drainer.stop()
    assert sorted(body for drainer in drainers for body in drainer.inbox.bodies) == list(range(n))


def test_pools(server: Server) -> None:
    connection = Connection(server.url())
    Queue("q", channel=connection.default_channel).declare()
    for i in range(20):
        with producers[connection].acquire(block=True) as producer:
            producer.publish(i, routing_key="q")
    with connections[connection].acquire(block=True) as pooled:
        assert pooled.default_channel.queue_declare("q", passive=True).message_count == 20
    from kombu.pools import reset

    reset()
    connection.close()


def test_eventloop(connection: Connection) -> None:
    inbox = Inbox(connection.default_channel, "q")
    send(connection, "q", *range(3))
    for _ in eventloop(connection, limit=3, timeout=1):
        pass
    assert inbox.bodies == [0, 1, 2]


# ------------------------------------------------------------------- kombu's mixins


class Worker(ConsumerMixin):
    """The example of kombu's documentation."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.seen: list[Any] = []

    def get_consumers(self, consumer: Any, channel: Any) -> list[Consumer]:
        return [consumer(queues=[Queue("work")], callbacks=[self.on_task], prefetch_count=2)]

    def on_task(self, body: Any, message: Any) -> None:
        self.seen.append(body)
        message.ack()


def run(worker: ConsumerMixin) -> threading.Thread:
    thread = threading.Thread(target=worker.run, daemon=True)
    thread.start()
    return thread


def stop(worker: ConsumerMixin, thread: threading.Thread) -> None:
    worker.should_stop = True
    thread.join(15)
    assert not thread.is_alive()


def test_consumer_mixin(connect: Callable[..., Connection]) -> None:
    worker = Worker(connect())
    thread = run(worker)
    sender = connect()
    send(sender, "work", *range(20))
    wait_for(lambda: len(worker.seen) == 20, 20, "all work")
    stop(worker, thread)
    assert worker.seen == list(range(20))


@ours
def test_consumer_mixin_reconnects(fresh_server: Callable[..., Server], connect_to: Callable[..., Connection]) -> None:
    server = fresh_server("--appendonly", "yes")
    worker = Worker(connect_to(server.url()))
    thread = run(worker)
    send(connect_to(server.url()), "work", "before")
    wait_for(lambda: worker.seen == ["before"], 20, "the first message")
    server.restart()
    connect_to(server.url()).ensure_connection(max_retries=5)
    send(connect_to(server.url()), "work", "after")
    wait_for(lambda: worker.seen == ["before", "after"], 20, "the second message")
    stop(worker, thread)


class Calculator(ConsumerProducerMixin):
    """The RPC server of kombu's examples."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def get_consumers(self, consumer: Any, channel: Any) -> list[Consumer]:
        return [consumer(queues=[Queue("rpc")], on_message=self.on_request, accept={"json"}, prefetch_count=1)]

    def on_request(self, message: Any) -> None:
        self.producer.publish(
            {"result": message.payload["n"] ** 2},
            exchange="",
            routing_key=message.properties["reply_to"],
            correlation_id=message.properties["correlation_id"],
            serializer="json",
            retry=True,
        )
        message.ack()


def test_rpc(connect: Callable[..., Connection]) -> None:
    server = Calculator(connect())
    thread = run(server)
    client = connect()
    callback_queue = Queue(uuid(), exclusive=True, auto_delete=True)
    answers: dict[str, int] = {}

    def on_answer(message: Any) -> None:
        answers[message.properties["correlation_id"]] = message.payload["result"]

    ids = [uuid() for _ in range(10)]
    with Consumer(client, on_message=on_answer, queues=[callback_queue], no_ack=True):
        with Producer(client) as producer:
            for n, correlation_id in enumerate(ids):
                producer.publish(
                    {"n": n}, exchange="", routing_key="rpc", declare=[callback_queue],
                    reply_to=callback_queue.name, correlation_id=correlation_id,
                )  # fmt: skip
        take(client, 10)
    stop(server, thread)
    assert [answers[correlation_id] for correlation_id in ids] == [n * n for n in range(10)]


def test_send_reply_and_collect_replies(connect: Callable[..., Connection]) -> None:
    client, server = connect(), connect()
    exchange = Exchange("answers", "direct")
    reply_queue = Queue(uuid(), exchange, routing_key=uuid(), expires=10, auto_delete=True)
    reply_queue(client.default_channel).declare()
    Queue("ask", channel=client.default_channel).declare()
    Producer(client).publish({"q": 1}, routing_key="ask", reply_to=reply_queue.routing_key, correlation_id="c")
    request = server.default_channel.basic_get("ask", no_ack=True)
    send_reply(exchange, request, {"a": 2}, Producer(server))
    replies = list(collect_replies(client, client.default_channel, reply_queue, limit=1, timeout=5))
    assert replies == [{"a": 2}]


@ours
def test_nothing_is_left_of_a_conversation(connect: Callable[..., Connection], server: Server) -> None:
    test_send_reply_and_collect_replies(connect)
    left = {key.decode() for key in server.client().keys("*")}
    assert {key for key in left if not key.startswith("fairlanes:2:{ask}")} <= {"fairlanes:2:queues"}
    assert check(server.client(), "ask").message == {}


def drained_into_a_batch(connection: Connection, n: int) -> Inbox:
    """An inbox that has got some of `n` messages; several more are claimed, and wait for their turn."""
    send(connection, "q", *range(n))
    inbox = Inbox(connection.default_channel, "q", prefetch=16)
    metronome = connection.transport.metronome
    while len(metronome.buffer) < 3:
        connection.drain_events(timeout=5)
    return inbox


@ours
def test_acks_within_a_batch_are_not_waited_for(connection: Connection, server: Server) -> None:
    inbox = drained_into_a_batch(connection, 20)
    before, pid = len(inbox), server.client().info()["process_id"]
    os.kill(pid, signal.SIGSTOP)
    try:
        started = time.monotonic()
        for _ in range(2):
            connection.drain_events(timeout=5)
        took = time.monotonic() - started
    finally:
        os.kill(pid, signal.SIGCONT)
    assert (len(inbox), took < 2) == (before + 2, True)
    take(connection, 20 - len(inbox))
    assert inbox.bodies == list(range(20))
    assert check(server.client(), "q").message == {}  # at once: the last ack of a batch is waited for


def last_of_a_batch(connection: Connection) -> Inbox:
    """An inbox whose next delivery is the last of a batch of several."""
    inbox = drained_into_a_batch(connection, 20)
    while len(connection.transport.metronome.buffer) > 1:
        connection.drain_events(timeout=5)
    return inbox


@ours
def test_a_callback_that_raises_leaves_no_ack_unread(connection: Connection, server: Server) -> None:
    inbox = last_of_a_batch(connection)

    def fail(body: Any, message: Any) -> None:
        raise ValueError(body)

    inbox.consumer.callbacks.append(fail)
    with pytest.raises(ValueError):
        connection.drain_events(timeout=5)
    assert not connection.transport.metronome.courier.waiting
    assert check(server.client(), "q").leases == {}


@ours
def test_a_consumer_that_is_cancelled_leaves_no_ack_unread(connection: Connection, server: Server) -> None:
    inbox = drained_into_a_batch(connection, 20)
    connection.drain_events(timeout=5)
    inbox.consumer.cancel()
    assert not connection.transport.metronome.courier.waiting
    state = check(server.client(), "q")
    assert (state.leases, len(state.message)) == ({}, 20 - len(inbox))


@ours
def test_a_signal_that_cancels_while_a_claim_is_taken_in(
    connection: Connection, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Celery's handler of SIGQUIT does, wherever the worker is: what no consumer takes any more goes back."""
    send(connection, "q", *range(7))
    channel = connection.default_channel
    inbox = Inbox(channel, "q", prefetch=16)
    take(connection, 3)
    accept, accepted = channel.accept, []

    def interrupted(*args: Any) -> Any:
        accepted.append(args)
        if len(accepted) == 2:  # of four
            inbox.consumer.cancel()
        return accept(*args)

    monkeypatch.setattr(channel, "accept", interrupted)
    with contextlib.suppress(TimeoutError):
        connection.drain_events(timeout=1)
    assert len(accepted) == 2
    state = check(server.client(), "q")
    assert sum(map(len, state.ready.values())) >= 2
    channel.close()
    assert check(server.client(), "q").leases == {}


@ours
def test_a_connection_that_is_lost_at_the_end_of_a_batch_is_nobodys_matter(
    connection: Connection, connect: Callable[..., Connection], server: Server
) -> None:
    """The acks are sent again, the message was delivered, and the path is not dead."""
    inbox, other = last_of_a_batch(connection), connect()
    Inbox(other.default_channel, "other")
    assert quiet(other, 0.01)
    inbox.consumer.callbacks.append(
        lambda body, message: connection.transport.metronome.courier.sock.shutdown(socket.SHUT_RDWR)
    )
    connection.drain_events(timeout=5)
    inbox.consumer.callbacks.pop()
    assert quiet(other, 0.01)
    take(connection, 20 - len(inbox))
    assert inbox.bodies == list(range(20))
    wait_for(lambda: check(server.client(), "q").message == {}, 10, "all acked")


@ours
def test_a_connection_that_the_server_closes_during_a_long_callback_is_made_anew(
    connection: Connection, server: Server
) -> None:
    """The reply to the last ack has come, then the server's idle timeout: nothing is lost by that."""
    inbox, courier = drained_into_a_batch(connection, 20), connection.transport.metronome.courier
    pid = server.client().info()["process_id"]

    def be_answered_late(body: Any, message: Any) -> None:
        os.kill(pid, signal.SIGSTOP)
        inbox._note(body, message)

    def work_for_long(body: Any, message: Any) -> None:
        os.kill(pid, signal.SIGCONT)
        assert courier.waiting
        assert readable(courier.sock, 5)
        name = "{}:{}".format(*courier.sock.getsockname())
        client = next(each for each in server.client().client_list() if each["addr"] == name)
        server.client().client_kill_filter(_id=client["id"])
        wait_for(lambda: _at_its_end(courier.sock), 5, "the end")
        inbox._note(body, message)

    try:
        for callback in (be_answered_late, work_for_long):
            inbox.consumer.callbacks[0] = callback
            connection.drain_events(timeout=5)
    finally:
        os.kill(pid, signal.SIGCONT)
    inbox.consumer.callbacks[0] = inbox._note
    for _ in range(20 - len(inbox)):
        connection.drain_events(timeout=5)
    assert inbox.bodies == list(range(20))
    wait_for(lambda: check(server.client(), "q").message == {}, 10, "all acked")


def _at_its_end(sock: socket.socket) -> bool:
    """Whether the other side has closed, whatever is still to be read."""
    poller = select.poll()
    poller.register(sock, select.POLLRDHUP)
    return bool(poller.poll(0))


@ours
@pytest.mark.parametrize("when", ["before the ack", "after the ack"])
def test_an_ack_that_is_lost_with_its_connection_is_sent_again(
    connection: Connection, server: Server, when: str
) -> None:
    inbox = drained_into_a_batch(connection, 20)
    courier = connection.transport.metronome.courier

    def cut() -> None:
        courier.sock.shutdown(socket.SHUT_RDWR)

    def cut_before(body: Any, message: Any) -> None:
        cut()
        message.ack()

    connection.drain_events(timeout=5)  # the courier is connected now
    assert courier.sock is not None
    if when == "before the ack":
        inbox.consumer.callbacks.insert(0, cut_before)
        inbox.consumer.callbacks[1] = lambda body, message: inbox.bodies.append(body)
    connection.drain_events(timeout=5)
    if when == "after the ack":
        cut()
    else:
        del inbox.consumer.callbacks[0]
        inbox.consumer.callbacks[0] = inbox._note
    for _ in range(40):
        if len(inbox) >= 20:
            break
        try:
            connection.drain_events(timeout=5)
        except connection.connection_errors:
            continue
    assert inbox.bodies == list(range(20))
    wait_for(lambda: check(server.client(), "q").message == {}, 10, "all acked")

"""The wake protocol as the server sees it: nobody polls, nobody is woken for nothing, no token is lost."""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from kombu import Connection, Exchange, Queue
from redis.exceptions import ConnectionError as DriverConnectionError

from fairlanes_transport.connections import Address, Link
from fairlanes_transport.park import Park
from fairlanes_transport.store import Store
from tests.faults.proxy import Proxy
from tests.harness import Server, wait_for
from tests.invariants import check
from tests.transport.conftest import Drainer, Inbox, Monitor, ours, parked, quiet, send, take

pytestmark = ours


def park(server: Server, *drainers: Drainer, others: int = 0) -> None:
    """Wait until all of them are parked, and known to drain in a loop: the first drain that times out unparks.

    Args:
        others: consumers that are parked besides.
    """
    for _ in range(2):
        for drainer in drainers:
            turns = drainer.turns
            wait_for(lambda drainer=drainer, turns=turns: drainer.turns > turns, 10, "a turn")
    wait_for(lambda: parked(server) == len(drainers) + others, 10, f"{len(drainers)} parked consumers")


def test_idle_means_no_command(connect: Callable[..., Connection], server: Server, monitor: Monitor) -> None:
    with Drainer(connect(), "a", "b") as one, Drainer(connect(), "a") as two:
        park(server, one, two)
        monitor.start()
        time.sleep(3)
        assert monitor.commands() == []


def test_a_park_that_ends_costs_one_claim_a_queue(
    connect: Callable[..., Connection], server: Server, monitor: Monitor
) -> None:
    with Drainer(connect(park_seconds=1), "a") as drainer:
        park(server, drainer)
        monitor.start()
        time.sleep(3.5)
        counts = Counter(monitor.commands())
        assert abs(counts["EVALSHA"] - counts["BLPOP"]) <= 1
        assert 2 <= counts["BLPOP"] <= 4
        assert set(counts) == {"EVALSHA", "BLPOP"}


def test_a_message_to_an_idle_consumer_costs_four_commands(
    connect: Callable[..., Connection], server: Server, monitor: Monitor
) -> None:
    """Enqueue, pop, claim, ack; and then the next park."""
    sender = connect()
    send(sender, "a", "warm up")
    with Drainer(connect(), "a", "b") as drainer:
        wait_for(lambda: len(drainer.inbox) == 1, 5, "the first message")
        park(server, drainer)
        for n in range(2, 5):
            monitor.start()
            send(sender, "a", n)
            wait_for(lambda n=n: len(drainer.inbox) == n, 5, "the message")
            park(server, drainer)
            assert monitor.commands() == ["EVALSHA", "EVALSHA", "EVALSHA", "BLPOP"]  # the pop was sent before


def test_one_message_wakes_one_of_six(connect: Callable[..., Connection], server: Server, monitor: Monitor) -> None:
    sender = connect()
    send(sender, "q", "warm up")
    drainers = [Drainer(connect(), "q") for _ in range(6)]
    wait_for(lambda: sum(len(drainer.inbox) for drainer in drainers) == 1, 5, "the first message")
    park(server, *drainers)
    time.sleep(0.2)
    monitor.start()
    send(sender, "q", "wake up")
    wait_for(lambda: sum(len(drainer.inbox) for drainer in drainers) == 2, 5, "the message")
    park(server, *drainers)
    time.sleep(0.2)
    # The consumer that was woken parks again; the other five do not stir.
    assert Counter(monitor.commands()) == {"EVALSHA": 3, "BLPOP": 1}
    for drainer in drainers:
        drainer.stop()


def test_four_messages_go_to_four_idle_consumers(connect: Callable[..., Connection], server: Server) -> None:
    sender = connect()
    gate = threading.Barrier(4, timeout=10)

    class Slow(Drainer):
        def _run(self) -> None:
            self.inbox.consumer.callbacks = [self.work]
            super()._run()

        def work(self, body: object, message: object) -> None:
            gate.wait()  # passes only if four of them work at the same time
            self.inbox.bodies.append(body)
            message.ack()  # type: ignore[attr-defined]

    drainers = [Slow(connect(), "q") for _ in range(4)]
    park(server, *drainers)
    send(sender, "q", *range(4))
    wait_for(lambda: sum(len(drainer.inbox) for drainer in drainers) == 4, 10, "four messages")
    assert [len(drainer.inbox) for drainer in drainers] == [1, 1, 1, 1]
    for drainer in drainers:
        drainer.stop()


@pytest.mark.parametrize("lanes", [1, 16])
def test_a_backlog_is_chained_on_at_full_speed(connect: Callable[..., Connection], server: Server, lanes: int) -> None:
    """Each consumer that is busy leaves a token for the next: also with one lane only, nobody waits for a park's end.
    It would be 5 to 8 messages a second otherwise.
    """
    sender = connect()
    store = Store(Link(Address.from_url(server.url("fairlanes"))))

    def work(body: object, message: Any) -> None:
        time.sleep(0.001)
        message.ack()

    drainers = [Drainer(connect(), "q", prefetch=1) for _ in range(4)]
    for drainer in drainers:
        drainer.inbox.consumer.callbacks.append(work)
        drainer.inbox._ack = False
    store.pause("q")
    for n in range(1000):
        send(sender, "q", n, headers={"tenant": f"t{n % lanes}"})
    park(server, *drainers)
    started = time.monotonic()
    store.pause("q", paused=False)
    wait_for(lambda: sum(len(drainer.inbox) for drainer in drainers) >= 1000, 20, "the backlog")
    took = time.monotonic() - started
    for drainer in drainers:
        drainer.stop()
    store.caller.close()  # type: ignore[attr-defined]
    assert sorted(body for drainer in drainers for body in drainer.inbox.bodies) == list(range(1000))
    assert min(len(drainer.inbox) for drainer in drainers) >= 100
    assert 1000 / took > 500
    assert check(server.client(), "q").message == {}


# ------------------------------------------------------------------- the token goes on


def test_cancelling_while_parked(connect: Callable[..., Connection], server: Server) -> None:
    """Many times, as the pop may end just when the message comes."""
    leaving, staying = connect(), connect()
    sender = connect()
    drainer = Drainer(staying, "q")
    park(server, drainer)
    for n in range(1, 31):
        inbox = Inbox(leaving.default_channel, "q")
        for _ in range(2):
            quiet(leaving, 0.001)
        thread = threading.Thread(target=send, args=(sender, "q", n))
        thread.start()
        inbox.consumer.cancel()
        thread.join()
        assert len(inbox) == 0
        wait_for(lambda n=n: len(drainer.inbox) == n, 5, f"message {n}")
    drainer.stop()
    check(server.client(), "q")


def test_losing_credit_while_a_message_comes(connect: Callable[..., Connection], server: Server) -> None:
    """A consumer that is full leaves its queue to the others at once."""
    full, free = connect(), connect()
    sender = connect()
    holding = Inbox(full.default_channel, "q", prefetch=1, ack=False)
    send(sender, "q", "held")
    take(full, 1)
    send(sender, "q", "next")
    assert quiet(full)
    assert parked(server) == 0
    inbox = Inbox(free.default_channel, "q")
    assert take(free, 1) == 1
    assert inbox.bodies == ["next"]
    holding.ack_all()
    check(server.client(), "q")


@pytest.mark.parametrize("end", ["close", "cancel", "collect"])
def test_the_timekeeper_hands_its_time_on(connect: Callable[..., Connection], server: Server, end: str) -> None:
    keeper, other = connect(), connect()
    soon = (datetime.now(timezone.utc) + timedelta(seconds=1.5)).isoformat()
    send(connect(), "q", "later", headers={"eta": soon})
    inbox = Inbox(keeper.default_channel, "q")
    for _ in range(3):
        quiet(keeper, 0.05)
    assert "keeper" in check(server.client(), "q").queue
    with Drainer(other, "q") as drainer:
        wait_for(lambda: parked(server), 5, "a parked consumer")
        inbox.consumer.cancel() if end == "cancel" else getattr(keeper, end)()
        wait_for(lambda: drainer.inbox.bodies == ["later"], 5, "the message")
        late = time.time() - datetime.fromisoformat(soon).timestamp()
        assert 0 <= late < 0.5


def test_an_earlier_time_reopens_the_role(connect: Callable[..., Connection], server: Server) -> None:
    sender = connect()

    def at(seconds: float) -> str:
        return (datetime.now(timezone.utc) + timedelta(seconds=seconds)).isoformat()

    with Drainer(connect(), "q") as drainer:
        send(sender, "q", "late", headers={"eta": at(60)})
        wait_for(lambda: "keeper" in check(server.client(), "q", token_out=True).queue, 5, "a timekeeper")
        send(sender, "q", "early", headers={"eta": at(0.5)})
        wait_for(lambda: drainer.inbox.bodies == ["early"], 5, "the early message")


def test_credit_that_comes_back_from_another_thread(connect: Callable[..., Connection], server: Server) -> None:
    sender = connect()
    with Drainer(connect(), "q", prefetch=1, ack=False) as drainer:
        send(sender, "q", *range(5))
        for n in range(1, 6):
            wait_for(lambda n=n: len(drainer.inbox) == n, 5, f"message {n}")
            drainer.inbox.messages[-1].ack()
    check(server.client(), "q")


def test_credit_on_a_queue_that_the_pop_does_not_name(connect: Callable[..., Connection], server: Server) -> None:
    """One channel is full, the connection is parked for the other one."""
    connection, sender = connect(), connect()
    full = Inbox(connection.channel(), "a", prefetch=1, ack=False)
    with Drainer(connection, "b") as drainer:
        send(sender, "a", 1, 2)
        wait_for(lambda: len(full) == 1, 5, "the first message")
        park(server, drainer)
        full.messages[0].ack()
        wait_for(lambda: len(full) == 2, 5, "the second message")
        full.messages[1].ack()
    assert full.bodies == [1, 2]
    check(server.client(), "a")


# ------------------------------------------------------------------- what needs no consumer


def test_a_paused_queue_has_no_token(connect: Callable[..., Connection], server: Server) -> None:
    store = Store(Link(Address.from_url(server.url("fairlanes"))))
    sender = connect()
    with Drainer(connect(), "q") as drainer:
        send(sender, "q", 1)
        wait_for(lambda: len(drainer.inbox) == 1, 5, "the first message")
        store.pause("q")
        send(sender, "q", 2)
        time.sleep(0.3)
        assert len(drainer.inbox) == 1
        store.pause("q", paused=False)
        wait_for(lambda: len(drainer.inbox) == 2, 5, "the second message")
    store.caller.close()  # type: ignore[attr-defined]


def test_fanout_does_not_keep_the_pop_from_its_queue(connect: Callable[..., Connection], server: Server) -> None:
    """Events come while we are parked: the pop goes on."""
    exchange = Exchange("shout", "fanout")
    sender = connect()
    with Drainer(connect(), "q", Queue("ear", exchange)) as drainer:
        park(server, drainer)
        for i in range(20):
            sender.Producer(exchange=exchange).publish(f"event{i}")
        send(sender, "q", "work")
        wait_for(lambda: len(drainer.inbox) == 21, 5, "events and work")


# ------------------------------------------------------------------- dead ends


def test_a_reply_that_is_overdue(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's host has vanished without a word: the pop's own deadline finds out."""
    monkeypatch.setattr("fairlanes_transport.park.GRACE_SECONDS", 0.2)
    with Proxy(server.port) as proxy:
        link = Link(Address.from_url(f"fairlanes://127.0.0.1:{proxy.port}/0"))
        place = Park(link, Store(link))
        place.start(("q",), 0.3)
        assert place.parked
        assert not place.overdue()
        proxy.swallow()
        wait_for(place.overdue, 5, "the deadline")
        place.close()
        assert not place.parked
        link.close()


def test_an_overdue_park_is_a_lost_connection(
    connect_to: Callable[..., Connection], server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program then reconnects, and serves what came meanwhile."""
    monkeypatch.setattr("fairlanes_transport.park.GRACE_SECONDS", 0.2)
    with Proxy(server.port) as proxy:
        url = f"fairlanes://127.0.0.1:{proxy.port}/0"
        connection = connect_to(url, park_seconds=1, socket_timeout=0.5)
        inbox = Inbox(connection.default_channel, "q")
        quiet(connection, 0.05)
        proxy.swallow()
        send(connect_to(server.url("fairlanes")), "q", "meanwhile")
        with pytest.raises(connection.connection_errors):
            for _ in range(50):
                assert quiet(connection, 0.1)
        proxy.forward()
        connection.collect()
        connection.ensure_connection(max_retries=3)
        inbox = Inbox(connection.default_channel, "q")
        assert take(connection, 1) == 1
        assert inbox.bodies == ["meanwhile"]
        connection.close()


def test_a_token_that_went_to_a_vanished_host(connect_to: Callable[..., Connection], server: Server) -> None:
    """Whoever waits beside it looks for work when its own park ends."""
    with Proxy(server.port) as proxy:
        gone = connect_to(f"fairlanes://127.0.0.1:{proxy.port}/0", socket_timeout=0.5)
        Inbox(gone.default_channel, "q")
        for _ in range(2):
            quiet(gone, 0.05)
        assert parked(server) == 1
        proxy.swallow()
        with Drainer(connect_to(server.url("fairlanes"), park_seconds=2), "q") as drainer:
            park(server, drainer, others=1)
            sent = time.monotonic()
            send(connect_to(server.url("fairlanes")), "q", "found")
            assert parked(server) == 1, "who has waited longest gets the token"
            assert len(drainer.inbox) == 0
            wait_for(lambda: len(drainer.inbox), 10, "the message")
            assert time.monotonic() - sent < 2.5
        assert check(server.client(), "q").message == {}


def test_a_connection_that_is_cut_while_parked(connect_to: Callable[..., Connection], server: Server) -> None:
    with Proxy(server.port) as proxy:
        connection = connect_to(f"fairlanes://127.0.0.1:{proxy.port}/0")
        Inbox(connection.default_channel, "q")
        for _ in range(2):
            quiet(connection, 0.05)
        proxy.cut()
        with pytest.raises(connection.connection_errors):
            for _ in range(5):
                quiet(connection, 0.1)
        connection.collect()


def test_the_server_ends_the_pop(connect: Callable[..., Connection], server: Server) -> None:
    """As it does when it becomes a replica: ``-UNBLOCKED``."""
    connection = connect()
    drainer = Drainer(connection, "q")
    park(server, drainer)
    for client in server.client().client_list():
        if client["cmd"] == "blpop":
            server.client().client_unblock(int(client["id"]), error=True)
    wait_for(lambda: drainer.errors, 5, "the error")
    assert isinstance(drainer.errors[0], connection.connection_errors)
    with pytest.raises(connection.connection_errors):
        drainer.stop()


@pytest.mark.parametrize("forbidden", ["client|unblock", "client|id"])
def test_where_the_acl_forbids_to_end_the_pop(
    connect_to: Callable[..., Connection], server: Server, forbidden: str
) -> None:
    """The pop's own connection is closed half-way then, and nothing is lost."""
    client = server.client()
    client.execute_command("ACL", "SETUSER", "poor", "on", ">secret", "~*", "&*", "+@all", f"-{forbidden}")
    try:
        connection = connect_to(f"fairlanes://poor:secret@127.0.0.1:{server.port}/0")
        inbox = Inbox(connection.default_channel, "a")
        sender = connect_to(server.url("fairlanes"))
        for n in range(5):
            for _ in range(2):
                quiet(connection, 0.01)
            second = Inbox(connection.default_channel, f"b{n}")
            quiet(connection, 0.01)
            second.consumer.cancel()
            send(sender, "a", n)
            assert take(connection, 1) == 1
        assert inbox.bodies == list(range(5))
        connection.close()
        wait_for(lambda: parked(server) == 0, 5, "nobody parked")
        check(client, "a")
    finally:
        client.execute_command("ACL", "DELUSER", "poor")


def test_a_park_on_nobody(server: Server) -> None:
    """The parked socket against a peer that closes."""
    listener = socket.create_server(("127.0.0.1", 0))
    link = Link(Address.from_url(f"fairlanes://127.0.0.1:{listener.getsockname()[1]}/0"))
    place = Park(link, Store(link))

    def refuse() -> None:
        peer, _ = listener.accept()
        peer.close()

    thread = threading.Thread(target=refuse)
    thread.start()
    with pytest.raises((DriverConnectionError, OSError)):
        place.start(("q",), 1)
    assert not place.parked
    thread.join(5)
    listener.close()
    link.close()

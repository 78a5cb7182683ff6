"""Publishing when the reply is lost, the server is full, and when the caller wants to know that a message is safe."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import redis

from fairlanes_transport.connections import Address, Link
from fairlanes_transport.durable import Confirming
from fairlanes_transport.errors import NotConfirmed, OptionError, ServerFull
from fairlanes_transport.store import Store
from tests.faults.conftest import KIND, Site
from tests.faults.proxy import Proxy
from tests.harness import Sender, Server, wait_done, wait_for

pytestmark = pytest.mark.faults


@contextmanager
def _sender(site: Site, **options: Any) -> Iterator[Sender]:
    sender = Sender(site.path or site.server, "fairlanes", broker_transport_options=options)  # type: ignore[arg-type]
    try:
        yield sender
    finally:
        sender.close()


def _version(server: Server) -> tuple[int, ...]:
    return tuple(int(part) for part in server.client().info("server")["redis_version"].split(".")[:2])


@pytest.mark.parametrize("times", [1, 2])
def test_a_publish_whose_reply_is_lost_enqueues_once(site: Callable[..., Site], times: int) -> None:
    here = site(proxied=True)
    assert here.path is not None
    with _sender(here) as sender:
        sender.send("faults.late", 0)
        for i in range(1, times + 1):
            here.path.proxy.cut_reply(b"EVALSHA")
            sender.send("faults.late", i)
    assert here.path.proxy.cuts == times
    assert here.sizes() == (times + 1, 0, 0, 0)
    here.worker(concurrency=1)
    wait_done(here.server, times + 1, 20)
    time.sleep(0.5)
    assert here.starts() == dict.fromkeys(range(times + 1), 1)


def test_a_publish_that_was_done_before_it_is_tried_again_enqueues_once(site: Callable[..., Site]) -> None:
    """With a worker so fast that the message may be acked before the second try."""
    here = site(proxied=True)
    assert here.path is not None
    here.worker(concurrency=1)
    with _sender(here) as sender:
        sender.send("faults.late", 0)
        wait_done(here.server, 1, 20)
        here.path.proxy.cut_reply(b"lost-reply")
        sender.send("faults.late", 1, tenant="lost-reply")
    wait_done(here.server, 2, 20)
    time.sleep(1)
    assert here.path.proxy.cuts == 1
    assert here.starts() == {0: 1, 1: 1}


def test_an_idle_path_that_was_forgotten(site: Callable[..., Site]) -> None:
    """A firewall drops an idle connection without a word: the next publish works, and once."""
    here = site(proxied=True)
    assert here.path is not None
    with _sender(here, socket_timeout=1) as sender:
        sender.send("faults.late", 0)
        here.path.proxy.swallow()
        here.path.proxy.forward()
        sender.send("faults.late", 1)
    assert here.sizes() == (2, 0, 0, 0)


def _fill(server: Server) -> None:
    client = server.client()
    client.config_set("maxmemory", client.info("memory")["used_memory"] + 300_000)
    with pytest.raises(redis.exceptions.OutOfMemoryError):
        for i in range(100_000):
            client.set(f"ballast:{i}", "x" * 1000)
    for i in range(2000):
        try:
            client.set(f"ballast:small:{i}", "x")
        except redis.exceptions.OutOfMemoryError:
            break


def test_a_full_server(site: Callable[..., Site], kind: str) -> None:
    """The publisher is told at once; workers start, claim, ack and drain it."""
    here = site(kind=kind)
    for i in range(30):
        here.send("early", i)
    records = Server(kind)
    records.start()
    try:
        _fill(here.server)
        before = {key: here.server.client().dump(key) for key in here.server.client().scan_iter("fairlanes:*")}
        began = time.monotonic()
        with pytest.raises(ServerFull):
            here.send("early", 99)
        assert time.monotonic() - began < 1
        after = {key: here.server.client().dump(key) for key in here.server.client().scan_iter("fairlanes:*")}
        assert before == after
        worker = here.worker("--without-mingle", concurrency=2, env={"FAIRLANES_TEST_PORT": str(records.port)})
        done = wait_done(records, 30, 30)
        assert {each["i"] for each in done} == set(range(30))
        wait_for(lambda: here.sizes() == (0, 0, 0, 0), 10, "an empty queue")
        assert worker.stop() == 0
    finally:
        records.close()


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl", "noeviction"])
def test_an_eviction_policy_is_named_once_at_start(site: Callable[..., Site], policy: str) -> None:
    here = site("--maxmemory-policy", policy)
    worker = here.worker(concurrency=1)
    assert worker.text().count("maxmemory-policy") == (policy != "noeviction")
    assert worker.text().count(policy) == (policy != "noeviction")


# -- durable publish


def test_a_durable_publish_waits_for_the_disk(site: Callable[..., Site], kind: str) -> None:
    here = site("--appendonly", "yes", kind=kind)
    if _version(here.server) < (7, 2):
        with _sender(here, durable_publish=True) as sender, pytest.raises(OptionError, match="cannot confirm"):
            sender.send("faults.late", 1)
        assert here.sizes() == (0, 0, 0, 0)
        return
    with _sender(here, durable_publish=True, durable_timeout=4) as sender:
        for i in range(5):
            sender.send("faults.late", i)
        here.server.restart(signal.SIGKILL)
        assert here.sizes() == (5, 0, 0, 0)
        sender.send("faults.late", 5)
    assert here.sizes() == (6, 0, 0, 0)


def test_a_server_without_a_disk_cannot_confirm(site: Callable[..., Site], kind: str) -> None:
    here = site(kind=kind)
    with _sender(here, durable_publish=True) as sender, pytest.raises(OptionError, match="cannot confirm"):
        sender.send("faults.late", 1)
    assert here.sizes() == (0, 0, 0, 0)


@pytest.mark.parametrize("aof", [False, True])
def test_a_durable_publish_waits_for_replicas(site: Callable[..., Site], kind: str, aof: bool) -> None:
    flags = ("--appendonly", "yes" if aof else "no", "--repl-diskless-sync-delay", "0")
    here = site(*flags, kind=kind)
    replica = Server(kind, *flags, "--replicaof", "127.0.0.1", str(here.server.port))
    with _sender(here, durable_publish=True, durable_replicas=1, durable_timeout=4) as sender:
        here.send("late", 1)  # the server knows the script now
        began = time.monotonic()
        with pytest.raises(NotConfirmed, match="not confirmed by 1 of 1 replicas"):
            sender.send("faults.late", 1)
        assert 3 < time.monotonic() - began < 5
        replica.start()
        try:
            wait_for(lambda: replica.client().info("replication")["master_link_status"] == "up", 20, "a replica")
            # A confirmation may come up to a second late, as the replica tells of its disk once a second.
            sender.send("faults.late", 2)
            assert replica.client().zcard("fairlanes:2:{celery}:ready:default") == 2
            replica._process.send_signal(signal.SIGSTOP)  # type: ignore[union-attr]
            with pytest.raises(NotConfirmed):
                sender.send("faults.late", 3)
            replica._process.send_signal(signal.SIGCONT)  # type: ignore[union-attr]
        finally:
            replica.close()
    assert here.sizes() == (4, 0, 0, 0)


def test_a_durable_publish_whose_reply_is_lost(site: Callable[..., Site]) -> None:
    here = site("--appendonly", "yes", proxied=True)
    assert here.path is not None
    with _sender(here, durable_publish=True, durable_timeout=4) as sender:
        sender.send("faults.late", 0)
        here.path.proxy.cut_reply(b"WAITAOF")
        sender.send("faults.late", 1)
    assert here.path.proxy.cuts == 1
    assert here.sizes() == (2, 0, 0, 0)


def test_scripts_are_loaded_by_a_durable_publish_too(site: Callable[..., Site]) -> None:
    here = site("--appendonly", "yes")
    link = Link(Address.from_url(here.server.url("fairlanes")))
    store = Store(Confirming(link, 0, 4))
    here.server.client().script_flush()
    assert store.enqueue("q", "1", "a", "{}", b"")
    assert not store.enqueue("q", "1", "a", "{}", b"")
    link.close()


def test_the_proxy_itself() -> None:
    """Of each of its ways to fail, that it does."""
    with Server(KIND) as server, Proxy(server.port) as proxy:

        def client() -> redis.Redis:
            return redis.Redis(port=proxy.port, socket_timeout=0.5, protocol=2)

        first = client()
        assert first.ping()
        proxy.delay = 0.2
        began = time.monotonic()
        first.ping()
        assert time.monotonic() - began >= 0.2
        proxy.delay = 0.0
        proxy.swallow()
        with pytest.raises(redis.exceptions.RedisError):
            first.ping()
        proxy.forward()
        assert client().ping()
        proxy.stall()
        with pytest.raises(redis.exceptions.RedisError):
            client().ping()
        proxy.forward()
        assert client().ping()
        assert proxy.cut() >= 1
        proxy.refuse()
        with pytest.raises(redis.exceptions.ConnectionError):
            client().ping()

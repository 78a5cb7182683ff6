"""Servers that answer, but do not serve: replicas, and those that load, save, are busy, or have forgotten scripts."""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from fairlanes_transport.guard import GuardedProcess
from tests.faults.conftest import POOLS, Site
from tests.harness import Server, Worker, need_redis, recorded, wait_done, wait_for

pytestmark = pytest.mark.faults


@pytest.fixture
def records() -> Iterator[Server]:
    """A server for what tasks record, where the broker takes no writes."""
    with Server("valkey") as server:
        yield server


def _apart(records: Server) -> dict[str, str]:
    return {"FAIRLANES_TEST_PORT": str(records.port)}


def _lines(worker: Worker, since: int) -> list[str]:
    return [line for line in worker.text()[since:].splitlines() if line.startswith("[")]


@pytest.mark.parametrize("pool", [*POOLS, "eventlet"])
def test_a_failover_while_busy(site: Callable[..., Site], records: Server, kind: str, pool: str) -> None:
    """A worker that holds all it may is not parked: it hears of the failover from the answer to an ack."""
    here = site(kind=kind, lease_seconds=20)
    worker = here.worker(
        "--without-mingle", "--prefetch-multiplier", "1", pool=pool, concurrency=1, env=_apart(records)
    )
    here.send("late", 1, 1.0)
    wait_for(lambda: recorded(records, "started"), 20, "the start")
    here.server.client().replicaof("127.0.0.1", "1")  # nobody is there: what it holds stays
    wait_done(records, 1, 20)
    time.sleep(2)
    assert worker.poll() is None, worker.text()
    here.server.client().replicaof("NO", "ONE")
    here.send("late", 2)
    wait_done(records, 2, 20)
    assert sorted(each["i"] for each in recorded(records, "started")) == [1, 2]
    wait_for(lambda: here.sizes() == (0, 0, 0, 0), 10, "both acks")


@pytest.mark.parametrize("pool", [*POOLS, "eventlet"])
def test_a_failover_while_parked(site: Callable[..., Site], kind: str, pool: str) -> None:
    """REPLICAOF ends the pop with UNBLOCKED; then writes are refused with READONLY, until the promotion."""
    here = site(kind=kind, lease_seconds=20)
    with Server(kind) as master:
        worker = here.worker("--without-mingle", pool=pool, concurrency=1)
        time.sleep(0.5)  # under gevent its remote control connects by itself
        since = len(worker.text())
        here.server.client().replicaof("127.0.0.1", str(master.port))
        time.sleep(4)
        assert worker.poll() is None
        here.server.client().replicaof("NO", "ONE")
        promoted = time.monotonic()
        here.send("late", 1)
        wait_for(lambda: here.ends().get(1), 20, "a task")
        assert time.monotonic() - promoted < 5
        assert len(_lines(worker, since)) < 25, "\n".join(_lines(worker, since))


def test_a_replica_that_has_lost_its_master(site: Callable[..., Site], records: Server, kind: str) -> None:
    """With `replica-serve-stale-data no` it answers MASTERDOWN, to reads too."""
    here = site("--replica-serve-stale-data", "no", kind=kind, lease_seconds=20)
    worker = here.worker("--without-mingle", concurrency=1, prefetch=2, env=_apart(records))
    here.send("late", 1, 1.0)
    wait_done(records, 1, 20, "started")
    since = len(worker.text())
    here.server.client().replicaof("127.0.0.1", "1")  # nobody is there
    with pytest.raises(redis.exceptions.MasterDownError):
        here.server.client().get("x")
    wait_done(records, 1, 20)
    worker.wait_for_log("Trying again in 4.00 seconds", 15)
    assert worker.poll() is None
    here.server.client().replicaof("NO", "ONE")
    here.send("late", 2)
    wait_done(records, 2, 10)
    assert [each["i"] for each in recorded(records, "started")] == [1, 2]
    wait_for(lambda: here.sizes() == (0, 0, 0, 0), 10, "both acks")
    assert (here.total("expired"), here.total("rejected")) == (0, 0)
    assert len(_lines(worker, since)) < 20, "\n".join(_lines(worker, since))


def test_a_replica_at_the_start(site: Callable[..., Site], kind: str) -> None:
    here = site(kind=kind, lease_seconds=20)
    with Server(kind) as master:
        here.server.client().replicaof("127.0.0.1", str(master.port))
        worker = here.worker(ready=False, concurrency=1)
        worker.wait_for_log("Cannot connect", 20)
        time.sleep(5)
        assert worker.poll() is None
        assert len(_lines(worker, 0)) < 10
        here.server.client().replicaof("NO", "ONE")
        worker.wait_ready(15)


def test_a_publisher_on_a_replica_is_told(site: Callable[..., Site]) -> None:
    from kombu.exceptions import OperationalError

    here = site()
    here.send("late", 1)
    with Server(here.server.kind) as master:
        here.server.client().replicaof("127.0.0.1", str(master.port))
        began = time.monotonic()
        with pytest.raises(OperationalError, match="READONLY|replica"):
            here.send("late", 2)
        assert time.monotonic() - began < 3


def test_a_server_that_cannot_save(site: Callable[..., Site], records: Server, kind: str) -> None:
    here = site("--save", "3600 1", kind=kind, lease_seconds=20)
    client = here.server.client()
    worker = here.worker("--without-mingle", concurrency=1, env=_apart(records))
    since = len(worker.text())
    shutil.rmtree(here.server.directory)
    client.bgsave()
    wait_for(lambda: client.info("persistence")["rdb_last_bgsave_status"] == "err", 10, "a failed save")
    with pytest.raises(redis.exceptions.ResponseError, match="MISCONF"):
        client.set("x", 1)
    time.sleep(6)
    assert worker.poll() is None
    assert len(_lines(worker, since)) < 20
    client.config_set("stop-writes-on-bgsave-error", "no")
    here.send("late", 1)
    wait_done(records, 1, 20)


def test_a_server_that_loads(site: Callable[..., Site], kind: str) -> None:
    slow = ("--key-load-delay", "1500", "--loading-process-events-interval-bytes", "1024", "--save", "3600 1")
    here = site(*slow, kind=kind, lease_seconds=30)
    worker = here.worker("--without-mingle", concurrency=1)
    client = here.server.client()
    for i in range(4000):
        client.set(f"ballast:{i}", "x" * 64)
    client.save()
    since = len(worker.text())
    restart = threading.Thread(target=here.server.restart, args=(signal.SIGTERM,))
    restart.start()
    time.sleep(3)
    with socket.create_connection(("127.0.0.1", here.server.port), 5) as probe:
        probe.sendall(b"PING\r\n")
        assert probe.recv(8) == b"-LOADING"
    restart.join(30)
    here.send("late", 1)
    wait_for(lambda: here.ends().get(1), 20, "a task")
    assert worker.poll() is None
    assert len(_lines(worker, since)) < 20


def test_a_server_that_is_busy_with_a_script(site: Callable[..., Site], kind: str) -> None:
    here = site("--lua-time-limit", "200", kind=kind, lease_seconds=20)
    worker = here.worker("--without-mingle", concurrency=1)
    since = len(worker.text())
    with redis.Redis(port=here.server.port) as busy, redis.Redis(port=here.server.port) as other:

        def spin() -> None:
            with contextlib.suppress(redis.exceptions.RedisError):
                busy.eval("while true do end", 0)

        thread = threading.Thread(target=spin)
        thread.start()
        time.sleep(8)
        other.script_kill()
        thread.join(10)
    here.send("late", 1)
    wait_for(lambda: here.ends().get(1), 20, "a task")
    assert worker.poll() is None
    assert len(_lines(worker, since)) < 20


def test_a_server_that_forgets_its_scripts(site: Callable[..., Site], kind: str) -> None:
    here = site(kind=kind, lease_seconds=20)
    worker = here.worker("--without-mingle", concurrency=2, prefetch=4)
    for i in range(60):
        here.send("late", i, 0.02)
        if i % 5 == 0:
            here.server.client().script_flush()
    wait_for(lambda: len(here.ends()) == 60, 30, "all")
    assert here.starts() == dict.fromkeys(range(60), 1)
    assert "connection" not in worker.text().lower().split("ready.")[1]


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent"])
def test_a_server_that_hangs(site: Callable[..., Site], pool: str) -> None:
    """Longer than a socket waits: stopped, as by a debugger or a slow disk."""
    here = site(lease_seconds=30)
    worker = here.worker(pool=pool, concurrency=2)
    here.send("late", 0, 3)
    wait_done(here.server, 1, 20, "started")
    process = here.server._process
    assert process is not None
    process.send_signal(signal.SIGSTOP)
    time.sleep(9)
    process.send_signal(signal.SIGCONT)
    here.send("late", 1)
    wait_for(lambda: here.ends().get(1), 20, "a task")
    wait_for(lambda: here.sizes() == (0, 0, 0, 0), 5, "the acks")
    assert here.starts() == {0: 1, 1: 1}
    assert worker.poll() is None


def test_a_master_that_vanishes_from_its_sentinels(site: Callable[..., Site], records: Server, tmp_path: Path) -> None:
    """Stopped, without a FIN: the worker follows to the new master."""
    here = site(kind="redis", lease_seconds=5)
    with Server("redis", "--replicaof", "127.0.0.1", str(here.server.port)) as replica:
        wait_for(lambda: replica.client().info("replication")["master_link_status"] == "up", 20, "a replica")
        with Server("redis") as placeholder:
            port = placeholder.port
        conf = tmp_path / "sentinel.conf"
        conf.write_text(
            f"port {port}\nbind 127.0.0.1\ndir {tmp_path}\n"
            f"sentinel monitor main 127.0.0.1 {here.server.port} 1\n"
            "sentinel down-after-milliseconds main 1500\nsentinel failover-timeout main 6000\n"
        )
        with GuardedProcess([need_redis(), str(conf), "--sentinel"]), redis.Redis(port=port) as sentinel:
            wait_for(lambda: _slaves(sentinel) == 1, 20, "the sentinel knows the replica")
            options = {"master_name": "main"}
            worker = Worker(
                _Sentinel(port, records.port), "--without-mingle",  # type: ignore[arg-type]
                app="tests.apps.faults", concurrency=2, conf={"broker_transport_options": options},
            )  # fmt: skip
            here.workers.append(worker)
            worker.wait_ready()
            here.send("late", 0)
            wait_done(records, 1, 10)
            here.send("late", 7, 15)  # runs over the failover
            wait_done(records, 2, 10, "started")
            time.sleep(0.5)
            process = here.server._process
            assert process is not None
            process.send_signal(signal.SIGSTOP)
            wait_for(lambda: replica.client().info("replication")["role"] == "master", 20, "a new master")
            promoted = time.monotonic()
            with _sender(replica) as sender:
                sender.send("faults.late", 1, tenant="a")
            wait_done(records, 3, 30)
            assert time.monotonic() - promoted < 30
            # Its lease ran out while there was no master; the worker took it again, and not a second time in hand.
            assert [each["i"] for each in recorded(records, "started")].count(7) == 1
            assert worker.poll() is None


class _Sentinel:
    """What a Worker asks of a server: the URL of a sentinel, and where tasks record."""

    def __init__(self, sentinel: int, records: int) -> None:
        self.sentinel, self.port = sentinel, records

    def url(self, scheme: str = "", db: int = 0) -> str:
        return f"fairlanes-sentinel://127.0.0.1:{self.sentinel}/{db}"


def _slaves(sentinel: redis.Redis) -> int:
    try:
        return len(sentinel.sentinel_slaves("main"))
    except redis.exceptions.RedisError:
        return 0


def _sender(server: Server) -> contextlib.AbstractContextManager:
    from tests.harness import Sender

    return Sender(server, "fairlanes")

"""A worker that is stopped past its lease, as a machine that swaps or a VM that is moved: the fence holds."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest

from fairlanes_transport.keeper import Keeper, Lease
from fairlanes_transport.store import Answer
from tests.faults.conftest import LEASE, POOLS, Site
from tests.harness import Worker, recorded, wait_done, wait_for

pytestmark = pytest.mark.faults


def _stop(worker: Worker) -> None:
    os.killpg(worker.pid, signal.SIGSTOP)


def _resume(worker: Worker) -> None:
    os.killpg(worker.pid, signal.SIGCONT)


@pytest.mark.parametrize("pool", POOLS)
def test_a_stale_ack_is_refused_and_logged_once(site: Callable[..., Site], pool: str) -> None:
    here = site()
    stopped = here.worker(pool=pool, concurrency=1, prefetch=1)
    task = here.send("late", 1, 4, tenant="acme")
    wait_done(here.server, 1, 20, "started")
    _stop(stopped)
    here.worker(pool=pool, concurrency=1)
    wait_done(here.server, 2, LEASE + 5, "started")
    _resume(stopped)
    wait_done(here.server, 2, 20)
    stopped.wait_for_log("its lease ran out", 10)
    time.sleep(1)
    lines = [line for line in stopped.text().splitlines() if "its lease ran out" in line]
    assert len(lines) == 1
    assert task in lines[0]
    assert "'acme'" in lines[0]
    assert "attempt 1" in lines[0]
    assert {each["attempt"] for each in recorded(here.server)} == {1, 2}
    assert here.sizes() == (0, 0, 0, 0)
    assert here.total("acked") == 1


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent"])
def test_what_had_not_started_is_not_started_after_all(site: Callable[..., Site], pool: str) -> None:
    """Behind a running task, and run by another worker meanwhile: they are not run again."""
    here = site()
    stopped = here.worker(pool=pool, concurrency=1, prefetch=8)
    here.send("late", 0, 3)
    wait_done(here.server, 1, 20, "started")
    for i in range(1, 6):
        here.send("late", i)
    time.sleep(0.5)
    _stop(stopped)
    here.worker(pool=pool, concurrency=1)
    wait_for(lambda: set(here.ends()) == set(range(6)), LEASE + 15, "all, by the other")
    _resume(stopped)
    time.sleep(2)
    assert {i: n for i, n in here.starts().items() if i} == dict.fromkeys(range(1, 6), 1)
    assert stopped.poll() is None
    here.send("late", 9)
    wait_for(lambda: 9 in here.ends(), 5, "the next")
    assert here.sizes() == (0, 0, 0, 0)


@pytest.mark.parametrize("operation", ["ack", "extend", "release", "reject"])
def test_each_stale_operation_is_refused_and_logged_once(
    site: Callable[..., Site], operation: str, caplog: pytest.LogCaptureFixture
) -> None:
    """What a resumed process may still say of a message, through the classes that say it in a worker."""
    from kombu import Connection, Consumer, Producer, Queue

    here = site(lease_seconds=1, client_name=None)
    options = {**here.options, "hung_loop_seconds": 600}
    queue = Queue("celery", routing_key="celery")
    with Connection(here.server.url("fairlanes"), transport_options=options) as ours:
        got = []
        channel = ours.channel()
        Producer(channel).publish({}, routing_key="celery", declare=[queue], headers={"tenant": "acme", "id": "task-1"})
        keeper = ours.transport.keeper
        renew, keeper.renew = keeper.renew, lambda: None  # stopped
        with Consumer(channel, [queue], callbacks=[lambda body, message: got.append(message)], prefetch_count=1):
            ours.drain_events(timeout=5)
            lease = got[0].lease
            assert str(lease) == "task task-1 of tenant 'acme', attempt 1"
            theirs = wait_for(lambda: here.store.claim("celery", 1, 60_000).claimed, 5, "the claim of another")
            before = here.server.client().hgetall("fairlanes:2:{celery}:message")
            for _ in range(2):
                if operation == "ack":
                    got[0].channel.qos.ack(got[0].delivery_tag)
                elif operation == "extend":
                    renew()
                elif operation == "release":
                    got[0].channel.qos.release([got[0].delivery_tag])
                else:
                    got[0].channel.qos.reject(got[0].delivery_tag, requeue=True)
            assert here.server.client().hgetall("fairlanes:2:{celery}:message") == before
            assert here.sizes() == (0, 1, 0, 0)
            lines = [record.getMessage() for record in caplog.records if "lease ran out" in record.getMessage()]
            assert len(lines) == 1
            assert lines[0].startswith("task task-1 of tenant 'acme', attempt 1:")
            assert here.store.ack("celery", [theirs[0].fence]).answers == (Answer.DONE,)


def test_a_process_takes_its_own_message_again_without_a_second_run(site: Callable[..., Site]) -> None:
    """Alone, and stopped past its lease: it claims the message anew while its task still runs."""
    here = site()
    worker = here.worker(concurrency=1, prefetch=4)
    here.send("late", 1, 6)
    wait_done(here.server, 1, 20, "started")
    os.kill(worker.pid, signal.SIGSTOP)  # the main process only
    time.sleep(LEASE + 1)
    os.kill(worker.pid, signal.SIGCONT)
    wait_done(here.server, 1, 20)
    wait_for(lambda: here.sizes() == (0, 0, 0, 0), 10, "its ack")
    assert here.starts() == {1: 1}


def test_the_keeper_of_a_process_is_not_inherited(site: Callable[..., Site]) -> None:
    """A child of a fork renews nothing of its parent's."""
    here = site()
    keeper = Keeper.shared(here.link, "", 60)
    assert Keeper.shared(here.link, "", 60) is keeper
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        other = Keeper.shared(here.link, "", 60)
        os.write(write, b"1" if other is not keeper and not other._held else b"0")
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 1) == b"1"
    os.close(read)
    os.close(write)


def test_an_idle_keeper_sends_nothing(site: Callable[..., Site]) -> None:
    here = site(lease_seconds=1)
    here.worker("--without-heartbeat", "--without-gossip", "--without-mingle", concurrency=1)
    here.send("early", 1)
    wait_done(here.server, 1, 20)
    time.sleep(0.5)
    seen = here.server.client().info("commandstats").get("cmdstat_evalsha", {}).get("calls", 0)
    parks = here.server.client().info("commandstats")["cmdstat_blpop"]["calls"]
    time.sleep(3)
    stats = here.server.client().info("commandstats")
    # A claim after each park, of half a second here, and no more.
    assert stats["cmdstat_evalsha"]["calls"] - seen <= stats["cmdstat_blpop"]["calls"] - parks + 1


def test_lease_text() -> None:
    from fairlanes_transport.store import Fence

    assert str(Lease("q", Fence("tag", 2, "token"), "a")) == "task tag of tenant 'a', attempt 2"

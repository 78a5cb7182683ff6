"""Tasks far longer than a lease, and what waits behind them: each starts once, with another worker idle."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from tests.faults.conftest import POOLS, Site
from tests.harness import wait_for

pytestmark = pytest.mark.faults

LEASE = 1.0


@pytest.mark.parametrize("pool", [*POOLS, "eventlet"])
@pytest.mark.parametrize("task", ["late", "early"])
def test_a_task_ten_leases_long_starts_once(site: Callable[..., Site], pool: str, task: str) -> None:
    here = site(lease_seconds=LEASE)
    for _ in range(2):
        here.worker(pool=pool, concurrency=1)
    here.send(task, 1, 10 * LEASE)
    wait_for(here.ends, 11 * LEASE + 10, "its end")
    time.sleep(1.5 * LEASE)
    assert (here.starts(), here.ends()) == ({1: 1}, {1: 1})
    assert here.sizes() == (0, 0, 0, 0)
    assert here.total("expired") == 0


@pytest.mark.parametrize("pool", ["gevent", "eventlet"])
def test_a_task_that_lets_no_greenlet_run_starts_once(site: Callable[..., Site], pool: str) -> None:
    """It computes for four leases: the keeper is a real thread."""
    here = site(lease_seconds=LEASE)
    for _ in range(2):
        here.worker(pool=pool, concurrency=1)
    here.send("burn", 1, 4 * LEASE)
    wait_for(here.ends, 4 * LEASE + 10, "its end")
    wait_for(lambda: here.sizes() == (0, 0, 0, 0), 5, "its ack")
    assert here.starts() == {1: 1}
    assert (here.total("expired"), here.total("acked")) == (0, 1)


@pytest.mark.parametrize("pool", POOLS)
def test_what_waits_behind_a_long_task_starts_once(site: Callable[..., Site], pool: str) -> None:
    """Prefetched by a worker that is busy for five leases: an idle worker must not get a second copy."""
    # In solo and green pools the consumer itself waits for the task, and fetches less.
    here = site(lease_seconds=LEASE)
    here.worker(pool=pool, concurrency=1, prefetch=11)
    here.send("late", 0, 5 * LEASE)
    for i in range(1, 11):
        here.send("late", i)
    if pool in ("prefork", "threads"):
        wait_for(lambda: here.sizes()[1] == 11, 10, "eleven leases")
    here.worker(pool=pool, concurrency=1)
    wait_for(lambda: len(here.ends()) == 11, 10 * LEASE + 10, "all")
    assert here.starts() == dict.fromkeys(range(11), 1)
    assert here.total("expired") == 0


def test_a_slot_is_kept_while_the_task_runs(site: Callable[..., Site]) -> None:
    """Acked early, in a lane with a limit of one: the next task waits for the end, for many leases."""
    here = site(lease_seconds=LEASE, lane_limit=1)
    for _ in range(2):
        here.worker(concurrency=1)
    here.send("early", 1, 6 * LEASE)
    wait_for(here.starts, 10, "its start")
    here.send("early", 2)
    time.sleep(4 * LEASE)
    assert here.starts() == {1: 1}
    wait_for(lambda: here.ends() == {1: 1, 2: 1}, 6 * LEASE + 10, "both")
    assert here.sizes() == (0, 0, 0, 0)


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent"])
def test_messages_that_wait_in_workers_for_their_time_run_once(site: Callable[..., Site], pool: str) -> None:
    """With ``eta_in_broker`` off, for four leases; there is never a second copy."""
    here = site(lease_seconds=LEASE, eta_in_broker=False)
    worker = here.worker(pool=pool, concurrency=1, prefetch=4)
    here.worker(pool=pool, concurrency=1, prefetch=4)
    due = time.time() + 4 * LEASE
    here.sender.app.conf.broker_transport_options = {"eta_in_broker": False}
    for i in range(6):
        here.send("late", i, countdown=due - time.time())
    wait_for(lambda: here.sizes()[1] == 6, 5, "held by workers")
    while time.time() < due - 0.5:
        assert sum(here.sizes()) == 6
        time.sleep(0.1)
        if due - time.time() < 2.5 * LEASE and worker.poll() is None:
            worker.stop()  # what it holds goes to the other, and waits there
    wait_for(lambda: len(here.ends()) == 6, 4 * LEASE + 10, "all")
    assert here.starts() == dict.fromkeys(range(6), 1)
    assert (here.total("expired"), here.total("rejected")) == (0, 0)

"""Processes that die: SIGKILL of a worker and of pool children, and what becomes of their messages."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable

import pytest

from tests.faults.conftest import LEASE, POOLS, Site
from tests.harness import recorded, wait_done, wait_for

pytestmark = pytest.mark.faults


@pytest.mark.parametrize("pool", POOLS)
def test_the_work_of_a_killed_worker_comes_back_one_lease_later(site: Callable[..., Site], pool: str) -> None:
    here = site()
    for i in range(12):
        here.send("late", i, 0.2, tenant=f"t{i % 3}")
    doomed = here.worker(pool=pool, concurrency=2, prefetch=4)
    wait_done(here.server, 2, 20)
    doomed.kill()
    killed = time.time()
    before = set(here.ends())
    here.worker(pool=pool, concurrency=2, prefetch=4)
    wait_for(lambda: len(here.ends()) == 12, 30, "all tasks")
    # Twice at most what had ended when the kill came, and was not acked yet.
    twice = {i for i, count in here.ends().items() if count > 1}
    assert len(twice) <= 2 and twice <= before
    back = [each for each in recorded(here.server) if each["t"] > killed and each["redelivered"]]
    assert back and all(each["attempt"] > 1 for each in back)
    assert all(each["lane"] == f"t{each['i'] % 3}" for each in back)
    # Each of them had been claimed, and has one failure more.
    assert here.total("expired") == len(back)
    starts = recorded(here.server, "started")
    late = [each["t"] - killed - LEASE for each in starts if each["i"] not in before]
    # One after another: the last has waited for the others.
    assert max(late) < 2 + 12 * 0.2
    assert here.sizes() == (0, 0, 0, 0)


@pytest.mark.parametrize("pool", POOLS)
def test_the_work_of_a_machine_that_vanishes_comes_back_one_lease_later(site: Callable[..., Site], pool: str) -> None:
    """No FIN: the server goes on to serve its connections, among them a parked pop."""
    here = site(proxied=True)
    assert here.path is not None
    doomed = here.worker(pool=pool, concurrency=1, prefetch=4)
    here.send("late", 0, 60, tenant="t0")
    wait_done(here.server, 1, 20, "started")
    here.worker(pool=pool, concurrency=1, prefetch=4, straight=True)
    here.path.proxy.swallow()
    doomed.kill()
    killed = time.time()
    assert len(here.clients()) > 1
    back = wait_done(here.server, 2, LEASE + 3, "started")[1]
    assert back["t"] - killed < LEASE + 2
    assert (back["i"], back["attempt"], back["redelivered"], back["lane"]) == (0, 2, True, "t0")
    assert here.total("expired") == 1


def test_a_task_whose_child_dies_is_acked_as_celery_has_it(site: Callable[..., Site]) -> None:
    here = site()
    here.worker(concurrency=1)
    here.send("late", 1, 30)
    started = wait_done(here.server, 1, 20, "started")
    os.kill(started[0]["pid"], signal.SIGKILL)
    wait_for(lambda: here.sizes() == (0, 0, 0, 0), 10, "an empty queue")
    assert here.starts() == {1: 1}


def test_a_task_that_is_to_survive_its_child_comes_back_with_backoff(site: Callable[..., Site]) -> None:
    here = site(backoff_base=0.5, backoff_factor=1.0)
    worker = here.worker(concurrency=1)
    here.send("die", 1, 3)
    done = wait_done(here.server, 1, 30)
    assert done[0]["attempt"] == 4
    assert done[0]["redelivered"]
    times = [each["t"] for each in recorded(here.server, "started")]
    # The upper half of a backoff is random.
    assert min(b - a for a, b in itertools.pairwise(times)) > 0.25
    assert worker.poll() is None


def test_a_task_that_kills_every_child_is_buried(site: Callable[..., Site]) -> None:
    here = site(backoff_base=0.05, backoff_factor=1.0, max_failures=3)
    here.worker(concurrency=1)
    here.send("die", 1)
    here.send("late", 2)
    wait_for(lambda: here.sizes()[3] == 1, 30, "a dead letter")
    assert here.starts() == {1: 3, 2: 1}
    reason = here.server.client().hvals("fairlanes:2:{celery}:reasons")
    assert len(reason) == 1
    assert b"WorkerLostError" in reason[0]


def test_a_message_that_waits_for_its_time_survives_its_worker(site: Callable[..., Site]) -> None:
    here = site()
    doomed = here.worker(concurrency=1)
    due = time.time() + 3
    for i in range(5):
        here.send("late", i, countdown=due - time.time())
    time.sleep(0.5)
    doomed.kill()
    here.worker(concurrency=1)
    done = wait_done(here.server, 5, 10)
    assert here.starts() == dict.fromkeys(range(5), 1)
    assert all(due <= each["t"] < due + 2 for each in done)

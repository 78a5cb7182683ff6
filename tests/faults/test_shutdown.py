"""Every way to end a worker, or a part of it: what has not started goes back at once, to the place it had."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.faults.conftest import Site
from tests.harness import Worker, recorded, wait_done, wait_for

pytestmark = pytest.mark.faults

#: tasks that wait behind the running ones
WAITING = 6


def _busy(here: Site, pool: str, seconds: float, **kwargs: Any) -> Worker:
    """A worker with one task running, and others prefetched behind it."""
    worker = here.worker(pool=pool, concurrency=1, prefetch=WAITING + 1, **kwargs)
    here.send("late", 0, seconds)
    wait_done(here.server, 1, 20, "started")
    for i in range(1, WAITING + 1):
        here.send("late", i)
    if pool in ("prefork", "threads"):
        wait_for(lambda: here.sizes()[1] == WAITING + 1, 10, "all prefetched")
    else:  # the consumer waits for a free greenlet
        time.sleep(0.5)
    return worker


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent", "eventlet"])
def test_warm_shutdown_hands_back_what_has_not_started_at_once(site: Callable[..., Site], pool: str) -> None:
    here = site(lease_seconds=30)
    worker = _busy(here, pool, 6)
    asked = time.monotonic()
    worker.send(signal.SIGTERM)
    wait_for(lambda: here.sizes()[:2] == (WAITING, 1), 3, "handed back")
    assert time.monotonic() - asked < 3
    assert here.ends() == {}
    worker.wait(20)
    assert here.ends() == {0: 1}
    assert here.sizes() == (WAITING, 0, 0, 0)
    released = here.total("released")
    assert released == WAITING if pool in ("prefork", "threads") else 0 < released < WAITING
    assert (here.total("expired"), here.total("rejected")) == (0, 0)
    here.worker(pool=pool, concurrency=1)
    done = wait_done(here.server, WAITING + 1, 20)
    assert [each["i"] for each in done] == list(range(WAITING + 1))  # in their old order
    assert here.sizes() == (0, 0, 0, 0)


def test_warm_shutdown_of_a_solo_worker(site: Callable[..., Site]) -> None:
    """It hears of nothing while its task runs; what it has prefetched goes back when that has ended."""
    here = site(lease_seconds=30)
    here.send("late", 0, 3)
    for i in range(1, WAITING + 1):
        here.send("late", i)
    worker = here.worker(pool="solo", concurrency=1, prefetch=WAITING + 1)
    wait_done(here.server, 1, 20, "started")
    worker.stop(signal.SIGTERM, 20)
    assert sum(here.ends().values()) + here.sizes()[0] == WAITING + 1
    assert here.sizes()[1:] == (0, 0, 0)


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent"])
def test_ctrl_c_once_is_a_warm_shutdown(site: Callable[..., Site], pool: str) -> None:
    here = site(lease_seconds=30)
    worker = _busy(here, pool, 4)
    worker.send(signal.SIGINT)
    wait_for(lambda: here.sizes()[:2] == (WAITING, 1), 3, "handed back")
    worker.wait(20)
    assert here.ends() == {0: 1}
    assert here.sizes() == (WAITING, 0, 0, 0)


@pytest.mark.parametrize("how", ["twice", "SIGQUIT"])
def test_cold_shutdown_hands_back_all(site: Callable[..., Site], how: str) -> None:
    """Ctrl-C twice, or SIGQUIT: the running task is cancelled, and comes back too."""
    here = site(lease_seconds=30)
    worker = _busy(here, "prefork", 60)
    if how == "twice":
        worker.send(signal.SIGINT)
        time.sleep(1)
        worker.send(signal.SIGINT)
    else:
        worker.send(signal.SIGQUIT)
    worker.wait(20)
    assert here.ends() == {}
    assert here.sizes() == (WAITING + 1, 0, 0, 0)
    here.worker(concurrency=1)
    wait_for(lambda: here.sizes()[0] == WAITING, 5, "the first again")
    assert recorded(here.server, "started")[-1]["i"] == 0


def test_soft_shutdown_lets_short_tasks_end(site: Callable[..., Site]) -> None:
    here = site(lease_seconds=30)
    worker = _busy(here, "prefork", 3, conf={"worker_soft_shutdown_timeout": 8})
    worker.send(signal.SIGQUIT)
    worker.wait(30)
    assert here.ends()[0] == 1
    assert sum(here.ends().values()) + here.sizes()[0] == WAITING + 1
    assert here.sizes()[1:] == (0, 0, 0)
    assert (here.total("expired"), here.total("rejected")) == (0, 0)


def _reconnected(here: Site) -> None:
    """CLIENT KILL all that the worker has, and wait until it is parked again."""
    client = here.server.client()
    killed = {each["id"] for each in here.clients()}
    for each in killed:
        client.client_kill_filter(_id=each)

    def parked() -> bool:
        return any(each["cmd"] == "blpop" and each["id"] not in killed for each in here.clients())

    wait_for(parked, 10, "parked again")


@pytest.mark.parametrize("reconnect", [False, True])
@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent", "eventlet"])
def test_finished_tasks_are_acked_while_the_pool_drains(site: Callable[..., Site], pool: str, reconnect: bool) -> None:
    here = site(lease_seconds=30)
    worker = here.worker("--without-mingle", pool=pool, concurrency=2, prefetch=2)
    here.send("late", 0, 2 + reconnect)
    here.send("late", 1, 6 + reconnect)
    wait_done(here.server, 2, 20, "started")
    if reconnect:
        _reconnected(here)
    worker.send(signal.SIGTERM)
    wait_for(lambda: here.ends() == {0: 1}, 10, "the first end")
    wait_for(lambda: here.sizes()[1] == 1, 3.5, "its ack")  # Celery reads the results of prefork once a second now
    assert here.ends() == {0: 1}
    worker.wait(20)
    assert (here.starts(), here.ends(), here.sizes()) == ({0: 1, 1: 1}, {0: 1, 1: 1}, (0, 0, 0, 0))
    assert [here.total(name) for name in ("acked", "released", "expired", "rejected")] == [2, 0, 0, 0]


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_a_task_that_ends_as_the_shutdown_begins_is_acked(site: Callable[..., Site], pool: str) -> None:
    """Its end is the last thing that the loop hears of before it stops turning."""
    here = site(lease_seconds=30)
    worker = here.worker("--without-mingle", pool=pool, concurrency=2, prefetch=1)
    here.send("late", 0, 1.5)
    here.send("late", 1, 7)
    wait_done(here.server, 2, 20, "started")
    time.sleep(1.2)  # the loop sees a signal with its next event
    worker.send(signal.SIGTERM)
    wait_for(lambda: here.ends() == {0: 1}, 10, "the first end")
    wait_for(lambda: here.sizes()[1] == 1, 3.5, "its ack")
    assert here.ends() == {0: 1}
    worker.wait(20)
    assert (here.starts(), here.sizes()) == ({0: 1, 1: 1}, (0, 0, 0, 0))


@pytest.mark.parametrize("reconnect", [False, True])
def test_the_task_of_a_solo_worker_that_ends_is_acked(site: Callable[..., Site], reconnect: bool) -> None:
    here = site(lease_seconds=30)
    worker = here.worker("--without-mingle", pool="solo", concurrency=1)
    here.send("late", 0, 2)
    wait_done(here.server, 1, 20, "started")
    if reconnect:
        for each in here.clients():
            here.server.client().client_kill_filter(_id=each["id"])
    worker.stop(signal.SIGTERM, 20)
    assert (here.starts(), here.ends(), here.sizes()) == ({0: 1}, {0: 1}, (0, 0, 0, 0))
    assert [here.total(name) for name in ("acked", "released", "expired", "rejected")] == [1, 0, 0, 0]


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent"])
def test_messages_that_wait_for_their_time_over_a_reconnect_and_a_shutdown(
    site: Callable[..., Site], pool: str
) -> None:
    """Held by the worker (``eta_in_broker`` off): each runs once, by the next worker, at its time."""
    here = site(lease_seconds=30, eta_in_broker=False)
    n = 20
    worker = here.worker("--without-mingle", pool=pool, concurrency=1, prefetch=4)
    here.sender.app.conf.broker_transport_options = {"eta_in_broker": False}
    due = time.time() + 12  # two workers start meanwhile, on a busy machine
    for i in range(n):
        here.send("late", i, countdown=due - time.time())
    wait_for(lambda: here.sizes() == (0, n, 0, 0), 5, "held by the worker")
    _reconnected(here)
    wait_for(lambda: here.sizes() == (0, n, 0, 0), 5, "held by it again")
    assert worker.stop(signal.SIGTERM) == 0
    assert here.sizes() == (n, 0, 0, 0)
    here.worker("--without-mingle", pool=pool, concurrency=1, prefetch=4)
    wait_for(lambda: here.sizes() == (0, n, 0, 0), 5, "held by the other")
    assert time.time() < due
    done = wait_done(here.server, n, 20)
    wait_for(lambda: here.sizes() == (0, 0, 0, 0), 5, "the acks")
    assert here.starts() == dict.fromkeys(range(n), 1)
    assert all(due - 0.1 <= each["t"] < due + 2 for each in done)
    assert (here.total("expired"), here.total("rejected")) == (0, 0)


def test_sigterm_to_the_whole_group(site: Callable[..., Site]) -> None:
    """As a supervisor sends it: the children get it too, and their tasks are to come back."""
    import os

    here = site(lease_seconds=4, backoff_base=0.1, backoff_max=0.1)
    worker = here.worker(concurrency=2)
    for i in range(2):
        here.send("lost", i, 5)
    wait_done(here.server, 2, 20, "started")
    os.killpg(worker.pid, signal.SIGTERM)
    worker.wait(30)
    here.worker(concurrency=2)
    wait_for(lambda: set(here.ends()) == {0, 1}, 30, "both")
    wait_for(lambda: here.sizes() == (0, 0, 0, 0), 5, "an empty queue")


def test_children_that_are_replaced_lose_nothing(site: Callable[..., Site]) -> None:
    here = site()
    here.worker("--max-tasks-per-child", "2", concurrency=2, prefetch=4)
    for i in range(24):
        here.send("late", i, 0.02)
    wait_for(lambda: len(here.ends()) == 24, 60, "all")
    assert (here.starts(), here.sizes()) == (dict.fromkeys(range(24), 1), (0, 0, 0, 0))


def test_pool_restart(site: Callable[..., Site]) -> None:
    here = site()
    worker = here.worker(concurrency=2, prefetch=4, conf={"worker_pool_restarts": True})
    for i in range(30):
        here.send("lost", i, 0.2)
    wait_done(here.server, 4, 20)
    here.sender.app.control.broadcast("pool_restart", arguments={"reload": False})
    wait_for(lambda: set(here.ends()) == set(range(30)), 60, "all")
    assert worker.poll() is None
    wait_for(lambda: here.sizes() == (0, 0, 0, 0), 10, "an empty queue")


def test_autoscale(site: Callable[..., Site]) -> None:
    here = site()
    worker = here.worker("--autoscale", "4,1", concurrency=1, prefetch=2)
    for i in range(40):
        here.send("late", i, 0.1)
    wait_for(lambda: len(here.ends()) == 40, 60, "all")
    for i in range(40, 44):
        here.send("late", i, 0.1)
    wait_for(lambda: len(here.ends()) == 44, 30, "all")
    assert worker.poll() is None
    assert (here.starts(), here.sizes()) == (dict.fromkeys(range(44), 1), (0, 0, 0, 0))

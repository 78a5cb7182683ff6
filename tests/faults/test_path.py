"""Paths that fail without a word: black holes, stalls, delays; and a worker that is asked to end meanwhile."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest

from tests.faults.conftest import Site
from tests.faults.proxy import Proxy
from tests.harness import wait_done, wait_for

pytestmark = pytest.mark.faults

#: Seconds after the return of a path in which a worker must work again.
BACK = 20


def _proxy(here: Site) -> Proxy:
    assert here.path is not None
    return here.path.proxy


def _works_again(here: Site, task: int, seconds: float, patience: float = 1) -> None:
    until = time.monotonic() + seconds
    here.send("late", task)
    wait_for(lambda: here.ends().get(task), seconds, "a task")
    while not here.sender.app.control.inspect(timeout=patience).ping():
        assert time.monotonic() < until, "no answer to a ping"


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent"])
@pytest.mark.parametrize("seconds", [8, 25])
def test_a_black_hole_for_all_sockets(site: Callable[..., Site], pool: str, seconds: float) -> None:
    """Default options, but for a name."""
    here = site(proxied=True, lease_seconds=None)
    worker = here.worker(pool=pool, concurrency=2)
    here.send("late", 0)
    wait_for(lambda: here.ends().get(0), 10, "a task")
    since = len(worker.text())
    _proxy(here).swallow()
    time.sleep(seconds)
    _proxy(here).forward()
    _works_again(here, 1, BACK)
    assert here.starts() == {0: 1, 1: 1}
    assert worker.poll() is None
    # One line per try to reconnect, and what Celery says of the loss.
    assert len(worker.text()[since:].splitlines()) < 60


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent"])
def test_what_runs_over_a_black_hole_is_acked(site: Callable[..., Site], pool: str) -> None:
    here = site(proxied=True, lease_seconds=40)
    worker = here.worker(pool=pool, concurrency=1, prefetch=4)
    here.send("late", 0, 12)
    wait_done(here.server, 1, 20, "started")
    for i in range(1, 4):
        here.send("late", i, 0.1)
    time.sleep(1)
    _proxy(here).swallow()
    time.sleep(15)  # the task ends meanwhile
    _proxy(here).forward()
    wait_for(lambda: len(here.ends()) == 4, BACK, "all")
    wait_for(lambda: here.sizes() == (0, 0, 0, 0), 5, "the acks")
    assert here.starts() == dict.fromkeys(range(4), 1)
    assert (here.total("expired"), here.total("rejected")) == (0, 0)
    assert worker.poll() is None


@pytest.mark.parametrize(("flags", "seconds"), [((), 30), (("--without-gossip",), 30 + 5 + 10)])
@pytest.mark.parametrize("pool", ["prefork", "gevent"])
def test_a_black_hole_for_the_subscribed_socket(
    site: Callable[..., Site], pool: str, flags: tuple[str, ...], seconds: float
) -> None:
    """Noticed when no heartbeat comes, or else by a check with the park."""
    here = site(proxied=True, lease_seconds=None)
    here.worker(*flags, pool=pool, concurrency=1)
    wait_for(lambda: here.sender.app.control.inspect(timeout=1).ping(), 10, "a ping")
    time.sleep(3)
    ports = {int(each["addr"].rsplit(":")[-1]) for each in here.clients() if int(each["psub"])}
    assert _proxy(here).lose(ports) >= 1
    wait_for(lambda: here.sender.app.control.inspect(timeout=1).ping(), seconds, "resubscribed")


def test_a_black_hole_for_the_parked_socket(site: Callable[..., Site]) -> None:
    """Noticed when its own wait is over: the park time, five seconds, and a turn of the loop."""
    here = site(proxied=True, lease_seconds=10)
    here.worker(concurrency=1)
    parked = [each for each in here.clients() if each["cmd"] == "blpop"]
    assert _proxy(here).lose({int(each["addr"].rsplit(":")[-1]) for each in parked}) == 1
    here.server.client().client_kill_filter(_id=parked[0]["id"])
    here.send("late", 1)
    wait_for(lambda: here.ends().get(1), 5 + 5 + 3, "a task")
    assert here.starts() == {1: 1}


def test_a_path_that_stalls_and_a_slow_one(site: Callable[..., Site]) -> None:
    here = site(proxied=True, lease_seconds=30)
    worker = here.worker(concurrency=2)
    here.send("late", 0, 3)
    wait_done(here.server, 1, 20, "started")
    _proxy(here).stall()
    time.sleep(12)
    _proxy(here).forward()
    _works_again(here, 1, BACK)
    wait_for(lambda: here.sizes() == (0, 0, 0, 0), 5, "the acks")
    _proxy(here).delay = 0.3
    _works_again(here, 2, BACK, patience=4)
    assert here.starts() == {0: 1, 1: 1, 2: 1}
    assert worker.poll() is None


def test_a_broker_that_is_away_costs_nothing(site: Callable[..., Site]) -> None:
    here = site(proxied=True, lease_seconds=30)
    worker = here.worker(concurrency=1)
    fds = len(os.listdir(f"/proc/{worker.pid}/fd"))
    since = len(worker.text())
    _proxy(here).refuse()
    time.sleep(25)
    assert len(os.listdir(f"/proc/{worker.pid}/fd")) <= fds
    tries = [line for line in worker.text()[since:].splitlines() if "Cannot connect" in line]
    assert 3 <= len(tries) <= 8
    _proxy(here).forward()
    _works_again(here, 1, 12)


@pytest.mark.parametrize("pool", ["prefork", "threads", "solo", "gevent"])
@pytest.mark.parametrize("after", [0.0, 4.0, 11.0])
def test_sigterm_on_a_black_holed_worker(site: Callable[..., Site], pool: str, after: float) -> None:
    here = site(proxied=True, lease_seconds=None)
    worker = here.worker(pool=pool, concurrency=1)
    here.send("late", 0)
    wait_for(lambda: here.ends().get(0), 10, "a task")
    _proxy(here).swallow()
    time.sleep(after)
    began = time.monotonic()
    worker.send(signal.SIGTERM)
    worker.wait(30)
    assert time.monotonic() - began < 10

"""A worker whose main loop does not turn: it keeps what runs, and not what waits."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.faults.conftest import Site
from tests.harness import wait_done, wait_for

pytestmark = pytest.mark.faults

WAITING = 3


def test_what_waits_in_a_hung_worker_goes_to_others(site: Callable[..., Site]) -> None:
    """On prefork. The other pools take what they are given at once, and run it though the loop hangs."""
    here = site(lease_seconds=2, hung_loop_seconds=1)
    many = 1 + WAITING
    hung = here.worker(concurrency=1, prefetch=many, conf={"imports": ["tests.apps.hanging"]})
    here.send("late", 0, 9)
    wait_done(here.server, 1, 20, "started")
    for i in range(1, many):
        here.send("late", i)
    wait_for(lambda: here.sizes()[:2] == (0, many), 10, "all in one worker")
    here.sender.app.control.broadcast("hang", arguments={"seconds": 8}, destination=["w0@here"])
    here.worker(concurrency=1)
    wait_for(lambda: set(here.ends()) == set(range(1, many)), 8, "those that wait, elsewhere")
    assert here.ends().get(0) is None
    wait_for(lambda: here.sizes() == (0, 0, 0, 0), 15, "all acked")
    assert here.starts() == dict.fromkeys(range(many), 1)
    assert here.total("expired") == WAITING
    assert hung.poll() is None


def test_a_task_that_runs_on_the_loop_is_no_hang(site: Callable[..., Site]) -> None:
    here = site(lease_seconds=2, hung_loop_seconds=1)
    here.worker(pool="solo", prefetch=1 + WAITING)
    here.send("late", 0, 6)
    wait_done(here.server, 1, 20, "started")
    for i in range(1, 1 + WAITING):
        here.send("late", i)
    here.worker(concurrency=1)
    wait_for(lambda: here.sizes() == (0, 0, 0, 0), 20, "all acked")
    assert here.starts() == dict.fromkeys(range(1 + WAITING), 1)
    assert here.total("expired") == 0

"""Tasks that run on the event loop itself: between two of them the loop has its turn."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from fairlanes_transport import Lanes
from tests.harness import Sender, Server, Worker, recorded, wait_for

pytestmark = pytest.mark.acceptance


def test_each_task_is_acked_before_many_others_start(
    server: Server, sender: Sender, worker: Callable[..., Worker]
) -> None:
    """What was claimed in one batch is not run in one go: a kill would repeat all of it."""
    for i in range(24):
        sender.send("sleepy", "a", i, 0.2, tenant="a")
    worker(pool="solo", prefetch=8)
    lanes = Lanes(server.url("fairlanes"))
    wait_for(lambda: len(recorded(server)) >= 12, 30, "half of the tasks")
    unacked = lanes.lane("celery", "a").ready + lanes.lane("celery", "a").in_flight
    assert len(recorded(server)) - (24 - unacked) <= 2


def test_a_shutdown_does_not_wait_for_a_batch(server: Server, sender: Sender, worker: Callable[..., Worker]) -> None:
    for i in range(24):
        sender.send("sleepy", "a", i, 0.3, tenant="a")
    solo = worker(pool="solo", prefetch=8)
    wait_for(lambda: len(recorded(server)) >= 9, 30, "some tasks")
    ended = len(recorded(server))
    assert solo.stop(signal.SIGTERM) == 0
    assert len(recorded(server)) <= ended + 2
    assert Lanes(server.url("fairlanes")).lane("celery", "a").ready == 24 - len(recorded(server))

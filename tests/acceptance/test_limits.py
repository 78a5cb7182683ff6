"""Limits count running work, lanes can be charged by time, and a task can throttle its lane: on real workers."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from fairlanes_transport import Lanes
from tests.harness import Sender, Server, Worker, recorded, wait_done, wait_for

pytestmark = pytest.mark.acceptance

POOLS = ["prefork", "threads", "gevent"]


class Site:
    """A queue with a worker, and what its tasks noted."""

    def __init__(self, server: Server, sender: Sender, worker: Callable[..., Worker]) -> None:
        self.server, self.sender, self.worker = server, sender, worker
        self.lanes = Lanes(server.url("fairlanes"))
        # The queue exists from its first declaration on.
        with sender.app.connection_for_write() as connection:
            sender.app.amqp.queues["celery"].bind(connection.default_channel).declare()

    def runs(self) -> list[tuple[str, float, float]]:
        """(Tenant, start, end) of every execution that ended."""
        ends = {(note["id"], note["retries"]): note["t"] for note in recorded(self.server)}
        starts = recorded(self.server, "started")
        return [
            (note["tenant"], note["t"], ends[note["id"], note["retries"]])
            for note in starts
            if (note["id"], note["retries"]) in ends
        ]

    def most_at_once(self, tenant: str) -> int:
        """How many tasks of the tenant ran at the same time, at most."""
        mine = [(start, end) for name, start, end in self.runs() if name == tenant]
        return max(sum(a <= start < b for a, b in mine) for start, _ in mine)

    def idle_while_waiting(self, tenant: str, limit: int) -> float:
        """The longest time in which a slot of the lane was free although work waited."""
        mine = sorted((start, end) for name, start, end in self.runs() if name == tenant)
        ends = sorted(end for _, end in mine)
        return max(start - ends[k] for k, (start, _) in enumerate(mine[limit:]))

    def nothing_in_flight(self) -> bool:
        """Whether no lane of the queue has anything in flight."""
        return all(lane.in_flight == 0 for lane in self.lanes.each_lane("celery"))


@pytest.fixture
def site(server: Server, sender: Sender, worker: Callable[..., Worker]) -> Site:
    return Site(server, sender, worker)


@pytest.mark.parametrize("task", ["sleepy", "late"])
@pytest.mark.parametrize("pool", POOLS)
def test_a_limit_counts_running_tasks(site: Site, pool: str, task: str) -> None:
    """With early acks too, which are Celery's default: the slot is held until the task has ended."""
    site.lanes.set("celery", "bounded", limit=2)
    for i in range(10):
        site.sender.send(task, "bounded", i, 0.5, tenant="bounded")
    for i in range(10, 18):
        site.sender.send(task, "free", i, 0.5, tenant="free")
    site.worker(pool=pool, concurrency=6, prefetch=1)
    wait_done(site.server, 18, 60)
    assert site.most_at_once("bounded") == 2
    assert site.most_at_once("free") >= 4  # the rest of the slots, at once
    assert site.idle_while_waiting("bounded", 2) < 0.4
    wait_for(site.nothing_in_flight, 10, "every slot to be free")


@pytest.mark.parametrize("pool", POOLS)
def test_failures_and_retries_give_their_slots_back(site: Site, pool: str) -> None:
    site.lanes.set("celery", "a", limit=1)
    for i in range(5):
        site.sender.send("fail", "a", i, tenant="a")
    site.sender.send("retrying", "a", 5, 3, 0, tenant="a")
    site.sender.send("sleepy", "a", 6, 0.1, tenant="a")
    site.worker(pool=pool, concurrency=3, prefetch=1)
    wait_for(lambda: {note["i"] for note in recorded(site.server)} == {5, 6}, 30, "the last ones")
    assert len([note for note in recorded(site.server, "started") if note["i"] == 5]) == 4
    wait_for(site.nothing_in_flight, 10, "every slot to be free")


def test_a_revoked_and_a_timed_out_task_give_their_slots_back(site: Site) -> None:
    site.lanes.set("celery", "a", limit=1)
    site.worker(pool="prefork", concurrency=2, prefetch=1)
    site.sender.send("sleepy", "a", 0, 60, tenant="a", time_limit=1)
    site.sender.send("mark", "a", 1, tenant="a")
    wait_for(lambda: [note["i"] for note in recorded(site.server)] == [1], 20, "what waits behind the time limit")
    running = site.sender.send("sleepy", "a", 2, 60, tenant="a")
    wait_for(lambda: recorded(site.server, "started")[-1]["i"] == 2, 10, "the task to run")
    site.sender.send("mark", "a", 3, tenant="a")
    site.sender.app.control.revoke(running.id, terminate=True, signal="SIGKILL")
    wait_for(lambda: recorded(site.server)[-1]["i"] == 3, 20, "what waits behind the revoked one")
    wait_for(site.nothing_in_flight, 10, "every slot to be free")


def test_a_dead_workers_slots_end_with_their_leases(site: Site) -> None:
    """An early ack is the end of the message: what was running is not run again, but its slot is free."""
    conf = {"broker_transport_options": {"lease_seconds": 2}}
    site.lanes.set("celery", "a", limit=1)
    first = site.worker(pool="prefork", concurrency=1, prefetch=1, conf=conf)
    site.sender.send("sleepy", "a", 0, 60, tenant="a")
    wait_for(lambda: len(recorded(site.server, "started")) == 1, 10, "the task to run")
    wait_for(lambda: site.lanes.lane("celery", "a").ready == 0, 10, "the ack")
    site.sender.send("mark", "a", 1, tenant="a")
    os.killpg(first.pid, signal.SIGKILL)
    site.worker(pool="prefork", concurrency=1, prefetch=1, conf=conf)
    wait_done(site.server, 1, 20)
    assert [note["i"] for note in recorded(site.server, "started")] == [0, 1]
    wait_for(site.nothing_in_flight, 10, "every slot to be free")


def test_a_rate_spreads_starts_over_all_workers(site: Site) -> None:
    site.lanes.set("celery", "slow", rate="10/s")
    for i in range(30):
        site.sender.send("mark", "slow", i, tenant="slow")
    for _ in range(2):
        site.worker(pool="threads", concurrency=4, prefetch=1)
    wait_done(site.server, 30, 30)
    starts = sorted(note["t"] for note in recorded(site.server, "started"))
    assert starts[-1] - starts[0] >= 2.7  # 29 pauses of a tenth of a second, less what the clocks differ


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_a_task_throttles_its_lane(site: Site, pool: str) -> None:
    site.worker(pool=pool, concurrency=1, prefetch=1)
    site.sender.send("throttling", "a", 0, 1.5, tenant="a")
    wait_for(lambda: len(recorded(site.server)) == 1, 10, "the throttle")
    site.sender.send("mark", "a", 1, tenant="a")
    site.sender.send("mark", "b", 2, tenant="b")
    done = wait_done(site.server, 3, 20)
    assert [note["i"] for note in done] == [0, 2, 1]
    assert done[2]["t"] - done[0]["t"] > 1.2


def test_worker_time_is_shared(site: Site) -> None:
    """A tenant with long tasks gets as much worker time as one with short ones, not as many tasks."""
    site.sender.app.conf.broker_transport_options = options = {"fairness": "time"}
    for i in range(60):
        site.sender.send("sleepy", "long", i, 0.5, tenant="long")
    for i in range(60, 1000):
        site.sender.send("sleepy", "short", i, 0.02, tenant="short")
    site.worker(pool="threads", concurrency=2, prefetch=1, conf={"broker_transport_options": options})

    def spent() -> dict[str, float]:
        total: dict[str, float] = {"long": 0.0, "short": 0.0}
        for tenant, start, end in site.runs():
            total[tenant] += end - start
        return total

    wait_for(lambda: spent()["long"] >= 5, 60, "five seconds of long tasks")
    share: Any = spent()
    assert 0.6 < share["short"] / share["long"] < 1.6, share

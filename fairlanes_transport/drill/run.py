"""The run of ``fairlanes drill``: fill the lanes, start workers, let tenants trickle, kill as asked, clean up."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from fairlanes_transport.demo.run import READY_SECONDS, Stage, sender
from fairlanes_transport.drill.figures import Claim, Facts, Record
from fairlanes_transport.errors import OptionError
from fairlanes_transport.lanes.api import Lanes
from fairlanes_transport.options import Options

__all__ = ["FLOOD", "Broker", "Plan", "run_drill"]

FLOOD = "flood"
"""Name of the tenant that floods the queue."""

LEASE_SECONDS = 5.0
"""The lease where workers are killed, so that what they held is soon back."""

EXPIRES_MS = 600_000
"""A drill that is killed cannot clean up: the server drops its queue when nobody has used it for so long."""


@dataclass(frozen=True)
class Plan:
    """What a drill does.

    Attributes:
        tenants: the quiet ones.
        flood: tasks that the flooding tenant keeps waiting.
        burst: tasks that each quiet tenant has waiting at the start, times its weight.
        seconds: how long the quiet tenants go on sending.
        every: seconds between two tasks of one of them.
        task_ms: how long a task takes.
        weights, limits: of lanes that have others than 1 and none.
        kill_every: seconds between two kills of workers; 0: none is killed.
        workers, concurrency, pool, multiplier: the workers, and how they are started.
        lease: ``lease_seconds`` of the workers; None: `LEASE_SECONDS` with kills, else the broker's options.
        ahead, max_wait: bounds of the user's own; see `Facts`.
    """

    tenants: tuple[str, ...] = ("acme", "bolt", "cargo", "delta", "ember")
    flood: int = 500
    burst: int = 20
    seconds: float = 10.0
    every: float = 0.25
    task_ms: float = 5.0
    weights: dict[str, float] = field(default_factory=dict)
    limits: dict[str, int] = field(default_factory=dict)
    kill_every: float = 0.0
    workers: int = 1
    concurrency: int = 2
    pool: str = "prefork"
    multiplier: int = 1
    lease: float | None = None
    ahead: int | None = None
    max_wait: float | None = None

    def weight(self, tenant: str) -> float:
        """A tenant's weight."""
        return self.weights.get(tenant, 1.0)

    def filling(self) -> Iterator[tuple[str, int]]:
        """Yield (tenant, tasks) that wait when the first worker starts."""
        yield FLOOD, max(self.flood, round(2 * self.burst * self.weight(FLOOD)))
        for tenant in self.tenants:
            yield tenant, max(1, round(self.burst * self.weight(tenant)))

    def worker_flags(self) -> list[str]:
        """The flags of ``celery worker``.  It neither talks to the user's workers nor takes commands for them."""
        flags = ["--pool", self.pool, "-c", str(self.concurrency), "--without-heartbeat"]
        return [*flags, "--prefetch-multiplier", str(self.multiplier)]

    def lease_seconds(self, options: dict[str, Any]) -> float | None:
        """The workers' lease, as far as it is not the transport's own default."""
        with_kills = LEASE_SECONDS if self.kill_every else None
        return self.lease or with_kills or options.get("lease_seconds")

    def facts(self, options: dict[str, Any]) -> Facts:
        """What the bounds depend on."""
        return Facts(
            flood=FLOOD,
            weights={tenant: self.weight(tenant) for tenant in (FLOOD, *self.tenants)},
            limits=self.limits,
            workers=self.workers,
            prefetch=self.concurrency * self.multiplier,
            lease=self.lease_seconds(options) or Options().lease_seconds,
            ahead=self.ahead,
            max_wait=self.max_wait,
        )


@dataclass(frozen=True)
class Broker:
    """Where a drill takes place.

    Attributes:
        url: for workers and senders.
        conf: Celery settings that belong to it.
        lanes: its lanes; None for kombu's own transport, which has none.
    """

    url: str
    conf: dict[str, Any]
    lanes: Lanes | None

    @property
    def options(self) -> dict[str, Any]:
        """``broker_transport_options``."""
        return dict(self.conf.get("broker_transport_options") or {})


# ---------------------------------------------------------------- running


def run_drill(plan: Plan, broker: Broker, queue: str, tell: Callable[[str], object]) -> Record:
    """Run the drill; when this returns or raises, neither workers nor queue are left.

    Args:
        queue: its name; it must not exist.
        tell: called with a line now and then.

    Raises:
        OptionError: the queue exists.
        DemoFailed: a worker did not start, or has ended by itself.
        redis.exceptions.RedisError: the broker cannot be reached.
    """
    options = broker.options
    lease = plan.lease_seconds(options)
    if lease and broker.lanes:
        options["lease_seconds"] = lease
    conf = {**broker.conf, **_queue_settings(queue), "broker_transport_options": options}
    with (
        _queue(plan, broker.lanes, queue),
        Stage(broker.url, plan.worker_flags(), conf) as stage,
        sender(broker.url, plan.task_ms / 1000, queue, conf) as send,
    ):
        return _Drill(plan, stage, send, tell).run(settle=2 * lease if lease and plan.kill_every else 0.0)


def _queue_settings(queue: str) -> dict[str, Any]:
    """Celery settings for one queue."""
    made = {"routing_key": queue, "queue_arguments": {"x-expires": EXPIRES_MS}}
    return {
        "task_queues": {queue: made},
        "task_default_queue": queue,
        "worker_enable_remote_control": False,
    }


@contextlib.contextmanager
def _queue(plan: Plan, lanes: Lanes | None, queue: str) -> Iterator[None]:
    """Make the queue with its lanes' settings, and delete it with all that is in it."""
    if lanes is None:
        yield
        return
    if lanes.store.exists(queue):
        raise OptionError(f"queue {queue!r} exists: a drill needs one of its own, and deletes it")
    try:
        lanes.store.declare(queue, EXPIRES_MS)
        for tenant in (FLOOD, *plan.tenants):
            settings = {"weight": plan.weights.get(tenant), "limit": plan.limits.get(tenant)}
            given = {name: value for name, value in settings.items() if value is not None}
            if given:
                lanes.set(queue, tenant, **given)
        yield
    finally:
        lanes.store.delete(queue)


class _Drill:
    """One run."""

    def __init__(
        self, plan: Plan, stage: Stage, send: Callable[[str, int], None], tell: Callable[[str], object]
    ) -> None:
        self.plan = plan
        self.stage = stage
        self.record = Record()
        self._send = send
        self._tell = tell
        self._sent: Counter[str] = Counter()
        self._started: Counter[str] = Counter()
        self._ready: set[int] = set()
        self._number = 0

    def run(self, settle: float) -> Record:
        """Fill the lanes, start the workers, let the quiet tenants trickle, and wait for the last of their tasks.

        Args:
            settle: seconds by which that may last longer, as a killed worker's messages are away for a while.
        """
        plan = self.plan
        for tenant, tasks in plan.filling():
            for _ in range(tasks):
                self._send_one(tenant)
        self._tell(f"{self._sent.total()} tasks wait, {self._sent[FLOOD]} of them of {FLOOD}; starting the workers")
        self._take(self.stage.wait_ready([self._start_worker() for _ in range(plan.workers)]))
        self._trickle()
        deadline = time.monotonic() + READY_SECONDS + settle
        while self._missing() and time.monotonic() < deadline:
            self._turn()
        return self.record

    def _trickle(self) -> None:
        plan, began = self.plan, time.monotonic()
        # Not all at one moment: a burst is what the drill has begun with.
        due = {tenant: began + plan.every * i / len(plan.tenants) for i, tenant in enumerate(plan.tenants)}
        kill, told = began + plan.kill_every, began
        while (now := time.monotonic()) < began + plan.seconds:
            self._turn()
            for tenant in [tenant for tenant, at in due.items() if at <= now]:
                self._send_one(tenant)
                due[tenant] += plan.every
            while self._sent[FLOOD] - self._started[FLOOD] < plan.flood and time.monotonic() < now + plan.every:
                self._send_one(FLOOD)
            if plan.kill_every and now >= kill and self._kill():
                kill = now + plan.kill_every
            if now - told >= 1.0:
                told = now
                kills = f", {len(self.record.kills)} workers killed" if plan.kill_every else ""
                self._tell(f"{now - began:3.0f} s: {len(self.record.starts)} of {self._sent.total()} started{kills}")

    def _turn(self) -> None:
        self._take(self.stage.read())
        self.stage.check(time.monotonic() + 1.0, "")

    def _send_one(self, tenant: str) -> None:
        number = self._sent[tenant]
        self._send(tenant, number)
        self._sent[tenant] += 1
        # After the publish: from here on its wait counts.
        self.record.sent[tenant, number] = time.time()

    def _missing(self) -> bool:
        return any(self._started[tenant] < self._sent[tenant] for tenant in self.plan.tenants)

    def _start_worker(self) -> Any:
        self._number += 1
        return self.stage.start_worker(f"drill{self._number}")

    def _kill(self) -> bool:
        """Kill the oldest worker and start another; False: not all are ready, so it is not the time."""
        if any(worker.pid not in self._ready for worker in self.stage.workers):
            return False
        worker = self.stage.workers[0]
        self.stage.kill_worker(worker)
        self.record.kills.append((time.time(), worker.pid))
        self._start_worker()
        return True

    def _take(self, entries: list[list[Any]]) -> None:
        """Take in what the workers noted."""
        record = self.record
        for what, worker, at, *rest in entries:
            if what == "ready":
                self._ready.add(worker)
            elif what == "claim":
                tenant, number, attempt = rest
                record.claims.append(Claim(tenant, number, attempt, at, worker))
            else:
                tenant, number = rest[:2]
                record.runs.append((at, 1 if what == "start" else -1, tenant, worker))
                if what == "start" and (tenant, number) not in record.starts:
                    record.starts[tenant, number] = at
                    self._started[tenant] += 1

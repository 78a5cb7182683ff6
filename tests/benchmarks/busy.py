"""Workers with a backlog: tasks per second on each pool, and what the server is asked meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.benchmarks.report import Benchmark, Figure, each
from tests.benchmarks.rig import ALONE, QUEUE, Commands, Process, Rig, backlog, drain_rate, wait_for, workers
from tests.harness import Sender, Server

LANES = 50
WORKERS = 6


def _fill(broker: Server, scheme: str, n: int) -> None:
    with Sender(broker, scheme) as sender, sender.app.producer_or_acquire() as producer:
        for number in range(n):
            headers = {"tenant": f"t{number % LANES}"}
            sender.app.send_task("bench.noop", (number,), headers=headers, producer=producer)


def _pool(tasks: int, **options: Any) -> Callable[[Rig, str], dict[str, float]]:
    def measure(rig: Rig, scheme: str) -> dict[str, float]:
        n = rig.count(tasks)
        with rig.broker() as (broker, records):
            _fill(broker, scheme, n)
            with workers([rig.worker(broker, records, scheme, *ALONE, "-l", "WARNING", **options)]):
                pass
            raise NotImplementedError(n, records)

    return measure


POOLS: tuple[Benchmark, ...] = ()


def _messages(rig: Rig, scheme: str) -> dict[str, float]:
    """Six solo workers empty a backlog."""
    n = rig.count(2000)
    with rig.broker() as (broker, records):
        started = [
            rig.worker(broker, records, scheme, *ALONE, "-n", f"w{number}@bench", pool="solo", concurrency=1)
            for number in range(WORKERS)
        ]
        with workers(started), Commands(broker) as counted:
            _fill(broker, scheme, n)
            wait_for(lambda: backlog(broker, scheme) == 0, 60, "the end of the backlog")
    return {"commands of clients": counted.sent / n}


MESSAGES = Benchmark("busy", {"commands of clients": Figure("per message")}, each(_messages))

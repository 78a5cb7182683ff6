"""Workers with a backlog: tasks per second on each pool, and what the server is asked meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from tests.benchmarks.report import Benchmark, Figure, each
from tests.benchmarks.rig import (
    ALONE,
    QUEUE,
    Commands,
    Rig,
    backlog,
    closing_quietly,
    drained,
    held_back,
    workers,
)
from tests.harness import Sender, Server, wait_for

LANES = 50
WORKERS = 6


def _fill(broker: Server, scheme: str, n: int, queue: str = QUEUE) -> None:
    """Send tasks that do nothing."""
    with Sender(broker, scheme) as sender, sender.app.producer_or_acquire() as producer:
        for number in range(n):
            headers = {"tenant": f"t{number % LANES}"}
            sender.app.send_task("bench.noop", (number,), headers=headers, producer=producer, queue=queue)


def _tasks(tasks: int, **options: Any) -> Callable[[Rig, str], dict[str, float]]:
    def measure(rig: Rig, scheme: str) -> dict[str, float]:
        n = rig.count(tasks)
        with rig.broker() as (broker, records):
            _fill(broker, scheme, n)
            worker = rig.worker(broker, records, scheme, *ALONE, "-l", "WARNING", **options)
            with closing_quietly([worker]):
                done = drained(lambda: backlog(broker, scheme), n, [worker.pid])
        return {"tasks": done["rate"], **({"CPU": done["cpu"]} if "cpu" in done else {})}

    return measure


def _pool(name: str, tasks: int, wanted: float, aim: float, **options: Any) -> Benchmark:
    figures = {
        "tasks": Figure(f"per second (aim: {aim})", ratio_at_least=wanted),
        "CPU": Figure("us of the worker per task"),
    }
    return Benchmark(name, figures, each(_tasks(tasks, **options)))


POOLS = (
    _pool("solo", 5000, 2.5, 3.0, pool="solo", concurrency=1),
    _pool("threads", 5000, 2.5, 3.5, pool="threads", concurrency=8),
    _pool("prefork", 5000, 1.4, 1.6, pool="prefork", concurrency=2),
)


def _messages(rig: Rig, scheme: str) -> dict[str, float]:
    """Let six solo workers empty a backlog that appears at once."""
    n = rig.count(2000)
    with rig.broker() as (broker, records):
        started = [
            rig.worker(broker, records, scheme, *ALONE, "-n", f"w{number}@bench", pool="solo", concurrency=1)
            for number in range(WORKERS)
        ]
        with workers(started):
            time.sleep(1.0)
            with held_back(broker, scheme, QUEUE) as hidden:
                _fill(broker, scheme, n, hidden)
                counted = Commands(broker).start()
            wait_for(lambda: backlog(broker, scheme) == 0, 120, "the end of the backlog")
            counted.stop()
    return {
        "commands of clients": counted.sent / n,
        "commands, with those in scripts": counted.all / n,
        "round trips": counted.trips / n,
        **counted.details(n),
    }


MESSAGES = Benchmark(
    "busy",
    {
        "commands of clients": Figure("per message, without its publish"),
        "commands, with those in scripts": Figure("per message, without its publish"),
        "round trips": Figure("per message, without its publish"),
    },
    each(_messages),
)

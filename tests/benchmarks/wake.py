"""Who wakes for a message: one worker of six, and four consumers for a backlog."""

from __future__ import annotations

import contextlib
import time

from tests.apps.settings import RECORD_DB
from tests.benchmarks import STARTS
from tests.benchmarks.report import Benchmark, Figure, each
from tests.benchmarks.rig import (
    ALONE,
    OURS,
    Commands,
    Process,
    Rig,
    backlog,
    drained,
    held_back,
    workers,
)
from tests.harness import Sender, wait_for

WORKERS = 6
SPACING_SECONDS = 0.1
CONSUMERS = 4
PREFETCH = 4
TASK_SECONDS = 0.001
LANES = (1, 16)


def _herd(rig: Rig, scheme: str) -> dict[str, float]:
    """Send single messages to six idle solo workers."""
    n = rig.count(60)
    with rig.broker() as (broker, records), Sender(broker, scheme) as sender:
        started = [
            rig.worker(
                broker, records, scheme, *ALONE, "-n", f"w{number}@bench", pool="solo", concurrency=1, prefetch=1
            )
            for number in range(WORKERS)
        ]
        seen = records.client(RECORD_DB)
        with workers(started), sender.app.pool.acquire(block=True), sender.app.producer_pool.acquire() as producer:

            def send(number: int) -> None:
                options = {"headers": {"tenant": f"t{number % 5}"}, "producer": producer}
                sender.app.send_task("bench.mark", (number,), **options)

            for number in range(WORKERS):  # connections are made, scripts are loaded
                send(number)
                time.sleep(SPACING_SECONDS)
            wait_for(lambda: seen.llen(STARTS) >= WORKERS, 10, "the first tasks")
            time.sleep(2.0)
            with Commands(broker) as counted:
                for number in range(n):
                    send(number)
                    time.sleep(SPACING_SECONDS)
                wait_for(lambda: seen.llen(STARTS) >= WORKERS + n, 10, "the tasks")
                time.sleep(0.5)
    parks = counted.by_name["BLPOP" if scheme == OURS else "BRPOP"]
    return {
        "commands of clients": counted.sent / n,
        "commands, with those in scripts": counted.all / n,
        "round trips": counted.trips / n,
        "blocking pops": parks / n,
        **counted.details(n),
    }


HERD = Benchmark(
    "herd",
    {
        "commands of clients": Figure("per message", at_most=4.1),
        "commands, with those in scripts": Figure("per message"),
        "round trips": Figure("per message", at_most=4.1),
        "blocking pops": Figure("per message", at_most=1.1),
    },
    each(_herd),
)


def _chain(rig: Rig, scheme: str) -> dict[str, float]:
    """Give a backlog of short messages to four parked consumers all at once."""
    return {name: value for lanes in LANES for name, value in _backlog(rig, scheme, lanes).items()}


def _backlog(rig: Rig, scheme: str, lanes: int) -> dict[str, float]:
    n, queue = rig.count(4000), "chain"
    with rig.server() as server, contextlib.ExitStack() as stack:
        url = server.url(scheme)
        consumers = [
            stack.enter_context(Process("park", url=url, queue=queue, prefetch=PREFETCH, seconds=TASK_SECONDS))
            for _ in range(CONSUMERS)
        ]
        for consumer in consumers:
            consumer.wait_ready()
        with held_back(server, scheme, queue) as hidden:
            Process("publish", url=url, queue=hidden, n=n, lanes=lanes).result()
        groups = [consumer.pid for consumer in consumers]
        done = drained(lambda: backlog(server, scheme, queue), n, groups)
    name = _lanes(lanes)
    return {name: done["rate"], **({f"CPU, {name}": done["cpu"]} if "cpu" in done else {})}


def _lanes(n: int) -> str:
    return "1 lane" if n == 1 else f"{n} lanes"


CHAIN = Benchmark(
    "chain",
    {
        **{_lanes(n): Figure("messages per second", ratio_at_least=1.0) for n in LANES},
        **{f"CPU, {_lanes(n)}": Figure("us of the consumers per message") for n in LANES},
    },
    each(_chain),
)

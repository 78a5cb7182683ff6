"""How many connections a worker and a producing process hold."""

from __future__ import annotations

import time

from tests.benchmarks.report import Benchmark, Figure, each
from tests.benchmarks.rig import Process, Rig, connections, workers

THREADS = 8


def _measure(rig: Rig, scheme: str) -> dict[str, float]:
    with rig.broker() as (broker, records):
        with workers([rig.worker(broker, records, scheme)]):
            time.sleep(5.0)
            idle = connections(broker)
        with Process("produce", url=broker.url(scheme), threads=THREADS, each=100) as producer:
            producer.wait_ready()
            producing = connections(broker)
    return {"idle worker, default flags": idle, f"process with {THREADS} producing threads": producing}


CONNECTIONS = Benchmark(
    "connections",
    {
        "idle worker, default flags": Figure("connections", at_most=5),
        f"process with {THREADS} producing threads": Figure("connections", at_most=9),
    },
    each(_measure),
)

"""What a worker costs while it waits."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

from tests.benchmarks.report import Benchmark, Figure, Values
from tests.benchmarks.rig import ALONE, Commands, Rig, cpu_seconds, workers

WORKERS = 2
SETTLE_SECONDS = 5.0


def _run(rig: Rig, schemes: Sequence[str]) -> Values:
    """Let the workers of both schemes wait side by side: they do nothing that could disturb the others."""
    seconds = max(30.0, rig.seconds(60.0))  # a park is 30 s: any less would miss it or weigh it too much
    with contextlib.ExitStack() as stack:
        groups = {}
        for scheme in schemes:
            broker, records = stack.enter_context(rig.broker())
            started = [
                rig.worker(broker, records, scheme, *ALONE, "-n", f"{scheme}{number}@bench")
                for number in range(WORKERS)
            ]
            groups[scheme] = broker, stack.enter_context(workers(started))
        time.sleep(SETTLE_SECONDS)
        counted = {scheme: Commands(broker).start() for scheme, (broker, _) in groups.items()}
        cpu = {scheme: cpu_seconds(*(worker.pid for worker in group)) for scheme, (_, group) in groups.items()}
        time.sleep(seconds)
        result: dict[str, dict[str, float]] = {}
        for scheme, (_, group) in groups.items():
            counted[scheme].stop()
            result[scheme] = {
                "commands of clients": counted[scheme].sent / seconds / WORKERS,
                "commands, with those in scripts": counted[scheme].all / seconds / WORKERS,
                **counted[scheme].details(WORKERS),
            }
            before, after = cpu[scheme], cpu_seconds(*(worker.pid for worker in group))
            if before is not None and after is not None:
                result[scheme]["CPU"] = (after - before) / seconds / WORKERS * 100
    return result


IDLE = Benchmark(
    "idle",
    {
        "commands of clients": Figure("per second and worker", at_most=0.1),
        "commands, with those in scripts": Figure("per second and worker"),
        "CPU": Figure("% of a core per worker"),
    },
    _run,
)

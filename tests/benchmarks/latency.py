"""From ``delay()`` to the start of the task, on an idle worker."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

from fairlanes_transport.demo.figures import percentile
from tests.apps.settings import RECORD_DB
from tests.benchmarks import STARTS
from tests.benchmarks.report import Benchmark, Figure, Values
from tests.benchmarks.rig import Rig, workers
from tests.harness import Sender

PAUSE_SECONDS = 0.01
WARM_UP = 10


def _run(rig: Rig, schemes: Sequence[str]) -> Values:
    """Send to both schemes' workers in turn, one message at a time."""
    n = rig.count(300)
    waits: dict[str, list[float]] = {scheme: [] for scheme in schemes}
    with contextlib.ExitStack() as stack:
        ends = {}
        for scheme in schemes:
            broker, records = stack.enter_context(rig.broker())
            sender = stack.enter_context(Sender(broker, scheme))
            stack.enter_context(workers([rig.worker(broker, records, scheme)]))
            ends[scheme] = sender, records.client(RECORD_DB)
        for number in range(n + WARM_UP):
            for scheme, (sender, records_client) in ends.items():
                sent = time.time()
                sender.app.send_task("bench.mark", (number,), headers={"tenant": f"t{number % 5}"})
                popped = records_client.blpop([STARTS], timeout=10)
                assert popped is not None, f"{scheme}: a task did not start"
                if number >= WARM_UP:
                    waits[scheme].append((float(popped[1]) - sent) * 1000)
                time.sleep(PAUSE_SECONDS)
    return {
        scheme: {"p50": percentile(sorted(ms), 50), "p99": percentile(sorted(ms), 99)} for scheme, ms in waits.items()
    }


LATENCY = Benchmark(
    "latency",
    {"p50": Figure("ms", ratio_at_most=1.0), "p99": Figure("ms", ratio_at_most=1.0)},
    _run,
)

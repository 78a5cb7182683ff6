"""Who keeps the time: claims per due message with 50 idle consumers.

Plain kombu on ``redis://`` knows no delayed messages: there is nothing to compare with.
"""

from __future__ import annotations

import contextlib
import time

from tests.benchmarks.report import Benchmark, Figure, each
from tests.benchmarks.rig import OURS, Commands, Process, Rig, backlog
from tests.harness import wait_for

PROCESSES = 2
CONSUMERS = 50
PREFETCH = 4
PER_SECOND = 100.0
DELAY_SECONDS = 2.0


def _measure(rig: Rig, scheme: str) -> dict[str, float]:
    """Publish 100 messages a second, each due in two seconds."""
    if scheme != OURS:
        return {}
    n, queue = round(PER_SECOND * rig.seconds(10.0)), "clock"
    with rig.server() as server, contextlib.ExitStack() as stack:
        url = server.url(scheme)
        parked = [
            stack.enter_context(
                Process("park", url=url, queue=queue, prefetch=PREFETCH, consumers=CONSUMERS // PROCESSES)
            )
            for _ in range(PROCESSES)
        ]
        for process in parked:
            process.wait_ready(60)
        with Commands(server) as counted:
            Process("publish", url=url, queue=queue, n=n, lanes=10, delay=DELAY_SECONDS, per_second=PER_SECOND).result()
            wait_for(lambda: backlog(server, scheme, queue) == 0, 30, "the due messages")
            time.sleep(0.5)
    return {
        "claims": counted.scripts["claim"] / n,
        "blocking pops": counted.by_name["BLPOP"] / n,
        "commands of clients": counted.sent / n,
        **counted.details(n),
    }


CLOCK = Benchmark(
    "clock",
    {
        "claims": Figure("per due message", at_most=1.5),
        "blocking pops": Figure("per due message"),
        "commands of clients": Figure("per due message"),
    },
    each(_measure),
)

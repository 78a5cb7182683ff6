"""Who keeps the time: claims per due message with 50 idle consumers, and how late they are.

Plain kombu on ``redis://`` knows no delayed messages: there is nothing to compare with.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from fairlanes_transport.demo.figures import percentile
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
        url, lateness = server.url(scheme), Path(stack.enter_context(TemporaryDirectory())) / "lateness"
        common = {"url": url, "queue": queue, "prefetch": PREFETCH, "consumers": CONSUMERS // PROCESSES}
        parked = [stack.enter_context(Process("park", **common, lateness=str(lateness))) for _ in range(PROCESSES)]
        for process in parked:
            process.wait_ready(60)
        with Commands(server) as counted:
            Process("publish", url=url, queue=queue, n=n, lanes=10, delay=DELAY_SECONDS, per_second=PER_SECOND).result()
            wait_for(lambda: backlog(server, scheme, queue) == 0, 30, "the due messages")
            time.sleep(0.5)
        late = sorted(map(float, lateness.read_text().split()))
    assert len(late) == n
    return {
        "late, p50": percentile(late, 50),
        "late, p99": percentile(late, 99),
        "early": sum(ms < 0 for ms in late),
        "claims": counted.scripts["claim"] / n,
        "blocking pops": counted.by_name["BLPOP"] / n,
        "commands of clients": counted.sent / n,
        **counted.details(n),
    }


CLOCK = Benchmark(
    "clock",
    {
        "late, p50": Figure("ms"),
        "late, p99": Figure("ms", at_most=100),
        "early": Figure("messages", at_most=0),
        "claims": Figure("per due message", at_most=1.5),
        "blocking pops": Figure("per due message"),
        "commands of clients": Figure("per due message"),
    },
    each(_measure),
)

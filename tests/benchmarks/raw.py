"""A producer and a consumer on plain kombu: ``Producer.publish``, and ``drain_events`` with acks, prefetch 16."""

from __future__ import annotations

from tests.benchmarks.report import Benchmark, Figure, each
from tests.benchmarks.rig import Process, Rig

LANES = 50
PREFETCH = 16


def _measure(rig: Rig, scheme: str) -> dict[str, float]:
    n, queue = rig.count(8000), "raw"
    with rig.server() as server:
        url = server.url(scheme)
        published = Process("publish", url=url, queue=queue, n=n, lanes=LANES).result()
        consumed = Process("consume", url=url, queue=queue, n=n, prefetch=PREFETCH).result()
    return {"published": published, "delivered": consumed["rate"], "CPU of the consumer": consumed["cpu"]}


RAW = Benchmark(
    "raw",
    {
        "published": Figure("messages per second", ratio_at_least=0.9),
        "delivered": Figure("messages per second", ratio_at_least=2.5),
        "CPU of the consumer": Figure("us per message"),
    },
    each(_measure),
)

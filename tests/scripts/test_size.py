"""size: how many messages are in which state."""

from __future__ import annotations

from fairlanes_transport.store import Sizes
from tests.scripts.bench import Bench


def test_each_state_is_counted(bench: Bench) -> None:
    assert bench.store.size(bench.queue) == Sizes(0, 0, 0, 0)
    bench.configure("slots", limit=1)
    bench.put("slot", "slots")
    bench.ack(bench.fence(), keep_slot=True)
    bench.put("dead")
    bench.store.reject(bench.queue, bench.fence(), requeue=False, reason="x")
    bench.fill("a", 6)
    bench.claim(2)
    for i in range(3):
        bench.put(f"later{i}", delay=1_000)
    bench.mark()
    assert bench.store.size(bench.queue) == Sizes(ready=4, leased=3, delayed=3, dead=1)
    assert bench.changes() == {}

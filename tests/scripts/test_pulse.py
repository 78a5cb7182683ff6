"""pulse: the queue as a whole, at one moment; nothing is changed."""

from __future__ import annotations

from fairlanes_transport.lanes.replies import queue_stats
from tests.scripts.bench import Bench
from tests.scripts.test_redrive import bury


def test_an_absent_queue(bench: Bench) -> None:
    stats = queue_stats("q", bench.store.pulse("q"))
    assert (stats.ready, stats.in_flight, stats.dead, stats.totals, stats.token) == (0, 0, 0, {}, False)


def test_counts(bench: Bench) -> None:
    bench.store.declare("q", weight=2, limit=5, fairness="time")
    bury(bench, "dead")
    bench.fill("a", 3)
    bench.fill("b", 2)
    bench.put("late", "c", delay=9_000)
    bench.ack([m.fence for m in bench.claim(1)], keep_slot=True)
    bench.claim(1)
    bench.store.throttle("q", "b", 4_000)
    bench.mark()
    stats = queue_stats("q", bench.store.pulse("q"))
    assert bench.changes() == {}
    assert (stats.ready, stats.in_flight, stats.running_slots, stats.delayed, stats.dead) == (3, 2, 1, 1, 1)
    assert (stats.lanes, stats.lanes_servable, stats.lanes_waiting, stats.lanes_configured) == (2, 1, 1, 0)
    assert (stats.fairness, stats.defaults.weight, stats.defaults.limit) == ("time", 2, 5)
    assert (stats.totals["enqueued"], stats.totals["acked"], stats.backlog) == (7, 1, 5)
    assert (stats.token, stats.expires, stats.paused) == (True, None, False)


def test_paused_and_expiring(bench: Bench) -> None:
    bench.store.declare("q", expires_ms=60_000)
    bench.store.pause("q")
    stats = queue_stats("q", bench.store.pulse("q"))
    assert (stats.paused, stats.expires, stats.defaults.paused) == (True, 60.0, None)

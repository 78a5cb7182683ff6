"""redrive: dead letters become ready again, beyond the reach of who held them."""

from __future__ import annotations

from tests.scripts.bench import STALE, Bench, Fence, Record


def bury(bench: Bench, tag: str, lane: str = "a") -> Fence:
    """Enqueue, claim and reject a message; returns the fence that it had."""
    bench.put(tag, lane)
    fence = bench.fence()
    bench.store.reject("q", fence, requeue=False, reason="broken")
    return fence


def test_the_whole_state(bench: Bench) -> None:
    bury(bench, "t")
    bench.mark()
    assert bench.store.redrive("q", ["t"]) == 1
    changed = bench.changes()
    assert changed.pop("message/t") == Record("a", attempt=2, score=1, born=bench.now)
    assert changed.pop("ring/a") is not None
    changed.pop("queue/last")
    assert changed == {
        "dead/t": None, "lanes/a": 0.0, "ready:a/t": 1.0, "reasons/t": None, "totals/redriven": 1, "wake": 1,
    }  # fmt: skip


def test_the_old_fence_is_stale(bench: Bench) -> None:
    fence = bury(bench, "t")
    bench.store.redrive("q", ["t"])
    assert bench.ack(fence) == (STALE,)
    assert bench.claim()[0].fence.attempt == 3
    assert bench.ack(fence) == (STALE,)
    bench.check()


def test_failures_start_over(bench: Bench) -> None:
    bench.put("t")
    for _ in range(4):
        bench.store.reject("q", bench.fence(), requeue=True, reason="no")
        bench.tick(10_000)
    assert list(bench.check().dead) == ["t"]
    bench.store.redrive("q", ["t"])
    assert bench.claim()[0].failures == 0


def test_what_is_not_dead_is_passed_over(bench: Bench) -> None:
    bench.put("ready")
    bench.put("late", delay=5)
    bench.mark()
    assert bench.store.redrive("q", ["ready", "late", "nobody"]) == 0
    assert bench.store.redrive("q", []) == 0
    assert bench.changes() == {}


def test_many_lanes(bench: Bench) -> None:
    tags = [f"t{i}" for i in range(20)]
    for i, tag in enumerate(tags):
        bury(bench, tag, f"lane{i % 3}")
    assert bench.store.redrive("q", tags) == 20
    assert len(bench.check().ring) == 3

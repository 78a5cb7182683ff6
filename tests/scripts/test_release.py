"""release: what was not started goes back to the place it had, and no failure is counted."""

from __future__ import annotations

import pytest

from tests.scripts.bench import DONE, GONE, STALE, T0, TURN, Bench, Fence, Record


def test_the_whole_state(bench: Bench) -> None:
    bench.put("t", priority=2)
    fence = bench.fence()
    bench.mark()
    assert bench.store.release(bench.queue, [fence]) == (DONE,)
    score = 2 * 2**49 + 1
    assert bench.state().message == {"t": Record("a", attempt=1, priority=2, score=score, born=T0, token=fence.token)}
    assert bench.changes() == {
        "flight:a/t": None,
        "leases/t": None,
        "queue/last": str(1 + TURN),
        "ready:a/t": score,
        "ring/a": 1 + 2 * TURN,
        "totals/released": 1,
        "wake": 1,
    }


def test_the_order_of_a_lane_is_kept(bench: Bench) -> None:
    bench.put("low", priority=7)
    bench.fill("a", 4)
    fences = [message.fence for message in bench.claim(4)]
    bench.put("new")
    assert bench.store.release(bench.queue, [fences[2], fences[0], fences[3]]) == (DONE,) * 3
    bench.check()
    again = bench.claim(16)
    assert [m.fence.tag for m in again] == ["a0", "a2", "a3", "new", "low"]
    assert [(m.fence.attempt, m.failures) for m in again[:3]] == [(2, 0)] * 3


def test_an_expired_lease_that_nobody_swept_is_still_held(bench: Bench) -> None:
    bench.put("t")
    fence = bench.fence(lease=1_000)
    bench.tick(5_000)
    assert bench.store.release(bench.queue, [fence]) == (DONE,)
    assert bench.claim()[0].failures == 0


def test_it_needs_a_live_lease(bench: Bench) -> None:
    bench.put("t")
    fence = bench.fence(lease=1_000)
    bench.tick(1_000)
    bench.store.expire(bench.queue)
    bench.mark()
    assert bench.store.release(bench.queue, [fence]) == (STALE,)
    assert bench.changes() == {}


@pytest.mark.parametrize("change", [{"attempt": 2}, {"token": "x"}])
def test_a_pair_that_is_not_current_changes_nothing(bench: Bench, change: dict[str, object]) -> None:
    bench.put("t")
    fence = bench.fence()._replace(**change)  # type: ignore[arg-type]
    bench.mark()
    assert bench.store.release(bench.queue, [fence, Fence("none", 1, "x")]) == (STALE, GONE)
    assert bench.changes() == {}


def test_a_running_slot_is_gone_and_kept(bench: Bench) -> None:
    bench.configure("a", limit=1)
    bench.put("t")
    fence = bench.fence()
    bench.ack(fence, keep_slot=True)
    bench.mark()
    assert bench.store.release(bench.queue, [fence]) == (GONE,)
    assert bench.changes() == {}


def test_nothing_to_release_asks_nobody(bench: Bench) -> None:
    assert bench.store.release(bench.queue, []) == ()


def test_a_released_claim_counts_as_served(bench: Bench) -> None:
    bench.fill("a", 6)
    bench.fill("b", 6)
    for _ in range(2):
        bench.store.release(bench.queue, [bench.fence()])
    bench.check()
    order = bench.lanes(4)
    assert order.count("a") == order.count("b") == 2


def test_a_lane_that_was_paused_meanwhile_stays_off_the_ring(bench: Bench) -> None:
    bench.put("t")
    fence = bench.fence()
    bench.configure("a", paused=1)
    assert bench.store.release(bench.queue, [fence]) == (DONE,)
    state = bench.check()
    assert (state.ready, state.ring, state.wake) == ({"a": {"t": 1}}, {}, [])

"""reject: a failure is counted and the message waits, or it becomes a dead letter."""

from __future__ import annotations

import itertools

import pytest

from fairlanes_transport.store import FailurePolicy
from tests.scripts.bench import DONE, GONE, STALE, T0, Bench, Fence, Record


def test_requeued_the_whole_state(bench: Bench) -> None:
    bench.put("t")
    fence = bench.fence()
    bench.mark()
    assert bench.store.reject(bench.queue, fence, requeue=True, reason="why") == DONE
    changes = bench.changes()
    wait = changes.pop("delayed/t") - T0
    assert 500 <= wait <= 1_000
    assert changes == {
        "flight:a/t": None,
        "lanes/a": None,
        "leases/t": None,
        "message/t": Record("a", attempt=1, failures=1, score=1, born=T0, token=fence.token),
        "totals/rejected": 1,
        "wake": 1,
    }


def test_buried_the_whole_state(bench: Bench) -> None:
    bench.put("t")
    fence = bench.fence()
    bench.mark()
    assert bench.store.reject(bench.queue, fence, requeue=False, reason="no such task\n✓") == DONE
    assert bench.changes() == {
        "dead/t": T0,
        "flight:a/t": None,
        "lanes/a": None,
        "leases/t": None,
        "reasons/t": "no such task\n✓",
        "totals/died": 1,
        "totals/rejected": 1,
    }
    assert bench.state().message["t"] == Record("a", attempt=1, score=1, born=T0, token=fence.token)


def test_backoff_grows_to_its_cap_then_the_message_dies(bench: Bench) -> None:
    bench.store.policy = FailurePolicy(backoff_base=1, backoff_factor=3, backoff_max=10, max_failures=6)
    bench.put("t")
    for n, full in enumerate([1_000, 3_000, 9_000, 10_000, 10_000], 1):
        (claimed,) = bench.claim()
        assert (claimed.failures, claimed.fence.attempt) == (n - 1, n)
        bench.store.reject(bench.queue, claimed.fence, requeue=True, reason=f"failure {n}")
        wait = bench.check().delayed["t"] - bench.now
        assert full / 2 <= wait <= full
        bench.tick(int(wait) - 1)
        assert bench.claim() == []
        bench.tick(1)
    bench.store.reject(bench.queue, bench.fence(), requeue=True, reason="failure 6")
    state = bench.check()
    assert (state.dead, state.reasons) == ({"t": bench.now}, {"t": "failure 6"})
    assert (state.message["t"].failures, state.wake) == (6, [])


def test_without_a_cap_it_never_dies(bench: Bench) -> None:
    bench.store.policy = FailurePolicy(max_failures=0, backoff_base=0.01, backoff_max=1)
    bench.put("t")
    for _ in range(60):
        bench.store.reject(bench.queue, bench.fence(), requeue=True, reason="x")
        bench.tick(1_000)
    assert bench.check().dead == {}
    assert bench.claim()[0].failures == 60


def test_without_a_backoff_it_comes_back_at_once_however_often_it_failed(bench: Bench) -> None:
    bench.store.policy = FailurePolicy(max_failures=0, backoff_base=0, backoff_factor=1000)
    bench.put("t")
    for _ in range(120):  # 1000 ^ 103 is infinite
        bench.store.reject(bench.queue, bench.fence(), requeue=True, reason="x")
    assert bench.check().delayed == {}


def test_what_comes_back_keeps_its_place(bench: Bench) -> None:
    bench.fill("a", 3)
    bench.store.reject(bench.queue, bench.fence(), requeue=True, reason="x")
    bench.put("new")
    bench.tick(1_000)
    assert bench.tags(16) == ["a0", "a1", "a2", "new"]


@pytest.mark.parametrize("requeue", [True, False])
@pytest.mark.parametrize("change", [{"attempt": 0}, {"attempt": 2}, {"token": "x"}])
def test_a_pair_that_is_not_current_changes_nothing(bench: Bench, change: dict[str, object], requeue: bool) -> None:
    bench.put("t")
    fence = bench.fence()._replace(**change)  # type: ignore[arg-type]
    bench.mark()
    assert bench.store.reject(bench.queue, fence, requeue=requeue, reason="x") == STALE
    assert bench.store.reject(bench.queue, Fence("none", 1, "x"), requeue=requeue, reason="x") == GONE
    assert bench.changes() == {}


@pytest.mark.parametrize("requeue", [True, False])
def test_it_needs_a_live_lease(bench: Bench, requeue: bool) -> None:
    bench.put("t")
    fence = bench.fence(lease=1_000)
    bench.tick(1_000)
    bench.store.expire(bench.queue)
    bench.mark()
    assert bench.store.reject(bench.queue, fence, requeue=requeue, reason="x") == STALE
    assert bench.changes() == {}


def test_a_dead_or_finished_one_cannot_be_rejected(bench: Bench) -> None:
    bench.fill("a", 2)
    dead, done = [message.fence for message in bench.claim(2)]
    bench.store.reject(bench.queue, dead, requeue=False, reason="x")
    bench.ack(done)
    bench.mark()
    for requeue in (True, False):
        assert bench.store.reject(bench.queue, dead, requeue=requeue, reason="y") == STALE
        assert bench.store.reject(bench.queue, done, requeue=requeue, reason="y") == GONE
    assert bench.changes() == {}


def test_the_place_in_flight_is_free_at_once(bench: Bench) -> None:
    bench.configure("a", limit=1)
    bench.fill("a", 2)
    bench.store.reject(bench.queue, bench.fence(), requeue=True, reason="x")
    assert bench.tags(16) == ["a1"]


def test_its_time_opens_the_keepers_role_if_it_is_sooner(bench: Bench) -> None:
    bench.put("far", delay=100_000)
    bench.put("t")
    fence = bench.fence()
    bench.turn(consumer="k", will_park=True)
    assert not bench.check().wake
    bench.store.reject(bench.queue, fence, requeue=True, reason="x")
    state = bench.check()
    assert ("keeper" in state.queue, len(state.wake)) == (False, 1)


# dead letters are bounded


def bury(bench: Bench, tag: str) -> None:
    bench.put(tag)
    bench.store.reject(bench.queue, bench.fence(), requeue=False, reason="x")


def test_no_more_dead_letters_than_their_number(bench: Bench) -> None:
    bench.store.policy = FailurePolicy(dead_letter_max=3)
    for i in range(5):
        bury(bench, f"t{i}")
        bench.tick(1)
    state = bench.check()
    assert (list(state.dead), state.totals["trimmed"], state.totals["died"]) == (["t2", "t3", "t4"], 2, 5)


def test_no_dead_letter_older_than_its_ttl(bench: Bench) -> None:
    bench.store.policy = FailurePolicy(dead_letter_ttl=10)
    bury(bench, "old")
    bench.tick(5_000)
    bury(bench, "newer")
    bench.tick(4_999)
    bench.store.expire(bench.queue)
    assert list(bench.check().dead) == ["old", "newer"]
    bench.tick(1)
    bench.claim()
    state = bench.check()
    assert (list(state.dead), state.totals.get("trimmed")) == (["newer"], 1)


def test_a_trim_takes_at_most_a_hundred(bench: Bench) -> None:
    for i in range(205):
        bury(bench, f"t{i:03}")
    bench.store.policy = FailurePolicy(dead_letter_max=2)
    lefts = []
    for _ in range(3):
        bench.store.expire(bench.queue)
        lefts.append(len(bench.check().dead))
    assert lefts == [105, 5, 2]
    bench.store.policy = FailurePolicy(dead_letter_max=0)
    bury(bench, "none is kept")
    assert bench.check().dead == {}


def test_what_fails_together_does_not_come_back_together(bench: Bench) -> None:
    bench.fill("a", 30)
    for fence in [message.fence for message in bench.claim(30, lease=1_000)]:
        bench.store.reject(bench.queue, fence, requeue=True, reason="x")
    times = sorted(bench.check().delayed.values())
    assert len(set(times)) > 20
    assert all(T0 + 500 <= t <= T0 + 1_000 for t in times)
    assert max(b - a for a, b in itertools.pairwise(times)) < 300


def test_a_reason_may_be_any_text(bench: Bench) -> None:
    """Of an exception that somebody else wrote: what is no UTF-8 is replaced, and what is long is cut."""
    bench.put("t")
    [message] = bench.claim()
    bench.store.reject(bench.queue, message.fence, requeue=False, reason="name \ud800" + "x" * 5000)
    assert bench.client.hget(bench.key("reasons"), "t") == b"name ?" + b"x" * 994

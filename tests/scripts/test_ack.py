"""ack: the holder of the current pair finishes its message; anybody else changes nothing."""

from __future__ import annotations

import pytest

from tests.scripts.bench import DONE, GONE, STALE, T0, TURN, Answer, Bench, Fence, Record


def test_the_whole_state(bench: Bench) -> None:
    bench.put("t")
    fence = bench.fence()
    bench.mark()
    turn = bench.ack_turn(fence)
    assert (turn.need, turn.due_in, turn.answers) == (False, None, (DONE,))
    assert bench.changes() == {
        "body/t": None,
        "envelope/t": None,
        "finished/t": True,
        "flight:a/t": None,
        "lanes/a": None,
        "leases/t": None,
        "message/t": None,
        "totals/acked": 1,
    }
    assert 290_000 < bench.state().ttl["finished"] <= 300_000


def test_nothing_of_a_lane_remains(bench: Bench) -> None:
    bench.put("t", "gone tenant")
    bench.ack(bench.fence())
    assert not [key for key in bench.client.scan_iter() if b"gone tenant" in key]
    assert set(bench.state().flat()) == {
        "finished/t", "queue/arrivals", "queue/last", "queue/vt", "totals/acked", "totals/claimed", "totals/enqueued",
        "totals/wait_le_50",
    }  # fmt: skip


def test_answers_come_in_order(bench: Bench) -> None:
    bench.fill("a", 3)
    one, two, three = [message.fence for message in bench.claim(3)]
    wrong = two._replace(token="x")
    assert bench.ack([one, wrong, Fence("none", 1, "x"), one, three]) == (DONE, STALE, GONE, GONE, DONE)
    assert list(bench.check().message) == ["a1"]


@pytest.mark.parametrize("change", [{"attempt": 2}, {"attempt": 0}, {"token": "x"}, {"token": ""}, {"token": "-"}])
def test_a_pair_that_is_not_current_changes_nothing(bench: Bench, change: dict[str, object]) -> None:
    bench.put("t")
    fence = bench.fence()
    bench.mark()
    assert bench.ack(fence._replace(**change)) == (STALE,)  # type: ignore[arg-type]
    assert bench.changes() == {}


def test_the_attempt_counts(bench: Bench) -> None:
    """A server that came back from an older copy may know the token, but not of the claim."""
    bench.put("t")
    fence = bench.fence()
    bench.mark()
    assert bench.ack(fence._replace(attempt=fence.attempt + 1)) == (STALE,)
    assert bench.changes() == {}


def test_a_message_that_was_never_claimed_cannot_be_acked(bench: Bench) -> None:
    bench.put("t")
    bench.mark()
    assert bench.ack([Fence("t", 0, "x"), Fence("t", 1, "-")]) == (STALE, STALE)
    assert bench.changes() == {}


def test_late_while_it_is_ready_again_counts(bench: Bench) -> None:
    bench.put("t")
    fence = bench.fence(lease=1_000)
    bench.tick(1_000)
    bench.store.expire(bench.queue)
    assert bench.check().ready == {"a": {"t": 1}}
    assert bench.ack(fence) == (DONE,)
    state = bench.check()
    assert (state.message, state.ring, state.wake, state.totals["acked"]) == ({}, {}, [], 1)


def test_late_while_it_waits_out_its_backoff_counts(bench: Bench) -> None:
    bench.put("t")
    for _ in range(2):
        fence = bench.fence(lease=1_000)
        bench.tick(1_000)
    bench.store.expire(bench.queue)
    assert list(bench.check().delayed) == ["t"]
    assert bench.ack(fence) == (DONE,)
    state = bench.check()
    assert (state.message, state.delayed, state.wake) == ({}, {}, [])


def test_late_before_any_sweep_counts(bench: Bench) -> None:
    bench.put("t")
    fence = bench.fence(lease=1_000)
    bench.tick(50_000)
    assert bench.ack(fence) == (DONE,)
    assert bench.check().message == {}


def test_late_after_another_claim_is_stale(bench: Bench) -> None:
    bench.put("t")
    fence = bench.fence(lease=1_000)
    bench.tick(1_000)
    bench.claim()
    bench.mark()
    assert bench.ack(fence) == (STALE,)
    assert bench.changes() == {}


def test_a_dead_message_cannot_be_acked(bench: Bench) -> None:
    bench.put("t")
    fence = bench.fence()
    bench.store.reject(bench.queue, fence, requeue=False, reason="x")
    bench.mark()
    assert bench.ack(fence) == (STALE,)
    assert bench.changes() == {}


def test_a_lane_at_its_limit_returns_to_the_ring(bench: Bench) -> None:
    bench.configure("a", limit=1, weight=4)
    bench.fill("a", 2)
    fence = bench.fence()
    assert bench.check().ring == {}
    bench.mark()
    assert bench.ack_turn(fence).need
    changes = bench.changes()
    assert (changes["ring/a"], changes["wake"]) == (1 + TURN // 2, 1)


# running slots


def test_a_running_slot_keeps_its_place_and_drops_the_payload(bench: Bench) -> None:
    bench.configure("a", limit=1)
    bench.fill("a", 2)
    fence = bench.fence()
    bench.mark()
    assert bench.ack(fence, keep_slot=True) == (Answer.SLOT,)
    assert bench.changes() == {
        "body/a0": None,
        "envelope/a0": None,
        "finished/a0": True,
        "message/a0": Record("a", attempt=1, score=1, born=T0, slot=True, token=fence.token),
        "totals/acked": 1,
    }
    assert bench.tags(16) == []
    bench.mark()
    # The reply may have been lost, and the ack be sent again.
    assert bench.ack([fence, fence], keep_slot=True) == (Answer.SLOT, Answer.SLOT)
    assert bench.ack([fence._replace(attempt=2), fence._replace(token="x")], keep_slot=True) == (GONE, GONE)
    assert bench.changes() == {}


def test_an_ack_that_is_sent_again_after_the_end_frees_the_slot(bench: Bench) -> None:
    bench.configure("a", limit=1)
    bench.fill("a", 2)
    fence = bench.fence()
    bench.ack(fence, keep_slot=True)
    assert bench.ack(fence) == (DONE,)
    assert bench.ack(fence) == (GONE,)
    assert bench.check().totals["acked"] == 1
    assert bench.fence().tag == "a1"


def test_an_ack_by_somebody_else_frees_no_slot(bench: Bench) -> None:
    bench.configure("a", limit=1)
    bench.put("t")
    fence = bench.fence()
    bench.ack(fence, keep_slot=True)
    assert bench.ack(fence._replace(token="forged")) == (GONE,)
    assert bench.check().running_slots() == {"t"}


def test_a_lane_without_bounds_needs_no_slot(bench: Bench) -> None:
    bench.put("t")
    bench.ack(bench.fence(), keep_slot=True)
    assert bench.check().message == {}


def test_a_late_ack_makes_no_slot(bench: Bench) -> None:
    bench.configure("a", limit=1)
    bench.put("t")
    fence = bench.fence(lease=1_000)
    bench.tick(1_000)
    bench.store.expire(bench.queue)
    assert bench.ack(fence, keep_slot=True) == (DONE,)
    assert bench.check().message == {}


# the wake protocol


def test_the_last_ack_before_a_park_takes_the_keepers_role(bench: Bench) -> None:
    bench.put("t")
    fence = bench.fence(consumer="k")
    bench.put("later", delay=4_000)
    turn = bench.ack_turn(fence, consumer="k", will_park=True)
    assert (turn.need, turn.due_in) == (False, 4_000)
    assert not bench.check().wake


def test_an_ack_with_work_ahead_leaves_the_role(bench: Bench) -> None:
    bench.put("later", delay=4_000)
    bench.turn(consumer="k", will_park=True)
    bench.fill("a", 2)
    fence = bench.fence()
    turn = bench.ack_turn(fence, consumer="k", will_park=True)
    assert (turn.need, turn.due_in) == (True, None)
    assert "keeper" not in bench.check().queue


def finished(bench: Bench, tag: str) -> None:
    bench.put(tag)
    assert bench.ack(bench.fence()) == (DONE,)


def test_ten_thousand_acks_later_a_publish_is_still_known(bench: Bench) -> None:
    """By time, and not by number: the same publish again, two seconds later."""
    finished(bench, "t")
    bench.client.sadd(bench.key("finished"), *(f"other{i}" for i in range(10_000)))
    bench.tick(1_700)
    finished(bench, "u")
    assert not bench.put("t")


def test_what_was_finished_is_known_for_five_minutes(bench: Bench) -> None:
    finished(bench, "t")
    bench.tick(299_999)
    finished(bench, "u")
    bench.tick(299_999)
    finished(bench, "v")
    assert not bench.put("u")
    assert 290_000 < bench.state().ttl["previous"] <= 300_000


def test_what_is_remembered_is_bounded(bench: Bench) -> None:
    finished(bench, "t")
    for start in range(0, 100_000, 10_000):
        bench.client.sadd(bench.key("finished"), *(f"other{i}" for i in range(start, start + 10_000)))
    finished(bench, "u")
    assert bench.client.scard(bench.key("finished")) == 1
    assert bench.client.scard(bench.key("previous")) == 100_001
    assert not bench.put("t")

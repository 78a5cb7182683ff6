"""extend: who still holds a lease, or a running slot, holds it longer."""

from __future__ import annotations

import pytest

from tests.scripts.bench import DONE, GONE, STALE, Bench, Fence


def test_the_whole_state(bench: Bench) -> None:
    bench.fill("a", 2)
    one, two = [message.fence for message in bench.claim(2, lease=1_000)]
    bench.mark()
    bench.tick(400)
    assert bench.store.extend(bench.queue, [one], 1_000) == (DONE,)
    assert bench.changes() == {"leases/a0": bench.now + 1_000}
    bench.tick(600)
    bench.store.expire(bench.queue)
    assert list(bench.check().leases) == ["a0"]
    assert two.tag in bench.state().ready["a"]


def test_answers_come_in_order(bench: Bench) -> None:
    bench.fill("a", 2)
    one, two = [message.fence for message in bench.claim(2)]
    asked = [two._replace(token="x"), Fence("none", 1, "x"), one, two._replace(attempt=7)]
    bench.mark()
    assert bench.store.extend(bench.queue, asked, 7_200_000) == (STALE, GONE, DONE, STALE)
    assert list(bench.changes()) == ["leases/a0"]
    assert bench.store.extend(bench.queue, [], 1) == ()


def test_an_expired_lease_that_nobody_swept_is_still_held(bench: Bench) -> None:
    bench.put("t")
    fence = bench.fence(lease=1_000)
    bench.tick(9_000)
    assert bench.store.extend(bench.queue, [fence], 1_000) == (DONE,)
    assert bench.store.expire(bench.queue) == (0, 0)


@pytest.mark.parametrize("again", [False, True])
def test_a_lost_lease_is_not_extended(bench: Bench, again: bool) -> None:
    bench.put("t")
    fence = bench.fence(lease=1_000)
    bench.tick(1_000)
    bench.store.expire(bench.queue)
    if again:
        bench.claim()
    bench.mark()
    assert bench.store.extend(bench.queue, [fence], 1_000) == (STALE,)
    assert bench.changes() == {}


def test_an_acked_message_is_gone(bench: Bench) -> None:
    bench.put("t")
    fence = bench.fence()
    bench.ack(fence)
    bench.mark()
    assert bench.store.extend(bench.queue, [fence], 1_000) == (GONE,)
    assert bench.changes() == {}


def test_a_running_slot_is_extended_by_its_holder_only(bench: Bench) -> None:
    bench.configure("a", limit=1)
    bench.put("t")
    fence = bench.fence(lease=1_000)
    bench.ack(fence, keep_slot=True)
    bench.mark()
    wrong = [fence._replace(token="x"), fence._replace(attempt=2)]
    assert bench.store.extend(bench.queue, wrong, 5_000) == (GONE, GONE)
    assert bench.changes() == {}
    assert bench.store.extend(bench.queue, [fence], 5_000) == (DONE,)
    assert bench.changes() == {"leases/t": bench.now + 5_000}

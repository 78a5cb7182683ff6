"""finish: a task that was acked early has ended; its running slot is free."""

from __future__ import annotations

import pytest

from tests.scripts.bench import TURN, Bench, Fence


def make_slot(bench: Bench) -> Fence:
    """A running slot of a lane with limit 1."""
    bench.configure("a", limit=1)
    bench.put("t")
    fence = bench.fence(lease=1_000)
    bench.ack(fence, keep_slot=True)
    return fence


@pytest.fixture
def slot(bench: Bench) -> Fence:
    """A running slot."""
    return make_slot(bench)


def test_another_token_frees_nothing(bench: Bench) -> None:
    slot = make_slot(bench)
    bench.mark()
    bench.store.finish(bench.queue, [slot._replace(token="x")])
    assert bench.changes() == {}


def test_the_whole_state(bench: Bench, slot: Fence) -> None:
    bench.mark()
    assert not bench.store.finish(bench.queue, [slot])
    assert bench.changes() == {"flight:a/t": None, "lanes/a": None, "leases/t": None, "message/t": None}


def test_the_next_one_may_start(bench: Bench, slot: Fence) -> None:
    bench.put("u")
    assert not bench.check().ring
    bench.mark()
    assert bench.store.finish(bench.queue, [slot])
    changes = bench.changes()
    assert (changes["ring/a"], changes["wake"]) == (1 + 2 * TURN, 1)


@pytest.mark.parametrize("change", [{"attempt": 2}, {"tag": "none"}])
def test_only_its_holder_frees_it(bench: Bench, slot: Fence, change: dict[str, object]) -> None:
    bench.mark()
    bench.store.finish(bench.queue, [slot._replace(**change)])  # type: ignore[arg-type]
    assert bench.changes() == {}


def test_twice_is_once(bench: Bench, slot: Fence) -> None:
    bench.store.finish(bench.queue, [slot, slot])
    bench.mark()
    bench.store.finish(bench.queue, [slot])
    assert bench.changes() == {}


def test_a_message_that_was_not_acked_is_left_alone(bench: Bench) -> None:
    bench.put("t")
    fence = bench.fence()
    bench.mark()
    bench.store.finish(bench.queue, [fence])
    assert bench.changes() == {}


def test_a_slot_that_expires_is_freed_and_nothing_is_redelivered(bench: Bench, slot: Fence) -> None:
    bench.put("u")
    bench.tick(1_000)
    bench.mark()
    assert bench.tags(16) == ["u"]
    state = bench.check()
    assert (list(state.message), state.delayed, state.totals["freed"]) == (["u"], {}, 1)
    assert "expired" not in state.totals
    bench.mark()
    bench.store.finish(bench.queue, [slot])
    assert bench.changes() == {}

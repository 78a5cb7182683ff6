"""pause: no claims from the queue, and no need, until it is resumed."""

from __future__ import annotations

from tests.scripts.bench import Bench


def test_the_whole_state(bench: Bench) -> None:
    bench.put("t")
    bench.mark()
    assert not bench.store.pause("q")
    assert bench.changes() == {"queue/paused": "1", "wake": None}
    assert bench.turn(consumer="c", will_park=True).claimed == ()
    assert bench.store.pause("q", paused=False)
    assert bench.changes() == {}
    assert bench.tags() == ["t"]


def test_what_arrives_in_a_pause_waits(bench: Bench) -> None:
    bench.store.declare("q")
    bench.store.pause("q")
    bench.put("t")
    bench.put("u", delay=100)
    assert bench.check().wake == []
    assert bench.store.pause("q", paused=False)
    assert len(bench.check().wake) == 1


def test_twice_is_once(bench: Bench) -> None:
    bench.put("t")
    bench.store.pause("q")
    bench.mark()
    bench.store.pause("q")
    assert bench.changes() == {}


def test_what_is_leased_can_be_finished(bench: Bench) -> None:
    bench.put("t")
    fence = bench.fence()
    bench.store.pause("q")
    assert bench.ack(fence) == (1,)
    bench.check()

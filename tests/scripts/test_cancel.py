"""cancel: ready and delayed messages go; what somebody holds stays."""

from __future__ import annotations

from tests.scripts.bench import Bench
from tests.scripts.test_redrive import bury


def test_the_whole_state_of_a_ready_one(bench: Bench) -> None:
    bench.put("t")
    bench.mark()
    assert bench.store.cancel("q", ["t"]) == (True,)
    assert bench.changes() == {
        "body/t": None, "envelope/t": None, "lanes/a": None, "message/t": None, "ready:a/t": None,
        "ring/a": None, "totals/cancelled": 1, "wake": None,
    }  # fmt: skip


def test_a_delayed_one(bench: Bench) -> None:
    bench.put("t", delay=1_000)
    assert bench.store.cancel("q", ["t"]) == (True,)
    state = bench.check()
    assert (state.message, state.delayed, state.wake) == ({}, {}, [])


def test_leased_dead_and_unknown_ones_are_left(bench: Bench) -> None:
    bury(bench, "dead")
    bench.put("leased")
    fence = bench.fence()
    bench.put("ready")
    answers = bench.store.cancel("q", ["dead", "leased", "nobody", "ready", "ready"])
    assert answers == (False, False, None, True, None)
    assert bench.ack(fence) == (1,)
    assert list(bench.check().message) == ["dead"]
    assert bench.store.cancel("q", []) == ()

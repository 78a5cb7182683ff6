"""throttle: a lane off the ring for a while."""

from __future__ import annotations

import pytest

from fairlanes_transport.errors import ScriptError
from tests.scripts.bench import T0, TURN, Bench


def test_the_whole_state(bench: Bench) -> None:
    bench.put("t")
    bench.mark()
    assert bench.store.throttle("q", "a", 5_000) == 5_000
    # Nobody keeps the time: that is need, and the token stays.
    assert bench.changes() == {
        "kept/a": f"0 {1 + TURN} 1", "ring/a": None, "throttle:a": T0 + 5_000,
        "throttled/a": T0 + 5_000, "waiting/a": T0 + 5_000,
    }  # fmt: skip
    assert bench.check().ttl["throttle:a"] <= 5_000


def test_it_ends(bench: Bench) -> None:
    bench.put("t")
    bench.put("u", "b")
    bench.store.throttle("q", "a", 5_000)
    assert bench.tags(2) == ["u"]
    turn = bench.turn(consumer="c", will_park=True)
    assert (turn.need, turn.due_in) == (False, 5_000)
    bench.tick(5_000)
    assert bench.tags() == ["t"]


def test_it_never_shortens_unless_told(bench: Bench) -> None:
    bench.put("t")
    bench.store.throttle("q", "a", 5_000)
    bench.tick(1_000)
    assert bench.store.throttle("q", "a", 2_000) == 4_000
    assert bench.store.throttle("q", "a", 6_000) == 6_000
    assert bench.store.throttle("q", "a", 2_000, shorten=True) == 2_000
    assert bench.check().waiting == {"a": T0 + 3_000}


def test_zero_ends_it_when_told(bench: Bench) -> None:
    bench.put("t")
    bench.store.throttle("q", "a", 5_000)
    assert bench.store.throttle("q", "a", 0) == 5_000
    assert bench.store.throttle("q", "a", 0, shorten=True) == 0
    state = bench.check()
    assert (state.throttle, set(state.ring), len(state.wake)) == ({}, {"a"}, 1)


def test_an_earlier_end_opens_the_keeper_s_role(bench: Bench) -> None:
    bench.put("t", delay=60_000)
    assert bench.turn(consumer="k", will_park=True).due_in == 60_000
    bench.put("u")
    bench.store.throttle("q", "a", 1_000)
    assert "keeper" not in bench.check().queue


def test_an_empty_lane_keeps_only_what_ends_by_itself(bench: Bench) -> None:
    bench.store.declare("q")
    bench.store.throttle("q", "a", 5_000)
    state = bench.check()
    assert (state.waiting, state.lanes, list(state.throttle)) == ({}, {}, ["a"])
    bench.put("t")
    assert bench.tags() == []
    bench.check()


@pytest.mark.parametrize("period", [-1, "soon", "nan", 1e300])
def test_a_bad_period_changes_nothing(bench: Bench, period: object) -> None:
    bench.put("t")
    bench.mark()
    with pytest.raises(ScriptError, match="FLARG"):
        bench.store.throttle("q", "a", period)  # type: ignore[arg-type]
    assert bench.changes() == {}

"""reschedule: delayed messages get another due time."""

from __future__ import annotations

from tests.scripts.bench import T0, Bench


def test_the_whole_state(bench: Bench) -> None:
    bench.put("t", delay=1_000)
    bench.mark()
    assert bench.store.reschedule("q", [("t", T0 + 9_000)]) == 1
    assert bench.changes() == {"delayed/t": T0 + 9_000}


def test_at_once_in_the_order_given(bench: Bench) -> None:
    for tag in "abc":
        bench.put(tag, delay=1_000)
    assert bench.store.reschedule("q", [("b", 0), ("c", T0), ("a", 0)]) == 3
    bench.check()
    assert bench.tags(3) == ["b", "c", "a"]


def test_an_earlier_time_opens_the_keeper_s_role(bench: Bench) -> None:
    bench.put("t", delay=60_000)
    assert bench.turn(consumer="k", will_park=True).due_in == 60_000
    bench.store.reschedule("q", [("t", T0 + 1_000)])
    state = bench.check()
    assert "keeper" not in state.queue
    assert len(state.wake) == 1


def test_what_is_not_delayed_is_passed_over(bench: Bench) -> None:
    bench.put("ready")
    bench.mark()
    assert bench.store.reschedule("q", [("ready", T0 + 5), ("nobody", 0)]) == 0
    assert bench.store.reschedule("q", []) == 0
    assert bench.changes() == {}

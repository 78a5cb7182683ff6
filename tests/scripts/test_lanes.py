"""lanes: what lanes look like, all at one moment; nothing is changed."""

from __future__ import annotations

from fairlanes_transport.lanes.replies import lane_stats
from fairlanes_transport.lanes.views import LaneStats, Settings
from tests.scripts.bench import T0, Bench


def look(bench: Bench, *lanes: str) -> list[LaneStats]:
    """The lanes, typed; asserts that looking changes nothing."""
    bench.mark()
    now, seen = bench.store.lanes("q", lanes)
    assert bench.changes() == {}
    return [lane_stats(lane, now, one) for lane, one in zip(lanes, seen, strict=True)]


def test_an_unknown_lane(bench: Bench) -> None:
    (lane,) = look(bench, "nobody")
    assert lane == LaneStats(
        "nobody", ready=0, in_flight=0, weight=1, limit=None, rate=None, burst=1, max_size=None, paused=False,
        blocked_until=None, on_ring=False, oldest_wait=None, own=Settings(),
    )  # fmt: skip
    assert lane.state == "idle"


def test_settings_in_force_and_own(bench: Bench) -> None:
    bench.store.declare("q", weight=2, limit=5, rate="100/60000", max_size=9)
    bench.store.configure("q", "a", weight=3, limit="none", rate="7/5000", burst=4, paused=True)
    a, b = look(bench, "a", "b")
    assert (a.weight, a.limit, a.rate, a.burst, a.max_size, a.paused) == (3, None, "1.4/s", 4, 9, True)
    assert a.own == Settings(weight=3, limit=0, rate="1.4/s", burst=4, paused=True)
    assert (b.weight, b.limit, b.rate, b.max_size, b.paused, b.own) == (2, 5, "100/m", 9, False, Settings())


def test_states(bench: Bench) -> None:
    for lane in ("ready", "paused", "full", "throttled", "rated"):
        bench.fill(lane, 3)
    bench.store.configure("q", "rated", rate="1/10000")
    bench.store.configure("q", "full", limit=1)
    bench.claim(5)
    bench.store.configure("q", "paused", paused=True)
    bench.store.throttle("q", "throttled", 2_000)
    bench.tick(500)
    seen = look(bench, "ready", "paused", "full", "throttled", "rated")
    assert [lane.state for lane in seen] == ["ready", "paused", "limit", "blocked", "blocked"]
    assert [lane.on_ring for lane in seen] == [True, False, False, False, False]
    assert [(lane.ready, lane.in_flight) for lane in seen] == [(2, 1)] * 5
    assert [lane.blocked_until for lane in seen[3:]] == [T0 / 1000 + 2, T0 / 1000 + 10]
    assert {lane.oldest_wait for lane in seen} == {0.5}


def test_the_wait_of_a_message_with_an_eta_begins_at_its_eta(bench: Bench) -> None:
    # 2023-11-14T22:13:30 is 10 s after T0.
    envelope = '{"headers": {"eta": "2023-11-14T22:13:30+00:00"}}'
    bench.store.enqueue("q", "t", "a", envelope, b"", due_ms=T0 + 10_000)
    bench.tick(12_000)
    bench.store.expire("q")
    assert look(bench, "a")[0].oldest_wait == 2.0


def test_the_last_tag_is_the_one_served_last(bench: Bench) -> None:
    bench.put("first")
    bench.put("last", priority=9)
    bench.put("second")
    assert look(bench, "a")[0].last_tag == "last"

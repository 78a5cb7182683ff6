"""configure: an operator's settings of one lane, in force at once."""

from __future__ import annotations

from collections import Counter

import pytest

from fairlanes_transport.bounds import YEAR_SECONDS
from fairlanes_transport.errors import LaneFull, ScriptError
from tests.scripts.bench import TURN, Bench


def test_before_the_first_message(bench: Bench) -> None:
    bench.mark()
    assert bench.store.configure("q", "a", weight=3, limit=10, rate="100/60000", burst=2, max_size=5) == 5
    assert bench.changes() == {
        "configured/a": 0.0,
        "settings:a/burst": "2",
        "settings:a/limit": "10",
        "settings:a/max_size": "5",
        "settings:a/rate": "100/60000",
        "settings:a/weight": "3",
    }


def test_settings_outlive_the_lane_s_messages(bench: Bench) -> None:
    bench.store.configure("q", "a", weight=3)
    bench.put("t")
    bench.ack(bench.fence())
    assert bench.check().settings == {"a": {"weight": "3"}}


def test_unset_of_everything_leaves_nothing(bench: Bench) -> None:
    bench.store.configure("q", "a", weight=3, paused=True)
    assert bench.store.configure("q", "a", weight=None) == 1
    assert bench.store.configure("q", "a", paused=False) == 0
    state = bench.check()
    assert (state.settings, state.configured) == ({}, {})


@pytest.mark.parametrize(
    "settings",
    [
        {"weight": 0}, {"weight": "0.0009"}, {"weight": 1000.1}, {"weight": "none"}, {"weight": "nan"},
        {"weight": "heavy"}, {"limit": 0}, {"limit": 1.5}, {"limit": "inf"}, {"rate": "100"},
        {"rate": "0/1000"}, {"rate": "5/0"}, {"burst": 0}, {"burst": "none"}, {"max_size": -1},
        {"paused": "yes"}, {"wieght": 1}, {"fairness": "time"}, {"rate": "0.0001/3600000"}, {"rate": "1001/1"},
        {"burst": 2_000_000}, {"limit": 2_000_000_000},
        {"weight": 2, "limit": "many"},
    ],
)  # fmt: skip
def test_a_bad_value_changes_nothing(bench: Bench, settings: dict[str, object]) -> None:
    bench.store.configure("q", "a", weight=4)
    bench.mark()
    with pytest.raises(ScriptError, match="FLARG"):
        bench.store.configure("q", "a", **settings)
    assert bench.changes() == {}


def test_a_weight_change_moves_a_waiting_lane_at_once(bench: Bench) -> None:
    bench.fill("a", 2)
    bench.mark()
    bench.store.configure("q", "a", weight=4)
    changed = bench.changes()
    assert float(changed.pop("ring/a")) == 1 + TURN // 4
    assert changed == {
        "configured/a": 0.0, "queue/own_lanes": "1", "queue/own_weight": "4000", "settings:a/weight": "4",
    }  # fmt: skip


def test_weights_set_in_the_backlog_act_on_the_next_claim(bench: Bench) -> None:
    for lane in "abc":
        bench.fill(lane, 60)
    bench.lanes(9)
    for lane, weight in {"a": 3, "b": 1, "c": 2}.items():
        bench.store.configure("q", lane, weight=weight)
    served: Counter[str] = Counter()
    for n in range(1, 61):
        served.update(bench.lanes())
        shares = [served["a"] / 3, served["b"], served["c"] / 2]
        assert max(shares) - min(shares) <= 1, (n, served)
    assert served == {"a": 30, "b": 10, "c": 20}


def test_a_limit_takes_a_lane_off_the_ring_and_unset_brings_it_back(bench: Bench) -> None:
    bench.fill("a", 3)
    bench.claim()
    bench.store.configure("q", "a", limit=1)
    assert bench.check().ring == {}
    bench.store.configure("q", "a", limit=None)
    assert set(bench.check().ring) == {"a"}
    assert len(bench.check().wake) == 1


def test_none_lifts_the_queue_s_default(bench: Bench) -> None:
    bench.store.declare("q", limit=1, max_size=2, rate="1/1000000")
    bench.store.configure("q", "a", limit="none", max_size="none", rate="none")
    bench.fill("a", 3)
    assert len(bench.claim(3)) == 3
    bench.fill("b", 2)
    with pytest.raises(LaneFull):
        bench.put("b3", "b")
    assert len(bench.claim(3)) == 1
    bench.check()


def test_pause_and_resume_a_lane(bench: Bench) -> None:
    bench.put("t")
    bench.store.configure("q", "a", paused=True)
    state = bench.check()
    assert (state.ring, state.wake) == ({}, [])
    assert bench.tags() == []
    bench.store.configure("q", "a", paused=None)
    assert len(bench.check().wake) == 1
    assert bench.tags() == ["t"]


def test_a_slower_rate_gives_no_start_back(bench: Bench) -> None:
    bench.store.configure("q", "a", rate="10/1000", burst=1)
    bench.fill("a", 5)
    assert len(bench.claim(5)) == 1
    bench.store.configure("q", "a", rate="1/60000")
    assert bench.claim(5) == []
    bench.tick(59_000)
    assert bench.claim(5) == []
    bench.tick(1_100)
    assert len(bench.claim(5)) == 1
    bench.check()


def test_the_slowest_rate_with_the_largest_burst_can_be_changed(bench: Bench) -> None:
    slowest = f"1/{YEAR_SECONDS * 1000}"
    bench.store.configure("q", "a", rate=slowest, burst=2)
    bench.put("t")
    assert bench.tags() == ["t"]
    bench.store.configure("q", "a", burst=1_000_000)
    bench.check()


def test_without_a_rate_nothing_of_it_remains(bench: Bench) -> None:
    bench.store.configure("q", "a", rate="1/1000")
    bench.fill("a", 2)
    bench.claim(2)
    assert bench.check().waiting
    bench.store.configure("q", "a", rate=None)
    state = bench.check()
    assert (state.allowed, state.waiting, set(state.ring)) == ({}, {}, {"a"})


def test_a_lane_s_name_may_hold_anything(bench: Bench) -> None:
    lane = "a b:{c} é'\"\n%"
    bench.store.configure("q", lane, weight=2)
    bench.put("t", lane)
    assert bench.check().settings == {lane: {"weight": "2"}}

"""The ring's promises: what nobody gains or loses, whatever a lane is like and however it leaves."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from tests.invariants import CIRCLE, LEAD
from tests.scripts.bench import TURN, Bench

LONG = 3_600_000

# K2: a lane whose messages cost 100 beside one whose messages cost 1


def serve_one(bench: Bench) -> str:
    """Claim and acknowledge one message; time passes until there is one."""
    while not (claimed := bench.claim(1, LONG)):
        waiting = bench.state().waiting
        bench.tick(max(1, int(min(waiting.values())) - bench.now))
    bench.ack(claimed[0].fence)
    return claimed[0].lane


@pytest.mark.parametrize("mode", ["stays", "limit", "rate", "singly", "paused"])
def test_a_dear_lane_gets_the_same_however_it_leaves(bench: Bench, mode: str) -> None:
    settings = {"limit": {"limit": 1}, "rate": {"rate": "1000/1"}}.get(mode)
    if settings:
        bench.store.configure("q", "x", **settings)
    for i in range(1 if mode == "singly" else 20):
        bench.put(f"x{i}", "x", cost=100)
    bench.fill("b", 210)
    served: Counter[str] = Counter()
    for i in range(200):
        lane = serve_one(bench)
        served[lane] += 1
        if mode == "singly" and lane == "x":
            bench.put(f"again{i}", "x", cost=100)
        if mode == "paused":
            bench.store.configure("q", "x", paused=True)
            bench.store.configure("q", "x", paused=None)
    assert 1 <= served["x"] <= 2, served
    bench.check()


@pytest.mark.parametrize("order", ["reversed", "shuffled"])
def test_who_comes_first_is_served_first_whatever_the_names(bench: Bench, order: str) -> None:
    names = [f"l{n:03}" for n in range(101)]
    names.reverse() if order == "reversed" else random.Random(7).shuffle(names)
    for lane in names:
        bench.put(f"{lane}-0", lane)
    assert bench.lanes(1, lease=LONG) == names[:1]
    bench.put("again", names[0])
    bench.put("late", "a")  # the first of all names, the last to come
    served: list[str] = []
    while (lane := bench.lanes(1, lease=LONG)[0]) != "a":
        served.append(lane)
        bench.put(f"{lane}-{len(served)}", lane)
    assert (len(served), max(Counter(served).values())) == (101, 1)
    assert served == [*names[1:], names[0]]


def test_the_longest_way_does_not_spoil_the_order_of_others(bench: Bench) -> None:
    """A weight of 0.001 with messages of cost 1,000: a million turns each."""
    bench.store.configure("q", "slow", weight=0.001)
    for i in range(60):
        bench.put(f"s{i}", "slow", cost=1000)
    bench.claim(59, LONG)
    bench.store.configure("q", "big", weight=1000)
    bench.fill("big", 2_020)
    bench.fill("one", 5)
    assert Counter(bench.lanes(2_002, lease=LONG)) == {"big": 2_000, "one": 2}
    bench.check()


# every lane of the circle


@pytest.fixture
def at_the_end(bench: Bench) -> Bench:
    """A queue whose virtual time is ten ticks before it goes round."""
    bench.client.hset(bench.key("queue"), mapping={"vt": CIRCLE - 10, "last": CIRCLE - 10})
    return bench


def test_the_order_goes_round(at_the_end: Bench) -> None:
    bench = at_the_end
    bench.store.configure("q", "fast", weight=1000)
    bench.store.configure("q", "slow", weight=0.001)
    for lane, n in (("slow", 2), ("a", 20), ("fast", 900), ("b", 20)):
        bench.fill(lane, n)
    state = bench.check()
    assert all(tag < LEAD for tag in state.ring.values())
    served = Counter(bench.lanes(600, lease=LONG))
    assert served["a"] == served["b"] == 1 or abs(served["a"] - served["b"]) <= 1
    assert served["slow"] == 0
    state = bench.check()
    assert state.queue["lap"] == "1"
    assert int(state.queue["vt"]) < 2 * TURN


def test_a_lane_before_the_end_comes_first(at_the_end: Bench) -> None:
    bench = at_the_end
    bench.fill("next_round", 2)
    bench.put("t", "this_round")
    bench.client.zadd(bench.key("ring"), {"this_round": CIRCLE - 5})
    assert bench.lanes(3, lease=LONG) == ["this_round", "next_round", "next_round"]
    bench.check()


def test_a_place_is_kept_over_the_end(at_the_end: Bench) -> None:
    bench = at_the_end
    bench.fill("b", 40)
    for i in range(3):
        bench.put(f"x{i}", "x", cost=10)
    bench.store.configure("q", "x", paused=True)
    assert bench.state().kept["x"].split()[0] == "1"
    assert set(bench.lanes(5, lease=LONG)) == {"b"}
    bench.store.configure("q", "x", paused=None)
    assert Counter(bench.lanes(15, lease=LONG)) == {"b": 14, "x": 1}
    bench.check()


def test_a_weight_is_stretched_over_the_end(at_the_end: Bench) -> None:
    bench = at_the_end
    bench.fill("a", 3)
    bench.store.configure("q", "a", weight=4)
    assert bench.check().ring == {"a": (CIRCLE - 10 + 1 + TURN // 4) % CIRCLE}
    bench.store.configure("q", "a", weight=0.5)
    assert (bench.check().ring["a"] - (CIRCLE - 10)) % CIRCLE == 2 * TURN + 8


def test_time_is_trued_up_over_the_end(at_the_end: Bench) -> None:
    bench = at_the_end
    bench.store.declare("q", fairness="time")
    bench.fill("a", 3)
    bench.fill("b", 3)
    first, second = bench.claim(2, LONG)
    before = bench.state().ring["a"]
    bench.ack(first.fence, spent_ms={first.fence: 5_000})
    after = bench.check().ring["a"]
    assert (after - before) % CIRCLE == 4 * TURN
    bench.ack(second.fence, spent_ms={second.fence: 1_000})
    assert bench.lanes(4, lease=LONG)[:2] == ["b", "b"]


# what is kept, and when it ends


def leave_by_pause(bench: Bench) -> None:
    bench.store.configure("q", "x", paused=True)


def leave_by_throttle(bench: Bench) -> None:
    bench.store.throttle("q", "x", 60_000)


LEAVES: list[Callable[[Bench], Any]] = [leave_by_pause, leave_by_throttle]


@pytest.mark.parametrize("leave", LEAVES)
@pytest.mark.parametrize("empty", ["purge", "cancel"])
def test_nothing_is_kept_of_an_empty_lane(bench: Bench, leave: Callable[[Bench], Any], empty: str) -> None:
    bench.fill("x", 2, cost=3)
    leave(bench)
    assert bench.check().kept
    bench.store.purge("q", "x") if empty == "purge" else bench.store.cancel("q", ["x0", "x1"])
    state = bench.check()
    assert (state.kept, state.reserved) == ({}, {})


def test_a_place_is_kept_after_an_expired_lease(bench: Bench) -> None:
    bench.store.configure("q", "x", limit=1)
    bench.fill("x", 3, cost=7)
    bench.fill("b", 30)
    while "x" not in bench.lanes(1, lease=1_000):
        pass
    place = bench.check().kept["x"].split()
    bench.tick(1_000)
    bench.store.expire("q")
    assert bench.check().ring["x"] == int(place[1])


def test_a_deleted_queue_leaves_nothing(bench: Bench) -> None:
    bench.fill("x", 2, cost=3)
    bench.fill("y", 2, cost=3)
    leave_by_pause(bench)
    assert bench.store.delete("q")
    assert bench.client.dbsize() == 0


def test_tenants_of_one_message_leave_no_key(bench: Bench) -> None:
    for n in range(3_000):
        bench.put(f"t{n}", f"tenant{n}", cost=2)
        if n % 3 == 2:
            bench.ack(message.fence for message in bench.claim(3))
    bench.client.delete(bench.key("finished"))
    state = bench.check()
    assert (state.kept, state.reserved, state.ring, state.lanes) == ({}, {}, {}, {})
    assert bench.client.dbsize() == 2  # the queue's state and totals


# dearer heads


def test_a_dearer_message_that_comes_in_is_paid_before_it_is_served(bench: Bench) -> None:
    bench.put("cheap", "x", priority=5)
    bench.fill("b", 120)
    bench.put("dear", "x", priority=0, cost=100)
    order = bench.lanes(102, lease=LONG)
    assert 98 <= order.index("x") <= 101
    bench.check()


def test_a_claim_pays_for_at_most_64_dearer_messages(bench: Bench) -> None:
    for n in range(100):
        bench.put(f"cheap{n}", f"l{n:03}", priority=5)
    for n in range(100):
        bench.put(f"dear{n}", f"l{n:03}", cost=50)
    turn = bench.turn(1, LONG)
    assert (turn.claimed, turn.need) == ((), True)
    assert len(bench.check().reserved) == 64
    turn = bench.turn(1, LONG)
    assert [m.lane for m in turn.claimed] == ["l000"]
    bench.check()


# a changed default


def test_a_default_is_brought_to_all_lanes_by_whoever_claims(bench: Bench) -> None:
    bench.store.declare("q", weight=0.001)
    for n in range(350):
        bench.put(f"t{n}", f"l{n:03}")
    bench.store.configure("q", "h", weight=1)
    bench.fill("h", 700)
    bench.store.declare("q", weight=1)
    assert "walk" in bench.check().queue  # who declared is gone: it is need
    assert bench.state().wake
    while "walk" in bench.state().queue:
        assert bench.turn(0, consumer="c", will_park=True).need
    bench.check()
    served = Counter(bench.lanes(352, lease=LONG))
    assert served["h"] in (1, 2)
    assert len(served) == 351


def test_a_walk_wakes_an_idle_fleet(bench: Bench) -> None:
    bench.store.declare("q", limit=1)
    for n in range(250):
        bench.fill(f"l{n:03}", 2)
    assert len(bench.claim(250, LONG)) == 250
    assert not bench.state().wake
    bench.store.declare("q", limit=2)
    assert bench.drop_token()
    turns = [bench.turn(0, consumer="c", will_park=True) for _ in range(3)]
    assert all(turn.need for turn in turns)
    state = bench.check()
    assert ("walk" in state.queue, len(state.ring)) == (False, 250)


def test_a_walk_over_lanes_that_cannot_be_served_ends(bench: Bench) -> None:
    bench.configure("a", paused=1)
    bench.put("t", "a")
    bench.store.declare("q", limit=2)
    assert bench.drop_token()
    assert not bench.turn(1).need
    assert "walk" not in bench.check().queue


def test_fairness_by_time_is_new_to_a_backlog(bench: Bench) -> None:
    for n in range(3):
        bench.put(f"x{n}", "x", cost=300)
    bench.fill("b", 20)
    bench.store.declare("q", fairness="time")
    assert "x" in bench.lanes(2, lease=LONG)
    bench.check()
    bench.store.declare("q", fairness="count")
    assert Counter(bench.lanes(15, lease=LONG))["b"] >= 14
    bench.check()


# rates and clocks


@pytest.mark.parametrize("back", [2_000, LONG])
def test_a_clock_that_steps_back_stops_nobody(bench: Bench, back: int) -> None:
    bench.store.configure("q", "a", rate="10/1000", burst=3)
    bench.fill("a", 9)
    assert len(bench.claim(16, 4 * LONG)) == 3
    bench.tick(-back)
    bench.turn(0)
    bench.replace()
    assert bench.check().waiting["a"] - bench.now <= 300
    bench.tick(300)
    assert len(bench.claim(16, 4 * LONG)) >= 1


@pytest.mark.parametrize("forward", [2_000, LONG])
def test_a_clock_that_steps_forward_gives_one_burst(bench: Bench, forward: int) -> None:
    bench.store.configure("q", "a", rate="10/1000", burst=3)
    bench.fill("a", 30)
    assert len(bench.claim(16, 4 * LONG)) == 3
    bench.tick(forward)
    assert len(bench.claim(16, 4 * LONG)) == 3


@pytest.mark.parametrize(
    ("rate", "per_second", "seconds"),
    [("1/1000", 1, 60), ("10/1000", 10, 30), ("100/1000", 100, 10), ("500/1000", 500, 4), ("2000/1000", 2000, 2)],
)
@pytest.mark.parametrize("late", [1, 40, 80])
def test_a_rate_is_kept_on_average_by_a_keeper_that_is_late(
    bench: Bench, rate: str, per_second: int, seconds: int, late: int
) -> None:
    if "fake" not in type(bench.client).__module__ and late != 40:
        pytest.skip("the same on each server")
    chance = random.Random(3)
    bench.store.configure("q", "r", rate=rate)
    bench.fill("r", per_second * seconds + 200)
    began, got, claims = bench.now, 0, 0
    while bench.now < began + seconds * 1_000:
        claimed = bench.claim(16, LONG)
        claims += 1
        got += len(claimed)
        if not claimed:
            bench.tick(max(1, int(bench.state().waiting["r"]) - bench.now + chance.randrange(late)))
    wanted = per_second * seconds
    assert wanted * 0.98 - 2 <= got <= wanted * 1.02 + per_second / 10 + 1
    assert claims / seconds <= 200

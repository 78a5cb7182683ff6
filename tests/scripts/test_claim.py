"""claim: lanes take turns by weight; each message becomes a lease with a new attempt."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from fractions import Fraction

import pytest

from fairlanes_transport.store import WillPark
from tests.scripts.bench import DONE, STALE, T0, TURN, Bench, Record

LONG = 3_600_000


def test_the_whole_state(bench: Bench) -> None:
    bench.put("t")
    bench.mark()
    turn = bench.turn(lease=7_000, consumer="c", will_park=False)
    (claimed,) = turn.claimed
    token = claimed.fence.token
    assert (turn.need, turn.due_in) == (False, None)
    assert (claimed.fence.tag, claimed.fence.attempt, claimed.failures) == ("t", 1, 0)
    assert (claimed.lane, claimed.born, claimed.envelope, claimed.body) == ("a", T0, b'{"t"}', b"t")
    assert bench.changes() == {
        "flight:a/t": True,
        "leases/t": T0 + 7_000,
        "message/t": Record("a", attempt=1, score=1, born=T0, token=token),
        "queue/vt": str(1 + TURN),
        "ready:a/t": None,
        "ring/a": None,
        "totals/claimed": 1,
        "totals/wait_le_50": 1,
        "wake": None,
    }


def test_an_empty_queue_writes_nothing(bench: Bench) -> None:
    bench.mark()
    turn = bench.turn(16, consumer="c", will_park=True)
    assert (turn.need, turn.due_in, turn.claimed) == (False, None, ())
    assert bench.changes() == {}


def test_one_of_two_leaves_need_and_a_token(bench: Bench) -> None:
    bench.fill("a", 2)
    bench.drop_token()
    assert bench.turn(consumer="c", will_park=True).need
    assert len(bench.check().wake) == 1


def test_max_zero_only_sweeps(bench: Bench) -> None:
    bench.put("t")
    bench.put("u", delay=10)
    bench.tick(10)
    turn = bench.turn(0)
    assert (turn.claimed, turn.need) == ((), True)
    assert sorted(bench.check().ready["a"]) == ["t", "u"]


def test_tokens_of_two_claims_differ(bench: Bench) -> None:
    bench.fill("a", 3)
    first, second = bench.claim(2), bench.claim()
    assert first[0].fence.token == first[1].fence.token != second[0].fence.token


# shares


@pytest.mark.parametrize(
    "weights",
    [
        {"a": 1, "b": 1, "c": 1, "d": 1}, {"a": 3, "b": 1, "c": 2}, {"a": 100, "b": 1, "c": 7},
        {"a": 1.5, "b": 0.5, "c": 0.25}, {"a": 0.001, "b": 0.002}, {"a": 2.75, "b": 1},
    ],
)  # fmt: skip
@pytest.mark.parametrize("seed", [1, 2])
def test_shares_are_exact_at_every_prefix(bench: Bench, weights: dict[str, float], seed: int) -> None:
    chance = random.Random(seed)
    rounds = 300
    for lane, weight in weights.items():
        bench.configure(lane, weight=weight)
        bench.fill(lane, 30)
    served: Counter[str] = Counter()
    n = 0
    while n < rounds:
        claimed = bench.claim(chance.randint(1, 16))
        n += len(claimed)
        for message in claimed:
            served[message.lane] += 1
            assert_shares(served, weights)
        # The lanes never run dry: what was served comes back under another tag.
        bench.ack(message.fence for message in claimed)
        for i, message in enumerate(claimed):
            bench.put(f"{message.lane}-{n}-{i}", message.lane)
    bench.check()


def assert_shares(served: Counter[str], weights: dict[str, float]) -> None:
    exact = {lane: Fraction(served[lane]) / Fraction(weight) for lane, weight in weights.items()}
    for one, other in itertools.combinations(weights, 2):
        bound = 1 / Fraction(weights[one]) + 1 / Fraction(weights[other])
        spread = abs(exact[one] - exact[other])
        assert spread <= bound, f"{one}, {other}: {dict(served)}"
        if weights[one] == weights[other]:
            assert abs(served[one] - served[other]) <= 1, f"{one}, {other}: {dict(served)}"


def test_equal_weights_rotate_strictly(bench: Bench) -> None:
    for lane in "abc":
        bench.fill(lane, 4)
    order = "".join(bench.lanes(4) + bench.lanes(5) + bench.lanes(1) + bench.lanes(2))
    assert order == order[:3] * 4
    assert sorted(order[:3]) == ["a", "b", "c"]


def test_three_one_two_interleaves(bench: Bench) -> None:
    for lane, weight in (("a", 3), ("b", 1), ("c", 2)):
        bench.configure(lane, weight=weight)
        bench.fill(lane, 20)
    order = bench.lanes(18)
    for start in (0, 6, 12):
        assert Counter(order[start : start + 6]) == {"a": 3, "b": 1, "c": 2}
    assert "aaa" not in "".join(order)


def test_cost_counts_instead_of_one(bench: Bench) -> None:
    for i in range(4):
        bench.put(f"dear{i}", "a", cost=3)
    bench.fill("b", 20)
    assert Counter(bench.lanes(12)) == {"a": 3, "b": 9}


@pytest.mark.parametrize("late", [0.5, 1, 3])
@pytest.mark.parametrize("other", [1, 2, 7])
@pytest.mark.parametrize("served", [0, 1, 10, 23])
def test_who_becomes_ready_waits_no_longer_than_one_turn(bench: Bench, late: float, other: float, served: int) -> None:
    bench.configure("late", weight=late)
    for lane in ("x", "y", "z"):
        bench.configure(lane, weight=other)
        bench.fill(lane, 40)
    bench.claim(served)
    bench.put("now", "late")
    before = bench.lanes(60)
    counts = Counter(before[: before.index("late")])
    assert max(counts.values(), default=0) <= math.ceil(other / late)


def test_who_leaves_and_joins_again_gains_nothing(bench: Bench) -> None:
    bench.fill("steady", 30)
    order = []
    for i in range(20):
        bench.put(f"hop{i}", "hopper")
        order += bench.lanes(1)
    assert abs(order.count("hopper") - order.count("steady")) <= 1
    bench.check()


def test_virtual_time_goes_on_when_the_ring_has_been_empty(bench: Bench) -> None:
    bench.fill("a", 5)
    bench.claim(5)
    bench.put("t")
    state = bench.check()
    vt = int(state.queue["vt"])
    assert (vt, state.ring) == (5 + 5 * TURN - 4, {"a": vt + TURN})


# bounds


def test_a_limit_bounds_what_is_in_flight(bench: Bench) -> None:
    bench.configure("a", limit=2)
    bench.fill("a", 4)
    first, second = bench.claim(16)
    state = bench.check()
    assert (state.ring, state.waiting, state.wake) == ({}, {}, [])
    assert bench.turn(16).claimed == ()
    assert bench.ack(first.fence) == (DONE,)
    assert bench.check().wake
    assert bench.tags(16) == ["a2"]
    assert bench.store.release(bench.queue, [second.fence]) == (DONE,)
    assert bench.tags(16) == ["a1"]
    bench.check()


def test_a_limit_of_nothing_holds_everything(bench: Bench) -> None:
    bench.put("t")
    bench.client.hset(bench.key("settings", "a"), "limit", 0)
    bench.client.zadd(bench.key("configured"), {"a": 0})
    bench.replace()
    bench.fill("a", 2)
    assert bench.tags(16) == []
    assert not bench.check().wake


def test_a_default_limit_and_its_exception(bench: Bench) -> None:
    bench.store.declare(bench.queue, limit=1)
    bench.configure("free", limit="none")
    bench.configure("two", limit=2)
    for lane in ("one", "two", "free"):
        bench.fill(lane, 3)
    assert Counter(bench.lanes(16)) == {"one": 1, "two": 2, "free": 3}
    bench.check()


def test_a_lowered_limit_takes_nothing_back(bench: Bench) -> None:
    bench.fill("a", 4)
    fences = [message.fence for message in bench.claim(3)]
    bench.configure("a", limit=1)
    bench.check()
    assert bench.tags(1) == []
    bench.ack(fences[:2])
    assert bench.tags(1) == []
    bench.ack(fences[2])
    assert bench.tags(1) == ["a3"]


def test_a_paused_lane_is_passed_over(bench: Bench) -> None:
    bench.configure("a", paused=1)
    bench.fill("a", 2)
    bench.fill("b", 2)
    assert bench.tags(16) == ["b0", "b1"]
    assert not bench.check().wake
    bench.configure("a", paused=None)
    assert bench.check().wake
    assert bench.tags(16) == ["a0", "a1"]


def test_a_paused_queue_serves_nothing_but_sweeps(bench: Bench) -> None:
    bench.put("t")
    bench.put("u", delay=10)
    bench.client.hset(bench.key("queue"), "paused", "1")
    bench.store.rearm(bench.queue)
    bench.tick(10)
    turn = bench.turn(16, consumer="c", will_park=True)
    assert (turn.claimed, turn.need) == ((), False)
    state = bench.check()
    assert sorted(state.ready["a"]) == ["t", "u"]
    assert list(state.ring) == ["a"]


# rate and throttle


def test_a_rate_spaces_claims_after_the_burst(bench: Bench) -> None:
    bench.configure("a", rate="1/10000", burst=2)
    bench.fill("a", 5)
    turn = bench.turn(16, LONG, consumer="k", will_park=True)
    assert [message.fence.tag for message in turn.claimed] == ["a0", "a1"]
    assert turn.due_in == 10_000
    state = bench.check()
    assert state.waiting == {"a": bench.now + 10_000}
    bench.tick(9_999)
    assert bench.tags(16, lease=LONG) == []
    bench.tick(1)
    assert bench.tags(16, lease=LONG) == ["a2"]
    bench.tick(20_000)
    assert bench.tags(16, lease=LONG) == ["a3", "a4"]
    bench.check()


def test_a_rested_lane_has_its_burst_and_no_more(bench: Bench) -> None:
    bench.configure("a", rate="1/10000", burst=2)
    bench.fill("a", 6)
    bench.claim(16, lease=LONG)
    bench.tick(1_000_000)
    assert bench.tags(16, lease=LONG) == ["a2", "a3"]


def test_a_rate_is_kept_over_any_length(bench: Bench) -> None:
    bench.configure("a", rate="3/70000", burst=1)
    bench.fill("a", 12)
    at: list[int] = []
    while len(at) < 12:
        at += [bench.now] * len(bench.tags(16, lease=LONG))
        waiting = bench.check().waiting
        bench.tick(int(waiting["a"]) - bench.now if waiting else 1)
    assert at[0] == T0
    for i, time in enumerate(at):
        assert i * 70_000 / 3 <= time - T0 <= i * (70_000 / 3 + 1)


def test_what_a_rate_remembers_ends_by_itself(bench: Bench) -> None:
    bench.configure("a", rate="1/10000", burst=3)
    bench.put("t")
    bench.ack(bench.fence())
    ttl = bench.check().ttl["allowed:a"]
    assert 10_000 < ttl <= 11_000


def test_a_throttled_lane_waits_for_its_time(bench: Bench) -> None:
    bench.client.set(bench.key("throttle", "a"), bench.now + 5_000, px=600_000)
    bench.put("t")
    bench.put("u", "b")
    state = bench.check()
    assert (list(state.ring), state.waiting) == (["b"], {"a": bench.now + 5_000})
    turn = bench.turn(16, LONG, consumer="k", will_park=True)
    assert ([m.lane for m in turn.claimed], turn.due_in) == (["b"], 5_000)
    bench.tick(5_000)
    assert bench.tags(16, lease=LONG) == ["t"]
    bench.check()


def test_throttle_and_rate_hold_until_the_later_one(bench: Bench) -> None:
    bench.configure("a", rate="1/10000")
    bench.fill("a", 2)
    bench.claim(lease=LONG)
    bench.client.set(bench.key("throttle", "a"), bench.now + 25_000, px=600_000)
    bench.replace()
    assert bench.check().waiting == {"a": bench.now + 25_000}
    bench.tick(25_000)
    assert bench.tags(16, lease=LONG) == ["a1"]


# what time brings


def test_due_messages_keep_priority_and_line_up_when_they_are_due(bench: Bench) -> None:
    bench.put("slow", delay=200)
    bench.put("fast", delay=100)
    bench.put("first", delay=200, priority=0)
    bench.put("last", delay=50, priority=5)
    bench.tick(200)
    bench.put("now")
    assert bench.tags(16) == ["now", "fast", "first", "slow", "last"]
    bench.check()


def test_a_sweep_moves_at_most_a_hundred_due_messages(bench: Bench) -> None:
    for i in range(205):
        bench.put(f"d{i:03}", f"lane{i % 7}", delay=10)
    bench.tick(50)
    seen = []
    for left in (105, 5, 0):
        turn = bench.turn(0, consumer="k", will_park=True)
        state = bench.check()
        assert len(state.delayed) == left
        seen.append(turn.due_in)
    assert seen == [0, 0, None]


def test_a_sweep_frees_at_most_a_hundred_leases(bench: Bench) -> None:
    bench.fill("a", 130)
    bench.claim(130, lease=1_000)
    bench.tick(1_000)
    bench.turn(0)
    assert len(bench.check().leases) == 30
    bench.turn(0)
    assert bench.check().leases == {}


def test_a_sweep_returns_at_most_a_hundred_waiting_lanes(bench: Bench) -> None:
    for i in range(110):
        bench.client.set(bench.key("throttle", f"l{i:03}"), bench.now + 10, px=600_000)
        bench.put(f"t{i}", f"l{i:03}")
    bench.tick(10)
    assert bench.turn(0, consumer="k", will_park=True).due_in == 0
    assert (len(bench.check().ring), len(bench.check().waiting)) == (100, 10)


def test_an_expired_lease_is_served_again_at_once(bench: Bench) -> None:
    bench.fill("a", 2)
    old = bench.fence(lease=1_000)
    bench.tick(1_000)
    (again,) = bench.claim()
    assert (again.fence.tag, again.fence.attempt, again.failures) == ("a0", 2, 1)
    assert again.fence.token != old.token
    bench.mark()
    assert bench.ack(old) == (STALE,)
    assert bench.changes() == {}


# the keeper


def test_who_parks_keeps_the_time_of_what_comes_first(bench: Bench) -> None:
    bench.put("later", delay=9_000)
    bench.put("sooner", delay=3_000)
    assert bench.turn(consumer="k", will_park=True).due_in == 3_000
    state = bench.check()
    assert (state.queue["keeper"], state.queue["keeper_until"], state.wake) == ("k", str(T0 + 3_000), [])


def test_the_keeper_watches_deadlines_too(bench: Bench) -> None:
    bench.put("t")
    bench.claim(lease=2_000)
    bench.put("later", delay=9_000)
    assert bench.turn(consumer="k", will_park=True).due_in == 2_000


def test_deadlines_alone_are_no_need(bench: Bench) -> None:
    bench.put("t")
    turn = bench.turn(consumer="k", will_park=False)
    assert (turn.need, turn.due_in) == (False, None)
    assert not bench.check().wake


def test_one_keeps_the_time_and_one_misses_it(bench: Bench) -> None:
    bench.put("t", delay=3_000)
    assert bench.turn(consumer="k", will_park=True).due_in == 3_000
    assert bench.turn(consumer="deputy", will_park=True).due_in == 3_050
    turn = bench.turn(consumer="other", will_park=True)
    assert (turn.need, turn.due_in) == (False, None)
    queue = bench.check().queue
    assert (queue["keeper"], queue["deputy"]) == ("k", "deputy")


def test_the_deputy_claims_what_a_dead_keeper_left(bench: Bench) -> None:
    bench.put("t", delay=3_000)
    bench.turn(consumer="dead", will_park=True)
    bench.turn(consumer="deputy", will_park=True)
    bench.tick(3_050)
    assert [m.fence.tag for m in bench.turn(consumer="deputy", will_park=True).claimed] == ["t"]
    assert bench.check().queue["keeper"] == "deputy"


def test_the_role_of_an_overdue_keeper_is_taken(bench: Bench) -> None:
    bench.put("t", delay=3_000)
    bench.put("u", delay=8_000)
    bench.turn(consumer="dead", will_park=True)
    bench.tick(3_050)
    turn = bench.turn(4, consumer="k", will_park=True)
    assert ([m.fence.tag for m in turn.claimed], turn.due_in) == (["t"], 4_950)
    assert bench.check().queue["keeper"] == "k"


def test_a_keeper_that_stays_busy_gives_the_role_back(bench: Bench) -> None:
    bench.put("t", delay=3_000)
    bench.turn(consumer="k", will_park=True)
    bench.fill("a", 2)
    turn = bench.turn(1, consumer="k", will_park=WillPark.IF_NOT_FULL)
    assert (turn.need, turn.due_in) == (True, None)
    assert "keeper" not in bench.check().queue


def test_a_keeper_that_gets_less_than_it_asked_for_parks(bench: Bench) -> None:
    bench.put("t", delay=3_000)
    bench.put("u")
    turn = bench.turn(2, consumer="k", will_park=WillPark.IF_NOT_FULL)
    assert (turn.need, turn.due_in) == (False, 3_000)


def test_a_keeper_without_work_ahead_is_none(bench: Bench) -> None:
    bench.put("t", delay=3_000)
    bench.turn(consumer="k", will_park=True)
    bench.tick(3_000)
    fence = bench.turn(consumer="k", will_park=False).claimed[0].fence
    bench.ack(fence, consumer="k", will_park=True)
    assert "keeper" not in bench.check().queue


def test_a_keeper_that_finds_the_queue_empty_is_none(bench: Bench) -> None:
    """Else a delayed message that comes later would believe that somebody keeps its time."""
    bench.put("t")
    fence = bench.turn(lease=5_000, consumer="other").claimed[0].fence
    assert bench.turn(consumer="k", will_park=True).due_in == 5_000
    bench.ack(fence, consumer="other", will_park=True)
    bench.tick(5_000)
    assert bench.turn(consumer="k", will_park=True).due_in is None
    assert "keeper" not in bench.check().queue
    bench.put("u", delay=60_000)
    assert bench.check().wake


# the token


def test_a_lost_token_costs_one_park(bench: Bench) -> None:
    bench.fill("a", 2)
    assert bench.drop_token()
    bench.check(token_out=True)
    assert not bench.state().wake
    assert bench.tags() == ["a0"]
    assert bench.check().wake


# use


def test_every_claim_moves_the_end_of_a_queue_that_has_one(bench: Bench) -> None:
    bench.store.declare(bench.queue, 60_000)
    for messages in (0, 2):
        bench.fill("a", messages)
        for key in bench.client.scan_iter():
            bench.client.pexpire(key, 1_000)
        bench.claim()
        ttl = bench.check().ttl
        assert {"queue"} <= set(ttl)
        assert min(ttl.values()) > 50_000


# the histogram of waits


def waits(bench: Bench) -> dict[str, int]:
    """What the totals say of waits."""
    return {name: n for name, n in bench.check().totals.items() if name.startswith("wait_")}


def test_waits_are_counted_once_per_message(bench: Bench) -> None:
    bench.fill("a", 3)
    bench.tick(30)
    bench.fill("b", 1)
    bench.tick(50)
    fences = [message.fence for message in bench.claim(4)]
    assert waits(bench) == {"wait_le_50": 1, "wait_le_100": 3, "wait_ms": 3 * 80 + 50}
    bench.store.release("q", fences)
    bench.tick(5_000)
    assert len(bench.claim(4)) == 4
    assert sum(waits(bench).values()) == 4 + 290


@pytest.mark.parametrize(
    ("ms", "field"),
    [
        (0, "wait_le_50"),
        (50, "wait_le_50"),
        (51, "wait_le_100"),
        (1800000, "wait_le_1800000"),
        (1800001, "wait_le_inf"),
        (10**9, "wait_le_inf"),
    ],
)
def test_buckets_of_waits(bench: Bench, ms: int, field: str) -> None:
    bench.put("t")
    bench.tick(ms)
    bench.claim()
    assert waits(bench) == ({field: 1, "wait_ms": ms} if ms else {field: 1})


def test_a_message_with_an_eta_is_not_in_the_histogram(bench: Bench) -> None:
    bench.store.enqueue("q", "t", "a", '{"headers": {"eta": "2023-11-14T22:13:30+00:00"}}', b"")
    bench.store.enqueue("q", "u", "a", '{"headers": {"eta": null, "argsrepr": "(\\"eta\\": \\"x\\")"}}', b"")
    assert len(bench.claim(2)) == 2
    assert waits(bench) == {"wait_le_50": 1}


def test_a_clock_that_went_back_is_a_wait_of_nothing(bench: Bench) -> None:
    bench.put("t")
    bench.tick(-5_000)
    bench.claim()
    assert waits(bench) == {"wait_le_50": 1}


def test_a_default_limit_that_is_lowered_holds_for_every_lane(bench: Bench) -> None:
    """Of more lanes than a declaration looks at."""
    bench.store.declare(bench.queue, limit=2)
    lanes = [f"t{n:04}" for n in range(1002)]
    for lane in lanes:
        bench.fill(lane, 2)
    assert len(bench.claim(len(lanes))) == len(lanes)
    bench.store.declare(bench.queue, limit=1)
    assert bench.claim(len(lanes)) == []
    bench.check()

"""expire: what time has brought, without a claim."""

from __future__ import annotations

from tests.scripts.bench import DONE, T0, TURN, Bench, Record


def test_nothing_is_due(bench: Bench) -> None:
    bench.put("t", delay=1_000)
    bench.put("u")
    bench.claim(lease=1_000)
    bench.mark()
    bench.tick(999)
    assert bench.store.expire(bench.queue) == (0, 0)
    assert bench.changes() == {}


def test_an_expired_lease_the_whole_state(bench: Bench) -> None:
    bench.put("t")
    fence = bench.fence(lease=1_000)
    bench.mark()
    bench.tick(1_000)
    assert bench.store.expire(bench.queue) == (1, 0)
    assert bench.changes() == {
        "flight:a/t": None,
        "leases/t": None,
        "message/t": Record("a", attempt=1, failures=1, score=1, born=T0, token=fence.token),
        "queue/last": str(1 + TURN),
        "ready:a/t": 1,
        "ring/a": 1 + 2 * TURN,
        "totals/expired": 1,
        "wake": 1,
    }


def test_a_due_message_the_whole_state(bench: Bench) -> None:
    bench.put("t", delay=1_000, priority=1)
    bench.mark()
    bench.tick(1_000)
    assert bench.store.expire(bench.queue) == (0, 1)
    score = 2**49 + 1
    assert bench.changes() == {
        "delayed/t": None,
        "lanes/a": 0,
        "message/t": Record("a", priority=1, score=score, born=T0),
        "queue/arrivals": "1",
        "queue/last": "1",
        "ready:a/t": score,
        "ring/a": 1 + TURN,
    }


def test_the_second_failure_waits_and_the_last_is_the_end(bench: Bench) -> None:
    bench.put("t")
    waits = []
    for _ in range(3):
        bench.claim(lease=1_000)
        bench.tick(1_000)
        bench.store.expire(bench.queue)
        due = bench.check().delayed.get("t", bench.now)
        waits.append(due - bench.now)
        bench.tick(int(waits[-1]))
        bench.store.expire(bench.queue)
    assert waits[0] == 0
    assert 1_000 <= waits[1] <= 2_000
    assert 2_000 <= waits[2] <= 4_000
    bench.claim(lease=1_000)
    bench.tick(1_000)
    bench.store.expire(bench.queue)
    state = bench.check()
    assert (state.dead, state.reasons, state.message["t"].failures) == (
        {"t": bench.now}, {"t": "lease expired"}, 4
    )  # fmt: skip
    assert state.totals["expired"] == 4


def test_expiry_keeps_the_order_of_a_lane(bench: Bench) -> None:
    bench.put("low", priority=9)
    bench.fill("a", 3)
    bench.claim(2, lease=1_000)
    bench.put("new")
    bench.tick(1_000)
    assert bench.store.expire(bench.queue) == (2, 0)
    assert bench.tags(16) == ["a0", "a1", "a2", "new", "low"]


def test_backoff_keeps_the_order_of_a_lane(bench: Bench) -> None:
    bench.fill("a", 3)
    for _ in range(2):
        bench.claim(2, lease=1_000)
        bench.tick(1_000)
        bench.store.expire(bench.queue)
    assert sorted(bench.check().delayed) == ["a0", "a1"]
    bench.put("new")
    bench.tick(4_000)
    assert bench.tags(16) == ["a0", "a1", "a2", "new"]


def test_leases_of_many_lanes(bench: Bench) -> None:
    for lane in "abcd":
        bench.configure(lane, limit=1)
        bench.fill(lane, 2)
    assert len(bench.claim(16, lease=1_000)) == 4
    assert bench.check().ring == {}
    bench.tick(1_000)
    assert bench.store.expire(bench.queue) == (4, 0)
    state = bench.check()
    assert (set(state.ring), state.flight) == (set("abcd"), {})


def test_after_an_outage_who_runs_a_task_extends_its_lease_before_it_is_taken(bench: Bench) -> None:
    """The server was away for longer than a lease: nobody could renew, and who claims first takes nothing."""
    bench.fill("a", 2)
    held, dead = (message.fence for message in bench.claim(2, lease=4_000))
    bench.tick(7_000, away=True)
    turn = bench.turn(2, lease=4_000, consumer="c", will_park=True)
    assert (turn.claimed, turn.need, turn.due_in) == ((), False, 666)
    assert bench.store.expire(bench.queue) == (0, 0)
    assert bench.store.extend(bench.queue, [held], 4_000) == (DONE,)
    bench.tick(666)
    assert bench.tags(2, lease=4_000) == [dead.tag]
    bench.check()


def test_a_renewal_that_comes_first_gives_grace_to_the_others_too(bench: Bench) -> None:
    bench.fill("a", 2)
    first, second = (message.fence for message in bench.claim(2, lease=60_000))
    bench.tick(61_000, away=True)
    assert bench.store.extend(bench.queue, [first], 60_000) == (DONE,)
    assert bench.tags(2, lease=60_000) == []
    bench.tick(4_999)
    assert bench.store.extend(bench.queue, [second], 60_000) == (DONE,)
    bench.tick(1)
    assert bench.tags(2, lease=60_000) == []


def test_where_the_server_was_there_a_dead_workers_lease_is_taken_at_once(bench: Bench) -> None:
    bench.put("t")
    bench.claim(1, lease=4_000)
    bench.tick(4_000)
    assert bench.tags(1, lease=4_000) == ["t"]


def test_where_others_renew_a_dead_workers_lease_is_taken_at_once(bench: Bench) -> None:
    """Nobody claims for long, as all are busy: that is no outage."""
    bench.fill("a", 2)
    held, dead = (message.fence for message in bench.claim(2, lease=60_000))
    for _ in range(4):
        bench.tick(20_000, away=True)
        assert bench.store.extend(bench.queue, [held], 60_000) == (DONE,)
    assert bench.tags(2, lease=60_000) == [dead.tag]


def test_a_clock_that_steps_back_is_no_outage(bench: Bench) -> None:
    bench.put("t")
    bench.claim(1, lease=4_000)
    bench.tick(7_000, away=True)
    assert bench.tags(1, lease=4_000) == []
    bench.tick(-3_600_000, away=True)
    assert bench.tags(1, lease=4_000) == []
    bench.tick(3_600_000)  # the grace of the time before lies ahead, and is none
    assert bench.tags(1, lease=4_000) == []
    bench.tick(667)
    assert bench.tags(1, lease=4_000) == ["t"]

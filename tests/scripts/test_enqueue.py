"""enqueue: a message is stored whole, once, in its place; or not at all."""

from __future__ import annotations

import pytest

from fairlanes_transport.errors import LaneFull, QueueAbsent, ScriptError
from tests.scripts.bench import DONE, T0, TURN, Bench, Record

ODD_NAMES = ["two words", "new\nline", "Ünïcødé ✓", "{braces}", "a:b", "100%", "zero\x00byte", "'; return", "*?[x]"]


def test_into_an_empty_queue(bench: Bench) -> None:
    bench.mark()
    assert bench.put("t")
    assert bench.changes() == {
        "body/t": b"t",
        "envelope/t": b'{"t"}',
        "lanes/a": 0,
        "message/t": Record("a", score=1, born=T0),
        "queue/arrivals": "1",
        "queue/last": "1",
        "ready:a/t": 1,
        "ring/a": 1 + TURN,
        "totals/enqueued": 1,
        "wake": 1,
    }


def test_a_second_message_of_a_lane_moves_nothing_on_the_ring(bench: Bench) -> None:
    bench.put("t")
    bench.mark()
    bench.put("u", cost=2.5)
    assert bench.changes() == {
        "body/u": b"u",
        "envelope/u": b'{"u"}',
        "message/u": Record("a", score=2, cost=2.5, born=T0),
        "queue/arrivals": "2",
        "queue/costs": "1",
        "ready:a/u": 2,
        "totals/enqueued": 2,
    }


def test_delayed(bench: Bench) -> None:
    bench.mark()
    assert bench.put("t", delay=5_000, priority=3)
    assert bench.changes() == {
        "body/t": b"t",
        "delayed/t": T0 + 5_000,
        "envelope/t": b'{"t"}',
        "message/t": Record("a", priority=3, born=T0),
        "totals/enqueued": 1,
        "wake": 1,
    }


@pytest.mark.parametrize("delay", [-1, -(10**9)])
def test_a_due_time_that_has_passed_is_now(bench: Bench, delay: int) -> None:
    bench.put("t", delay=delay)
    assert bench.check().ready == {"a": {"t": 1}}


def test_a_delayed_message_before_the_keepers_time_opens_the_role(bench: Bench) -> None:
    bench.put("late", delay=60_000)
    assert bench.turn(consumer="k", will_park=True).due_in == 60_000
    assert not bench.check().wake
    bench.put("later", delay=90_000)
    assert (bench.check().wake, bench.state().queue["keeper"]) == ([], "k")
    bench.put("sooner", delay=1_000)
    state = bench.check()
    assert "keeper" not in state.queue
    assert state.wake


@pytest.mark.parametrize("delay", [0, 1_000])
def test_a_known_tag_is_left_alone(bench: Bench, delay: int) -> None:
    bench.put("t", "a")
    bench.mark()
    assert not bench.put("t", "b", priority=4, delay=delay)
    assert bench.changes() == {"totals/repeated": 1}


def test_a_known_tag_is_left_alone_in_any_state(bench: Bench) -> None:
    bench.put("delayed", delay=1_000)
    bench.put("dead")
    bench.store.reject(bench.queue, bench.fence(), requeue=False, reason="x")
    bench.put("leased")
    bench.claim()
    bench.configure("slots", limit=5)
    bench.put("slot", "slots")
    bench.ack(bench.fence(), keep_slot=True)
    bench.mark()
    assert not any(bench.put(tag) for tag in ("delayed", "dead", "leased", "slot"))
    assert bench.changes() == {"totals/repeated": 4}


def test_a_publish_that_is_retried_after_its_ack_is_not_run_again(bench: Bench) -> None:
    bench.put("t")
    assert bench.ack(bench.fence()) == (DONE,)
    bench.mark()
    assert not bench.put("t")
    assert bench.changes() == {"totals/repeated": 1}


def test_a_finished_tag_is_forgotten_in_the_end(bench: Bench) -> None:
    bench.put("t")
    bench.ack(bench.fence())
    for tag in ("u", "v"):
        bench.tick(300_000)
        bench.put(tag)
        bench.ack(bench.fence())
    assert (bench.state().finished, bench.state().previous) == ({"v"}, {"u"})
    assert bench.put("t")


def test_max_size(bench: Bench) -> None:
    bench.configure("a", max_size=2)
    bench.fill("a", 2)
    bench.mark()
    with pytest.raises(LaneFull) as full:
        bench.put("more", "a")
    assert (full.value.size, full.value.max_size) == (2, 2)
    assert bench.changes() == {}
    assert not bench.put("a0", "a"), "a known tag is known, also in a full lane"
    assert bench.put("b0", "b"), "another lane is not full"
    bench.claim()
    assert bench.put("more", "a"), "a claimed message takes no room"


def test_max_size_by_default_and_its_exception(bench: Bench) -> None:
    bench.store.declare(bench.queue, max_size=1)
    bench.configure("free", max_size="none")
    bench.fill("free", 3)
    bench.put("t", "a")
    with pytest.raises(LaneFull):
        bench.put("u", "a")
    bench.check()


def test_must_exist(bench: Bench) -> None:
    with pytest.raises(QueueAbsent):
        bench.put("t", must_exist=True)
    assert bench.check().flat() == {}
    bench.store.declare(bench.queue)
    assert bench.put("t", must_exist=True)
    bench.check()


@pytest.mark.parametrize(
    "bad",
    [
        {"priority": -1}, {"priority": 10}, {"priority": 1.5}, {"priority": "high"}, {"cost": 0}, {"cost": -1},
        {"cost": float("nan")}, {"cost": float("inf")}, {"cost": "much"}, {"due_ms": "soon"},
        {"due_ms": float("nan")}, {"lane": ""}, {"tag": ""},
    ],
)  # fmt: skip
def test_arguments_that_cannot_be_stored_are_refused_whole(bench: Bench, bad: dict[str, object]) -> None:
    arguments = {"tag": "t", "lane": "a", **bad}
    with pytest.raises(ScriptError, match="FLARG"):
        bench.put(**arguments)  # type: ignore[arg-type]
    assert bench.check().flat() == {}


def test_priority_before_arrival(bench: Bench) -> None:
    for tag, priority in [("n0", 3), ("n1", 9), ("n2", 0), ("n3", 3), ("n4", 0)]:
        bench.put(tag, priority=priority)
    assert bench.tags(5) == ["n2", "n4", "n0", "n3", "n1"]
    bench.check()


@pytest.mark.parametrize("lane", ODD_NAMES)
def test_a_lane_may_have_any_name(bench: Bench, lane: str) -> None:
    bench.put("t", lane)
    bench.put("u", lane, delay=5)
    bench.check()
    (claimed,) = bench.claim()
    assert claimed.lane == lane
    bench.tick(5)
    assert bench.store.expire(bench.queue) == (0, 1)
    bench.check()
    assert bench.ack([claimed.fence, bench.fence()]) == (DONE, DONE)
    assert set(bench.check().flat()) <= {
        "finished/t", "finished/u", "queue/arrivals", "queue/last", "queue/vt", "totals/enqueued", "totals/claimed",
        "totals/acked",
        "totals/wait_le_50", "totals/wait_ms",
    }  # fmt: skip


@pytest.mark.parametrize("queue", ["{q}", "a}b", "50%", "%7Bq%7D", *ODD_NAMES])
def test_a_queue_may_have_any_name(bench: Bench, queue: str) -> None:
    for name in (queue, "other"):
        odd = Bench(bench.client, name, prefix="app.")
        odd.put("t")
        odd.check()
        assert odd.tags() == ["t"]


@pytest.mark.parametrize("body", [b"", b"\x00\xff\r\n$5\r\n", bytes(range(256)) * 40, "✓".encode()])
def test_a_body_is_bytes(bench: Bench, body: bytes) -> None:
    envelope = b'{"headers": "\xc3\xa9\\u0000"}'
    bench.store.enqueue(bench.queue, "t", "a", envelope, body)
    bench.check()
    (claimed,) = bench.claim()
    assert (claimed.body, claimed.envelope) == (body, envelope)


def test_what_is_admitted_ignores_max_size(bench: Bench) -> None:
    bench.configure("a", max_size=1)
    bench.put("t")
    assert bench.put("u", admit=True)
    with pytest.raises(LaneFull) as full:
        bench.put("v")
    assert (full.value.lane, full.value.queue) == ("a", "q")

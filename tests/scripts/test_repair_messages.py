"""repair_messages: each message with its payload in exactly one set."""

from __future__ import annotations

from tests.scripts.bench import Bench, Record
from tests.scripts.test_redrive import bury


def test_sound_data_stays(bench: Bench) -> None:
    bury(bench, "dead")
    bench.put("leased")
    bench.claim()
    bench.put("late", delay=500)
    bench.put("slot")
    bench.ack(bench.fence(), keep_slot=True)
    bench.put("ready")
    bench.mark()
    tags = ["dead", "leased", "late", "ready"]
    assert bench.store.repair_messages("q", [(tag, "a") for tag in tags]) == (True,) * 4
    assert bench.store.repair_messages("q", [("nobody", "a")]) == (False,)
    assert bench.store.repair_messages("q", []) == ()
    assert bench.changes() == {}


def test_a_slot_stays(bench: Bench) -> None:
    bench.store.configure("q", "a", limit=1)
    bench.put("slot")
    bench.ack(bench.fence(), keep_slot=True)
    bench.mark()
    assert bench.store.repair_messages("q", [("slot", "a")]) == (True,)
    assert bench.changes() == {}


def test_in_no_set_it_becomes_ready_at_its_place(bench: Bench) -> None:
    bench.fill("a", 3)
    bench.mark()
    bench.client.zrem(bench.key("ready", "a"), "a1")
    assert bench.store.repair_messages("q", [("a1", "a")]) == (True,)
    assert bench.changes() == {}


def test_of_several_sets_the_lease_counts(bench: Bench) -> None:
    bench.put("t")
    fence = bench.fence()
    bench.mark()
    bench.client.zadd(bench.key("ready", "a"), {"t": 1})
    bench.client.zadd(bench.key("delayed"), {"t": 1})
    bench.client.zadd(bench.key("dead"), {"t": 1})
    assert bench.store.repair_messages("q", [("t", "a")]) == (True,)
    assert bench.changes() == {}
    assert bench.ack(fence) == (1,)


def test_a_lost_record_is_made_anew(bench: Bench) -> None:
    bench.put("t", priority=3)
    bench.tick(100)
    bench.mark()
    bench.client.hdel(bench.key("message"), "t")
    assert bench.store.repair_messages("q", [("t", "a")]) == (True,)
    assert bench.changes() == {"message/t": Record("a", priority=3, score=3 * 2**49 + 1, born=bench.now)}


def test_without_its_payload_it_is_removed_and_counted(bench: Bench) -> None:
    bench.put("t")
    bench.client.hdel(bench.key("body"), "t")
    assert bench.store.repair_messages("q", [("t", "a")]) == (False,)
    state = bench.check()
    assert (state.message, state.envelope, state.ring, state.totals["purged"]) == ({}, {}, {}, 1)


def test_a_foreign_lane_loses_it(bench: Bench) -> None:
    bench.put("t", "a")
    bench.mark()
    bench.client.zadd(bench.key("ready", "b"), {"t": 1})
    bench.client.sadd(bench.key("flight", "b"), "t")
    assert bench.store.repair_messages("q", [("t", "b")]) == (True,)
    assert bench.changes() == {}

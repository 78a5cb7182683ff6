"""untold: who waits for a message that died by its failures is told, by one worker at a time, until one has done it."""

from __future__ import annotations

import pytest

from fairlanes_transport.store import Dead, FailurePolicy
from tests.scripts.bench import T0, Bench

LEASE = 5_000


def die(bench: Bench, tag: str, lane: str = "a") -> None:
    """Enqueue a message and let its failures be used up, by the expiry of its leases."""
    bench.store.policy = FailurePolicy(backoff_base=0, max_failures=2)
    bench.put(tag, lane)
    for _ in range(2):
        assert bench.tags(lease=10) == [tag]
        bench.tick(10)
        bench.store.expire("q")
    assert tag in bench.check().dead


def untold(bench: Bench, told: bytes = b"") -> Dead | None:
    """Take one, for `LEASE`."""
    return bench.store.untold("q", LEASE, told)


def test_the_whole_state(bench: Bench) -> None:
    die(bench, "t")
    assert bench.state().untold == {"t": bench.now}
    bench.mark()
    assert untold(bench) == Dead(b"t", "a", 2, "lease expired", b'{"t"}', b"t")
    assert bench.changes() == {"untold/t": bench.now + LEASE}
    assert untold(bench, b"t") is None
    assert bench.changes() == {"untold/t": None}


def test_a_claim_says_so(bench: Bench) -> None:
    assert not bench.turn().untold
    die(bench, "t")
    turn = bench.turn()
    assert (turn.untold, turn.need) == (True, False)
    bench.put("next")
    turn = bench.turn()
    assert (turn.untold, [m.fence.tag for m in turn.claimed]) == (True, ["next"])
    untold(bench)
    assert not bench.turn().untold, "somebody is telling it"
    bench.tick(LEASE)
    assert bench.turn().untold
    untold(bench)
    untold(bench, b"t")
    bench.tick(10 * LEASE)
    assert not bench.turn().untold


def test_the_claim_that_buries_says_so_too(bench: Bench) -> None:
    bench.store.policy = FailurePolicy(max_failures=1)
    bench.put("t")
    bench.claim(lease=10)
    bench.tick(10)
    assert bench.turn().untold


def test_who_died_while_telling_leaves_it_to_another_ever_later(bench: Bench) -> None:
    die(bench, "t")
    died = bench.now
    for wait in (LEASE, LEASE, 2 * LEASE, 4 * LEASE):
        assert untold(bench) is not None
        bench.tick(wait - 1)
        assert untold(bench) is None
        bench.tick(1)
    assert bench.now - died == 8 * LEASE


def test_one_at_a_time_the_first_dead_first(bench: Bench) -> None:
    for tag in ("x", "y", "z"):
        die(bench, tag)
    seen = []
    told = b""
    while dead := untold(bench, told):
        seen.append(dead.tag)
        told = dead.tag
    assert seen == [b"x", b"y", b"z"]
    assert bench.check().untold == {}


def test_rejected_until_its_failures_are_used_up(bench: Bench) -> None:
    bench.store.policy = FailurePolicy(max_failures=1)
    bench.put("t")
    bench.store.reject("q", bench.fence(), requeue=True, reason="killed")
    dead = untold(bench)
    assert dead is not None
    assert (dead.failures, dead.reason) == (1, "killed")


def test_what_is_rejected_for_good_was_told_by_who_rejected_it(bench: Bench) -> None:
    bench.put("t")
    bench.store.reject("q", bench.fence(), requeue=False, reason="unknown task")
    assert bench.check().untold == {}


@pytest.mark.parametrize("how", ["redrive", "drop_dead"])
def test_what_is_dead_no_more_is_not_told(bench: Bench, how: str) -> None:
    die(bench, "t")
    assert getattr(bench.store, how)("q", ["t"]) == 1
    assert bench.check().untold == {}
    assert untold(bench) is None


def test_a_trimmed_dead_letter_is_not_told(bench: Bench) -> None:
    for tag in ("x", "y"):
        die(bench, tag)
    bench.store.policy = FailurePolicy(dead_letter_max=1)
    bench.store.expire("q")
    assert list(bench.check().untold) == ["y"]


def test_a_deleted_queue_tells_nothing(bench: Bench) -> None:
    die(bench, "t")
    bench.store.delete("q")
    assert untold(bench) is None
    assert bench.client.keys() == []


def test_an_entry_that_is_no_dead_letter_goes(bench: Bench) -> None:
    die(bench, "t")
    bench.client.zadd(bench.key("untold"), {"nobody": T0})
    dead = untold(bench)
    assert dead is not None
    assert dead.tag == b"t"
    assert list(bench.check().untold) == ["t"]


def test_names_and_reasons_that_are_no_text(bench: Bench) -> None:
    die(bench, "t")
    bench.client.hset(bench.key("reasons"), "t", b"\xff")
    dead = untold(bench)
    assert dead is not None
    assert dead.reason == "\\xff"


def test_it_ends_with_its_queue(bench: Bench) -> None:
    bench.store.declare("q", 60_000)
    die(bench, "t")
    untold(bench)
    assert 0 < bench.client.pttl(bench.key("untold")) <= 63_000

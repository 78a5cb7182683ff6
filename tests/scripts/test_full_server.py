"""A server at its memory limit: publishing is refused whole, everything that drains or repairs goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from fairlanes_transport.errors import ServerFull
from tests.harness import Server
from tests.scripts.bench import DONE, STALE, Answer, Bench, Fence


@pytest.fixture
def full(fresh_server: Callable[..., Server]) -> Iterator[Bench]:
    """A queue with messages in every state, on a server that has been full since."""
    server = fresh_server("--maxmemory-policy", "noeviction")
    bench = Bench(server.client())
    bench.configure("slots", limit=1)
    bench.put("slot", "slots")
    bench.ack(bench.fence(), keep_slot=True)
    bench.put("dead")
    bench.store.reject(bench.queue, bench.fence(), requeue=False, reason="x")
    bench.fill("a", 8)
    bench.put("later", delay=1_000)
    bench.put("waits", "slots")
    server.client().config_set("maxmemory", 1)
    yield bench
    server.client().config_set("maxmemory", 0)
    bench.check()


def test_enqueue_is_refused_whole(full: Bench) -> None:
    full.mark()
    for options in ({}, {"delay": 1_000}, {"must_exist": True}):
        with pytest.raises(ServerFull):
            full.put("new", **options)
    assert full.changes() == {}
    assert not full.put("a0"), "a known tag is known, also on a full server"


def test_a_message_lives_on_to_its_end(full: Bench) -> None:
    one, two, three, four, five = [m.fence for m in full.claim(5, lease=1_000, consumer="c", will_park=True)]
    full.check()
    assert full.store.extend(full.queue, [one], 2_000) == (DONE,)
    assert full.store.release(full.queue, [two]) == (DONE,)
    assert full.store.reject(full.queue, three, requeue=True, reason="x") == DONE
    assert full.store.reject(full.queue, four, requeue=False, reason="x") == DONE
    full.check()
    full.tick(1_000)
    assert full.store.expire(full.queue) == (1, 2)
    assert full.ack(five) == (DONE,), "it came late and counts"
    assert full.ack([one, two, three, four]) == (DONE, DONE, DONE, STALE)
    full.check()


def test_running_slots_are_kept_and_freed(full: Bench) -> None:
    slot = full.state().message["slot"]
    fence = Fence("slot", slot.attempt, slot.token)
    assert full.store.extend(full.queue, [fence], 99_000) == (DONE,)
    assert full.store.finish(full.queue, [fence])
    (claimed,) = [m for m in full.claim(16) if m.lane == "slots"]
    assert full.ack(claimed.fence, keep_slot=True) == (Answer.SLOT,)
    full.check()


def test_the_queue_can_be_drained(full: Bench) -> None:
    full.tick(1_000)
    while claimed := full.claim(3):
        full.ack(message.fence for message in claimed)
        full.check()
    assert (full.check().ready, full.state().delayed) == ({"slots": full.state().ready["slots"]}, {})


def test_the_wake_token_is_kept(full: Bench) -> None:
    assert full.drop_token()
    assert full.store.rearm(full.queue)
    assert len(full.check().wake) == 1


def test_an_operator_can_act(full: Bench) -> None:
    store, queue = full.store, full.queue
    store.declare(queue, 600_000, limit=3)
    full.check()
    store.configure(queue, "a", weight=2, limit=5)
    store.throttle(queue, "a", 1_000)
    store.throttle(queue, "a", 0, shorten=True)
    store.pause(queue)
    store.pause(queue, paused=False)
    full.check()
    assert store.redrive(queue, ["dead"]) == 1
    assert store.cancel(queue, ["a0"]) == (True,)
    assert store.reschedule(queue, [("later", full.now + 5_000)]) == 1
    full.check()
    assert store.size(queue).dead == 0
    assert store.purge(queue, "a", step=2) > 0
    full.check()
    assert store.purge(queue) > 0
    full.check()
    assert store.delete(queue)
    assert full.state().flat() == {}

"""delete: nothing of the queue is left, however many lanes it had."""

from __future__ import annotations

from typing import Any

import pytest

from fairlanes_transport import scripts
from tests.scripts.bench import GONE, Bench, ClientLink


def litter(bench: Bench, lanes: int) -> None:
    """Something of every kind."""
    bench.store.declare(bench.queue, limit=4)
    for i in range(lanes):
        lane = f"lane{i:03}"
        if i % 2:
            bench.configure(lane, weight=2, rate="1/60000", burst=2)
        bench.put(f"t{i}", lane)
    bench.claim(lanes // 2)
    bench.put("later", delay=1_000)
    bench.put("slot", "lane000")
    bench.store.throttle(bench.queue, "lane001", 600_000)
    bench.client.hset(bench.key("work", "lane001"), "mean", 1)


def test_all_of_it_goes_in_pieces(bench: Bench) -> None:
    other = Bench(bench.client, "q2")
    other.put("t")
    litter(bench, 260)
    calls = []

    class Counting(ClientLink):
        def call(self, *args: Any) -> Any:
            calls.append(args[0])
            return super().call(*args)

    bench.store.caller = Counting(bench.client)
    assert bench.store.delete(bench.queue)
    assert calls.count("EVALSHA") > 3
    assert bench.state().flat() == {}
    assert not bench.state().earlier
    assert other.check().message


def test_between_two_pieces_consumers_do_no_harm(bench: Bench) -> None:
    litter(bench, 150)
    fence = bench.fence()
    delete = scripts.load("delete")
    base = bench.key("queue")[:-5]
    assert delete.run(bench.store.caller, base, 0, 0) == 2
    bench.turn(16, consumer="k", will_park=True)
    bench.ack(fence)
    bench.put("new", "lane149")
    bench.store.clear_ruins(bench.queue)
    state = bench.check()
    assert (set(state.message), state.settings, state.earlier) == ({"new"}, {}, {})
    assert bench.store.delete(bench.queue)
    assert bench.state().flat() == {}
    assert bench.client.keys() == []


def test_a_later_ack_finds_it_gone(bench: Bench) -> None:
    bench.put("t")
    fence = bench.fence()
    bench.store.delete(bench.queue)
    assert bench.ack(fence) == (GONE,)
    assert bench.store.extend(bench.queue, [fence], 1_000) == (GONE,)
    assert bench.store.release(bench.queue, [fence]) == (GONE,)
    bench.check()


def test_only_if_it_is_empty(bench: Bench) -> None:
    for operation in (
        lambda: bench.put("t"),
        bench.claim,
        lambda: bench.put("later", delay=1_000),
    ):
        operation()
        bench.mark()
        assert not bench.store.delete(bench.queue, if_empty=True)
        assert bench.changes() == {}


def test_dead_letters_do_not_keep_it(bench: Bench) -> None:
    bench.put("t")
    bench.store.reject(bench.queue, bench.fence(), requeue=False, reason="x")
    assert bench.store.delete(bench.queue, if_empty=True)
    assert bench.state().flat() == {}


def test_a_queue_that_is_not_there(bench: Bench) -> None:
    assert bench.store.delete(bench.queue)
    assert bench.store.delete(bench.queue, if_empty=True)
    assert bench.state().flat() == {}


@pytest.mark.parametrize("expires", [0, 60_000])
def test_after_the_first_step_nothing_of_it_is_left_to_run_or_to_rule(bench: Bench, expires: int) -> None:
    """Whoever deletes dies after one step: no message is in any set, and the next life begins anew."""
    bench.store.declare(bench.queue, expires)
    for i in range(250):
        bench.put(f"t{i}", f"lane{i:03}")
    bench.store.configure(bench.queue, "lane003", paused=1)
    bench.store.throttle(bench.queue, "idle", 600_000)
    bench.client.lpop(bench.key("wake"))
    assert scripts.load("delete").run(bench.store.caller, bench.key("queue")[:-5], 0, 0) == 2
    state = bench.state()
    assert not (state.message or state.ready or state.settings or state.throttle or state.lanes or state.ring)
    bench.put("new", "lane003")
    bench.put("more", "idle")
    assert sorted(bench.tags(5)) == ["more", "new"]
    assert bench.store.declare(bench.queue) is False
    assert bench.check().earlier == {}


def test_a_message_that_arrives_meanwhile_keeps_it(bench: Bench) -> None:
    """Looking and taking away are one step; what comes after it is in the next life."""
    bench.put("t")
    bench.ack(bench.fence())
    for i in range(150):
        bench.store.configure(bench.queue, f"lane{i:03}", weight=2)
    delete = scripts.load("delete")
    base = bench.key("queue")[:-5]
    assert delete.run(bench.store.caller, base, 1, 0) == 2
    bench.put("new")
    assert delete.run(bench.store.caller, base, 1, 1) == 1
    assert delete.run(bench.store.caller, base, 1, 0) == -1
    assert bench.tags() == ["new"]
    bench.check()


def test_a_delete_that_finds_another_interrupted_finishes_both(bench: Bench) -> None:
    litter(bench, 150)
    assert scripts.load("delete").run(bench.store.caller, bench.key("queue")[:-5], 0, 0) == 2
    litter(bench, 150)
    assert bench.store.delete(bench.queue)
    assert bench.client.keys() == []


def test_a_throttle_does_not_come_back(bench: Bench) -> None:
    """Of a lane that holds nothing."""
    bench.put("t", "other")
    bench.store.throttle(bench.queue, "idle", 600_000)
    assert scripts.load("delete").run(bench.store.caller, bench.key("queue")[:-5], 0, 0) == 1
    bench.put("new", "idle")
    assert bench.tags(5) == ["new"]

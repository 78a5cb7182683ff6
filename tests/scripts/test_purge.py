"""purge: what was ready or delayed when it began goes; what is held, dead, or arrived later stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.scripts.bench import DONE, Bench, ClientLink


class Meddling(ClientLink):
    """A link that does something between two calls of one purge."""

    def __init__(self, bench: Bench, meddle: Callable[[int], Any]) -> None:
        super().__init__(bench.client)
        self.calls, self.meddle = 0, meddle

    def call(self, *args: Any) -> Any:
        reply = super().call(*args)
        if args[0] == "EVALSHA" and isinstance(reply, list) and len(reply) == 6:
            self.calls += 1
            self.meddle(self.calls)
        return reply


def purge_with(bench: Bench, meddle: Callable[[int], Any], **options: Any) -> int:
    """Purge; `meddle` runs after each call, through a bench of its own on the same queue."""
    inner = bench.store.caller
    bench.store.caller = Meddling(bench, meddle)
    try:
        return bench.store.purge(bench.queue, **options)
    finally:
        bench.store.caller = inner


def test_the_whole_state(bench: Bench) -> None:
    bench.put("t")
    bench.put("later", delay=1_000)
    bench.mark()
    assert bench.store.purge(bench.queue) == 2
    assert bench.changes() == {
        "body/later": None,
        "body/t": None,
        "delayed/later": None,
        "envelope/later": None,
        "envelope/t": None,
        "lanes/a": None,
        "message/later": None,
        "message/t": None,
        "ready:a/t": None,
        "ring/a": None,
        "totals/purged": 2,
        "wake": None,
    }


@pytest.mark.parametrize("step", [1, 3, 7, 1000])
def test_held_and_dead_messages_stay(bench: Bench, step: int) -> None:
    bench.put("dead")
    bench.store.reject(bench.queue, bench.fence(), requeue=False, reason="x")
    for lane in "abc":
        for priority in (0, 4, 9):
            bench.put(f"{lane}{priority}", lane, priority=priority)
            bench.put(f"{lane}{priority} later", lane, priority=priority, delay=1_000)
    fences = [message.fence for message in bench.claim(4)]
    assert bench.store.purge(bench.queue, step=step) == 14
    state = bench.check()
    assert sorted(state.message) == sorted(["dead", *(fence.tag for fence in fences)])
    assert bench.ack(fences) == (DONE,) * 4
    assert bench.store.purge(bench.queue, step=step) == 0


@pytest.mark.parametrize("step", [1, 2, 1000])
def test_one_lane_only(bench: Bench, step: int) -> None:
    for lane in ("a", "ab", "b"):
        bench.fill(lane, 3)
        bench.put(f"later {lane}", lane, delay=1_000)
    assert bench.store.purge(bench.queue, "ab", step=step) == 4
    state = bench.check()
    assert (set(state.ready), sorted(state.delayed)) == ({"a", "b"}, ["later a", "later b"])
    assert bench.store.purge(bench.queue, "no such lane", step=step) == 0


def test_more_lanes_than_one_call_visits(bench: Bench) -> None:
    for i in range(230):
        bench.put(f"t{i}", f"lane{i:03}")
    assert bench.store.purge(bench.queue) == 230
    assert (bench.check().ready, bench.state().ring) == ({}, {})


@pytest.mark.parametrize("step", [1, 4])
def test_what_arrives_meanwhile_stays(bench: Bench, step: int) -> None:
    for lane in "abc":
        for priority in (0, 5):
            for i in range(3):
                bench.put(f"{lane}{priority}{i}", lane, priority=priority)
        bench.put(f"later {lane}", lane, delay=1_000)
    new: list[str] = []

    def arrive(call: int) -> None:
        bench.tick(1)
        if call > 30:
            return
        for lane in ("a", "c", "aa", "z"):
            for delay in (0, 500):
                tag = f"new {lane} {call} {delay}"
                bench.put(tag, lane, priority=call % 10, delay=delay)
                new.append(tag)

    assert purge_with(bench, arrive, step=step) == 21
    assert sorted(bench.check().message) == sorted(new)
    assert new


@pytest.mark.parametrize("step", [1, 3])
def test_consumers_may_go_on_meanwhile(bench: Bench, step: int) -> None:
    for lane in "abc":
        bench.fill(lane, 5)
    held = []

    def consume(_call: int) -> None:
        bench.tick(1)
        held.extend(bench.claim(1))

    removed = purge_with(bench, consume, step=step)
    state = bench.check()
    assert removed + len(held) == 15
    assert sorted(state.leases) == sorted(message.fence.tag for message in held)


def test_a_purged_id_may_be_sent_again(bench: Bench) -> None:
    bench.put("t")
    bench.store.purge(bench.queue)
    assert bench.put("t")
    bench.check()


def test_an_empty_queue(bench: Bench) -> None:
    assert bench.store.purge(bench.queue) == 0
    assert bench.check().flat() == {}


def test_the_keeper_may_stay(bench: Bench) -> None:
    bench.put("later", delay=1_000)
    bench.turn(consumer="k", will_park=True)
    assert bench.store.purge(bench.queue) == 1
    bench.check()
    bench.put("much later", delay=60_000)
    bench.tick(1_000)
    assert bench.turn(consumer="k", will_park=True).due_in == 59_000

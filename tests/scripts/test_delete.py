"""delete: nothing of the queue is left, however many lanes it had."""

from __future__ import annotations

from typing import Any

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
    bench.client.set(bench.key("throttle", "lane001"), bench.now + 5_000, px=600_000)
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
    assert other.check().message


def test_between_two_pieces_consumers_do_no_harm(bench: Bench) -> None:
    litter(bench, 150)
    fence = bench.fence()
    delete = scripts.load("delete")
    base = bench.key("queue")[:-5]
    assert delete.run(bench.store.caller, base, 0) == 0
    bench.turn(16, consumer="k", will_park=True)
    bench.ack(fence)
    bench.put("new", "lane149")
    assert bench.store.delete(bench.queue)
    assert bench.state().flat() == {}


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

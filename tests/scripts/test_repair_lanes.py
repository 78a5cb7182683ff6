"""repair_lanes: lanes and the wake token where they belong."""

from __future__ import annotations

from tests.scripts.bench import TURN, Bench


def test_sound_data_stays(bench: Bench) -> None:
    bench.fill("a", 2)
    bench.fill("b", 1)
    bench.store.configure("q", "c", weight=2)
    bench.mark()
    assert bench.store.repair_lanes("q", ["a", "b", "c", "nobody"])
    assert bench.store.repair_lanes("q", [])
    assert bench.changes() == {}


def test_the_whole_state(bench: Bench) -> None:
    bench.put("t")
    bench.store.configure("q", "a", weight=2)
    bench.mark()
    bench.client.delete(bench.key("ring"), bench.key("wake"), bench.key("lanes"), bench.key("configured"))
    bench.client.set(bench.key("throttle", "b"), bench.now)
    assert bench.store.repair_lanes("q", ["a", "b"])
    # It joins anew, after what has joined before.
    assert bench.changes() == {"queue/last": "2", "ring/a": 2 + TURN // 2, "throttle:b": bench.now}
    assert 0 < bench.check().ttl["throttle:b"] <= 3_600_000


def test_without_lanes_only_the_token(bench: Bench) -> None:
    bench.put("t")
    bench.mark()
    bench.client.rpush(bench.key("wake"), "1", "1")
    assert bench.store.repair_lanes("q", [])
    assert bench.changes() == {}


def test_a_keeper_long_gone_loses_the_role(bench: Bench) -> None:
    bench.put("t", delay=1_000)
    assert bench.turn(consumer="k", will_park=True).due_in == 1_000
    bench.tick(62_000)
    assert bench.store.repair_lanes("q", [])
    state = bench.check()
    assert "keeper" not in state.queue
    assert len(state.wake) == 1

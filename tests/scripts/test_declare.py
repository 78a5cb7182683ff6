"""declare: the queue exists from now on, with the defaults of its lanes, and its end if it has one."""

from __future__ import annotations

import time

import pytest

from fairlanes_transport.bounds import NUMBERS, OF_A_QUEUE, YEAR_SECONDS
from fairlanes_transport.errors import ScriptError
from tests.scripts.bench import DONE, Bench


def test_new_and_known(bench: Bench) -> None:
    assert not bench.store.exists(bench.queue)
    bench.mark()
    assert bench.store.declare(bench.queue, weight=2, limit=None)
    assert bench.changes() == {"queue/expires": "0", "queue/weight": "2"}
    assert bench.store.exists(bench.queue)
    bench.mark()
    assert not bench.store.declare(bench.queue, weight=2, limit=None)
    assert bench.changes() == {}


def test_a_queue_that_only_holds_messages_exists(bench: Bench) -> None:
    bench.put("t")
    assert bench.store.exists(bench.queue)
    assert not bench.store.declare(bench.queue)


def test_defaults_change_and_go(bench: Bench) -> None:
    bench.store.declare(bench.queue, limit=3, rate="5/1000")
    bench.mark()
    bench.store.declare(bench.queue, limit=None, rate="6/1000")
    assert bench.changes() == {"queue/limit": None, "queue/rate": "6/1000"}


@pytest.mark.parametrize(
    "defaults",
    [
        {"weight": "heavy"}, {"weight": 0}, {"weight": "none"}, {"limit": 2_000_000_000}, {"limit": 1.5},
        {"rate": "5"}, {"rate": "0/1000"}, {"rate": "-1/-1"}, {"rate": "1/0"}, {"burst": "nan"}, {"max_size": "0x10"},
        {"fairness": "luck"}, {"vt": 5}, {"keeper": "me"}, {"paused": 1}, {"limit": 3, "expires": 1},
    ],
)  # fmt: skip
def test_a_bad_default_changes_nothing(bench: Bench, defaults: dict[str, object]) -> None:
    bench.put("t")
    bench.mark()
    with pytest.raises(ScriptError, match="FLARG"):
        bench.store.declare(bench.queue, **defaults)
    assert bench.changes() == {}


def test_a_queue_that_was_refused_is_not_there(bench: Bench) -> None:
    with pytest.raises(ScriptError, match='FLARG setting weight: "heavy"'):
        bench.store.declare(bench.queue, weight="heavy")
    assert not bench.store.exists(bench.queue)
    bench.put("t")
    assert bench.tags() == ["t"]


def test_the_bounds_themselves_are_let_in(bench: Bench) -> None:
    for high in (False, True):
        numbers = {name: b[high] for name, b in NUMBERS.items() if name in OF_A_QUEUE and name != "rate"}
        rate = "1000/1" if high else f"1/{YEAR_SECONDS * 1000}"
        bench.store.declare(bench.queue, **numbers, rate=rate, fairness="time" if high else "count")
        lane = f"lane{high}"
        bench.store.configure(bench.queue, lane, **numbers, rate=rate)
        bench.put(f"t{high}", lane)
        assert bench.tags() == [f"t{high}"]
        bench.check()


def test_a_default_that_changes_places_the_lanes_anew(bench: Bench) -> None:
    bench.fill("a", 3)
    bench.fill("b", 3)
    bench.claim(2)
    bench.store.declare(bench.queue, limit=1)
    bench.turn(0)
    state = bench.check()
    assert (state.ring, state.wake) == ({}, [])
    bench.store.declare(bench.queue, limit=2)
    bench.turn(0)
    state = bench.check()
    assert (set(state.ring), len(state.wake)) == ({"a", "b"}, 1)


def test_a_rate_by_default(bench: Bench) -> None:
    bench.store.declare(bench.queue, rate="1/60000", burst=1)
    bench.fill("a", 2)
    bench.claim(2)
    assert bench.check().waiting == {"a": bench.now + 60_000}
    bench.store.declare(bench.queue, rate=None)
    bench.turn(0)
    state = bench.check()
    assert (state.waiting, list(state.ring)) == ({}, ["a"])


# the end of a queue


def of_the_queue(bench: Bench) -> dict[str, int]:
    """Ms to live of the queue's own keys."""
    return {key: ttl for key, ttl in bench.check().ttl.items() if ":" not in key and key != "finished"}


def of_lanes(bench: Bench) -> dict[str, int]:
    """The same of the lanes' keys."""
    return {key: ttl for key, ttl in bench.check().ttl.items() if ":" in key}


def test_everything_of_a_queue_ends_with_it(bench: Bench) -> None:
    bench.store.declare(bench.queue, 60_000)
    bench.fill("a", 3)
    bench.fill("b", 1)
    bench.put("later", delay=1_000)
    bench.store.reject(bench.queue, bench.fence(), requeue=False, reason="x")
    bench.ack(bench.fence())
    state = bench.check()
    assert len(bench.client.keys()) == len(state.ttl)
    assert all(60_000 <= ttl + 1_000 <= 64_000 for ttl in of_the_queue(bench).values())
    assert all(120_000 <= ttl <= 140_000 for ttl in of_lanes(bench).values())


def test_each_use_moves_the_end(bench: Bench) -> None:
    bench.store.declare(bench.queue, 60_000)
    bench.put("t")
    fence = bench.fence()
    uses = {
        "declare": lambda: bench.store.declare(bench.queue, 60_000),
        "enqueue": lambda: bench.put("u"),
        "claim": lambda: bench.claim(0),
        "rearm": lambda: bench.store.rearm(bench.queue),
        "expire": lambda: bench.store.expire(bench.queue),
        "extend": lambda: bench.store.extend(bench.queue, [fence], 3_600_000),
        "release": lambda: bench.store.release(bench.queue, [fence]),
        "reject": lambda: bench.store.reject(bench.queue, fence, requeue=True, reason="x"),
        "ack": lambda: bench.ack(fence),
        "finish": lambda: bench.store.finish(bench.queue, [fence]),
    }
    for name, use in uses.items():
        for key in of_the_queue(bench):
            bench.client.pexpire(bench.key(key), 5_000)
        use()
        short = {key: ttl for key, ttl in of_the_queue(bench).items() if ttl <= 5_000}
        assert not short, f"{name}: {short}"


def test_a_queue_with_many_lanes_ends_whole(bench: Bench) -> None:
    """All of them are there while the queue is used, and each call moves some only."""
    bench.store.declare(bench.queue, 600)
    for i in range(1_500):
        bench.put(f"t{i}", f"lane{i:04}")
    stop = time.monotonic() + 4
    while time.monotonic() < stop:
        time.sleep(0.05)
        bench.store.rearm(bench.queue)
    state = bench.check()
    assert len(state.ready) == len(state.message) == 1_500
    ready = [ttl for key, ttl in state.ttl.items() if key.startswith("ready:")]
    assert len(ready) == 1_500
    assert min(ready) >= state.ttl["queue"] - 5


def test_the_queue_never_outlives_a_lane(bench: Bench) -> None:
    bench.store.declare(bench.queue, 60_000)
    bench.fill("a", 1)
    bench.fill("b", 1)
    time_now, us = bench.client.time()
    soon = time_now * 1000 + us // 1000 + 20_000
    bench.client.zadd(bench.key("ends"), {f"idle{i}": soon for i in range(250)} | {"a": soon + 1})
    for i in range(250):
        bench.client.sadd(bench.key("flight", f"idle{i}"), "x")
    bench.client.pexpire(bench.key("queue"), 5_000)
    bench.store.rearm(bench.queue)
    assert 15_000 < bench.client.pttl(bench.key("queue")) <= 20_001
    bench.store.rearm(bench.queue)
    assert bench.client.pttl(bench.key("queue")) > 55_000


def test_what_is_new_ends_with_the_rest(bench: Bench) -> None:
    bench.store.declare(bench.queue, 60_000)
    bench.put("t")
    for key in of_the_queue(bench):
        bench.client.pexpire(bench.key(key), 60_500)
    bench.put("u", "b")
    bench.put("later", "c", delay=1_000)
    bench.tick(1_000)
    bench.store.expire(bench.queue)
    ttl = of_the_queue(bench)
    assert max(ttl.values()) <= 60_500
    assert "message" in ttl
    assert {"ready:a", "ready:b", "ready:c"} <= set(of_lanes(bench))


def test_settings_end_with_the_queue(bench: Bench) -> None:
    bench.store.declare(bench.queue, 60_000)
    bench.store.configure(bench.queue, "a", weight=2)
    assert "configured" in of_the_queue(bench)
    assert "settings:a" in of_lanes(bench)


def test_settings_do_not_come_back_in_the_next_life(bench: Bench) -> None:
    bench.store.declare(bench.queue, 60_000)
    bench.store.configure(bench.queue, "a", paused=1)
    bench.put("old")
    bench.client.delete(*(bench.key(part) for part in of_the_queue(bench)))  # its time has come
    bench.store.declare(bench.queue, 60_000)
    bench.put("new")
    assert bench.tags(5) == ["new"]
    assert all(ttl > 0 for ttl in bench.check().earlier.values())


def test_a_queue_that_gets_an_end_keeps_what_it_holds(bench: Bench) -> None:
    bench.fill("a", 2)
    bench.store.configure(bench.queue, "b", weight=2)
    fence = bench.fence()
    bench.store.declare(bench.queue, 60_000)
    state = bench.check()
    assert (len(state.message), state.settings) == (2, {"b": {"weight": "2"}})
    assert set(of_lanes(bench)) == {"ready:a", "flight:a", "settings:b"}
    assert bench.ack(fence) == (DONE,)


def test_a_queue_with_too_many_lanes_stays_without_an_end(bench: Bench) -> None:
    for i in range(251):
        bench.put(f"t{i}", f"lane{i:03}")
    bench.store.declare(bench.queue, 60_000)
    state = bench.check()
    assert (state.ttl, len(state.ready)) == ({}, 251)


def test_a_queue_that_no_longer_ends_loses_nothing(bench: Bench) -> None:
    bench.store.declare(bench.queue, 60_000)
    for i in range(1_130):
        bench.put(f"t{i}", f"lane{i:04}")
    bench.claim(5)
    bench.put("later", delay=1_000)
    bench.store.declare(bench.queue, 0)
    assert bench.check().ttl == {}


def test_another_end(bench: Bench) -> None:
    bench.store.declare(bench.queue, 60_000)
    bench.put("t")
    bench.store.declare(bench.queue, 600_000)
    assert min(bench.check().ttl.values()) > 500_000

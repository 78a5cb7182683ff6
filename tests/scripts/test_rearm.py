"""rearm: who leaves gives back what it holds of the wake protocol."""

from __future__ import annotations

import pytest

from tests.scripts.bench import Bench


def test_a_token_that_cannot_be_used_is_given_back(bench: Bench) -> None:
    bench.put("t")
    bench.mark()
    assert bench.drop_token()
    assert bench.store.rearm(bench.queue, "c")
    assert bench.changes() == {}


def test_a_second_token_is_never_made(bench: Bench) -> None:
    bench.put("t")
    bench.mark()
    assert bench.store.rearm(bench.queue)
    assert bench.changes() == {}


def test_a_token_without_need_goes(bench: Bench) -> None:
    bench.put("t")
    bench.claim()
    bench.client.rpush(bench.key("wake"), "1")
    assert not bench.store.rearm(bench.queue)
    assert bench.check().wake == []


def test_the_keeper_leaves_its_role(bench: Bench) -> None:
    bench.put("t", delay=1_000)
    bench.turn(consumer="k", will_park=True)
    bench.mark()
    assert bench.store.rearm(bench.queue, "k")
    assert bench.changes() == {"queue/keeper": None, "queue/keeper_until": None, "wake": 1}


@pytest.mark.parametrize("who", ["other", ""])
def test_others_do_not(bench: Bench, who: str) -> None:
    bench.put("t", delay=1_000)
    bench.turn(consumer="k", will_park=True)
    bench.mark()
    assert not bench.store.rearm(bench.queue, who)
    assert bench.changes() == {}


def test_a_queue_that_does_not_exist(bench: Bench) -> None:
    assert not bench.store.rearm(bench.queue, "k")
    assert bench.check().flat() == {}

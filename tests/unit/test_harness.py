"""The harness itself: what other tests lean on must fail loudly and clean up."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest
import redis

from fairlanes_transport.connections import Link
from fairlanes_transport.errors import LaneFull
from tests.harness import FakeLink, Sender, Server, Worker, recorded, wait_done, wait_for


def test_wait_for_says_what_it_waited_for() -> None:
    with pytest.raises(AssertionError, match=r"the tide: not within 0.05 s; last seen: 0"):
        wait_for(lambda: 0, 0.05, "the tide")


def test_each_test_finds_an_empty_server(any_client: redis.Redis) -> None:
    assert any_client.dbsize() == 0
    any_client.set("left", "over")


def test_a_restarted_server_keeps_its_port_and_its_data(fresh_server: Callable[..., Server]) -> None:
    server = fresh_server("--appendonly", "yes", "--appendfsync", "always")
    port, pid = server.port, server.pid
    server.client().set("k", "v")
    server.kill()
    assert not server.running()
    server.restart()
    assert (server.port, server.client().get("k")) == (port, b"v")
    assert server.pid != pid


def test_each_link_gives_the_same_raw_replies_and_errors(link: Link | FakeLink) -> None:
    assert link.call("HSET", "h", "a", 1) == 1
    assert link.call("HGETALL", "h") == [b"a", b"1"]
    with pytest.raises(redis.exceptions.ResponseError, match="WRONGTYPE"):
        link.call("LPUSH", "h", 1)
    with pytest.raises(LaneFull, match="limit 3"):
        link.call("EVAL", "return redis.error_reply('FLFULL 3 3')", 0)
    bad, good = link.pipeline([("LPUSH", "h", 1), ("EVAL", "return {1, false, 'x'}", 0)])
    assert isinstance(bad, redis.exceptions.ResponseError)
    assert good == [1, None, b"x"]


@pytest.mark.parametrize("server", ["valkey"], indirect=True)
def test_a_worker_runs_the_basic_app_and_is_reaped(server: Server) -> None:
    flags = ("--without-mingle", "--without-gossip")
    with (
        Sender(server, "redis", results=True) as sender,
        Worker(server, *flags, scheme="redis", conf={"results": True}) as worker,
    ):
        assert sender.send("add", 1, 2).get(10) == 3
        sender.send("fail", "acme", 1)
        sender.send("mark", "acme", 2, 0.5, tenant="acme")
        done = wait_done(server, 2, 10)
        assert [entry["task"] for entry in done] == ["add", "mark"]
        wait_for(lambda: len(recorded(server, "started")) == 3, 5, "three starts")
        seen = sender.send("whoami", "me", tenant="acme").get(10)
        assert (seen["label"], seen["headers"]["tenant"]) == ("me", "acme")
        sender.send("retrying", "acme", 3, times=1)
        worker.wait_for_log("succeeded")
        assert worker.stop(signal.SIGTERM) == 0
    assert "Warm shutdown" in worker.text()

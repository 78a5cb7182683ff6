"""What this process holds, and what it says of it twice."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import redis
from kombu import Connection

from tests.harness import Server, wait_for
from tests.invariants import check
from tests.transport.conftest import ours, send

pytestmark = ours


def test_a_message_that_this_process_holds_is_not_got_again(connection: Connection, server: Server) -> None:
    """Its lease ran out, and we claim it ourselves: the one execution goes on, under the newer fence."""
    send(connection, "q", 1)
    channel = connection.default_channel
    message = channel.basic_get("q")
    connection.transport.store.extend("q", [message.lease.fence], 0)
    assert channel.basic_get("q") is None
    assert message.lease.fence.attempt == 2
    message.ack()
    assert check(server.client(), "q").message == {}


@pytest.mark.parametrize("what", ["reject", "release"])
def test_what_is_told_again_after_a_lost_reply_is_no_lost_lease(
    connection: Connection,
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    what: str,
) -> None:
    send(connection, "q", 1)
    message = connection.default_channel.basic_get("q")
    store = connection.transport.store
    told = getattr(store, what)

    def lose_the_reply(*args: Any, **kwargs: Any) -> Any:
        told(*args, **kwargs)
        raise redis.exceptions.ConnectionError("the reply was lost")

    monkeypatch.setattr(store, what, lose_the_reply)
    with caplog.at_level(logging.WARNING):
        if what == "reject":
            message.requeue()
        else:
            connection.default_channel.qos.restore_unacked()
        wait_for(lambda: not connection.transport.keeper.behind, 5, "the keeper has told it again")
    assert "lease ran out" not in caplog.text
    state = check(server.client(), "q")
    assert (state.leases, len(state.message)) == ({}, 1)

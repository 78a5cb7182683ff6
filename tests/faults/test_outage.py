"""A server that is away for longer than a lease: who runs a task keeps it, whoever claims first when it is back."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable

import pytest
import redis
from kombu import Connection

from fairlanes_transport.store import Store
from tests.harness import Server
from tests.scripts.bench import ClientLink
from tests.transport.conftest import send

pytestmark = pytest.mark.faults

LEASE = 4.0
AWAY = 7.0


def stop_and_continue(server: Server) -> None:
    os.kill(server.pid, signal.SIGSTOP)
    time.sleep(AWAY)
    os.kill(server.pid, signal.SIGCONT)


def restart(server: Server) -> None:
    server.stop()
    time.sleep(AWAY)
    server.start()


@pytest.mark.parametrize("outage", [stop_and_continue, restart])
def test_what_runs_keeps_its_lease(fresh_server: Callable[..., Server], outage: Callable[[Server], None]) -> None:
    server = fresh_server("--appendonly", "yes", "--appendfsync", "always")
    connection = Connection(server.url(), transport_options={"lease_seconds": LEASE, "socket_timeout": 2})
    try:
        send(connection, "celery", "long")
        message = connection.default_channel.basic_get("celery")
        outage(server)
        client = server.client(retry=None)
        store = Store(ClientLink(client), "")
        stolen = []
        until = time.monotonic() + 2 * LEASE
        while time.monotonic() < until:
            with contextlib.suppress(redis.exceptions.ConnectionError):
                stolen += store.claim("celery", 1, int(LEASE * 1000)).claimed
            time.sleep(0.02)
        assert stolen == []
        message.ack()
        assert store.size("celery").leased == 0
    finally:
        connection.close()


def test_what_nobody_renews_is_taken_when_the_grace_is_over(fresh_server: Callable[..., Server]) -> None:
    server = fresh_server()
    store = Store(ClientLink(server.client()), "")
    store.enqueue("q", "t", "a", "{}", b"")
    store.claim("q", 1, 2_000)
    os.kill(server.pid, signal.SIGSTOP)
    time.sleep(3)
    os.kill(server.pid, signal.SIGCONT)
    began = time.monotonic()
    while not store.claim("q", 1, 2_000).claimed:
        assert time.monotonic() - began < 5
        time.sleep(0.01)
    assert time.monotonic() - began > 0.3

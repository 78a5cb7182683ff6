"""The store against the reference, through every transition.

The profile (``HYPOTHESIS_PROFILE``, see ``tests/conftest.py``) decides how much: 60 runs derandomised in
``ci``, a hundred times that in ``nightly``.
"""

from __future__ import annotations

from collections.abc import Callable

import fakeredis
import pytest
import redis
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.harness import Server
from tests.model.machine import QueueMachine


def run(connect: Callable[[], redis.Redis], examples: int = 0, steps: int = 40) -> None:
    """Run the machine; a `connect` makes the client of each example."""
    machine = type("Machine", (QueueMachine,), {"connect": staticmethod(connect)})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples or max(1, settings().max_examples * 6 // 10),
            stateful_step_count=steps,
            suppress_health_check=list(HealthCheck),
        ),
    )


def fake_client() -> redis.Redis:
    """A client of an empty fake server."""
    return fakeredis.FakeRedis(server=fakeredis.FakeServer(version=(7,), server_type="redis"), protocol=2)


@pytest.mark.timeout(0)
def test_on_fakeredis() -> None:
    run(fake_client)


@pytest.mark.timeout(0)
def test_on_a_server(server: Server) -> None:
    def connect() -> redis.Redis:
        server.client().flushall()
        return server.client()

    run(connect)

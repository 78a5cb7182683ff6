"""Weights set by the command line act on the backlog at once, and the shares are exact at every prefix."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
from kombu import Connection, Consumer, Producer, Queue

from tests.harness import Server

pytestmark = pytest.mark.acceptance

WEIGHTS = {"a": 3, "b": 1, "c": 2}
EACH = 300


def spread(served: dict[str, int]) -> float:
    """The largest difference between two lanes of what they were served by their weights."""
    turns = [served[lane] / weight for lane, weight in WEIGHTS.items()]
    return max(turns) - min(turns)


def test_weights_set_while_messages_wait(server: Server) -> None:
    queue = Queue("q", routing_key="q")
    with Connection(server.url("fairlanes")) as connection:
        producer = Producer(connection.default_channel)
        for lane, _ in itertools.product(WEIGHTS, range(EACH)):
            producer.publish(lane, routing_key="q", declare=[queue], headers={"tenant": lane})
        for lane, weight in WEIGHTS.items():
            command = ("-b", server.url("fairlanes"), "set", "q", lane, "--weight", str(weight))
            subprocess.run([sys.executable, "-m", "fairlanes_transport.cli", *command], check=True, timeout=60)
        order: list[str] = []

        def take(body: str, message: object) -> None:
            order.append(body)
            message.ack()  # type: ignore[attr-defined]

        with Consumer(connection.channel(), [queue], callbacks=[take], prefetch_count=7):
            while len(order) < len(WEIGHTS) * EACH:
                connection.drain_events(timeout=10)

    served = dict.fromkeys(WEIGHTS, 0)
    for lane in order:
        served[lane] += 1
        if max(served.values()) == EACH:
            break  # from here on a lane is empty
        assert spread(served) <= 1 + 1e-9, served
    assert served == {"a": 300, "b": 100, "c": 200} or served["a"] == EACH

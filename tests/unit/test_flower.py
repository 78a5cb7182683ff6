"""Flower's broker page: what it is told, and that brokers of others are asked as before."""

from __future__ import annotations

import asyncio
import sys
from types import ModuleType
from typing import Any

import pytest
from celery import Celery

from fairlanes_transport.flower import LanesBroker, install
from tests.harness import Server
from tests.unit.rig import Rig


class Factory:
    """As `flower.utils.broker.Broker`."""

    def __new__(cls, broker_url: str, *args: Any, **kwargs: Any) -> Any:
        if broker_url.startswith("redis:"):
            return "redis", args, kwargs
        raise NotImplementedError


@pytest.fixture
def factory(monkeypatch: pytest.MonkeyPatch) -> type:
    """Flower's factory of brokers, where Flower is installed; else one like it."""
    try:
        from flower.utils import broker
    except ModuleNotFoundError:
        for name in ("flower", "flower.utils", "flower.utils.broker"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        broker = sys.modules["flower.utils.broker"]  # type: ignore[assignment]
        sys.modules["flower.utils"].broker = broker  # type: ignore[attr-defined]
        broker.Broker = type("Broker", (Factory,), {})
    monkeypatch.setattr(broker.Broker, "__new__", broker.Broker.__new__)
    return broker.Broker


def test_it_tells_the_lengths_of_queues(server: Server, factory: type) -> None:
    rig = Rig(server.client())
    for i in range(5):
        rig.send(f"t{i}", f"lane{i % 2}")
    rig.store.claim("q", 2, 60_000)
    app = Celery(broker=server.url("fairlanes"), set_as_current=False)
    install(app)
    install(app)
    broker = factory("fairlanes://:x@wherever:1/0", http_api=None, broker_options={})
    assert isinstance(broker, LanesBroker)
    assert asyncio.run(broker.queues(["q", "absent"])) == [
        {"name": "q", "messages": 5, "messages_ready": 3, "messages_unacknowledged": 2}
    ]
    rig.close()
    app.close()


def test_other_brokers_are_asked_as_before(factory: type) -> None:
    install(Celery(set_as_current=False))
    assert not isinstance(factory("redis://localhost:1/0", broker_options={}), LanesBroker)
    with pytest.raises(NotImplementedError):
        factory("carrier-pigeon://")

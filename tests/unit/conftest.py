"""Fixtures of the operator's tools; the classes are in ``rig.py``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from tests.harness import Server
from tests.unit.rig import Command, Rig


@pytest.fixture
def rig(any_client: redis.Redis) -> Iterator[Rig]:
    """A broker with the queue ``q``: fakeredis, and each kind of server."""
    rig = Rig(any_client)
    yield rig
    rig.close()


@pytest.fixture
def command(server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Command]:
    """The command line on a broker with the queue ``q``; no variable names another broker."""
    for name in ("FAIRLANES_BROKER", "CELERY_BROKER_URL"):
        monkeypatch.delenv(name, raising=False)
    command = Command(server)
    yield command
    command.close()

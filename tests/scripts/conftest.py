"""The bench that script tests work on: once on fakeredis, once on each kind of server."""

from __future__ import annotations

import pytest
import redis

from tests.scripts.bench import Bench


@pytest.fixture
def bench(any_client: redis.Redis) -> Bench:
    """An empty queue ``q``."""
    return Bench(any_client)

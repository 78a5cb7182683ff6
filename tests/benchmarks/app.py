"""The Celery app of the benchmarks."""

from __future__ import annotations

import functools
import os
import time

import redis

from tests.apps.settings import PORT, RECORD_DB, from_environment
from tests.benchmarks import STARTS

app = from_environment("bench")
app.set_default()


@functools.cache
def _records(pid: int) -> redis.Redis:
    return redis.Redis(port=int(os.environ[PORT]), db=RECORD_DB)


@app.task(name="bench.noop")
def noop(number: int) -> None:
    """Do nothing."""


@app.task(name="bench.mark")
def mark(number: int) -> None:
    """Note when this started."""
    now = time.time()
    _records(os.getpid()).rpush(STARTS, now)

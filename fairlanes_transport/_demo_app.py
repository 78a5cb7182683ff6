"""The Celery app that ``fairlanes demo`` runs: plain Celery, which nowhere says what its broker is.

The broker comes from Celery's own ``CELERY_BROKER_URL``; where to note what ran, from
``FAIRLANES_DEMO_RECORD``.
"""

from __future__ import annotations

import functools
import json
import os
import time
from typing import Any

import redis
from celery import Celery
from celery.signals import worker_ready

RECORD_ENV = "FAIRLANES_DEMO_RECORD"
"""Environment variable with the redis URL of the database for the two lists below."""

STARTS = "starts"
"""List of what ran: JSON ``[tenant, number, sent, started]``, times in seconds since the epoch."""

READY = "ready"
"""List that gets an entry when the worker is ready: a demo waits on it, and reads no log."""

app = Celery("fairlanes-demo")
app.conf.update(task_ignore_result=True, broker_connection_retry_on_startup=False)


@functools.cache
def _record(pid: int) -> redis.Redis:
    """Return this process's client: a pool process must not share its parent's connection."""
    return redis.Redis.from_url(os.environ[RECORD_ENV])


@worker_ready.connect
def _tell_ready(**_: Any) -> None:
    _record(os.getpid()).rpush(READY, 1)


@app.task(name="demo.work")
def work(tenant: str, number: int, sent: float, seconds: float) -> None:
    """Note when this started and wait ``seconds``, as a task that calls some service would."""
    _record(os.getpid()).rpush(STARTS, json.dumps([tenant, number, sent, time.time()]))
    time.sleep(seconds)

"""The Celery app of the acceptance tests. Plain Celery: nothing in it knows which broker it runs on.

Each task notes its start under ``started`` and, if it gets there, its end under ``done``: tenant, sequence
number, when it was sent, time, process id, task id, and how often it was retried.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import time
from collections.abc import Iterator
from typing import Any

import redis
from celery import Task

import fairlanes_transport
from tests.apps.settings import PORT, RECORD_DB, from_environment

app = from_environment("basic")
app.set_default()


@functools.cache
def _client(pid: int) -> redis.Redis:
    """Return the client of this process: a prefork child must not share its parent's connection."""
    return redis.Redis(port=int(os.environ[PORT]), db=RECORD_DB)


@contextlib.contextmanager
def noting(task: Task[Any, Any], **facts: Any) -> Iterator[dict[str, Any]]:
    """Note the start now and the end when the block ends without an exception; facts may be added in the
    block.
    """
    client = _client(os.getpid())
    facts = {
        "task": task.name.rsplit(".")[-1],
        "id": task.request.id,
        "retries": task.request.retries,
        **facts,
    }
    facts["pid"] = os.getpid()
    client.rpush("started", json.dumps({**facts, "t": time.time()}))
    yield facts
    client.rpush("done", json.dumps({**facts, "t": time.time()}))


@app.task(bind=True, name="basic.add")
def add(self: Task[Any, Any], x: int, y: int) -> int:
    """Return the sum."""
    with noting(self, x=x, y=y):
        return x + y


@app.task(bind=True, name="basic.mark")
def mark(self: Task[Any, Any], tenant: str, i: int, sent: float | None = None) -> None:
    """Do nothing but note it."""
    with noting(self, tenant=tenant, i=i, sent=sent):
        pass


@app.task(bind=True, name="basic.late", acks_late=True)
def late(self: Task[Any, Any], tenant: str, i: int, seconds: float = 0.0) -> None:
    """Take ``seconds``; acknowledged when done."""
    with noting(self, tenant=tenant, i=i):
        time.sleep(seconds)


@app.task(bind=True, name="basic.sleepy")
def sleepy(self: Task[Any, Any], tenant: str, i: int, seconds: float = 0.0) -> None:
    """Take ``seconds``; acknowledged before it starts, Celery's default."""
    with noting(self, tenant=tenant, i=i):
        time.sleep(seconds)


@app.task(bind=True, name="basic.fail")
def fail(self: Task[Any, Any], tenant: str, i: int) -> None:
    """Raise: ``started`` has it, ``done`` does not."""
    with noting(self, tenant=tenant, i=i):
        raise RuntimeError("a task that fails on purpose")


@app.task(bind=True, name="basic.retrying", max_retries=10)
def retrying(self: Task[Any, Any], tenant: str, i: int, times: int = 2, countdown: float = 0.0) -> None:
    """Retry ``times`` times, ``countdown`` seconds apart, then succeed."""
    with noting(self, tenant=tenant, i=i):
        if self.request.retries < times:
            raise self.retry(countdown=countdown)


@app.task(bind=True, name="basic.whoami")
def whoami(self: Task[Any, Any], label: str = "") -> dict[str, Any]:
    """Note and return what the request knows: ``headers``, ``properties``, ``tenant``, ``delivery_info``."""
    request = self.request
    seen = {
        "label": label,
        "headers": request.headers,
        "properties": request.properties,
        "tenant": getattr(request, "tenant", None),
        "delivery_info": request.delivery_info,
    }
    with noting(self, **json.loads(json.dumps(seen, default=repr))) as facts:
        return facts


@app.task(bind=True, name="basic.throttling")
def throttling(self: Task[Any, Any], tenant: str, i: int, seconds: float) -> None:
    """Take the lane off the ring for ``seconds``, as after a 429."""
    with noting(self, tenant=tenant, i=i):
        fairlanes_transport.throttle(seconds)

"""The Celery app that ``fairlanes demo`` and ``fairlanes drill`` run: plain Celery, which nowhere says what its
broker is.

The broker comes from Celery's own ``CELERY_BROKER_URL``, other settings from ``FAIRLANES_DEMO_CONF``; where to note
what happened, from ``FAIRLANES_DEMO_RECORD``: a file, so that nothing but the tasks touches the broker.
"""

from __future__ import annotations

import functools
import json
import os
import time
from typing import Any

from celery import Celery
from celery.signals import task_received, worker_ready

RECORD_ENV = "FAIRLANES_DEMO_RECORD"
"""Environment variable with the path of the record, which is there already."""

CONF_ENV = "FAIRLANES_DEMO_CONF"
"""Environment variable with Celery settings, as JSON."""

TASK = "demo.work"
NUMBER = "demo_number"
"""Header with a task's number within its tenant's."""

app = Celery("fairlanes-demo")
app.conf.update(task_ignore_result=True, broker_connection_retry_on_startup=False)
app.conf.update(json.loads(os.environ.get(CONF_ENV) or "{}"))


@functools.cache
def _record(pid: int) -> int:
    """Return this process's descriptor of the record."""
    return os.open(os.environ[RECORD_ENV], os.O_WRONLY | os.O_APPEND)


def note(*entry: Any) -> None:
    """Add a line to the record: what, process group of the worker, time, and what else there is to it.

    One write, to a file that is opened for appending: lines of several processes do not mix.
    """
    what, *rest = entry
    line = json.dumps([what, os.getpgrp(), time.time(), *rest]) + "\n"
    os.write(_record(os.getpid()), line.encode())


@worker_ready.connect
def _note_ready(**_: Any) -> None:
    note("ready")


@task_received.connect
def _note_claim(request: Any, **_: Any) -> None:
    """Messages are delivered in the order in which they were claimed."""
    headers, properties = request.message.headers, request.message.properties
    attempt = properties.get("fairlanes", {}).get("attempt", 1)
    note("claim", headers.get("tenant"), headers.get(NUMBER), attempt)


@app.task(name=TASK)
def work(tenant: str, number: int, sent: float, seconds: float) -> None:
    """Note when this started, and wait ``seconds``, as a task that calls some service would."""
    note("start", tenant, number, sent)
    time.sleep(seconds)
    note("end", tenant, number)

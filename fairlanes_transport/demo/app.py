"""The Celery app that ``fairlanes demo`` and ``fairlanes drill`` run: plain Celery, which nowhere says what its
broker is.

The broker comes from Celery's own ``CELERY_BROKER_URL``, other settings from ``FAIRLANES_DEMO_CONF``.  What happened
is noted among what the worker logs, so that nothing but the tasks touches the broker, and nothing is left of it.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

from celery import Celery
from celery.app.amqp import AMQP
from celery.signals import task_received, worker_ready
from kombu.entity import Exchange

CONF_ENV = "FAIRLANES_DEMO_CONF"
"""Environment variable with Celery settings, as JSON."""

MARK = b"\x1e"
"""What a line begins with that is no log line."""

TASK = "demo.work"
NUMBER = "demo_number"
"""Header with a task's number within its tenant's."""


class UnboundAMQP(AMQP):  # type: ignore[misc]
    """Queues on the exchange without a name, where each is known by its own."""

    default_exchange = Exchange("")


def configured(app: Celery, conf: dict[str, Any]) -> Celery:
    """Give the app these settings.  Queues named there are on the default exchange: a binding would stay behind."""
    app.conf.update(conf)
    if "task_queues" in conf:
        app.amqp_cls = UnboundAMQP
    return app


app = Celery("fairlanes-demo")
app.conf.update(task_ignore_result=True, broker_connection_retry_on_startup=False)
configured(app, json.loads(os.environ.get(CONF_ENV) or "{}"))


def note(what: str, *rest: Any) -> None:
    """Write a line to standard output: what, process group of the worker, time, and what else there is to it.

    It is one write, to a file that is open for appending, so lines of several processes do not mix; somebody may
    have left a line unfinished.
    """
    line = json.dumps([what, os.getpgrp(), time.time(), *rest]).encode()
    os.write(1, b"\n" + MARK + line + b"\n")


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

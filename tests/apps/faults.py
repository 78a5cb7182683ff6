"""The Celery app of the fault tests: tasks that take long, die, fail, and say which attempt they are.

Each notes its start under ``started`` and its end under ``done``, as those of ``tests.apps.basic`` do.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from celery import Task
from celery.exceptions import Reject
from celery.worker.control import inspect_command

from fairlanes_transport import tasks
from tests.apps.basic import app, noting


def _facts(task: Task[Any, Any], i: int) -> dict[str, Any]:
    delivery = tasks.delivery(task.request)
    info = task.request.delivery_info or {}
    return {
        "i": i,
        "attempt": tasks.attempt(task.request),
        "lane": delivery.lane if delivery else None,
        "redelivered": info.get("redelivered"),
    }


@app.task(bind=True, name="faults.late", acks_late=True)
def late(self: Task[Any, Any], i: int, seconds: float = 0.0) -> None:
    """Take ``seconds``; acknowledged when done; counted as a failure of its own when its process is lost."""
    with noting(self, **_facts(self, i)):
        time.sleep(seconds)


@app.task(bind=True, name="faults.lost", acks_late=True, reject_on_worker_lost=True)
def lost(self: Task[Any, Any], i: int, seconds: float = 0.0) -> None:
    """The same, but it comes back when its process is lost."""
    with noting(self, **_facts(self, i)):
        time.sleep(seconds)


@app.task(bind=True, name="faults.early")
def early(self: Task[Any, Any], i: int, seconds: float = 0.0) -> None:
    """Take ``seconds``; acknowledged before it starts."""
    with noting(self, **_facts(self, i)):
        time.sleep(seconds)


@app.task(bind=True, name="faults.burn", acks_late=True)
def burn(self: Task[Any, Any], i: int, seconds: float) -> None:
    """Compute for ``seconds``, without a moment in which a greenlet could run."""
    with noting(self, **_facts(self, i)):
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            pass


@app.task(bind=True, name="faults.die", acks_late=True, reject_on_worker_lost=True)
def die(self: Task[Any, Any], i: int, times: int = 1_000) -> None:
    """Kill the process that runs it, on its first ``times`` attempts."""
    with noting(self, **_facts(self, i)):
        if tasks.attempt() <= times:
            os.kill(os.getpid(), signal.SIGKILL)


@app.task(bind=True, name="faults.refuse", acks_late=True)
def refuse(self: Task[Any, Any], i: int, requeue: bool = False) -> None:
    """Reject its message."""
    with noting(self, **_facts(self, i)):
        raise Reject("on purpose", requeue=requeue)


@app.task(bind=True, name="faults.again", acks_late=True, max_retries=1)
def again(self: Task[Any, Any], i: int) -> None:
    """Retry once, with a child."""
    with noting(self, **_facts(self, i)):
        if self.request.retries == 0:
            early.delay(1000 + i)
            raise self.retry(countdown=0)


@inspect_command()
def timer_entries(state: Any, **kwargs: Any) -> int:
    """How many timers the worker's loop has, without those that were cancelled and wait for their time."""
    return sum(not getattr(each, "entry", each).canceled for each in state.consumer.timer.queue)

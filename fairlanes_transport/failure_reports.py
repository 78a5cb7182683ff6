"""Tell who waits for a task that its message is a dead letter: through its result, chord, chain and errbacks.

A message dies by its failures when no worker lived to say anything: the task killed each of them, or its leases ran
out.  The server keeps such messages in a set of their own until a worker has marked the task as failed; the claims of
every worker say that there are some.  A worker takes one for a while, so that its own death loses nothing: who waits
is told at least once.
"""

from __future__ import annotations

import logging
from time import monotonic
from typing import Any

from billiard.einfo import ExceptionInfo
from celery import signals, states
from celery.app.task import Context
from celery.worker.strategy import proto1_to_proto2
from kombu.message import Message
from kombu.serialization import prepare_accept_content
from kombu.utils.encoding import safe_repr

from . import envelope
from .errors import DeadLettered, unreachable
from .store import Dead, Store
from .tenancy_worker import on_behalf_of

logger = logging.getLogger(__name__)

#: Result backends that cannot be asked: their results are with the sender, or nowhere.
_UNREADABLE = ("rpc://", "disabled://")


class FailureReporter:
    """Marks the tasks of dead letters as failed; one each time that the worker's timer fires, as a result backend may
    be slow.

    Args:
        consumer: the worker's.
        store: of its broker.
        lease_ms: how long a report may take before another worker tries.
    """

    def __init__(self, consumer: Any, store: Store, lease_ms: int) -> None:
        self._consumer, self._app = consumer, consumer.app
        self._store, self._lease_ms = store, lease_ms
        self._scheduled: set[str] = set()
        self._not_before = 0.0

    def schedule(self, queue: str) -> None:
        """Report the dead letters of a queue soon."""
        if queue not in self._scheduled and monotonic() >= self._not_before:
            self._scheduled.add(queue)
            self._call_soon(queue, b"")

    def _call_soon(self, queue: str, told: bytes) -> None:
        self._consumer.timer.call_after(0, self._report, (queue, told))

    def _report(self, queue: str, told: bytes) -> None:
        """Report the next dead letter, and have the one after it reported."""
        try:
            dead = self._store.untold(queue, self._lease_ms, told)
            if dead is not None:
                self._tell(queue, dead)
                return self._call_soon(queue, dead.tag)
        except Exception as exc:
            # Each try may keep the worker from its work for as long as the result backend is given.
            self._not_before = monotonic() + self._lease_ms / 1000
            known = isinstance(exc, unreachable)
            text = "queue %r: cannot report a dead letter now, and will try again: %r"
            logger.error(text, queue, exc, exc_info=None if known else exc)
        self._scheduled.discard(queue)
        return None

    def _tell(self, queue: str, dead: Dead) -> None:
        where = f"tenant {dead.lane!r}, queue {queue!r}"
        count = f"{dead.failures} failure{'' if dead.failures == 1 else 's'}"
        try:
            request = self._request(dead)
        except Exception as exc:
            name = dead.tag.decode("utf-8", "backslashreplace")
            text = "message %s of %s is a dead letter after %s (%s), and cannot be read: %r"
            logger.error(text, name, where, count, dead.reason, exc)
            return
        name = f"{request.task}[{request.id}]"
        logger.error("task %s of %s is a dead letter after %s: %s", name, where, count, dead.reason)
        with on_behalf_of(vars(request), self._app):
            self._mark(request, DeadLettered(f"{dead.reason}; {where}, {count}"))

    def _request(self, dead: Dead) -> Context:
        """What Celery knows of a task while it runs."""
        stored = envelope.load(dead.envelope, dead.body)
        properties = stored["properties"]
        message = Message(
            body=dead.body, content_type=stored.get("content-type"), content_encoding=stored.get("content-encoding"),
            properties=properties, headers=stored["headers"],
            accept=prepare_accept_content(self._app.conf.accept_content),
        )  # fmt: skip
        headers, payload = message.headers, message.payload
        if "task" not in headers:
            payload, headers, _, _ = proto1_to_proto2(message, payload)
        args, kwargs, embedded = payload
        return Context(
            {**headers, **(embedded or {})}, args=args, kwargs=kwargs, properties=properties,
            delivery_info=properties.get("delivery_info") or {}, reply_to=properties.get("reply_to"),
            correlation_id=properties.get("correlation_id"), called_directly=False,
        )  # fmt: skip

    def _mark(self, request: Context, exc: DeadLettered) -> None:
        """As Celery does when a process of its pool was lost."""
        task = self._app.tasks.get(request.task)
        backend = task.backend if task is not None else self._app.backend
        ignored, store_errors = self._ignores_result(request, task)
        if not ignored and _has_succeeded(backend, request.id):
            logger.warning("task %s[%s] has succeeded before: its result stays", request.task, request.id)
            return
        backend.mark_as_failure(request.id, exc, request=request, store_result=not ignored or store_errors)
        if task is not None:
            _send_signal(task, request, exc)
        events = self._consumer.event_dispatcher
        if events:
            events.send("task-failed", uuid=request.id, exception=safe_repr(exc), traceback=None)

    def _ignores_result(self, request: Context, task: Any) -> tuple[bool, bool]:
        """Whether the task's result is ignored, and whether its errors are kept all the same."""
        conf = self._app.conf
        ignored = vars(request).get("ignore_result")
        if ignored is None:
            ignored = task.ignore_result if task is not None else conf.task_ignore_result
        kept = task.store_errors_even_if_ignored if task is not None else conf.task_store_errors_even_if_ignored
        return bool(ignored), bool(kept)


def _has_succeeded(backend: Any, task_id: str) -> bool:
    if backend.as_uri() in _UNREADABLE:
        return False
    return bool(backend._get_task_meta_for(task_id)["status"] == states.SUCCESS)


def _send_signal(task: Any, request: Context, exc: DeadLettered) -> None:
    try:
        raise exc
    except DeadLettered:
        einfo = ExceptionInfo()
    signals.task_failure.send(
        sender=task, task_id=request.id, exception=exc, args=request.args, kwargs=request.kwargs,
        traceback=einfo.traceback, einfo=einfo,
    )  # fmt: skip

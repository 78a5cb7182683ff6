"""The Celery worker's side: what is running, what will never start, and when a task has ended.

Celery tells a transport when a message is acked, which by default is when its task starts.  Running slots, the
release of what has not started, and dead letters with a reason need more; a bootstep watches the pool for it.
It is part of a worker's consumer only if the worker's broker is of this transport.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import re
from collections import deque
from collections.abc import Callable, Mapping
from time import monotonic
from typing import Any

from billiard.einfo import ExceptionWithTraceback
from billiard.pool import RUN as POOL_RUN
from celery import bootsteps
from celery.exceptions import Reject, TaskRevokedError
from celery.worker import state
from kombu.message import Message
from kombu.utils.encoding import safe_repr, safe_str
from kombu.utils.url import maybe_sanitize_url

from . import control, tenancy
from .errors import connection_errors, unreachable
from .failure_reports import FailureReporter
from .keeper import Lease

logger = logging.getLogger(__name__)

STEP = f"{__name__}:LanesStep"

#: How long a shutdown waits for a broker that does not answer.
ANSWER_SECONDS = 1.0
#: Longest pause between two tries to reach the broker again.
RECONNECT_SECONDS = 10.0
#: How often a consumer that waits for a free greenlet looks whether it is to shut down.
ROOM_SECONDS = 0.5
#: Names of options whose values are not shown.
_SECRET = re.compile("pass|secret|token|credential", re.IGNORECASE)


def install() -> None:
    """Make the bootstep part of every consumer that is built from now on."""
    from celery.worker.consumer import Consumer

    steps = Consumer.Blueprint.default_steps
    if STEP not in steps:
        steps.append(STEP)


class Run:
    """One task on its way through the pool.

    Attributes:
        accepted: a process, thread or greenlet of the pool has begun it.
        late_check: the pool begins it in this process, perhaps long after it was handed over.
    """

    def __init__(self, lease: Lease, request: Any, on_end: Callable[[Run], None], *, late_check: bool = False) -> None:
        self.lease = lease
        self.request = request
        self.late_check = late_check
        self.result: Any = None
        self.accepted = False
        self._began = 0.0
        self._on_end = on_end

    def watch(self, options: dict[str, Any]) -> None:
        """Wrap the pool's callbacks: each but the soft timeout says that the task has ended."""
        options["callback"] = self._ending(options.get("callback"))
        options["error_callback"] = self._ending(options.get("error_callback"))
        options["accept_callback"] = self._accepting(options.get("accept_callback"))
        options["timeout_callback"] = self._timing_out(options.get("timeout_callback"))

    def withdraw(self) -> bool:
        """True if the task will never start here."""
        if self.accepted or self.lease.ended:
            return False
        future = getattr(self.result, "f", None)
        if future is not None:
            return bool(future.cancel())
        # A prefork job: the pool forgets what it has not written to a child, and a child runs what it has got.
        return getattr(self.result, "_write_to", self) is None

    def _ending(self, callback: Any) -> Callable[..., Any]:
        def ended(*args: Any, **kwargs: Any) -> Any:
            if self.accepted and not self.lease.ended:
                self.lease.spent_ms = max(1, round(self._seconds(*args) * 1000))
            self.lease.ended = True
            with contextlib.suppress(Exception):  # an exception of the user's may do anything when it is looked at
                self.lease.reason = _failure(*args) or self.lease.reason
            try:
                return callback(*args, **kwargs) if callback else None
            finally:
                self._on_end(self)

        return ended

    def _seconds(self, *reply: Any) -> float:
        """What the task took: as measured where it ran, if its reply says it; else from its start until now."""
        told = reply[0] if reply else None
        if isinstance(told, tuple) and len(told) == 3 and isinstance(told[2], (int, float)):
            return told[2]
        return monotonic() - self._began

    def _accepting(self, callback: Any) -> Callable[..., Any]:
        def accept(*args: Any, **kwargs: Any) -> Any:
            if self.late_check and not _still_ours(self.request):
                raise TaskRevokedError(f"{self.lease} is somebody else's now")
            self.accepted, self._began = True, monotonic()
            return callback(*args, **kwargs) if callback else None

        return accept

    def _timing_out(self, callback: Any) -> Callable[..., Any]:
        def timed_out(soft: bool, *args: Any, **kwargs: Any) -> Any:
            if soft:
                return callback(soft, *args, **kwargs) if callback else None
            return self._ending(callback)(soft, *args, **kwargs)

        return timed_out


def _failure(*reply: Any) -> str | None:
    """Why a task has failed, for its dead letter: from what the pool hands to its callbacks; None: it has not."""
    told = reply[0] if reply else None
    if isinstance(told, tuple) and len(told) == 3:
        failed, told, _ = told
        told = told if failed else None
    exc = getattr(told, "exception", None)
    if isinstance(exc, ExceptionWithTraceback):
        exc = exc.exc
    if isinstance(exc, Reject):
        return f"rejected: {safe_str(exc.reason)}" if exc.reason else None
    return str(safe_repr(exc)) or type(exc).__name__ if isinstance(exc, BaseException) else None


def _without_secrets(told: Any) -> Any:
    """Return what is told with stars in place of passwords, in options and in URLs, at any depth."""
    if isinstance(told, Mapping):
        return {
            name: "**" if value and _SECRET.search(str(name)) else _without_secrets(value)
            for name, value in told.items()
        }
    if isinstance(told, (list, tuple)):
        return [_without_secrets(value) for value in told]
    return maybe_sanitize_url(told)


class LanesStep(bootsteps.StartStopStep):  # type: ignore[misc]
    """Watches the pool of a worker whose broker is of this transport."""

    name = "Lanes"
    requires = ("celery.worker.consumer.connection:Connection",)

    def __init__(self, c: Any, **kwargs: Any) -> None:
        super().__init__(c, **kwargs)
        self.closing = False
        self._acks: deque[Callable[[], Any]] = deque()
        if not self._is_ours(c):
            return
        # Task strategies take the pool's method when they are built, which is after this.
        c.pool.apply_async = _watching(c.pool)
        soon = "call_soon_ack" if hasattr(c, "call_soon_ack") else "call_soon"
        setattr(c, soon, self._soon_or_now(c, getattr(c, soon)))
        c.ensure_connected = _retrying_often(c.ensure_connected)
        c.on_decode_error = _burying_undecodable(c.on_decode_error)
        c.on_unknown_task = _with_reason(c.on_unknown_task, "unknown task")
        c.on_invalid_task = _with_reason(c.on_invalid_task, "invalid task")
        c.on_unknown_message = _with_reason(c.on_unknown_message, "not a task")
        tenancy.install_worker(c.app)
        _send_events_without_waiting(c.app)
        control.install(c)

    def include_if(self, c: Any) -> bool:
        """Only with our transport."""
        return self._is_ours(c)

    @staticmethod
    def _is_ours(c: Any) -> bool:
        from .transport import Transport

        cls = c.conninfo.get_transport_cls()
        return isinstance(cls, type) and issubclass(cls, Transport)

    def start(self, c: Any) -> None:
        """The pool and the connection are there now."""
        self.closing = False
        transport = c.connection.transport
        transport.in_worker = True
        transport.metronome.on_untold = FailureReporter(c, transport.store, transport.metronome.lease_ms).schedule
        flush = getattr(c.pool, "flush", None)
        if getattr(c.pool, "uses_semaphore", False) and flush is not None and not hasattr(flush, "keeps_written"):
            c.pool.flush = _keeping_written(c.pool, flush)

    def _soon_or_now(self, c: Any, call_soon: Callable[..., Any]) -> Callable[..., Any]:
        """Celery has its loop run acks. While the pool drains the loop does not turn, and not every pool runs its
        callbacks then; and where there is no loop, Celery 5.6 runs them after the next message. So they are run by
        whoever brings them.
        """

        def soon_or_now(callback: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if not isinstance(getattr(callback, "__self__", None), Message):
                return call_soon(callback, *args, **kwargs)
            self._acks.append(functools.partial(callback, *args, **kwargs))
            if c.hub is None or self.closing or _stops():
                self._run_acks()
            else:
                call_soon(self._run_acks)
            return callback

        return soon_or_now

    def _run_acks(self) -> None:
        """Run those that wait, in their order; from any thread."""
        while True:
            try:
                ack = self._acks.popleft()
            except IndexError:
                return
            try:
                ack()
            except Exception:
                logger.exception("cannot settle a message")

    def stop(self, c: Any) -> None:
        """Nothing to stop."""

    def info(self, c: Any) -> dict[str, Any]:
        """What ``inspect stats`` says of the broker: Celery's own words, without passwords in the options."""
        from celery.worker.consumer.connection import Connection

        told = [step.info(c) for step in c.steps if isinstance(step, Connection)]
        return dict(_without_secrets(told[0])) if told else {}

    def close(self, c: Any) -> None:
        """The shutdown begins: hand back what has not started, now, and not when the pool has drained."""
        self.closing = True
        self._run_acks()  # the loop will not
        connection = c.connection
        if connection is None or connection._transport is None:
            return
        # Looked at first: much is to be sent in a shutdown, and each of it would wait for a broker that is silent.
        connection._transport.link.answers(ANSWER_SECONDS)
        try:
            connection._transport.stop_turning()
        except connection_errors as exc:
            logger.debug("cannot send what was on its way: %s", exc)
        for channel in list(connection._transport.channels):
            channel.qos.restore_unacked()


def _stops() -> bool:
    """Whether the worker was told to end: its loop may have turned for the last time."""
    return any(flag is not None and flag is not False for flag in (state.should_stop, state.should_terminate))


def _watching(pool: Any) -> Callable[..., Any]:
    """`pool.apply_async`, which from now on tells of each task whether it was started, and when it has ended."""
    apply_async = pool.apply_async
    late_check = type(pool).__module__.endswith(".thread")

    def watched(target: Any, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        request = getattr(options.get("callback"), "__self__", None)
        lease = getattr(getattr(request, "message", None), "lease", None)
        if lease is None:
            return apply_async(target, args, kwargs, **options)
        if pool.is_green:
            _wait_for_room(pool._pool)
        if not _still_ours(request):
            raise TaskRevokedError(f"{lease} is somebody else's now")
        run = Run(lease, request, _ended, late_check=late_check)
        run.watch(options)
        lease.started, lease.withdraw = True, run.withdraw
        run.result = apply_async(target, args, kwargs, **options)
        if hasattr(run.result, "_write_to"):
            run.result.lanes_run = run  # for the pool's flush
        return run.result

    return watched


def _still_ours(request: Any) -> bool:
    """Whether a task may begin: not if its message was handed back, or its lease ran out while this process was
    stopped or cut off.
    """
    lease, qos = request.message.lease, request.message.channel.qos
    try:
        if not lease.returned and qos.check(lease):
            return True
    except unreachable as exc:
        logger.warning("%s: not started, as its lease may have run out and the broker does not say: %s", lease, exc)
    qos.release([request.message.delivery_tag])
    state.task_ready(request)
    return False


def _wait_for_room(greenlets: Any) -> None:
    """A green pool that is full would block the consumer for as long as its tasks run, also for a shutdown."""
    while True:
        if hasattr(greenlets, "wait_available"):  # gevent
            if greenlets.free_count() > 0:
                return
            greenlets.wait_available(ROOM_SECONDS)
        elif greenlets.sem.acquire(timeout=ROOM_SECONDS):  # eventlet
            greenlets.sem.release()
            return
        state.maybe_shutdown()


def _retrying_often(ensure_connected: Callable[..., Any]) -> Callable[..., Any]:
    """The worker looks for a lost broker every ten seconds at least; Celery's pauses grow to thirty.  It does so
    for as long as ``broker_connection_max_retries`` says with Celery's pauses.
    """

    def ensure(conn: Any) -> Any:
        ensure_connection = conn.ensure_connection

        def often(errback: Any = None, max_retries: int | None = None, **kwargs: Any) -> Any:
            retries = max_retries and 3 * max_retries
            return ensure_connection(errback, retries, interval_max=RECONNECT_SECONDS, **kwargs)

        conn.ensure_connection = often
        return ensure_connected(conn)

    return ensure


def _send_events_without_waiting(app: Any) -> None:
    """Celery's worker sends heartbeats from its main loop, and tries each for ever: as long as the broker is away it
    would hear of nothing else.  Here a heartbeat that cannot be sent waits for the new connection.
    """
    from kombu.utils.imports import symbol_by_name

    base = symbol_by_name(app.events.dispatcher_cls)
    if hasattr(base, "waits_for_nobody"):
        return

    class PromptEventDispatcher(base):  # type: ignore[misc,valid-type]
        """Sends each event once."""

        waits_for_nobody = True

        def send(self, type: str, *args: Any, **fields: Any) -> Any:  # noqa: A002
            fields["retry"] = False
            return super().send(type, *args, **fields)

    app.events.dispatcher_cls = PromptEventDispatcher
    vars(app.events).pop("Dispatcher", None)  # the class that Celery has made of the former one


def _keeping_written(pool: Any, flush: Callable[[], None]) -> Callable[[], None]:
    """The prefork pool's `flush` forgets each job that no child has accepted yet.  A job that was written to a
    child is run all the same: we want to hear of its end.  What will not be run is handed back.

    A child may have died unnoticed with a job in its pipe.  While the pool knows the job, it gives the next child
    another pipe; else that child would run what was handed back.
    """

    def flush_unwritten() -> None:
        processes = pool._pool
        if processes is None:  # terminated: there is nothing to flush
            return
        waiting = [job for job in tuple(processes._cache.values()) if job._accepted is False]
        kept = [job for job in waiting if _is_written(processes, job)]
        fallen: list[Any] = []
        put_back = processes._put_back
        processes._put_back = fallen.append  # flush would forget it there
        for job in kept:
            job.discard = lambda: None
        try:
            with contextlib.suppress(StopIteration):  # Celery: a child has died, and its pipes are not free yet
                flush()
        finally:
            processes._put_back = put_back
            processes.outbound_buffer.clear()
            for job in kept:
                del job.discard
        for job in waiting:
            if job not in kept or job in fallen:
                _hand_back(job)

    flush_unwritten.keeps_written = True  # type: ignore[attr-defined]
    return flush_unwritten


def _is_written(processes: Any, job: Any) -> bool:
    """Whether the job is in a child's pipe, and not in the pool's buffer again because that child has died."""
    if job in processes.outbound_buffer:
        return False
    writer = getattr(job, "_writer", lambda: None)()
    # What is half written is completed, but not once the pool closes.
    return getattr(job, "_write_to", None) is not None and (
        processes._state == POOL_RUN or writer not in processes._active_writers
    )


def _hand_back(job: Any) -> None:
    """No child has the job, and none will get it."""
    job.discard()
    run = getattr(job, "lanes_run", None)
    if run is not None and not run.accepted:
        run.request.message.channel.qos.release([run.request.message.delivery_tag])


def _ended(run: Run) -> None:
    """A task has ended: free its slot, and hand back a message that will not be acked."""
    run.result = None  # which knows the run
    lease, message = run.lease, run.request.message
    qos = message.channel.qos
    try:
        if lease.slot:
            qos.finish(lease)
        elif not run.request.acknowledged:
            # Cancelled: at a connection loss, or by a cold shutdown.
            qos.release([message.delivery_tag])
        else:
            qos.wake()
    except connection_errors as exc:
        logger.warning("cannot finish %s now (%s); its lease ends by itself", lease, exc)


def _burying_undecodable(on_decode_error: Callable[..., Any]) -> Callable[..., Any]:
    """Celery acks what it cannot decode; we keep it as a dead letter."""

    def bury(message: Any, exc: Exception) -> Any:
        if getattr(message, "lease", None) is not None and not message.acknowledged:
            message.lease.reason = f"cannot be decoded: {exc!r}"
            message.reject()
            # The log line is Celery's; its ack is of a message that is settled.
            message.ack = lambda *args, **kwargs: None
        return on_decode_error(message, exc)

    return bury


def _with_reason(handler: Callable[..., Any], reason: str) -> Callable[..., Any]:
    """Celery rejects these without a word; the dead letter says why."""

    def handle(body: Any, message: Any, *args: Any, **kwargs: Any) -> Any:
        lease = getattr(message, "lease", None)
        if lease is not None:
            lease.reason = ": ".join([reason, *(repr(arg) for arg in args if isinstance(arg, Exception))])
        return handler(body, message, *args, **kwargs)

    return handle

"""The tenant in a worker: what is sent for a task where it does not run.

What a task sends while it runs needs nothing of this: :mod:`fairlanes_transport.tenancy` finds the running
task. But:

* The worker's main process speaks for tasks that cannot: it sends their errbacks, and fails their chords,
  after a hard time limit, the death of a pool child, a revoke or an expiry. It has no current task then.
  Celery has no hook around this, so the four methods of its ``Request`` that do so are wrapped.
* After an error outside of the task's body Celery sends the errbacks when the task has left the stack. The
  tenants of the last tasks are remembered by task id, which is the ``parent_id`` of those messages.
* Threads that get a copy of the task's context (``asyncio.to_thread``) find its tenant there.
* Events about tasks, and lines in the log, carry the tenant.

All of it acts on messages with a tenant only.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from . import tenancy
from .logs import add_filter_now
from .tenancy import UNSET

if TYPE_CHECKING:
    from celery import Celery

_UID = "fairlanes_tenant"

#: Methods of ``celery.worker.request.Request`` in which the main process sends messages for a task.
_SPEAKING = ("on_timeout", "on_failure", "_announce_revoked", "_announce_cancelled")

_installed: weakref.WeakSet[Any] = weakref.WeakSet()


def install(app: Celery) -> None:
    """Make a worker's app know its tasks' tenants. Does nothing the second time.

    To be called before the consumer makes its event dispatcher, so in the constructor of a bootstep.
    """
    if app in _installed:
        return
    _installed.add(app)
    _connect_signals()
    _wrap_requests()
    _tag_events(app)
    add_filter_now()


def _connect_signals() -> None:
    from celery import signals

    for signal, receiver in (
        (signals.task_received, _on_received),
        (signals.task_prerun, _on_prerun),
        (signals.task_postrun, _on_postrun),
    ):
        signal.connect(receiver, weak=False, dispatch_uid=_UID)


def _on_received(request: Any, **kwargs: Any) -> None:
    """A message has reached the worker's main process."""
    name = tenancy.tenant_of_request(request.request_dict, tenancy.header_of(request.app))
    if name is not UNSET and name is not None:
        tenancy.recent.put(request.id, str(name))


def _on_prerun(task_id: str, task: Any, **kwargs: Any) -> None:
    """A task begins, in this thread; in a prefork pool the child has not seen its message before."""
    name = _tenant_of_running(0, task)
    tenancy.carried.set(name)
    tenancy.at_work.set(True)
    if name is not UNSET and name is not None:
        tenancy.recent.put(task_id, str(name))


def _on_postrun(task: Any, **kwargs: Any) -> None:
    """It ends; what goes on is the eager task's caller, or nothing."""
    tenancy.carried.set(_tenant_of_running(1, task))
    tenancy.at_work.set(len(tenancy._running()) > 1)
    tenancy.leave_forgotten()


def _tenant_of_running(depth: int, task: Any) -> Any:
    running = tenancy._running()
    return tenancy._own(running, depth, tenancy.header_of(task.app)) if depth < len(running) else UNSET


def _wrap_requests() -> None:
    from celery.worker.request import Request

    for name in _SPEAKING:
        method = getattr(Request, name, None)
        if method is not None and not hasattr(method, _UID):
            setattr(Request, name, _in_lane_of_request(method))


@contextlib.contextmanager
def on_behalf_of(request: Mapping[str, Any], app: Celery) -> Iterator[None]:
    """Send what the block sends as the task of a received message does: into its lane, and also if that is full.

    It is no block of code (`tenancy.tenant`), which would win over an errback's own default.

    Args:
        request: headers of the message, as a worker keeps them.
    """
    carried = tenancy.carried.set(tenancy.tenant_of_request(request, tenancy.header_of(app)))
    at_work = tenancy.at_work.set(True)
    try:
        yield
    finally:
        tenancy.at_work.reset(at_work)
        tenancy.carried.reset(carried)


def _in_lane_of_request(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method of a request: what it sends goes into the request's lane."""

    @functools.wraps(method)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        with on_behalf_of(self.request_dict, self.app):
            return method(self, *args, **kwargs)

    setattr(wrapper, _UID, True)
    return wrapper


def _tag_events(app: Celery) -> None:
    """Let the app's event dispatchers name the tenant in events about tasks."""
    from kombu.utils.imports import symbol_by_name

    events = app.events
    events.dispatcher_cls = _naming_tenants(symbol_by_name(events.dispatcher_cls))
    vars(events).pop("Dispatcher", None)  # the class that Celery has made of the former one


def _naming_tenants(base: type) -> type:
    class TenantEventDispatcher(base):  # type: ignore[misc]
        """Names the tenant in events about tasks."""

        def send(self, type: str, *args: Any, **fields: Any) -> Any:  # noqa: A002
            if type.startswith("task-") and "tenant" not in fields:
                name = tenancy.recent.get(fields.get("uuid"))
                if name is not None:
                    fields["tenant"] = name
            return super().send(type, *args, **fields)

    return TenantEventDispatcher

"""Whose work is it: the tenant of a message, of the running task, and of a block of code.

The channel asks :func:`resolve` for the tenant of every message that is published through this transport.
What decides, highest first:

1. the header ``tenant`` on the call (None: no tenant);
2. ``with tenant("acme"):`` or :func:`set_tenant`, entered in the running task, or outside of any task;
3. a stamp ``tenant``;
4. the default of the task: ``@app.task(tenant="acme")``;
5. the task that is running, whatever sends on its behalf: its own code, its callbacks, its chord's body;
6. the option ``tenant_of``.

The decision is written into the message's header, so that whoever runs the task knows it and passes it on.
Also the decision for no tenant, if it was made on purpose: the header is null then, and retries and children
stay in the default lane.

Celery is not imported here: where nobody else has imported it, no task can be running.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from . import on_commit
from .envelope import tenant_name
from .errors import FairlanesError, TenantError
from .options import TENANT_HEADER, Options

if TYPE_CHECKING:
    from celery import Celery

#: Tenants of so many received tasks are kept, for what is sent after a task has left the stack.
RECENT_TASKS = 10_000


class _Unset(enum.Enum):
    UNSET = "nothing decided"


UNSET = _Unset.UNSET
"""Nothing has been decided; None is a decision: no tenant."""


# -------------------------------------------------------------------------------------------- a block of code


class _Scope:
    """The tenant of a block of code.

    Attributes:
        tenant: its name; None: no tenant.
        request: the request of the task that entered the block; None: no task was running. What a worker's
            thread entered for one task, and forgot to leave, is none of the next task's business.
        outer: the block around it that another request entered, for what an eager task inherits.
        closed, before: it was left, and what was in force before it.
    """

    __slots__ = ("before", "closed", "outer", "request", "tenant")

    def __init__(self, name: str | None, request: Any, outer: _Scope | None) -> None:
        self.tenant = name
        self.request = request
        self.outer = outer
        self.closed = False
        self.before: _Scope | None = None


class Token:
    """What :func:`reset_tenant` needs to undo a :func:`set_tenant`."""

    __slots__ = ("_before", "_scope")

    def __init__(self, scope: _Scope, before: _Scope | None) -> None:
        self._scope = scope
        self._before = before


_scope: ContextVar[_Scope | None] = ContextVar("fairlanes_tenant", default=None)

#: Tenant of the task that this thread works for where Celery's stack of running tasks does not tell: in a
#: thread with a copy of the task's context (``asyncio.to_thread``), in the worker's main process. Set by the
#: worker.
carried: ContextVar[Any] = ContextVar("fairlanes_task_tenant", default=UNSET)
#: This context works for a task, of whatever tenant. Set by the worker, like `carried`.
at_work: ContextVar[bool] = ContextVar("fairlanes_at_work", default=False)


def set_tenant(name: Any) -> Token:
    """Send what this context sends from now on into the lane of a tenant, until :func:`reset_tenant`.

    For web middlewares; elsewhere :func:`tenant` is the better choice.

    Args:
        name: a string, an int or a UUID; None: no tenant.

    Raises:
        TenantError: `name` cannot be the name of a lane.
    """
    on_commit.install(_bound)
    checked = None if name is None else tenant_name(name)
    running = _running()
    before = _scope.get()
    scope = _Scope(checked, running[0] if running else None, _around(before, running))
    _scope.set(scope)
    return Token(scope, before)


def reset_tenant(token: Token) -> None:
    """Undo one :func:`set_tenant`.

    Never raises: a token of another context, or one that is used twice, changes nothing. Tokens may be used
    in any order (generators that are left early do so).
    """
    scope = token._scope
    scope.closed, scope.before = True, token._before
    if _scope.get() is not scope:
        return
    before = token._before
    while before is not None and before.closed:
        before = before.before
    _scope.set(before)


@contextlib.contextmanager
def tenant(name: Any) -> Iterator[str | None]:
    """Send everything that the block sends into the lane of a tenant: ``with tenant("acme"):``.

    It is a context variable: it holds in coroutines and asyncio tasks that the block starts, not in other
    threads or greenlets. Blocks can be nested; the inner one counts.

    Args:
        name: a string, an int or a UUID; None: no tenant, the default lane.

    Raises:
        TenantError: `name` cannot be the name of a lane.
    """
    token = set_tenant(name)
    try:
        yield token._scope.tenant
    finally:
        reset_tenant(token)


def _bound(function: Any) -> Any:
    """Return `function` so that it runs in the block that is in force now; as it is where none is."""
    value = _entered(_running())
    if value is UNSET or not callable(function):
        return function

    @functools.wraps(function, assigned=("__module__", "__name__", "__qualname__", "__doc__"), updated=())
    def run() -> Any:
        with tenant(value):
            return function()

    return run


def current_tenant() -> str | None:
    """The tenant that a task sent from here would get: of the block of code, else of the running task.

    Works in eager tasks too. None: there is no tenant.
    """
    running = _running()
    value = _entered(running)
    if value is UNSET:
        value = _own(running, 0, _header_of_running()) if running else carried.get()
    if value is UNSET or value is None:
        return None
    return value if isinstance(value, str) else str(value)


def _among(request: Any, requests: Sequence[Any]) -> bool:
    return any(request is other for other in requests)


def _around(scope: _Scope | None, running: Sequence[Any]) -> _Scope | None:
    """The nearest block that another request, one that still runs, or no request entered."""
    innermost = running[0] if running else None
    while scope is not None:
        if scope.request is not innermost and (scope.request is None or _among(scope.request, running)):
            return scope
        scope = scope.outer
    return None


def leave_forgotten() -> None:
    """Leave the blocks that the running task entered and, at its end, has not left."""
    running, scope = _running(), _scope.get()
    while scope is not None and running and scope.request is running[0]:
        scope = scope.outer
    _scope.set(scope)


def _entered(running: Sequence[Any], depth: int = 0) -> Any:
    """The tenant of the block in force for the running task `depth`; where none runs, of any block."""
    scope = _scope.get()
    while scope is not None and depth and _among(scope.request, running[:depth]):
        scope = scope.outer
    if scope is None or (depth < len(running) and scope.request is not running[depth]):
        return UNSET
    return scope.tenant


# ------------------------------------------------------------------------------------------- the running task


def _running() -> Sequence[Any]:
    """Requests of the tasks that run in this thread, innermost first, without those called as functions."""
    state = sys.modules.get("celery._state")
    stack = state._task_stack.stack if state is not None else None
    if not stack:
        return ()
    if len(stack) == 1:
        request = stack[0].request
        return () if request.called_directly else (request,)
    requests: list[Any] = []
    stacks: dict[int, list[Any]] = {}
    for task in reversed(stack):
        # A task that calls or applies itself is on the stack twice, with one stack of requests.
        own = stacks.get(id(task))
        if own is None:
            own = stacks[id(task)] = list(task.request_stack.stack)
        request = own.pop() if own else task.request
        if not request.called_directly:
            requests.append(request)
    return requests


def _own(running: Sequence[Any], depth: int, header: str) -> Any:
    """The tenant of a running task, as its message said.

    An eager task had no message: it belongs to whom its message would have belonged to.
    """
    request = running[depth]
    headers = request.headers
    value = headers[header] if headers and header in headers else vars(request).get(header, UNSET)
    if value is not UNSET or not request.is_eager:
        return value
    return _decide(running, depth + 1, header, request.stamps, vars(request).get("task"))


def _decide(running: Sequence[Any], depth: int, header: str, stamps: Any, task: Any) -> Any:
    """The tenant of a message without an explicit one that is sent by the running task `depth`."""
    value = _entered(running, depth)
    if value is UNSET:
        value = _stamped(stamps, header)
    if value is UNSET:
        value = _default_of(task)
    if value is UNSET and depth < len(running):
        value = _own(running, depth, header)
    return value


def _stamped(stamps: Any, header: str) -> Any:
    """The tenant of a canvas stamp, which may be a list."""
    if not stamps or not isinstance(stamps, Mapping):
        return UNSET
    value = stamps.get(header)
    if isinstance(value, (list, tuple, set, frozenset)):
        different = list(dict.fromkeys(value))
        if len(different) > 1:
            raise TenantError(f"stamped with several tenants: {', '.join(map(repr, different))}")
        value = different[0] if different else None
    return UNSET if value is None else value


def _default_of(task: Any) -> Any:
    """The tenant that the task named `task` was declared with."""
    found = _find_task(task) if task else None
    default = getattr(type(found), "tenant", None)
    # A property or method of the same name, in somebody's base class, is no default.
    return UNSET if default is None or hasattr(default, "__get__") else default


def _find_task(name: str) -> Any:
    """The task of a name in the current app, else in any app of this process; None: it is not known here.

    A thread of a web server has no current app, so the other apps are not a rare case. Apps are not finalized
    for this, as Celery's own ``send_task`` does not.
    """
    state = sys.modules.get("celery._state")
    if state is None:
        return None
    app = state._tls.current_app or state.default_app
    task = app._tasks.get(name) if app is not None else None
    if task is not None:
        return task
    for other in list(state._get_active_apps()):
        task = other._tasks.get(name)
        if task is not None:
            return task
    return None


#: The header's name in an app's options.
_headers: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


def header_of(app: Celery) -> str:
    """The name of the tenant header in an app's ``broker_transport_options``, as it was first seen."""
    name = _headers.get(app)
    if name is None:
        options = app.conf.broker_transport_options or {}
        name = _headers[app] = options.get("tenant_header") or TENANT_HEADER
    return name


def _header_of_running() -> str:
    return header_of(sys.modules["celery._state"]._task_stack.top.app)


def tenant_of_request(request: Mapping[str, Any], header: str) -> Any:
    """The tenant in the headers of a received message, as a worker keeps them: protocol 1 nests them."""
    value = request.get(header, UNSET)
    if value is UNSET:
        nested = request.get("headers")
        value = nested.get(header, UNSET) if isinstance(nested, Mapping) else UNSET
    return value


class _Recent:
    """Tenants of the tasks that this process received last, by task id."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._tenants: dict[str, str] = {}

    def put(self, task_id: str, name: str) -> None:
        """Note a task; the oldest one is forgotten."""
        tenants = self._tenants
        tenants.pop(task_id, None)
        tenants[task_id] = name
        if len(tenants) > self._limit:
            # No lock: a child that is forked meanwhile would wait for it for ever. Two threads may meet here.
            with contextlib.suppress(RuntimeError, StopIteration):
                tenants.pop(next(iter(tenants)), None)

    def get(self, task_id: Any) -> str | None:
        """The tenant of a task; None: unknown, or it has none."""
        return self._tenants.get(task_id)

    def clear(self) -> None:
        """Forget all."""
        self._tenants = {}


recent = _Recent(RECENT_TASKS)


# -------------------------------------------------------------------------------------------------- a message


def resolve(headers: dict[str, Any], properties: Mapping[str, Any], options: Options) -> str | None:
    """Decide whose message this is, and write it into the message's headers.

    Args:
        headers: of the message, and of this message only: they are changed.
        properties: of the message.
        options: of the transport.

    Returns:
        the tenant; None: the message has none and goes to the default lane.

    Raises:
        TenantError: the tenant cannot be the name of a lane, or ``tenant_of`` failed.
    """
    header = options.tenant_header
    value = headers.get(header, UNSET)
    if value is UNSET:
        value = _implied(headers, properties, options)
        if value is UNSET:
            return None
    headers[header] = name = None if value is None else tenant_name(value)
    return name


def _implied(headers: dict[str, Any], properties: Mapping[str, Any], options: Options) -> Any:
    """The tenant of a message that does not name one."""
    if _is_celerys_own(headers):
        return UNSET
    running = _running()
    value = _decide(running, 0, options.tenant_header, headers.get("stamps"), headers.get("task"))
    if value is UNSET and not running:
        value = carried.get()
        if value is UNSET:
            # The id is the message's own in a result that the worker's main process sends.
            value = recent.get(headers.get("parent_id") or properties.get("correlation_id")) or UNSET
    if value is UNSET and options.tenant_of is not None:
        value = _derived(headers, properties, options)
    return value


def sent_by_a_task(headers: Mapping[str, Any]) -> bool:
    """Return whether a task sends this message: in its own code, or as its retry, callback or errback.

    Celery notes the task that sends in ``parent_id``, also where the worker's main process speaks for it, and counts
    ``retries``.  To refuse such a message would lose work that has begun.
    """
    return bool(headers.get("parent_id") or headers.get("retries") or at_work.get() or _running())


def _is_celerys_own(headers: Mapping[str, Any]) -> bool:
    """Whether this is an event or remote control, and nobody's work: ``tenant_of`` is not for these."""
    return "task" not in headers and ("clock" in headers or headers.keys() == {"hostname"})


def _derived(headers: dict[str, Any], properties: Mapping[str, Any], options: Options) -> Any:
    try:
        function = options.tenant_function()
        value = function(headers, properties) if function is not None else None
    except FairlanesError:
        raise
    except Exception as exc:
        # A KeyError of it would be a lost connection for kombu, which would try again and again.
        raise TenantError(f"tenant_of failed: {exc!r}") from exc
    return UNSET if value is None else value


def install_worker(app: Celery) -> None:
    """Make a worker's app know its tasks' tenants: see `fairlanes_transport.tenancy_worker`."""
    from . import tenancy_worker

    tenancy_worker.install(app)

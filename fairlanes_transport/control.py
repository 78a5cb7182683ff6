"""Celery remote control: steer lanes through a worker, where nothing else reaches the broker.

::

    app.control.broadcast("lane_set", arguments={"queue": "celery", "tenant": "acme", "weight": 3}, reply=True)
    celery -A app control lane_pause celery acme
    celery -A app inspect lanes celery

The settings are the server's: each command acts for all workers, whichever carries it out, and a second time changes
nothing.  Every worker that gets it does so; name one as destination to have it done once.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from celery.worker.control import Panel, nok, ok

if TYPE_CHECKING:
    from .lanes.api import Lanes
    from .metronome import Metronome

logger = logging.getLogger(__name__)

# `celery` imports this module on each of its commands: what is not needed to know the commands is imported when one
# is carried out.

#: Consumers of this process whose broker is of this transport.
_consumers: weakref.WeakSet[Any] = weakref.WeakSet()


def install(consumer: Any) -> None:
    """Know a worker's consumer; importing this module is what makes the commands known."""
    _consumers.add(consumer)


def metronomes() -> Iterator[tuple[str, Metronome]]:
    """(Worker's name, its metronome) of the workers in this process that are connected."""
    for consumer in list(_consumers):
        transport = _transport(consumer)
        if transport is not None:
            yield consumer.hostname, transport.metronome


def _transport(consumer: Any) -> Any:
    from .transport import Transport

    connection = getattr(consumer, "connection", None)
    transport = getattr(connection, "_transport", None)
    return transport if isinstance(transport, Transport) and hasattr(transport, "metronome") else None


def _command(kind: str, signature: str, *names: str, variadic: str | None = None) -> Callable[..., Any]:
    """Make ``f(lanes, state, ...)`` a command; what it returns is the answer, what it raises the error.

    Args:
        kind: ``control`` (changes something) or ``inspect``.
        names: arguments by position, on the command line.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        wanted = inspect.signature(function)

        @functools.wraps(function)
        def run(state: Any, **arguments: Any) -> dict[str, Any]:
            try:
                wanted.bind(None, state, **arguments)
            except TypeError as exc:
                return dict(nok(f"{function.__name__} {signature}: {exc}"))
            try:
                answer = function(_lanes(state), state, **arguments)
            except Exception as exc:
                if not _is_an_answer(exc):
                    raise
                return dict(nok(f"{function.__name__}: {exc}"))
            if kind == "control":
                logger.info("by remote control: %r", answer)
            return dict(ok(answer))

        args = [(name, str) for name in names]
        Panel.register(type=kind, signature=signature, args=args, variadic=variadic)(run)
        return run

    return decorate


def _is_an_answer(exc: Exception) -> bool:
    from .errors import FairlanesError, connection_errors

    return isinstance(exc, (FairlanesError, *connection_errors))


def _wrong(text: str) -> Exception:
    """The error to raise for arguments that cannot be used."""
    from .errors import OptionError

    return OptionError(text)


def _lanes(state: Any) -> Lanes:
    from .lanes.api import Lanes

    transport = _transport(state.consumer)
    if transport is None:
        raise _wrong("this worker is not connected to a fairlanes:// broker")
    return Lanes(transport.link, global_keyprefix=transport.options.global_keyprefix)


@_command("control", "<queue> <tenant>", "queue", "tenant")
def lane_pause(lanes: Lanes, state: Any, queue: str, tenant: Any) -> str:
    """Let no more messages of one lane be claimed."""
    lanes.pause(queue, _given(tenant))
    return f"lane {tenant} of queue {queue} paused"


@_command("control", "<queue> <tenant>", "queue", "tenant")
def lane_resume(lanes: Lanes, state: Any, queue: str, tenant: Any) -> str:
    """End the pause of one lane."""
    lanes.resume(queue, _given(tenant))
    return f"lane {tenant} of queue {queue} resumed"


@_command("control", "<queue> <tenant> <name=value>...", "queue", "tenant", variadic="settings")
def lane_set(lanes: Lanes, state: Any, queue: str, tenant: Any, settings: Sequence[str] = (), **named: Any) -> str:
    """Set weight, limit, rate, burst, max_size or paused of one lane."""
    given = {**dict(map(_setting, settings)), **named}
    if not given:
        raise _wrong("give one setting at least, such as weight=3")
    lane = lanes.set(queue, _given(tenant), **given)
    return f"lane {tenant} of queue {queue} set: {_own(lane.own)}"


@_command("control", "<queue> <tenant> [name]...", "queue", "tenant", variadic="names")
def lane_unset(lanes: Lanes, state: Any, queue: str, tenant: Any, names: Sequence[str] = ()) -> str:
    """Let the queue's defaults be in force again: for the settings named, or for all."""
    if isinstance(names, str):
        names = [names]
    lane = lanes.unset(queue, _given(tenant), *names)
    return f"lane {tenant} of queue {queue} set: {_own(lane.own)}"


@_command("control", "<queue>", "queue")
def queue_pause(lanes: Lanes, state: Any, queue: str) -> str:
    """Let no more messages of a queue be claimed, by any worker."""
    lanes.pause(queue)
    return f"queue {queue} paused"


@_command("control", "<queue>", "queue")
def queue_resume(lanes: Lanes, state: Any, queue: str) -> str:
    """End the pause of a queue."""
    lanes.resume(queue)
    return f"queue {queue} resumed"


#: Lanes that `lanes` reads of each queue, and names if nothing else is asked for: the worker's loop waits for it.
_READ, _NAMED = 2000, 20


@_command("inspect", "[queue] [top]", "queue", "top")
def lanes(lanes: Lanes, state: Any, queue: str | None = None, top: Any = _NAMED) -> dict[str, Any]:
    """Show the longest lanes of a queue, or of each queue that the worker consumes."""
    try:
        most = min(int(top), 1000)
    except (TypeError, ValueError):
        raise _wrong(f"top is a number of lanes, not {top!r}") from None
    names = [queue] if queue else sorted(_transport(state.consumer).metronome.subscriptions)
    return {name: _look(lanes, name, most) for name in names}


def _look(lanes: Lanes, queue: str, top: int) -> dict[str, Any]:
    from .lanes.api import shared
    from .lanes.survey import Survey

    stats = lanes.snapshot(queue)
    found = Survey(lanes.store, queue, top, lanes_per_step=_READ).step()
    longest = lanes.browser.lanes(queue, [name for name, _ in found.by_length()])
    return {
        "ready": stats.ready,
        "in_flight": stats.in_flight,
        "delayed": stats.delayed,
        "dead": stats.dead,
        "paused": stats.paused,
        "lanes": [
            {
                "lane": lane.lane,
                "state": lane.state,
                **{
                    name: getattr(lane, name)
                    for name in (
                        "ready", "in_flight", "weight", "limit", "rate", "share", "oldest_wait",
                    )
                },
            }
            for lane in shared(longest, max(found.weight, sum(x.weight for x in longest)))
        ],
    }  # fmt: skip


def _given(tenant: Any) -> Any:
    """The tenant; None would mean the whole queue."""
    if tenant is None:
        raise _wrong("name a tenant")
    return tenant


def _setting(text: Any) -> tuple[str, Any]:
    """``name=value`` of the command line."""
    name, equals, value = str(text).partition("=")
    if not equals:
        raise _wrong(f"{text!r}: write name=value, such as weight=3")
    if name == "paused":
        if value not in ("true", "false"):
            raise _wrong(f"paused is true or false, not {value!r}")
        return name, value == "true"
    try:
        number = float(value)
    except ValueError:
        return name, value
    return name, int(number) if number.is_integer() else number


def _own(settings: Any) -> str:
    set_ = {name: value for name, value in dataclasses.asdict(settings).items() if value is not None}
    return (
        ", ".join(
            f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}" for name, value in set_.items()
        )
        or "nothing"
    )

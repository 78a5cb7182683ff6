"""What a running task can ask about its own message."""

from __future__ import annotations

from typing import Any, NamedTuple


class Delivery(NamedTuple):
    """How the message of the running task was delivered."""

    #: claims of the message so far, this one included: the fencing token for writes of your own
    attempt: int
    queue: str
    #: the lane, which is the tenant, or the default lane's name
    lane: str


def delivery(request: Any = None) -> Delivery | None:
    """The delivery of the running task; None outside a task, or if it came over another transport.

    Args:
        request: of a bound task (``self.request``), instead of the current task's.
    """
    if request is None:
        from celery import current_task

        request = current_task.request if current_task else None
    properties = getattr(request, "properties", None) or {}
    told = properties.get("fairlanes") if isinstance(properties, dict) else None
    return Delivery(told["attempt"], told["queue"], told["lane"]) if told else None


def attempt(request: Any = None) -> int:
    """The attempt of the running task's message: 1 when it is delivered first, more after every claim.

    It never falls while the message lives, and a retry or a child is a message of its own and begins at 1.  Store
    it with what the task writes, and refuse a write with a lower one: so a worker that was taken for dead cannot
    overwrite the work of its successor.  1 where the task did not come over this transport (eager, other brokers).
    """
    told = delivery(request)
    return told.attempt if told else 1

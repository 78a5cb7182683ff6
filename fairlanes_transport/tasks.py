"""What a running task can ask about its own message."""

from __future__ import annotations

from typing import Any, NamedTuple

from .errors import FairlanesError


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


def throttle(seconds: float, request: Any = None) -> None:
    """Take the running task's lane off the ring for `seconds`: a vendor has said 429 for this tenant.

    What is running goes on; nothing of the lane is started anywhere until then.  A longer throttle that is in force
    stays.

    Args:
        seconds: from now, by the server's clock; 0 or more.
        request: of a bound task (``self.request``), instead of the current task's.

    Raises:
        ValueError: `seconds` is negative, or no number.
        FairlanesError: no task is running here, or it came over another transport.
        redis.exceptions.RedisError, OSError: the broker cannot be reached.
    """
    number: Any = seconds
    if isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number < 1e9:
        raise ValueError(f"throttle for {seconds!r} s: it must be a number of seconds, 0 or more")
    told = delivery(request)
    if told is None:
        raise FairlanesError("throttle() works in a task that came over a fairlanes:// broker")
    from celery import current_app

    with current_app.producer_or_acquire() as producer:
        producer.channel.connection.store.throttle(told.queue, told.lane, int(seconds * 1000))

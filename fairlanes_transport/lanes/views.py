"""What an operator sees of a queue, as frozen dataclasses.

Times are seconds since the epoch by the server's clock, durations seconds; both as float.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Settings:
    """Settings of a lane, or a queue's defaults for its lanes.  None: not set here."""

    weight: float | None = None
    #: most tasks in flight; 0: no limit, whatever the queue's default
    limit: int | None = None
    #: as in ``"100/m"``; ``"none"``: no rate, whatever the queue's default
    rate: str | None = None
    burst: float | None = None
    #: most ready messages; 0: no bound, whatever the queue's default
    max_size: int | None = None
    paused: bool | None = None


@dataclass(frozen=True)
class QueueStats:
    """One queue at one moment."""

    queue: str
    ready: int
    #: claimed messages and running slots
    in_flight: int
    #: of these: tasks that still run after an early ack
    running_slots: int
    delayed: int
    dead: int
    paused: bool
    #: lanes with ready or leased messages
    lanes: int
    #: lanes on the ring: they can be served now
    lanes_servable: int
    #: lanes that a throttle or rate keeps off the ring
    lanes_waiting: int
    lanes_configured: int
    #: ``"count"`` or ``"time"``
    fairness: str
    defaults: Settings
    #: virtual time, in turns of a lane of weight 1
    virtual_time: float
    #: a wake token is there
    token: bool
    #: the queue ends after so many seconds without use; None: never
    expires: float | None
    #: counters since the queue began: enqueued, claimed, acked, ...
    totals: dict[str, int] = field(default_factory=dict)

    @property
    def backlog(self) -> int:
        """Ready messages and those in flight: what an autoscaler follows."""
        return self.ready + self.in_flight


@dataclass(frozen=True)
class LaneStats:
    """One lane at one moment, with the settings in force."""

    lane: str
    ready: int
    in_flight: int
    weight: float
    limit: int | None
    #: as in ``"100/m"``
    rate: str | None
    burst: float
    max_size: int | None
    paused: bool
    #: when throttle and rate let it back on the ring; None: they do not hold it
    blocked_until: float | None
    #: the lane can be served now
    on_ring: bool
    #: seconds since the next message was published or, with an eta, due; None: no message is ready
    oldest_wait: float | None
    #: what an operator has configured of this lane
    own: Settings
    #: weight over those of all unpaused lanes with ready messages; None: it is none, or not all were read
    share: float | None = None
    #: tag of the message that will be served last, to measure progress by its rank
    last_tag: str = ""

    @property
    def state(self) -> str:
        """``idle`` (nothing ready), ``paused``, ``limit``, ``blocked`` (throttle or rate) or ``ready``."""
        if not self.ready:
            return "idle"
        if self.paused:
            return "paused"
        if self.limit is not None and self.in_flight >= self.limit:
            return "limit"
        return "blocked" if self.blocked_until is not None else "ready"


@dataclass(frozen=True)
class Message:
    """What all kinds of listed messages have."""

    tag: str
    lane: str
    task_id: str
    task: str
    #: number of claims so far
    attempt: int
    #: expiries and requeues so far
    failures: int
    priority: int
    #: when it was published
    published: float


@dataclass(frozen=True)
class Waiting(Message):
    """A ready message, as a peek shows it."""

    headers: dict[str, Any] = field(default_factory=dict, repr=False)
    body: bytes = field(default=b"", repr=False)


@dataclass(frozen=True)
class Lease(Message):
    """A claimed message, or a running slot (acked early; its task id is no longer known)."""

    deadline: float = 0.0
    slot: bool = False


@dataclass(frozen=True)
class Delayed(Message):
    """A message that is due later."""

    due: float = 0.0


@dataclass(frozen=True)
class DeadLetter(Message):
    """A message that was rejected, or whose failures are used up."""

    died: float = 0.0
    reason: str = ""
    headers: dict[str, Any] = field(default_factory=dict, repr=False)
    body: bytes = field(default=b"", repr=False)


@dataclass(frozen=True)
class Cancelled:
    """What `Lanes.cancel` did."""

    #: delayed or ready messages removed
    removed: int
    #: messages of that task id that a worker holds, or that are dead: left alone
    left: int


@dataclass(frozen=True)
class Page:
    """One page of lanes."""

    lanes: tuple[LaneStats, ...]
    #: pass this as `after` for the next page; None: this is the last
    next: str | None

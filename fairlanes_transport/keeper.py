"""The lease keeper: one daemon thread per process and broker that renews what this process holds.

A hub timer would not do: it does not run while a solo worker's task runs, nor, in several pools, after SIGTERM
while the last tasks finish.  The thread is a real one also under gevent and eventlet, has a connection of its
own, and sends nothing while nothing is held.  Children of a fork start without one.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Any, Protocol

from .connections import Link
from .errors import unreachable
from .store import Answer, FailurePolicy, Fence, Store

logger = logging.getLogger(__name__)

#: Seconds between tries while the broker does not answer.
RETRY_SECONDS = 1.0
#: How long a process that ends waits for the broker to hear of what has been done.
EXIT_SECONDS = 1.0
FLUSH_STEP_SECONDS = 0.02
#: Leases renewed per call.
CHUNK = 500


def since_boot() -> float:
    """Seconds on a clock that goes on while the machine is suspended, where there is one: leases do."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else monotonic()


class Owner(Protocol):
    """Who knows whether a lease is still worth renewing."""

    def renews(self, lease: Lease) -> bool:
        """False lets the lease end: the loop hangs.  Called by the keeper's thread."""


class Holder:
    """What a channel has here that must not outlive it; knows nothing of the channel.

    Attributes:
        consumed: queues that end and that it consumes from, once per consumer.
    """

    __slots__ = ("consumed",)

    def __init__(self) -> None:
        self.consumed: list[str] = []


class Lease:
    """A claimed message that this process holds.

    Attributes:
        queue, fence, lane: where it was claimed, and what makes an ack count.
        task_id: for logs; None for a message that is no Celery task.
        lost: the server gave the message to somebody else, or buried it; an ack will change nothing.
        renewed: when (`since_boot`) it was claimed or renewed last.
        started: it was handed to a pool.
        ended: the task has finished.
        spent_ms: worker time that the task took; 0 while it is not known.
        returned: it was handed back, and must not be started here.
        reason: why it will be rejected, for its dead letter.
        withdraw: keeps the pool from starting it; True: it will never start here.
        slot: acked early, and the lane keeps its running slot until the task has ended.
        ends: seconds without use after which its queue is gone; 0: never.
        owner: gives who is asked by the keeper's thread whether the lease is worth renewing; a weak reference, so that
            a connection that is dropped can be collected.  None: always.
        holder: of the channel that holds it.
    """

    __slots__ = (
        "ended", "ends", "fence", "holder", "lane", "lost", "owner", "queue", "reason", "renewed", "returned", "slot",
        "spent_ms", "started", "task_id", "withdraw",
    )  # fmt: skip

    def __init__(self, queue: str, fence: Fence, lane: str, task_id: str | None = None) -> None:
        self.queue = queue
        self.fence = fence
        self.lane = lane
        self.task_id = task_id
        self.lost = False
        self.started = False
        self.ended = False
        self.slot = False
        self.spent_ms = 0
        self.ends = 0.0
        self.renewed = since_boot()
        self.returned = False
        self.reason = "rejected"
        self.withdraw: Callable[[], bool] | None = None
        self.owner: Callable[[], Owner | None] | None = None
        self.holder: Holder | None = None

    def will_not_start(self) -> bool:
        """Whether the message can be handed back: its task was not started here, and never will be."""
        return not self.started or (self.withdraw is not None and self.withdraw())

    @property
    def key(self) -> tuple[str, str]:
        """Identifies the message in this process: a tag is unique within its queue."""
        return self.queue, self.fence.tag

    def __str__(self) -> str:
        return f"task {self.task_id or self.fence.tag} of tenant {self.lane!r}, attempt {self.fence.attempt}"


def _native(name: str) -> Any:
    """`_thread.<name>` as it is without gevent's or eventlet's patches."""
    if "gevent.monkey" in sys.modules:
        return sys.modules["gevent.monkey"].get_original("_thread", name)
    if "eventlet.patcher" in sys.modules:
        return getattr(sys.modules["eventlet.patcher"].original("_thread"), name)
    import _thread

    return getattr(_thread, name)


class Keeper:
    """Renews the leases of this process on one broker, and does what could not be done while the broker was away.

    Args:
        link: the broker; the keeper makes a connection of its own to it.
        prefix: ``global_keyprefix``.
        lease_seconds: how long a lease lasts from its last renewal; renewed every third of it.
        policy: what happens to failures.
    """

    def __init__(self, link: Link, prefix: str, lease_seconds: float, policy: FailurePolicy | None = None) -> None:
        self.lease_ms = int(lease_seconds * 1000)
        self.interval = lease_seconds / 3
        self._link = Link(link.address, link.options)
        self.store = Store(self._link, prefix, policy)
        self._held: dict[tuple[str, str], Lease] = {}
        self._later: deque[Callable[[Store], object]] = deque()
        self._unsaid: deque[Callable[[], None]] = deque()
        #: queue that ends -> seconds without use after which it does, once per consumer of this process
        self._consumed: dict[str, list[float]] = {}
        #: when (monotonic) they were used last
        self._used = 0.0
        self._renewal = 0.0
        self._failing = False
        self._running = False
        #: taken once, by whoever starts the thread
        self._starting = _native("allocate_lock")()
        self._sleeping = False
        self._signal = _native("allocate_lock")()
        self._signal.acquire()

    @classmethod
    def shared(cls, link: Link, prefix: str, lease_seconds: float, policy: FailurePolicy | None = None) -> Keeper:
        """This process's keeper for a broker."""
        key = (link, prefix, lease_seconds, policy)
        keeper = _keepers.get(key)
        if keeper is None:
            keeper = _keepers[key] = cls(link, prefix, lease_seconds, policy)
        return keeper

    @property
    def behind(self) -> bool:
        """Whether something waits for the broker: what else there is to tell it had better wait too."""
        return bool(self._later)

    @property
    def silences(self) -> int:
        """How often the keeper was not answered in time."""
        return self._link.silences

    def goes_on(self, queue: str, fence: Fence) -> bool:
        """Whether this process has the message that it has just claimed already: its lease ran out, and we claimed
        it ourselves.  The one execution goes on, under the newer fence.
        """
        known = self._held.get((queue, fence.tag))
        if known is not None:
            known.fence, known.lost = fence, False
        return known is not None

    def hold(self, lease: Lease) -> None:
        """Renew `lease` from now on."""
        self._held[lease.key] = lease
        if self._sleeping or not self._running or lease.ends:
            self._start()

    def drop(self, lease: Lease) -> None:
        """Renew `lease` no more."""
        if self._held.get(lease.key) is lease:
            del self._held[lease.key]

    def consume(self, queue: str, ends: float) -> None:
        """Note a consumer of a queue that is gone after so many seconds without use: it is in use until `leave`."""
        self._consumed.setdefault(queue, []).append(ends)
        self._start()

    def leave(self, queue: str) -> None:
        """Undo one `consume`."""
        consumers = self._consumed.get(queue, [])
        if consumers:
            consumers.pop()
        if not consumers:
            self._consumed.pop(queue, None)

    def abandon(self, holder: Holder) -> None:
        """Let go of what a channel had that was collected without being closed.

        It is called wherever the garbage collector runs, so the thread does it.
        """
        self.later(lambda store: self._abandon(holder, store))

    def _abandon(self, holder: Holder, store: Store) -> None:
        while holder.consumed:
            self.leave(holder.consumed.pop())
        by_queue: dict[str, list[Lease]] = {}
        for lease in list(self._held.values()):
            if lease.holder is holder and lease.will_not_start():
                by_queue.setdefault(lease.queue, []).append(lease)
        for queue, leases in by_queue.items():
            for i in range(0, len(leases), CHUNK):
                store.release(queue, [lease.fence for lease in leases[i : i + CHUNK]])
        for lease in (lease for leases in by_queue.values() for lease in leases):
            lease.returned = True
            self.drop(lease)

    def later(self, operation: Callable[[Store], object]) -> None:
        """Do it as soon as the broker can be reached, in the order of these calls."""
        self._later.append(operation)
        self._start()

    def ack_later(self, lease: Lease) -> None:
        """Ack `lease` as soon as the broker can be reached, and renew it until then."""
        self.later(lambda store: self._ack(store, lease))

    def finish(self, lease: Lease) -> None:
        """The task of an early ack has ended: free its running slot, as soon as the broker can be reached."""
        lease.slot = False
        self.drop(lease)
        self.later(lambda store: store.finish(lease.queue, [lease.fence], spent_ms={lease.fence: lease.spent_ms}))

    def check(self, lease: Lease, store: Store) -> bool:
        """Whether `lease` is still ours.  It is asked of the server only if it may have run out: this process
        was stopped, or the broker was away.

        Args:
            store: of the caller; the keeper's own is for its thread.

        Raises:
            redis.exceptions.RedisError, OSError: the broker cannot be reached.
        """
        if not lease.lost and since_boot() > lease.renewed + self.lease_ms / 1000:
            self._extend(store, lease.queue, [lease])
        return not lease.lost

    def renew(self) -> None:
        """Renew everything that is held, once.

        Raises:
            redis.exceptions.RedisError, OSError: the broker cannot be reached.
        """
        by_queue: dict[str, list[Lease]] = {}
        for lease in list(self._held.values()):
            owner = lease.owner and lease.owner()
            if not lease.lost and (owner is None or owner.renews(lease)):
                by_queue.setdefault(lease.queue, []).append(lease)
        for queue, leases in by_queue.items():
            try:
                for i in range(0, len(leases), CHUNK):
                    self._extend(self.store, queue, leases[i : i + CHUNK])
            except unreachable:
                raise
            except Exception as exc:
                # Damaged data, or a right that is missing: the other queues are renewed all the same.
                self._say(functools.partial(logger.error, "cannot renew the leases of queue %r", queue, exc_info=exc))

    def use(self) -> None:
        """Use the queues that end, of which this process has a consumer or holds a message.

        Raises:
            redis.exceptions.RedisError, OSError: the broker cannot be reached.
        """
        for queue in self._in_use():
            try:
                self.store.rearm(queue)
            except unreachable:
                raise
            except Exception as exc:
                self._say(functools.partial(logger.error, "cannot use queue %r", queue, exc_info=exc))

    def _in_use(self) -> dict[str, float]:
        """Queue -> seconds without use after which it is gone."""
        held = {lease.queue: lease.ends for lease in list(self._held.values()) if lease.ends}
        return held | {queue: min(ends) for queue, ends in list(self._consumed.items()) if ends}

    def _next_use(self) -> float:
        """When (monotonic) to use them: three times before the first would end, so that a try may fail."""
        return self._used + min(self._in_use().values(), default=math.inf) / 3

    def flush(self, seconds: float) -> None:
        """Wait until nothing waits for the broker any more, for at most so long."""
        give_up = monotonic() + seconds
        while self._later and not self._failing and monotonic() < give_up:
            time.sleep(FLUSH_STEP_SECONDS)

    def _extend(self, store: Store, queue: str, leases: list[Lease]) -> None:
        fences = [lease.fence for lease in leases]
        asked = since_boot()
        for lease, fence, answer in zip(leases, fences, store.extend(queue, fences, self.lease_ms)):
            if answer is Answer.DONE:
                lease.renewed = asked
            elif lease.fence != fence or self._held.get(lease.key) is not lease:
                pass  # a fence that changed meanwhile is of a newer claim of ours; what was dropped is settled
            elif answer is Answer.STALE:
                self._lost(lease)
            else:
                # Finished: by somebody else, or by an ack of ours that is on its way.
                lease.lost = True

    def _ack(self, store: Store, lease: Lease) -> None:
        running = lease.started and not lease.ended
        spent = {lease.fence: lease.spent_ms}
        answer = store.ack(lease.queue, [lease.fence], keep_slot=running, spent_ms=spent).answers[0]
        lease.slot = answer is Answer.SLOT
        if not lease.slot:
            self.drop(lease)
        elif lease.ended:  # while the ack was on its way
            self.finish(lease)
        if answer is Answer.STALE:
            self._lost(lease)

    def _lost(self, lease: Lease) -> None:
        self._say(functools.partial(report_lost, lease))

    def _say(self, line: Callable[[], None]) -> None:
        """Log something: now, or where logging from this thread would block the others, with their next `speak`.

        Under eventlet the locks of `logging` are made for one thread.
        """
        if "eventlet.patcher" in sys.modules:
            self._unsaid.append(line)
        else:
            line()

    def speak(self) -> None:
        """Log what the keeper's thread has to say and cannot log itself."""
        while self._unsaid:
            self._unsaid.popleft()()

    def _start(self) -> None:
        """Have the thread look at what there is to do."""
        if self._starting.acquire(False):
            # What is held now was claimed now.
            self._renewal = monotonic() + self.interval
            self._running = True
            _native("start_new_thread")(self._run, ())
        with contextlib.suppress(RuntimeError):  # signalled already
            self._signal.release()

    def _run(self) -> None:
        """Body of the thread."""
        # Debuggers and coverage ask `threading` for this, which knows nothing of a thread made below it.
        sys.settrace(threading.gettrace())
        while True:
            self._rest()
            try:
                try:
                    self._turn()
                except unreachable:
                    # It may have been the one connection; a new one says more.
                    self._turn()
                self._failing = False
            except unreachable as exc:
                if not self._failing:
                    text = "the lease keeper cannot reach the broker, and tries on; it renews %d leases: %s"
                    self._say(functools.partial(logger.warning, text, len(self._held), exc))
                self._failing = True
            except Exception as exc:
                # The thread must not die: with it every lease of this process would.
                self._say(functools.partial(logger.error, "lease keeper", exc_info=exc))
                time.sleep(RETRY_SECONDS)

    def _rest(self) -> None:
        """Wait until there is something to do."""
        if self._failing:
            self._signal.acquire(True, min(RETRY_SECONDS, self.interval))
        elif self._held and not self._later:
            self._wait(self._renewal)
        elif not self._later:
            # Said before looking: who holds something new looks for us only after that.
            self._sleeping = True
            if not self._held and not self._later:
                self._wait(math.inf)
            self._sleeping = False
            # What is held now was claimed now.
            self._renewal = monotonic() + self.interval

    def _wait(self, until: float) -> None:
        """Wait for a signal, or for a time (monotonic), or until a queue is to be used."""
        until = min(until, self._next_use())
        self._signal.acquire(True, -1 if until == math.inf else max(0.0, until - monotonic()))

    def _turn(self) -> None:
        if monotonic() >= self._next_use():
            self.use()
            self._used = monotonic()
        if self._held and monotonic() >= self._renewal:
            self.renew()
            self._renewal = monotonic() + self.interval
        while self._later:
            try:
                self._later[0](self.store)
            except unreachable:
                raise
            except Exception as exc:
                # The server has refused it for good: it must not keep the others from being done.
                self._say(functools.partial(logger.error, "lease keeper", exc_info=exc))
            self._later.popleft()


def report_lost(lease: Lease) -> None:
    """Mark that the fence has refused an operation on `lease`, and say so once."""
    if not lease.lost:
        lease.lost = True
        logger.warning(
            "%s: its lease ran out, and another worker has the message or will get it; "
            "what this one says about it is refused",
            lease,
        )


_keepers: dict[Any, Keeper] = {}


def _forget_keepers() -> None:
    _keepers.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_keepers)


def _flush_keepers() -> None:
    for keeper in list(_keepers.values()):
        keeper.flush(EXIT_SECONDS)


atexit.register(_flush_keepers)

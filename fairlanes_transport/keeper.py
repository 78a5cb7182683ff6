"""The lease keeper: one daemon thread per process and broker that renews what this process holds.

A hub timer would not do: it does not run while a solo worker's task runs, nor, in several pools, after SIGTERM
while the last tasks finish.  The thread is a real one also under gevent and eventlet, has a connection of its
own, and sends nothing while nothing is held.  Children of a fork start without one.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from typing import Any, Protocol

from redis.exceptions import RedisError

from .connections import Link
from .errors import FairlanesError
from .store import Answer, Fence, Store

logger = logging.getLogger(__name__)

#: Seconds between tries while the broker does not answer, or acks wait to be sent.
RETRY_SECONDS = 1.0
#: Leases renewed per call.
CHUNK = 500


class Owner(Protocol):
    """Who knows whether a lease is still worth renewing."""

    def renews(self, lease: Lease) -> bool:
        """False lets the lease end: the loop hangs, or the job is lost.  Called by the keeper's thread."""


class Lease:
    """A claimed message that this process holds.

    Attributes:
        queue, fence, lane: where it was claimed, and what makes an ack count.
        task_id: for logs; None for a message that is no Celery task.
        lost: the server gave the message to somebody else, or buried it; an ack will change nothing.
        started: it was handed to a pool, and nobody can stop that any more.
        ended: the task has finished.
        slot: acked early, and the lane keeps its running slot until the task has ended.
        owner: asked by the keeper's thread whether the lease is worth renewing; None: always.
    """

    __slots__ = ("ended", "fence", "lane", "lost", "owner", "queue", "slot", "started", "task_id")

    def __init__(self, queue: str, fence: Fence, lane: str, task_id: str | None = None) -> None:
        self.queue = queue
        self.fence = fence
        self.lane = lane
        self.task_id = task_id
        self.lost = False
        self.started = False
        self.ended = False
        self.slot = False
        self.owner: Owner | None = None

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
    """Renews the leases of this process on one broker, and sends the acks that could not be sent.

    Args:
        link: the broker; the keeper makes a connection of its own to it.
        prefix: ``global_keyprefix``.
        lease_seconds: how long a lease lasts from its last renewal; renewed every third of it.
    """

    def __init__(self, link: Link, prefix: str, lease_seconds: float) -> None:
        self.lease_ms = int(lease_seconds * 1000)
        self.interval = lease_seconds / 3
        self.store = Store(Link(link.address, link.options), prefix)
        self._held: dict[tuple[str, str], Lease] = {}
        self._unsent: dict[tuple[str, str], tuple[Lease, bool]] = {}
        self._running = False
        self._signal = _native("allocate_lock")()
        self._signal.acquire()

    @classmethod
    def shared(cls, link: Link, prefix: str, lease_seconds: float) -> Keeper:
        """This process's keeper for a broker."""
        key = (link, prefix, lease_seconds)
        keeper = _keepers.get(key)
        if keeper is None:
            keeper = _keepers[key] = cls(link, prefix, lease_seconds)
        return keeper

    def held(self, key: tuple[str, str]) -> Lease | None:
        """The lease that this process has on a message, if it has one."""
        return self._held.get(key)

    def hold(self, lease: Lease) -> None:
        """Renew `lease` from now on."""
        self._held[lease.key] = lease
        if not self._running:
            self._running = True
            _native("start_new_thread")(self._run, ())
        elif len(self._held) == 1:
            self._wake()

    def drop(self, lease: Lease) -> None:
        """Renew `lease` no more."""
        if self._held.get(lease.key) is lease:
            del self._held[lease.key]

    def ack_later(self, lease: Lease, keep_slot: bool) -> None:
        """The broker could not be reached: send this ack when it can be."""
        self._unsent[lease.key] = (lease, keep_slot)
        if not self._running:
            self._running = True
            _native("start_new_thread")(self._run, ())
        self._wake()

    def renew(self) -> None:
        """Send waiting acks and renew everything once.

        Raises:
            redis.exceptions.RedisError, OSError: the broker cannot be reached.
        """
        self._send_acks()
        by_queue: dict[str, list[Lease]] = {}
        for lease in list(self._held.values()):
            if not lease.lost and (lease.owner is None or lease.owner.renews(lease)):
                by_queue.setdefault(lease.queue, []).append(lease)
        for queue, leases in by_queue.items():
            for i in range(0, len(leases), CHUNK):
                self._extend(queue, leases[i : i + CHUNK])

    def _extend(self, queue: str, leases: list[Lease]) -> None:
        fences = [lease.fence for lease in leases]
        for lease, fence, answer in zip(leases, fences, self.store.extend(queue, fences, self.lease_ms)):
            # A fence that changed meanwhile belongs to a newer claim of ours.
            if answer is not Answer.DONE and lease.fence == fence and self._held.get(lease.key) is lease:
                lease.lost = True

    def _send_acks(self) -> None:
        for key, (lease, keep_slot) in list(self._unsent.items()):
            answer = self.store.ack(lease.queue, [lease.fence], keep_slot=keep_slot).answers[0]
            del self._unsent[key]
            if answer is Answer.STALE:
                report_lost(lease)

    def _wake(self) -> None:
        try:
            self._signal.release()
        except RuntimeError:
            pass  # signalled already

    def _run(self) -> None:
        """Body of the thread."""
        failed = False
        while True:
            if failed or self._unsent:
                pause = min(RETRY_SECONDS, self.interval)
            else:
                pause = self.interval if self._held else -1
            self._signal.acquire(True, pause)
            try:
                self.renew()
                failed = False
            except (RedisError, OSError, FairlanesError) as exc:
                if not failed:
                    logger.warning("cannot renew %d leases, will retry: %s", len(self._held), exc)
                failed = True
            except Exception:
                # The thread must not die: with it every lease of this process would.
                logger.exception("lease keeper")
                failed = True
                time.sleep(RETRY_SECONDS)


def report_lost(lease: Lease) -> None:
    """Say once that the fence refused an operation on `lease`."""
    logger.warning(
        "%s: the lease was lost, somebody else has the message now; its ack was refused and changed nothing",
        lease,
    )


_keepers: dict[Any, Keeper] = {}


def _forget_keepers() -> None:
    _keepers.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_keepers)

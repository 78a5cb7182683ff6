"""Which messages a channel holds, and what becomes of them: kombu's QoS over our leases."""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Iterable
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING, Any

from kombu.transport import virtual

from .errors import unreachable
from .keeper import Lease, report_lost
from .store import MAX_FENCES, Answer, Store

if TYPE_CHECKING:
    from .channel import Channel

logger = logging.getLogger(__name__)


class QoS(virtual.QoS):
    """The unacknowledged messages of a channel.

    It works on after its channel is closed: a task that outlives its connection is acked through the process's
    link to the broker, which makes new connections as needed.
    """

    def __init__(self, channel: Channel, prefetch_count: int = 0) -> None:
        super().__init__(channel, prefetch_count)
        self._transport = channel.connection
        # kombu's own would keep the channel, and all that it holds, for the life of the process.
        self._on_collect.cancel()
        self._on_collect = Finalize(self, functools.partial(_restore_at_exit, weakref.ref(self)), exitpriority=1)

    def can_consume(self) -> bool:
        """Whether the prefetch limit allows another message."""
        return not self.prefetch_count or len(self._delivered) < self.prefetch_count

    def can_consume_max_estimate(self) -> int | None:
        """How many more messages the prefetch limit allows; None: as many as there are."""
        return max(self.prefetch_count - len(self._delivered), 0) if self.prefetch_count else None

    def append(self, message: Any, delivery_tag: str) -> None:
        """Hold a message: its lease is renewed from now on."""
        self._delivered[delivery_tag] = message
        self._transport.keeper.hold(message.lease)

    def ack(self, delivery_tag: str) -> None:
        """Finish a message.  If the broker cannot be reached, the ack is sent as soon as it can."""
        message = self._delivered.pop(delivery_tag, None)
        if message is None:
            return
        self._transport.acks.ack(message.lease)

    def finish(self, lease: Lease) -> None:
        """The task of an early ack has ended: free its running slot."""
        self._transport.acks.finish(lease)

    def wake(self) -> None:
        """Something has changed that may give credit (``worker_disable_prefetch``)."""
        self._transport.metronome.wake()

    def reject(self, delivery_tag: str, requeue: bool = False) -> None:
        """A message failed: it comes back after its backoff, or goes to the dead letters.

        If the broker cannot be reached, it is told as soon as it can be.
        """
        message = self._delivered.pop(delivery_tag, None)
        if message is None:
            return
        lease = message.lease
        self._transport.keeper.drop(lease)

        def reject(store: Store, again: bool) -> None:
            answer = store.reject(lease.queue, lease.fence, requeue=requeue, reason=lease.reason)
            if answer is Answer.STALE and not again:
                report_lost(lease)
            elif answer is Answer.DIED:
                self._transport.metronome.on_untold(lease.queue)
            elif not requeue and answer is Answer.DONE:
                logger.error("%s, queue %r, is a dead letter now: %s", lease, lease.queue, lease.reason)

        self.tell(reject)
        self._transport.metronome.wake()

    def release(self, tags: Iterable[str]) -> None:
        """Hand back messages that were not started, to the place they had, one call per queue."""
        by_queue: dict[str, list[Lease]] = {}
        for tag in tags:
            message = self._delivered.pop(tag, None)
            if message is not None and message.lease is not None:
                self._transport.keeper.drop(message.lease)
                by_queue.setdefault(message.lease.queue, []).append(message.lease)
        for queue, leases in by_queue.items():
            for lease in leases:
                lease.returned = True
            self.tell(functools.partial(_release, queue=queue, leases=leases))

    def check(self, lease: Lease) -> bool:
        """Whether a lease is still ours.

        Raises:
            redis.exceptions.RedisError, OSError: the broker cannot be reached, and the lease may have run out.
        """
        return bool(self._transport.keeper.check(lease, self._transport.store))

    def restore_unacked(self) -> None:
        """Hand back everything that has not started here."""
        self.release([tag for tag, message in list(self._delivered.items()) if message.lease.will_not_start()])

    def restore_unacked_once(self, stderr: Any = None) -> None:
        """The same at close and at exit."""
        self._on_collect.cancel()
        self._transport.acks.flush()
        self.restore_unacked()

    def tell(self, operation: Callable[[Store, bool], object]) -> None:
        """Tell the broker something, now or, if it cannot be reached, as soon as it can be.

        Args:
            operation: called with a store, and whether the broker may have been told already: a reply was lost.
        """
        tried = False

        def attempt(store: Store) -> None:
            nonlocal tried
            again, tried = tried, True
            operation(store, again)

        keeper = self._transport.keeper
        if keeper.behind or self._transport.link.down:
            keeper.later(attempt)
            return
        try:
            attempt(self._transport.store)
        except unreachable as exc:
            logger.debug("cannot tell the broker now: %s", exc)
            keeper.later(attempt)


def _restore_at_exit(reference: weakref.ref[QoS]) -> None:
    qos = reference()
    if qos is not None:
        qos.restore_unacked_once()


def _release(store: Store, again: bool, *, queue: str, leases: list[Lease]) -> None:
    for i in range(0, len(leases), MAX_FENCES):
        some = leases[i : i + MAX_FENCES]
        for lease, answer in zip(some, store.release(queue, [lease.fence for lease in some])):
            if answer is Answer.STALE and not again:
                report_lost(lease)

"""Which messages a channel holds, and what becomes of them: kombu's QoS over our leases."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from kombu.transport import virtual
from redis.exceptions import ConnectionError as DriverConnectionError
from redis.exceptions import TimeoutError as DriverTimeoutError

from .keeper import Lease, report_lost
from .store import Answer

if TYPE_CHECKING:
    from .channel import Channel

logger = logging.getLogger(__name__)

UNREACHABLE = (DriverConnectionError, DriverTimeoutError, OSError)


class QoS(virtual.QoS):
    """The unacknowledged messages of a channel.

    It works on after its channel is closed: a task that outlives its connection is acked through the process's
    link to the broker, which makes new connections as needed.
    """

    def __init__(self, channel: Channel, prefetch_count: int = 0) -> None:
        super().__init__(channel, prefetch_count)
        self._transport = channel.connection

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
        lease, transport = message.lease, self._transport
        keep_slot = lease.started and not lease.ended
        metronome = transport.metronome
        parks = metronome.will_park()
        try:
            turn = transport.store.ack(
                lease.queue,
                [lease.fence],
                keep_slot=keep_slot,
                consumer=metronome.id if parks else "",
                will_park=parks,
            )
        except UNREACHABLE as exc:
            logger.warning("cannot ack %s now (%s); it will be sent when the broker is back", lease, exc)
            transport.keeper.drop(lease)
            transport.keeper.ack_later(lease, keep_slot)
            return
        lease.slot = turn.answers[0] is Answer.SLOT
        if not lease.slot:
            transport.keeper.drop(lease)
        if turn.answers[0] is Answer.STALE:
            report_lost(lease)
        metronome.acked(lease.queue, turn, parks)

    def reject(self, delivery_tag: str, requeue: bool = False, reason: str = "rejected") -> None:
        """A message failed: it comes back after its backoff, or goes to the dead letters.

        If the broker cannot be reached, the lease ends by itself, which counts as a failure too.
        """
        message = self._delivered.pop(delivery_tag, None)
        if message is None:
            return
        lease = message.lease
        self._transport.keeper.drop(lease)
        try:
            answer = self._transport.store.reject(lease.queue, lease.fence, requeue=requeue, reason=reason)
        except UNREACHABLE as exc:
            logger.warning("cannot reject %s now (%s); it comes back when its lease ends", lease, exc)
            return
        if answer is Answer.STALE:
            report_lost(lease)
        self._transport.metronome.wake()

    def release(self, tags: Iterable[str]) -> None:
        """Hand back messages that were not started, to the place they had, one call per queue."""
        by_queue: dict[str, list[Lease]] = {}
        for tag in tags:
            message = self._delivered.pop(tag, None)
            if message is not None:
                self._transport.keeper.drop(message.lease)
                by_queue.setdefault(message.lease.queue, []).append(message.lease)
        for queue, leases in by_queue.items():
            self._transport.store.release(queue, [lease.fence for lease in leases])

    def restore_unacked(self) -> None:
        """Hand back everything that has not started here."""
        self.release([tag for tag, message in list(self._delivered.items()) if not message.lease.started])

    def restore_unacked_once(self, stderr: Any = None) -> None:
        """The same at close and at exit; a dead broker gets its messages back when their leases end."""
        self._on_collect.cancel()
        try:
            self.restore_unacked()
        except UNREACHABLE as exc:
            logger.warning("cannot release messages now (%s); they come back when their leases end", exc)

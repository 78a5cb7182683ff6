"""Acks on their way: what an event loop gathers in one turn goes out in one call per queue."""

from __future__ import annotations

import logging
from collections.abc import Callable

from .errors import unreachable
from .keeper import Keeper, Lease, report_lost
from .metronome import Metronome
from .store import MAX_FENCES, Answer, Request, Store, Turn

logger = logging.getLogger(__name__)


class Acks:
    """Sends the acks of one transport.

    On the loop's thread, while the loop turns, an ack waits for the end of the loop's callbacks: Celery queues
    acks as callbacks, so all that are ready go out together, before the loop polls, and nobody waits for the
    reply.  Under plain draining an ack is sent at once, and its reply read while the next messages of the batch are
    worked on.  Elsewhere it is waited for.
    """

    def __init__(self, store: Store, keeper: Keeper, metronome: Metronome) -> None:
        self.store = store
        self.keeper = keeper
        self.metronome = metronome
        self._waiting: list[Lease] = []
        metronome.flush_acks = self.flush

    def ack(self, lease: Lease) -> None:
        """Finish a message.  If the broker cannot be reached, that is done as soon as it can."""
        if self.keeper.behind:
            self.keeper.ack_later(lease)
        elif self.metronome.turns():
            self._waiting.append(lease)
        else:
            self._send(lease.queue, [lease])

    def flush(self) -> None:
        """Send what waits."""
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        by_queue: dict[str, list[Lease]] = {}
        for lease in waiting:
            by_queue.setdefault(lease.queue, []).append(lease)
        for queue, leases in by_queue.items():
            for i in range(0, len(leases), MAX_FENCES):
                self._send(queue, leases[i : i + MAX_FENCES])

    def finish(self, lease: Lease) -> None:
        """The task of an early ack has ended: free its running slot."""
        if self.keeper.behind:
            self.keeper.finish(lease)
            return
        lease.slot = False
        self.keeper.drop(lease)
        try:
            need = self.store.finish(lease.queue, [lease.fence], spent_ms={lease.fence: lease.spent_ms})
        except unreachable as exc:
            logger.debug("cannot finish %s now: %s", lease, exc)
            self.keeper.finish(lease)
        else:
            self.metronome.acked(lease.queue, Turn(need, None), False)

    def _send(self, queue: str, leases: list[Lease]) -> None:
        # While its task runs, the slot of an early ack is kept in lanes that need it.
        running = {lease.fence for lease in leases if lease.started and not lease.ended}
        parks = self.metronome.will_park()
        request = self.store.ack_request(
            queue,
            [lease.fence for lease in leases],
            keep_slot=running,
            spent_ms={lease.fence: lease.spent_ms for lease in leases if lease.ended},
            consumer=self.metronome.id if parks else "",
            will_park=parks,
        )

        def done(turn: Turn) -> None:
            for lease, answer in zip(leases, turn.answers):
                self._settle(lease, answer)
            self.metronome.acked(queue, turn, parks)

        def lost() -> None:
            for lease in leases:
                self.keeper.ack_later(lease)

        if self.metronome.turns():
            self.metronome.courier.put(request, done, lost)
            return
        try:
            if self.metronome.draws():
                self._post(request, done, lost)
            else:
                done(request.run(self.store.caller))
        except unreachable as exc:
            # One line per outage, which is the keeper's, not one per ack.
            logger.debug("cannot ack %s now: %s", leases[0], exc)
            lost()

    def _post(self, request: Request, done: Callable[[Turn], None], lost: Callable[[], None]) -> None:
        courier = self.metronome.courier
        courier.put(request, done, lost)
        try:
            courier.refresh()
            courier.post()
        except unreachable as exc:
            # What was under way is lost, and this with it; each was told so.
            logger.debug("the acks of a batch are sent again: %s", exc)

    def _settle(self, lease: Lease, answer: Answer) -> None:
        lease.slot = answer is Answer.SLOT
        if not lease.slot:
            self.keeper.drop(lease)
        elif lease.ended:  # while the ack was on its way
            self.finish(lease)
        if answer is Answer.STALE:
            report_lost(lease)

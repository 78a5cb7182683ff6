"""The metronome on an event loop, where nothing waits.

A turn (`tick`, before the loop polls) parks, or posts the acks of the turn and the next claim in one packet; messages
are delivered by the reader callback of the courier's socket.  (What is delivered from a tick would have its ack wait
out the loop's poll.)
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import Any

from .metronome import Metronome

#: How long credit may grow before it is used, on a channel that is nearly full.
SETTLE_SECONDS = 0.005
#: How long messages are delivered in one turn.
DELIVERY_SECONDS = 0.02
#: An event loop polls no longer than this.
LONGEST_POLL_SECONDS = 10.0


class Turning:
    """Turns a metronome on a kombu hub.

    Args:
        loop: the hub.  Its readers do not survive a reset, so each turn adds them.
    """

    def __init__(self, metronome: Metronome, loop: Any) -> None:
        self.metronome = metronome
        self.loop = loop
        self._settling = self._settled = False
        #: something was delivered since the last turn
        self._delivered = False
        self._readers: dict[int, tuple[Any, Callable[[], None]]] = {}
        self._timer: Any = None
        self._timer_at = 0.0
        loop.on_tick.add(self.tick)

    def tick(self) -> None:
        """Before each poll: send what there is to send, and park if there is nothing to claim.

        Raises:
            redis.exceptions.RedisError, OSError: the connection is lost, or the server cannot serve now.
        """
        metronome = self.metronome
        if metronome.closed:
            return
        metronome.looping = True
        metronome.begin_turn()
        metronome.flush_acks()
        self._advance()
        metronome.courier.post()
        metronome.fanout.check()
        self._watch_due()
        self._add_readers()

    def stop(self) -> None:
        """The loop will not turn again: send and read what is on its way.

        Raises:
            redis.exceptions.RedisError, OSError: the server cannot be reached.
        """
        self.metronome.looping = False
        self.metronome.settle()

    def close(self) -> None:
        """Leave the loop."""
        self.loop.on_tick.discard(self.tick)
        for fd in self._readers:
            self._remove_reader(fd)
        self._readers = {}
        if self._timer is not None:
            self._timer.cancel()

    def _advance(self) -> None:
        """Park, or claim without waiting for the reply; one claim at a time."""
        metronome = self.metronome
        metronome.courier.check()
        if metronome.buffer:
            metronome.doorbell.ring()
            return
        # What was just delivered is on its way to the pool; the park, which has time, waits until it is there.
        park, self._delivered = not self._delivered, False
        if metronome.claiming or not metronome.prepare(park):
            if not park:
                metronome.doorbell.ring()
            return
        # A channel that is nearly full has enough to do: its credit may grow for a moment, so that one claim
        # brings several messages.
        hot = [s.channel for queue in tuple(metronome.hot) for s in tuple(metronome.subscriptions.get(queue, ()))]
        if self._settled or not all(channel.nearly_full() for channel in hot):
            self._settled = False
            metronome.send_claim()
        elif not self._settling:
            self._settling = True
            self._call_later(SETTLE_SECONDS, self._settle)

    def _settle(self) -> None:
        self._settling, self._settled = False, True
        self.metronome.doorbell.ring()

    # what the sockets bring

    def _on_doorbell(self) -> None:
        # The next turn does what else there is to do.
        self.metronome.doorbell.quiet()
        self.metronome.heat_due()
        self._deliver_for_a_moment()

    def _on_park(self) -> None:
        metronome = self.metronome
        if metronome.closed:
            return
        if not metronome.park.parked:
            # Nothing was asked, so nothing is to come: the server has closed the idle connection.
            metronome.park.close()
            return
        metronome.read_park()
        # Not in the next turn: somebody waits for this message.
        self._advance()
        metronome.courier.post()

    def _on_courier(self) -> None:
        if not self.metronome.closed:
            self.metronome.courier.receive()
            self._deliver_for_a_moment()

    def _on_fanout(self) -> None:
        if not self.metronome.closed and self.metronome.fanout.active:
            self.metronome.fanout.receive()

    def _deliver_for_a_moment(self) -> None:
        """Deliver, and give the loop its turn between long deliveries: where tasks run on the loop (solo), each of
        them may be acked, and a shutdown be seen, before the next one starts.
        """
        metronome = self.metronome
        until = monotonic() + DELIVERY_SECONDS
        while metronome.buffer and not metronome.closed and monotonic() < until:
            self._delivered = True
            metronome.deliver_next()

    # what the loop watches for us

    def _add_readers(self) -> None:
        """Add what the loop does not have: it drops all readers when it resets."""
        metronome = self.metronome
        sockets = (
            (metronome.doorbell.reader, self._on_doorbell),
            (metronome.park.sock, self._on_park),
            (metronome.fanout.sock, self._on_fanout),
            (metronome.courier.sock, self._on_courier),
        )
        wanted = {sock.fileno(): (sock, callback) for sock, callback in sockets if sock is not None}
        for fd, (sock, _) in list(self._readers.items()):
            # A closed socket takes its number out of the poller; a new one may have got the same number.
            if fd not in wanted or wanted[fd][0] is not sock:
                self._remove_reader(fd)
        for fd, (_, callback) in wanted.items():
            known = self.loop.readers.get(fd)
            if known is None or known[0] != callback:
                self.loop.add_reader(fd, callback)
        self._readers = wanted

    def _remove_reader(self, fd: int) -> None:
        known = self.loop.readers.get(fd)
        # The number may belong to somebody else's socket by now.
        if known is not None and known[0] == self._readers[fd][1]:
            self.loop.remove_reader(fd)

    def _watch_due(self) -> None:
        """Have the loop's timer ring when we have to claim as timekeeper."""
        at = self.metronome.next_due()
        # One that rings too early does no harm, and a cancelled one stays in the loop's heap until its time.
        if at is None or (self._timer is not None and self._timer_at <= at):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = at
        self._timer = self._call_later(at - monotonic(), self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self.metronome.doorbell.ring()

    def _call_later(self, seconds: float, callback: Callable[[], None]) -> Any:
        """A timer of the loop, set from a tick: the loop has chosen the length of its next poll before that."""
        if seconds < LONGEST_POLL_SECONDS:
            self.metronome.doorbell.ring()
        return self.loop.call_later(max(0.0, seconds), callback)

"""The metronome under plain ``drain_events``: scripts, gevent and eventlet workers."""

from __future__ import annotations

from time import monotonic
from typing import Any

from kombu.utils.eventio import ERR, READ, poll

from .errors import unreachable
from .metronome import Metronome

#: A caller of `Draining.drain` that comes back within this many seconds is taken to loop: the pop stays parked for it.
LOOPING_SECONDS = 0.1


class Draining:
    """Turns a metronome once per call."""

    def __init__(self, metronome: Metronome) -> None:
        self.metronome = metronome
        self._drained_at = 0.0

    def drain(self, timeout: float | None) -> None:
        """Deliver one message, or whatever fanout has brought.

        Raises:
            socket.timeout: nothing came within `timeout` seconds (None: wait for ever).
            redis.exceptions.RedisError, OSError: the connection is lost, or the server cannot serve now.
        """
        metronome = self.metronome
        started = monotonic()
        looping = started - self._drained_at < LOOPING_SECONDS
        deadline = None if timeout is None else started + timeout
        if timeout == 0:
            metronome.hot.update(metronome.subscriptions)
        try:
            while not self._drain_once(deadline):
                if deadline is not None and monotonic() >= deadline and not metronome.claimable():
                    if not looping:
                        metronome.leave_park()
                    raise TimeoutError()
        finally:
            self._drained_at = monotonic()

    def _drain_once(self, deadline: float | None) -> bool:
        metronome = self.metronome
        metronome.begin_turn()
        metronome.looping = False  # if a loop has turned it before
        metronome.flush_acks()
        metronome.courier.refresh()
        if self._drain_fanout():
            return True
        if metronome.buffer or metronome.prepare(park=deadline is None or deadline > metronome.beat):
            return self._deliver_one()
        ready = self._poll(self._pause(deadline))
        if metronome.doorbell.reader in ready:
            metronome.doorbell.quiet()
        if metronome.fanout.sock in ready and self._drain_fanout():
            return True
        if metronome.park.parked and metronome.park.sock in ready:
            metronome.read_park()
        metronome.heat_due()
        return False

    def _deliver_one(self) -> bool:
        metronome = self.metronome
        if not metronome.buffer:
            metronome.claim()
        if not metronome.buffer:
            return False
        try:
            metronome.deliver_next()
        finally:
            metronome.settle_batch()
        return True

    def _drain_fanout(self) -> bool:
        """Deliver what fanout has brought.  Who consumes nothing else waits here for the broker to come back: it
        has lost nothing that it could be told of.
        """
        fanout = self.metronome.fanout
        try:
            fanout.check()
            return fanout.sock is not None and fanout.receive() > 0
        except unreachable:
            if self.metronome.subscriptions:
                raise
            return False

    def _pause(self, deadline: float | None) -> float:
        """Seconds to wait for something to happen; a second at most when nothing is parked, as credit may
        come back in ways that ring no bell.
        """
        metronome = self.metronome
        now, due = monotonic(), metronome.next_due()
        pause = metronome.options.park_seconds if metronome.park.parked else 1.0
        return max(0.0, min([pause, *(end - now for end in (due, deadline) if end is not None)]))

    def _poll(self, seconds: float) -> list[Any]:
        """The sockets that are readable; cooperative under gevent and eventlet."""
        metronome = self.metronome
        park = metronome.park.sock if metronome.park.parked else None
        courier = metronome.courier.sock if metronome.courier.waiting else None
        socks = [metronome.doorbell.reader, metronome.fanout.sock, park, courier]
        by_fd = {sock.fileno(): sock for sock in socks if sock is not None}
        poller = poll()
        try:
            for fd in by_fd:
                poller.register(fd, READ | ERR)
            return [by_fd[fd] for fd, _ in poller.poll(seconds) or () if fd in by_fd]
        finally:
            close = getattr(poller, "close", None)
            if close is not None:
                close()

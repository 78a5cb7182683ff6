"""The metronome: claims when there is work, parks when there is none, and never polls.

One per transport.  Under plain `drain`, it claims and waits for the reply.  On an event loop it never waits: `tick`
parks, or posts the acks of this turn and the next claim in one packet; messages are delivered by the reader callback
of the courier's socket.  (What is delivered from a tick would have its ack wait out the loop's poll.)
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import Any, Protocol

from kombu.utils.eventio import ERR, READ, poll
from kombu.utils.scheduling import cycle_by_name
from redis.exceptions import ConnectionError as DriverConnectionError
from redis.exceptions import RedisError

from .courier import Courier
from .errors import unreachable
from .fanout import Fanout
from .keeper import Keeper
from .options import Options
from .park import Park
from .store import Claimed, Request, Store, Turn, WillPark

logger = logging.getLogger(__name__)

#: A caller of `drain` that comes back within this many seconds is taken to loop: the pop stays parked for it.
LOOPING_SECONDS = 0.1
#: How long credit may grow before it is used, on a channel that is nearly full.
SETTLE_SECONDS = 0.005
#: How long messages are delivered in one turn of an event loop.
DELIVERY_SECONDS = 0.02
#: An event loop polls no longer than this.
LONGEST_POLL_SECONDS = 10.0


class Channel(Protocol):
    """What the metronome asks of a channel."""

    def credit(self) -> int:
        """How many messages it takes now."""

    def nearly_full(self) -> bool:
        """Whether it holds so many messages that it cannot run out of work in a moment."""

    def accept(self, subscription: Subscription, claimed: Claimed) -> Any:
        """Take a claimed message into its books; the result goes to `deliver`, None: nothing to deliver."""

    def deliver(self, subscription: Subscription, message: Any) -> None:
        """Call the consumer."""


@dataclass(eq=False)
class Subscription:
    """A consumer of one queue on one channel."""

    channel: Any
    queue: str
    tag: str
    no_ack: bool
    callback: Callable[[Any], Any]
    #: ms without use after which the queue is gone; 0 = never
    expires_ms: int = 0


class Doorbell:
    """Makes an event loop call back soon, from any thread."""

    def __init__(self) -> None:
        self.reader, self.writer = socket.socketpair()
        self.reader.setblocking(False)
        self.writer.setblocking(False)
        self._rung = False

    def ring(self) -> None:
        """Make `reader` readable."""
        if not self._rung:
            self._rung = True
            with contextlib.suppress(OSError):  # full: it is readable anyway; closed: nobody listens
                self.writer.send(b"\0")

    def quiet(self) -> None:
        """The bell was heard; what was the matter has to be looked at after this.

        First the bytes, then the flag: a ring of another thread between the two is one that we look at.  The other
        way round its byte would be gone and its flag would stay, and nobody could ring any more.
        """
        with contextlib.suppress(OSError):
            self.reader.recv(4096)
        self._rung = False

    def close(self) -> None:
        """Close both ends."""
        self.reader.close()
        self.writer.close()


class Metronome:
    """Serves the subscriptions of one transport.

    Attributes:
        hot: queues to claim from before parking: the server said need, or nobody has looked yet.
        beat: when the loop last turned (monotonic seconds).
        delivering: a consumer's callback is running now.
    """

    def __init__(self, store: Store, keeper: Keeper, park: Park, fanout: Fanout, options: Options) -> None:
        self.id = uuid.uuid4().hex
        self.store = store
        self.keeper = keeper
        self.park = park
        self.courier = Courier(park.link)
        self.fanout = fanout
        self.options = options
        self.lease_ms = int(options.lease_seconds * 1000)
        self.subscriptions: dict[str, deque[Subscription]] = {}
        self.buffer: deque[tuple[Subscription, Any]] = deque()
        self.hot: set[str] = set()
        self.beat = monotonic()
        self.delivering = 0
        #: called by each turn of the loop before it polls
        self.before_park: Callable[[], None] = lambda: None
        self.closed = False
        self._order = cycle_by_name(options.queue_order_strategy)()
        self._batch = 1
        #: queue -> when (monotonic) we have to claim again as its timekeeper
        self._due: dict[str, float] = {}
        #: queues whose token we popped and have not claimed from since
        self._tokens: set[str] = set()
        self._starved = False
        #: the pop has just looked at the tokens of all queues
        self._looked = False
        #: queue -> when (monotonic) we last claimed from it
        self._visited: dict[str, float] = {}
        #: queue -> seconds without use after which it is gone; only queues with an end
        self._ends: dict[str, float] = {}
        self._doorbell = Doorbell()
        self._thread: int | None = None
        self._turning = False
        self._settling = self._settled = False
        #: a claim is on its way
        self._claiming = False
        self._loop: Any = None
        self._readers: dict[int, tuple[Any, Callable[[], None]]] = {}
        self._timer: Any = None
        self._timer_at = 0.0
        self._drained_at = 0.0
        self._heard = self._silences()

    # subscriptions

    def add(self, subscription: Subscription) -> None:
        """Start to consume."""
        self.subscriptions.setdefault(subscription.queue, deque()).append(subscription)
        if subscription.expires_ms:
            self._ends[subscription.queue] = subscription.expires_ms / 1000
        self.hot.add(subscription.queue)
        self._order.update(list(self.subscriptions))

    def remove(self, subscription: Subscription) -> list[Any]:
        """Stop to consume; returns the messages that were claimed for it and not delivered."""
        queue = subscription.queue
        remaining = self.subscriptions.get(queue)
        if remaining is None or subscription not in remaining:
            return []
        remaining.remove(subscription)
        if not remaining:
            del self.subscriptions[queue]
            self._ends.pop(queue, None)
            self._visited.pop(queue, None)
            self.hot.discard(queue)
            if queue in self.park.queues:
                self._unpark()
            self._leave_role(queue)
            self._order.update(list(self.subscriptions))
        undelivered = [message for owner, message in self.buffer if owner is subscription]
        self.buffer = deque(item for item in self.buffer if item[0] is not subscription)
        return undelivered

    # what the channels tell

    def acked(self, queue: str, turn: Turn, parks: bool) -> None:
        """An ack came back with `turn`; from any thread.

        Args:
            parks: it was made with `will_park`, so `turn` says whether we keep the time.
        """
        if parks:
            self._keep_time(queue, turn)
        if turn.need and queue in self.subscriptions and queue not in self.park.queues:
            self.hot.add(queue)
        self._starved = False
        if self.hot and not self.turning():
            self._doorbell.ring()

    def will_park(self) -> bool:
        """Whether an ack made now, by the loop, is followed by a park if there is no need."""
        return (
            threading.get_ident() == self._thread
            and not (self.park.parked or self.hot or self.closed or self._claiming)
            and bool(self.subscriptions)
        )

    def wake(self) -> None:
        """Something changed that may have given a channel credit; from any thread."""
        self._doorbell.ring()

    def hangs(self) -> bool:
        """Whether the event loop has not turned for so long that it must hang; not while a task runs on it."""
        if self._loop is None or self.delivering:
            return False
        return monotonic() - self.beat > self.options.hung_loop_seconds

    def attention(self) -> list[tuple[str, float, int]]:
        """(Queue, seconds since we last began to claim from it, messages that we would take now); from any thread."""
        now, seen = monotonic(), []
        for queue, subscriptions in list(self.subscriptions.items()):
            visited = self._visited.get(queue)
            if visited is not None:
                room = sum(channel.credit() for channel in {each.channel for each in list(subscriptions)})
                seen.append((queue, now - visited, room))
        return seen

    # the event loop

    def attach(self, loop: Any) -> None:
        """Work on a kombu hub from now on.  Its readers do not survive a reset: `tick` adds them."""
        self._loop = loop
        loop.on_tick.add(self.tick)

    def tick(self) -> None:
        """Before each poll of the event loop: send what there is to send, and park if there is nothing to claim."""
        if self.closed:
            return
        self._turned()
        self._turning = True
        self._check_path()
        self.before_park()
        self._advance()
        self.courier.post()
        self.fanout.check()
        self._watch_due()
        self._add_readers()

    def _check_path(self) -> None:
        """Somebody in this process was not answered: our own waits may be for a path that is dead too, and would
        notice it only when they are over.  (Celery swallows the errors of heartbeats.)
        """
        silences = self._silences()
        if silences == self._heard:
            return
        self._heard = silences
        if self.subscriptions:
            raise DriverConnectionError("the broker did not answer a command: connecting anew")
        self.fanout.close()  # to be subscribed anew

    def _silences(self) -> int:
        return self.park.link.silences + self.keeper.silences

    def turning(self) -> bool:
        """Whether the caller is on the loop's thread and another `tick` is to come."""
        return self._turning and threading.get_ident() == self._thread

    def stop_turning(self) -> None:
        """The loop will not turn again: send and read what is on its way.

        Raises:
            redis.exceptions.RedisError, OSError: the server cannot be reached.
        """
        self._turning = False
        self.before_park()
        if self.park.link.down:
            self.courier.close()  # its acks go out when the broker is back
            return
        try:
            self.courier.post()
            self.courier.settle()
        except unreachable:
            self.park.link.note_silence()
            raise

    def _advance(self) -> None:
        """Park, or claim without waiting for the reply; one claim at a time."""
        if self.courier.overdue():
            self.courier.close()
            raise DriverConnectionError("no reply to a claim or an ack: the connection is dead")
        if self.buffer:
            self._doorbell.ring()
            return
        if self._claiming or not self._prepare():
            return
        # A channel that is nearly full has enough to do: its credit may grow for a moment, so that one claim
        # brings several messages.
        hot = [s.channel for queue in list(self.hot) for s in self.subscriptions.get(queue, ())]
        if self._settled or not all(channel.nearly_full() for channel in hot):
            self._settled = False
            self._send_claim()
        elif not self._settling:
            self._settling = True
            self._call_later(SETTLE_SECONDS, self._settle)

    def _settle(self) -> None:
        self._settling, self._settled = False, True
        self._doorbell.ring()

    def _turned(self) -> None:
        self.keeper.speak()
        self.beat = monotonic()
        self._thread = threading.get_ident()

    def _on_doorbell(self) -> None:
        # The next turn does what else there is to do.
        self._doorbell.quiet()
        self._heat_due()
        self._deliver_for_a_moment()

    def _on_park(self) -> None:
        if self.closed:
            return
        if not self.park.parked:
            # Nothing was asked, so nothing is to come: the server has closed the idle connection.
            self.park.close()
        else:
            self._read_park()

    def _on_courier(self) -> None:
        if not self.closed:
            self.courier.receive()
            self._deliver_for_a_moment()

    def _deliver_for_a_moment(self) -> None:
        """Deliver, and give the loop its turn between long deliveries: where tasks run on the loop (solo), each of
        them may be acked, and a shutdown be seen, before the next one starts.
        """
        until = monotonic() + DELIVERY_SECONDS
        while self.buffer and not self.closed and monotonic() < until:
            self._deliver_buffer(1)

    def _on_fanout(self) -> None:
        if not self.closed and self.fanout.active:
            self.fanout.receive()

    def _add_readers(self) -> None:
        """Add what the loop does not have: it drops all readers when it resets."""
        sockets = (
            (self._doorbell.reader, self._on_doorbell),
            (self.park.sock, self._on_park),
            (self.fanout.sock, self._on_fanout),
            (self.courier.sock, self._on_courier),
        )
        wanted = {sock.fileno(): (sock, callback) for sock, callback in sockets if sock is not None}
        for fd, (sock, _) in list(self._readers.items()):
            # A closed socket takes its number out of the poller; a new one may have got the same number.
            if fd not in wanted or wanted[fd][0] is not sock:
                self._remove_reader(fd)
        for fd, (_, callback) in wanted.items():
            known = self._loop.readers.get(fd)
            if known is None or known[0] != callback:
                self._loop.add_reader(fd, callback)
        self._readers = wanted

    def _remove_reader(self, fd: int) -> None:
        known = self._loop.readers.get(fd)
        # The number may belong to somebody else's socket by now.
        if known is not None and known[0] == self._readers[fd][1]:
            self._loop.remove_reader(fd)

    def _watch_due(self) -> None:
        """Have the loop's timer ring when we have to claim as timekeeper."""
        at = min(self._due.values(), default=0.0)
        # One that rings too early does no harm, and a cancelled one stays in the loop's heap until its time.
        if not at or (self._timer is not None and self._timer_at <= at):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = at
        self._timer = self._call_later(at - monotonic(), self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._doorbell.ring()

    def _call_later(self, seconds: float, callback: Callable[[], None]) -> Any:
        """A timer of the loop, set from a tick: the loop has chosen the length of its next poll before that."""
        if seconds < LONGEST_POLL_SECONDS:
            self._doorbell.ring()
        return self._loop.call_later(max(0.0, seconds), callback)

    # plain draining

    def drain(self, timeout: float | None) -> None:
        """Deliver one message, or whatever fanout has brought.

        Raises:
            socket.timeout: nothing came within `timeout` seconds (None: wait for ever).
        """
        started = monotonic()
        looping = started - self._drained_at < LOOPING_SECONDS
        deadline = None if timeout is None else started + timeout
        if timeout == 0:
            self.hot.update(self.subscriptions)
        try:
            while not self._drain_once(deadline):
                if deadline is not None and monotonic() >= deadline and not self._claimable():
                    if not looping:
                        self._unpark()
                    raise TimeoutError()
        finally:
            self._drained_at = monotonic()

    def _drain_once(self, deadline: float | None) -> bool:
        self._turned()
        self._check_path()
        if self._drain_fanout():
            return True
        if self.buffer or self._prepare(park=deadline is None or deadline > self.beat):
            return self.step(1)
        pause = self._pause(deadline)
        ready = self._poll(pause)
        if self._doorbell.reader in ready:
            self._doorbell.quiet()
        if self.fanout.sock in ready and self._drain_fanout():
            return True
        if self.park.parked and self.park.sock in ready:
            self._read_park()
        self._heat_due()
        return False

    def _drain_fanout(self) -> bool:
        """Deliver what fanout has brought.  Who consumes nothing else waits here for the broker to come back: it
        has lost nothing that it could be told of.
        """
        try:
            self.fanout.check()
            return self.fanout.sock is not None and self.fanout.receive() > 0
        except unreachable:
            if self.subscriptions:
                raise
            return False

    def _pause(self, deadline: float | None) -> float:
        """Seconds to wait for something to happen; a second at most when nothing is parked, as credit may
        come back in ways that ring no bell.
        """
        now = monotonic()
        pause = self.options.park_seconds if self.park.parked else 1.0
        ends = [*self._due.values()] + ([deadline] if deadline is not None else [])
        return max(0.0, min([pause, *(end - now for end in ends)]))

    def _poll(self, seconds: float) -> list[Any]:
        """The sockets that are readable; cooperative under gevent and eventlet."""
        socks = [self._doorbell.reader, self.fanout.sock, self.park.sock if self.park.parked else None]
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

    # the work

    def step(self, deliveries: int | None = None) -> bool:
        """Claim once from the next hot queue, and deliver; True if something was delivered.

        Args:
            deliveries: at most so many; the rest waits in the buffer.
        """
        if not self.buffer:
            self._claim()
        return self._deliver_buffer(deliveries) > 0

    def _deliver_buffer(self, deliveries: int | None = None) -> int:
        delivered = 0
        while self.buffer and (deliveries is None or delivered < deliveries):
            subscription, message = self.buffer.popleft()
            delivered += 1
            self._deliver(subscription, message)
        return delivered

    def _deliver(self, subscription: Subscription, message: Any) -> None:
        self.delivering += 1
        try:
            subscription.channel.deliver(subscription, message)
        finally:
            self.delivering -= 1

    def _claim(self) -> None:
        """Claim once, and wait for the reply."""
        request = self._claim_request()
        if request is not None:
            self._claimed(request[0], request[1].run(self.store.caller))

    def _send_claim(self) -> None:
        request = self._claim_request()
        if request is None:
            return
        queue, letter = request
        self._claiming = True
        self.courier.put(letter, lambda turn: self._claimed(queue, turn), self._claim_lost)

    def _claim_request(self) -> tuple[str, Request] | None:
        """The next claim: of a hot queue in its turn, for the credit there is."""
        wanted = self._with_credit()
        self._look_around(wanted)
        queue = next((queue for queue in self._in_order() if queue in self.hot and queue in wanted), None)
        if queue is None:
            return None
        self._unpark()
        credit = wanted[queue]
        most = min(self._batch, credit)
        self._looked = False
        self._visited[queue] = monotonic()
        self._tokens.discard(queue)
        self._order.rotate(queue)
        self._batch = min(self._batch * 2, self.options.claim_batch)
        return queue, self.store.claim_request(
            queue, most, self.lease_ms,
            consumer=self.id, will_park=WillPark.YES if credit > most else WillPark.IF_NOT_FULL,
        )  # fmt: skip

    def _look_around(self, wanted: dict[str, int]) -> None:
        """Who goes on claiming without a park hears of no token: see whether the other queues have one, or a
        queue that is never empty would starve them.
        """
        if self._looked or self.hot.isdisjoint(wanted):
            return
        self._looked = True
        self.hot.update(self.store.awake([queue for queue in wanted if queue not in self.hot]))

    def _claimed(self, queue: str, turn: Turn) -> None:
        self._claiming = False
        if queue not in self.subscriptions:
            # Cancelled while the claim was on its way.
            self.store.release(queue, [claimed.fence for claimed in turn.claimed])
            self._rearm(queue)
            return
        self._keep_time(queue, turn)
        if not turn.need:
            self.hot.discard(queue)
        for claimed in turn.claimed:
            self._assign(queue, claimed)

    def _claim_lost(self) -> None:
        """What it may have claimed is a lease that nobody renews: it comes back when that ends."""
        self._claiming = False

    def _assign(self, queue: str, claimed: Claimed) -> None:
        """Give a claimed message to the next subscription that has credit."""
        known = self.keeper.held((queue, claimed.fence.tag))
        if known is not None:
            # This process has the message already: its lease ran out, and we claimed it ourselves. The one
            # execution goes on, under the newer fence.
            known.fence, known.lost = claimed.fence, False
            return
        subscriptions = self.subscriptions[queue]
        for _ in range(len(subscriptions)):
            subscription = subscriptions[0]
            subscriptions.rotate(-1)
            if subscription.channel.credit() > 0:
                break
        message = subscription.channel.accept(subscription, claimed)
        if message is not None:
            self.buffer.append((subscription, message))

    def _with_credit(self) -> dict[str, int]:
        """Queue -> how many of its messages our channels would take now."""
        known: dict[Any, int] = {}
        wanted: dict[str, int] = {}
        for queue, subscriptions in self.subscriptions.items():
            total = 0
            for channel in {subscription.channel for subscription in subscriptions}:
                if channel not in known:
                    known[channel] = channel.credit()
                total += known[channel]
            if total > 0:
                wanted[queue] = total
        return wanted

    def _in_order(self) -> list[str]:
        return list(self._order.consume(len(self.subscriptions)))

    def _claimable(self) -> bool:
        return not self.hot.isdisjoint(self._with_credit())

    def _prepare(self, park: bool = True) -> bool:
        """Park if there is nothing to claim; True: there is, and somebody has the credit for it."""
        wanted = self._with_credit()
        if not wanted:
            if self.subscriptions:
                self._starved = True
            self._unpark()
        for queue in {*self._due, *self._tokens} - wanted.keys():
            self._leave_role(queue)
        if not wanted:
            return False
        if self._starved:
            self._starved = False
            self.hot.update(wanted)
        self._check_park(wanted)
        self._use_those_that_end(wanted)
        if not self.hot.isdisjoint(wanted):
            return True
        if park and not self.park.parked:
            order = tuple(queue for queue in self._in_order() if queue in wanted)
            # Each park names the queues in another order: a fixed one would starve the last.
            self._order.rotate(order[0])
            self.park.start(order, self._park_seconds())
        return False

    def _use_those_that_end(self, wanted: dict[str, int]) -> None:
        """A queue with ``x-expires`` is in use while it is consumed, also if we are busy with others."""
        now = monotonic()
        for queue, seconds in self._ends.items():
            if queue in wanted and now - self._visited.get(queue, 0.0) > seconds / 2:
                self.hot.add(queue)

    def _check_park(self, wanted: dict[str, int]) -> None:
        """End a pop that names the wrong queues, or whose reply is overdue."""
        if self.park.overdue():
            self.park.close()
            raise DriverConnectionError("no reply to the blocking pop: the connection is dead")
        if self.park.parked and set(self.park.queues) != wanted.keys():
            self._unpark()

    def _park_seconds(self) -> float:
        seconds = min(self.options.park_seconds, self.options.lease_seconds / 2)
        return min([seconds, *(end / 2 for end in self._ends.values())])

    def _read_park(self) -> None:
        queue = self.park.read()
        self._batch = 1
        self._looked = True
        if queue is not None:
            self.hot.add(queue)
            self._tokens.add(queue)
        else:
            self.hot.update(self.subscriptions)

    def _unpark(self) -> None:
        was_parked = self.park.parked
        queue = self.park.stop()
        if was_parked and self.park.sock is None:
            # The connection is gone, perhaps with a token: look before we park again.
            self.hot.update(self.subscriptions)
        if queue is not None:
            self._tokens.add(queue)
            if queue in self.subscriptions:
                self.hot.add(queue)
            else:
                self._leave_role(queue)

    # the timekeeper's role

    def _keep_time(self, queue: str, turn: Turn) -> None:
        if turn.due_in is None:
            self._due.pop(queue, None)
        else:
            self._due[queue] = monotonic() + turn.due_in / 1000

    def _heat_due(self) -> None:
        now = monotonic()
        for queue in [queue for queue, at in self._due.items() if at <= now]:
            del self._due[queue]
            if queue in self.subscriptions:
                self.hot.add(queue)
                # We owe it a claim, or to give the role back.
                self._tokens.add(queue)

    def _leave_role(self, queue: str) -> None:
        """We cannot serve the queue now: give back its time, and its token if we have popped it."""
        keeps_time = self._due.pop(queue, None) is not None
        if keeps_time or queue in self._tokens:
            self._tokens.discard(queue)
            self._rearm(queue)

    def _rearm(self, queue: str) -> None:
        """Now or, if the broker cannot be reached, as soon as it can be."""
        consumer = self.id
        if self.keeper.behind or self.park.link.down:
            self.keeper.later(lambda store: store.rearm(queue, consumer))
            return
        try:
            self.store.rearm(queue, consumer)
        except unreachable:
            self.keeper.later(lambda store: store.rearm(queue, consumer))

    def close(self) -> None:
        """Give everything back that others may need, and close the sockets.  Never raises for a dead server."""
        if self.closed:
            return
        with contextlib.suppress(RedisError, OSError):
            self.before_park()
        self.closed = True
        self._turning = False
        if self._loop is not None:
            self._loop.on_tick.discard(self.tick)
            for fd in self._readers:
                self._remove_reader(fd)
        if self._timer is not None:
            self._timer.cancel()
        try:
            if not self.park.link.down:
                self.courier.post()
                self.courier.settle()
            self._unpark()
            for queue in {*self._due, *self._tokens}:
                self._leave_role(queue)
        except (RedisError, OSError) as exc:
            # With the connection went the token; the next park end finds the work.
            logger.debug("a consumer could not leave in good order: %s", exc)
        finally:
            self.courier.close()
            self.park.close()
            self.fanout.close()
            self._doorbell.close()

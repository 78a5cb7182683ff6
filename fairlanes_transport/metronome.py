"""The metronome: claims when there is work, parks when there is none, and never polls.

One per transport.  It knows what to claim, for whom, and whether to park; who turns it is one of two: `draining`
claims and waits for the reply, `turning` works on an event loop and never waits.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import Any, Protocol

from kombu.utils.scheduling import cycle_by_name
from redis.exceptions import ConnectionError as DriverConnectionError
from redis.exceptions import RedisError

from .courier import Courier
from .doorbell import Doorbell
from .errors import unreachable
from .fanout import Fanout
from .keeper import Keeper
from .options import Options
from .park import Park
from .store import Claimed, Request, Store, Turn, WillPark

logger = logging.getLogger(__name__)


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


class Metronome:
    """Serves the subscriptions of one transport.

    Attributes:
        hot: queues to claim from before parking: the server said need, or nobody has looked yet.
        buffer: messages that were claimed and are to be delivered, with their subscriptions.
        beat: when it was last turned (monotonic seconds).
        looping: an event loop turns it, and will do so again.
        delivering: a consumer's callback is running now.
        claiming: a claim is on its way.
    """

    def __init__(self, store: Store, keeper: Keeper, park: Park, fanout: Fanout, options: Options) -> None:
        self.id = uuid.uuid4().hex
        self.store = store
        self.keeper = keeper
        self.park = park
        self.courier = Courier(park.link)
        self.fanout = fanout
        self.options = options
        self.doorbell = Doorbell()
        self.lease_ms = int(options.lease_seconds * 1000)
        self.subscriptions: dict[str, deque[Subscription]] = {}
        self.buffer: deque[tuple[Subscription, Any]] = deque()
        self.hot: set[str] = set()
        self.beat = monotonic()
        self.looping = False
        self.delivering = 0
        self.claiming = False
        self.closed = False
        #: called with a queue that the broker does not know, though it is consumed from
        self.forgotten: Callable[[str], None] = lambda queue: None
        #: told of each queue with dead letters whose senders are to be told; a Celery worker does it
        self.on_untold: Callable[[str], None] = lambda queue: None
        #: sends the acks that wait for the end of a turn
        self.flush_acks: Callable[[], None] = lambda: None
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
        self._thread: int | None = None
        self._heard = self._silences()

    # subscriptions

    def add(self, subscription: Subscription) -> None:
        """Start to consume."""
        self.subscriptions.setdefault(subscription.queue, deque()).append(subscription)
        if subscription.expires_ms:
            self.keeper.consume(subscription.queue, subscription.expires_ms / 1000)
        self.hot.add(subscription.queue)
        self._order.update(list(self.subscriptions))

    def remove(self, subscription: Subscription) -> list[Any]:
        """Stop to consume; returns the messages that were claimed for it and not delivered."""
        queue = subscription.queue
        remaining = self.subscriptions.get(queue)
        if remaining is None or subscription not in remaining:
            return []
        remaining.remove(subscription)
        if subscription.expires_ms:
            self.keeper.leave(queue)
        if not remaining:
            del self.subscriptions[queue]
            self._visited.pop(queue, None)
            self.hot.discard(queue)
            if queue in self.park.queues:
                self._unpark()
            self._leave_role(queue)
            self._order.update(list(self.subscriptions))
        undelivered = [message for owner, message in self.buffer if owner is subscription]
        self.buffer = deque(item for item in self.buffer if item[0] is not subscription)
        self.settle_batch()
        return undelivered

    # what the channels tell

    def acked(self, queue: str, turn: Turn, parks: bool) -> None:
        """An ack came back with `turn`; from any thread.

        Args:
            parks: it was made with `will_park`, so `turn` says whether we keep the time.
        """
        if turn.forgotten:
            self.forgotten(queue)
        if parks:
            self._keep_time(queue, turn)
        if turn.need and queue in self.subscriptions and queue not in self.park.queues:
            self.hot.add(queue)
        self._starved = False
        if self.hot and not self.turns():
            self.doorbell.ring()

    def will_park(self) -> bool:
        """Whether an ack made now, by the thread that turns, is followed by a park if there is no need."""
        return (
            threading.get_ident() == self._thread
            and not (self.park.parked or self.hot or self.buffer or self.closed or self.claiming)
            and bool(self.subscriptions)
        )

    def wake(self) -> None:
        """Something changed that may have given a channel credit; from any thread."""
        self.doorbell.ring()

    def turns(self) -> bool:
        """Whether the caller is on the event loop's thread and another turn is to come."""
        return self.looping and threading.get_ident() == self._thread

    def draws(self) -> bool:
        """Whether the caller is a consumer's callback under plain draining, and more messages wait for it."""
        return bool(self.delivering and self.buffer) and not self.looping and threading.get_ident() == self._thread

    def hangs(self) -> bool:
        """Whether nobody has turned us for so long that whoever should must hang; not while a task runs on that
        thread.  From any thread.
        """
        return not self.delivering and monotonic() - self.beat > self.options.hung_loop_seconds

    def attention(self) -> list[tuple[str, float, int]]:
        """(Queue, seconds since we last began to claim from it, messages that we would take now); from any thread."""
        now, seen = monotonic(), []
        for queue, subscriptions in list(self.subscriptions.items()):
            visited = self._visited.get(queue)
            if visited is not None:
                room = sum(channel.credit() for channel in {each.channel for each in list(subscriptions)})
                seen.append((queue, now - visited, room))
        return seen

    # a turn

    def begin_turn(self) -> None:
        """Somebody turns the metronome, on this thread.

        Raises:
            redis.exceptions.ConnectionError: somebody in this process was not answered.  Our own waits may be for a
                path that is dead too, and would notice it only when they are over.  (Celery swallows the errors of
                heartbeats.)
        """
        self.keeper.speak()
        self.beat = monotonic()
        self._thread = threading.get_ident()
        silences = self._silences()
        if silences == self._heard:
            return
        self._heard = silences
        if self.subscriptions:
            raise DriverConnectionError("the broker did not answer a command: connecting anew")
        self.fanout.close()  # to be subscribed anew

    def _silences(self) -> int:
        return self.park.link.silences + self.keeper.silences

    def prepare(self, park: bool = True) -> bool:
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
        if not self.hot.isdisjoint(wanted):
            return True
        if park and not self.park.parked:
            order = tuple(queue for queue in self._in_order() if queue in wanted)
            if not order:
                return False
            # Each park names the queues in another order: a fixed one would starve the last.
            self._order.rotate(order[0])
            self.park.start(order, self._park_seconds())
        return False

    def claimable(self) -> bool:
        """Whether there is something to claim, as far as we know, and the credit for it."""
        return not self.hot.isdisjoint(self._with_credit())

    # claims

    def claim(self) -> None:
        """Claim once from the next hot queue, and wait for the reply."""
        request = self._claim_request()
        if request is not None:
            self._claimed(request[0], request[1].run(self.store.caller))

    def send_claim(self) -> None:
        """The same with the courier's next post; the reply is taken in when it comes."""
        request = self._claim_request()
        if request is None:
            return
        queue, letter = request
        self.claiming = True
        self.courier.put(letter, lambda turn: self._claimed(queue, turn), lambda: self._claim_lost(queue))

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
        self.claiming = False
        if turn.forgotten:
            self.forgotten(queue)
        self._keep_time(queue, turn)
        if not turn.need:
            self.hot.discard(queue)
        if turn.untold:
            self.on_untold(queue)
        unwanted = [claimed.fence for claimed in turn.claimed if not self._assign(queue, claimed)]
        if queue not in self.subscriptions:
            # Cancelled while the claim was on its way.
            self.hot.discard(queue)
            self._due.pop(queue, None)
            self.store.release(queue, unwanted)
            self._rearm(queue)

    def _claim_lost(self, queue: str) -> None:
        """What it may have claimed is a lease that nobody renews: it comes back when that ends."""
        self.claiming = False
        # If it was not sent, we still owe the queue a claim.
        self._tokens.add(queue)

    def _assign(self, queue: str, claimed: Claimed) -> bool:
        """Give a claimed message to the next subscription that has credit; False: there is no subscription.

        Celery's handler of a signal cancels its consumers wherever we are: what is looked at is a copy.
        """
        if self.keeper.goes_on(queue, claimed.fence):
            return True
        subscriptions = self.subscriptions.get(queue, deque())
        order = tuple(subscriptions)
        if not order:
            return False
        subscription = next((each for each in order if each.channel.credit() > 0), order[-1])
        subscriptions.rotate(-1 - order.index(subscription))
        message = subscription.channel.accept(subscription, claimed)
        if message is not None:
            self.buffer.append((subscription, message))
        return True

    def deliver_next(self) -> None:
        """Hand the first message of the buffer to its consumer."""
        subscription, message = self.buffer.popleft()
        self.delivering += 1
        try:
            subscription.channel.deliver(subscription, message)
        finally:
            self.delivering -= 1

    def _with_credit(self) -> dict[str, int]:
        """Queue -> how many of its messages our channels would take now."""
        known: dict[Any, int] = {}
        wanted: dict[str, int] = {}
        # Copies, here and below: a signal's handler may cancel consumers wherever we are.
        for queue, subscriptions in tuple(self.subscriptions.items()):
            total = 0
            for channel in {subscription.channel for subscription in tuple(subscriptions)}:
                if channel not in known:
                    known[channel] = channel.credit()
                total += known[channel]
            if total > 0:
                wanted[queue] = total
        return wanted

    def _in_order(self) -> list[str]:
        return list(self._order.consume(len(self.subscriptions)))

    # the park

    def read_park(self) -> None:
        """The pop has ended: a queue has work, or we look at all of them."""
        queue = self.park.read()
        self._batch = 1
        self._looked = True
        if queue is not None:
            self.hot.add(queue)
            self._tokens.add(queue)
        else:
            self.hot.update(self.subscriptions)

    def leave_park(self) -> None:
        """Nobody may turn us soon: a pop that goes on would take a token and not use it."""
        self._unpark()

    def _check_park(self, wanted: dict[str, int]) -> None:
        """End a pop that names the wrong queues, or whose reply is overdue."""
        if self.park.overdue():
            self.park.close()
            raise DriverConnectionError("no reply to the blocking pop: the connection is dead")
        if self.park.parked and set(self.park.queues) != wanted.keys():
            self._unpark()

    def _park_seconds(self) -> float:
        return min(self.options.park_seconds, self.options.lease_seconds / 2)

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

    def next_due(self) -> float | None:
        """When (monotonic) we have to claim as somebody's timekeeper."""
        return min(tuple(self._due.values()), default=None)

    def heat_due(self) -> None:
        """Claim from the queues whose time has come."""
        now = monotonic()
        for queue in [queue for queue, at in tuple(self._due.items()) if at <= now]:
            self._due.pop(queue, None)
            if queue in self.subscriptions:
                self.hot.add(queue)
                # We owe it a claim, or to give the role back.
                self._tokens.add(queue)

    def _keep_time(self, queue: str, turn: Turn) -> None:
        if turn.due_in is None:
            self._due.pop(queue, None)
        else:
            self._due[queue] = monotonic() + turn.due_in / 1000

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

    # the end

    def settle(self) -> None:
        """Send the acks that wait, and read what is to come.

        Raises:
            redis.exceptions.RedisError, OSError: the server cannot be reached.
        """
        self.flush_acks()
        if self.park.link.down:
            self.courier.close()  # its acks go out when the broker is back
            return
        try:
            self.courier.post()
            self.courier.settle()
        except unreachable as exc:
            self.park.link.note_failure(exc)
            raise

    def settle_batch(self) -> None:
        """Under plain draining nothing is on its way between two batches: who looks at the queue then sees what was
        acked, and who does not drain again leaves nothing unread.
        """
        if self.buffer or self.looping or not self.courier.waiting:
            return
        try:
            self.settle()
        except unreachable as exc:
            # The acks are with the keeper; what is wrong is said to who drains again.
            logger.debug("the acks of a batch are sent again: %s", exc)

    def close(self) -> None:
        """Give everything back that others may need, and close the sockets.  Never raises for a dead server."""
        if self.closed:
            return
        with contextlib.suppress(RedisError, OSError):
            self.flush_acks()
        self.closed = True
        self.looping = False
        try:
            with contextlib.suppress(RedisError, OSError):
                if not self.park.link.down:
                    self.courier.post()
                    self.courier.settle()
            self.courier.close()
            self._unpark()
            for queue in {*self._due, *self._tokens}:
                self._leave_role(queue)
        except (RedisError, OSError) as exc:
            # With the connection went the token; the next park end finds the work.
            logger.debug("a consumer could not leave in good order: %s", exc)
        finally:
            self.park.close()
            self.fanout.close()
            self.doorbell.close()

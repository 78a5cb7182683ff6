"""The channel: kombu's AMQP words on one side, lanes on the other."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable
from queue import Empty
from typing import Any
from uuid import uuid4

from kombu.exceptions import ChannelError
from kombu.transport import virtual
from kombu.transport.virtual.base import queue_declare_ok_t  # type: ignore[attr-defined]
from kombu.utils.json import dumps
from kombu.utils.uuid import uuid

from . import envelope, tenancy
from .envelope import EnvelopeError, eta_ms, tenant_name
from .errors import OptionError, QueueAbsent, unreachable
from .keeper import Holder, Keeper, Lease
from .lane_settings import COSTS, checked_defaults
from .metronome import Subscription
from .qos import QoS
from .store import Claimed

logger = logging.getLogger(__name__)

#: Where the fanout exchange of a routing key is a pattern in AMQP, this is it in pub/sub.
_WILDCARD = str.maketrans("#", "*")

#: Queue arguments that set the defaults of a queue's lanes.
LANE_ARGUMENTS = {
    "x-lane-weight": "weight",
    "x-lane-limit": "limit",
    "x-lane-rate": "rate",
    "x-lane-burst": "burst",
    "x-lane-max-size": "max_size",
    "x-fairness": "fairness",
}
#: How long a channel that closes waits for a broker that does not answer.
CLOSE_SECONDS = 1.0
#: An auto-delete queue whose consumer died without a word ends after so long without use.
AUTO_DELETE_EXPIRES_MS = 24 * 3600 * 1000
#: A queue that nobody has declared, to which an answer is sent, ends like one whose consumer died.
ORPHAN_EXPIRES_MS = AUTO_DELETE_EXPIRES_MS
#: Queue arguments of other brokers that change what is delivered, and have no effect here.
IGNORED_ARGUMENTS = ("x-message-ttl", "x-max-length", "x-max-length-bytes", "x-max-priority", "x-queue-mode")


class PublishTag(str):
    """A delivery tag given by us, in this process: kombu hands the same properties in again when it retries a
    publish, and a tag of any other origin (a message that is published again) must not be kept.
    """

    __slots__ = ()


class LaneMessage(virtual.Message):
    """A message with its lease; None for one that fanout brought."""

    lease: Lease | None = None


class Channel(virtual.Channel):
    """A channel of the transport.

    Attributes:
        client, subclient: the parked and the subscribed socket's owners, where Celery looks for sockets to bound
            before it closes a connection that may be dead.
    """

    QoS = QoS
    Message = LaneMessage
    supports_fanout = True
    from_transport_options = ("deadletter_queue",)  # type: ignore[assignment]

    def __init__(self, connection: Any, **kwargs: Any) -> None:
        super().__init__(connection, **kwargs)
        self.options = connection.options
        self.client = connection.metronome.park
        self.subclient = connection.fanout
        self._transport = connection
        self._subscriptions: dict[str, Subscription] = {}
        self._fanouts: dict[str, tuple[str, Callable[[dict[str, Any]], None]]] = {}
        #: fanout queue -> (exchange, routing key as a pattern); of the transport: it may be bound on one channel
        #: and consumed on another
        self._fanout_queues: dict[str, tuple[str, str]] = connection.fanout_queues
        self._auto_delete: set[str] = set()
        self._consumed: set[str] = set()
        self._holder = Holder()
        self._collected = weakref.finalize(self, _abandon, connection.keeper, self._holder, os.getpid())
        self._collected.atexit = False

    # publishing

    def prepare_message(
        self,
        body: Any,
        priority: int | None = None,
        content_type: str | None = None,
        content_encoding: str | None = None,
        headers: dict[str, Any] | None = None,
        properties: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Prepare a message, and find its tenant: every publish of this transport passes here.

        Raises:
            TenantError: the tenant is of a wrong type, empty or too long.
        """
        message: dict[str, Any] = super().prepare_message(
            body, priority, content_type, content_encoding, headers, properties
        )
        # A copy: the tenant is written into it, and the caller may use its own for other messages too.
        message["headers"] = dict(message["headers"])
        tenancy.resolve(message["headers"], message["properties"], self.options)
        return message

    def _inplace_augment_message(self, message: dict[str, Any], exchange: str, routing_key: str) -> None:
        properties = message["properties"]
        # A message that is published again still says how its last broker stored it; `celery migrate` sends it so.
        properties.pop("body_encoding", None)
        if not isinstance(properties.get("delivery_tag"), PublishTag):
            properties["delivery_tag"] = PublishTag(uuid4().hex)
        properties["delivery_info"].update(exchange=exchange, routing_key=routing_key)

    def basic_publish(self, message: dict[str, Any], exchange: str, routing_key: str, **kwargs: Any) -> Any:
        """Publish to an exchange, or straight to the queue `routing_key` where there is none.

        Raises:
            LaneFull, ServerFull, NotConfirmed: see `fairlanes_transport.errors`.
        """
        self._inplace_augment_message(message, exchange, routing_key)
        if exchange:
            return self.typeof(exchange).deliver(message, exchange, routing_key, bound_to=exchange, **kwargs)
        return self._put(routing_key, message, **kwargs)

    def _put(self, queue: str, message: dict[str, Any], bound_to: str = "", **kwargs: Any) -> None:
        headers, properties = message["headers"], message["properties"]
        due = eta_ms(headers) if self.options.eta_in_broker else 0
        if due:
            # A message that still carries an eta would go through the worker's timer, and raise its prefetch.
            message = {
                **message,
                "headers": {**headers, "eta": None},
                "properties": {**properties, "eta": headers["eta"]},
            }
        body = message["body"]
        arguments = {
            "tag": properties["delivery_tag"],
            "lane": self._lane(headers),
            "envelope": envelope.dump(message),
            "body": body.encode() if isinstance(body, str) else bytes(body or b""),
            "priority": self._get_message_priority(message),
            "due_ms": due,
            "cost": _cost(self.options.cost_header, headers),
            "admit": tenancy.sent_by_a_task(headers),
        }
        if not bound_to:
            # The reply queue may have gone with who asked.
            ends_ms = ORPHAN_EXPIRES_MS if _is_reply(message) else 0
            self._transport.publisher.enqueue(queue, ends_ms=ends_ms, **arguments)
            return
        try:
            self._transport.publisher.enqueue(queue, must_exist=True, **arguments)
        except QueueAbsent:
            if self._transport.restore(queue, durable_only=True) or self._transport.is_durable(queue):
                self._transport.publisher.enqueue(queue, **arguments)
            else:
                self._forget_bindings(queue, bound_to)

    def _lane(self, headers: dict[str, Any]) -> str:
        tenant = headers.get(self.options.tenant_header)
        return self.options.default_tenant if tenant is None else tenant_name(tenant)

    def _forget_bindings(self, queue: str, exchange: str) -> None:
        """A queue that had an end has ended: what is routed to it goes nowhere, as in AMQP."""
        logger.debug("dropped a message to queue %r, which has expired", queue)
        self._transport.bindings.forget(exchange, queue)

    def _put_fanout(self, exchange: str, message: dict[str, Any], routing_key: str, **kwargs: Any) -> None:
        body, encoding = self.encode_body(message["body"], "base64")
        properties = {**message["properties"], "body_encoding": encoding}
        payload = dumps({**message, "body": body, "properties": properties})
        self._transport.fanout.publish(exchange, routing_key, payload)

    # queues and exchanges

    def queue_declare(self, queue: str | None = None, passive: bool = False, **kwargs: Any) -> queue_declare_ok_t:
        """Declare a queue; `message_count` is what is ready, in all lanes."""
        queue = queue or f"amq.gen-{uuid()}"
        if passive:
            if not self._has_queue(queue):
                raise ChannelError(
                    f"NOT_FOUND - no queue {queue!r} in vhost {self.connection.client.virtual_host or '/'!r}",
                    (50, 10), "Channel.queue_declare", "404",
                )  # fmt: skip
        else:
            self._new_queue(queue, **kwargs)
        return queue_declare_ok_t(queue, self._size(queue), 0)

    def _new_queue(
        self, queue: str, auto_delete: bool = False, arguments: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        arguments = arguments or {}
        expires = _expires(queue, arguments)
        if auto_delete:
            self._auto_delete.add(queue)
            expires = expires or AUTO_DELETE_EXPIRES_MS
        self._transport.queue_ends[queue] = expires
        if not expires:
            _warn_of_ignored(queue, arguments)
        # What the options say of lanes is meant for tenants: a queue with an end, such as a reply queue, has none.
        general = {} if expires else self._transport.lane_defaults
        defaults = {**general, **_lane_defaults(queue, arguments)}
        if self._transport.declare_queue(queue, expires, durable=not expires, defaults=defaults):
            # If it was there before, its bindings have ended with it: kombu must not take them for made.
            self.state.queue_bindings_delete(queue)

    def _has_queue(self, queue: str, **kwargs: Any) -> bool:
        return bool(self._transport.store.exists(queue))

    def _size(self, queue: str) -> int:
        return 0 if queue in self._fanout_queues else int(self._transport.store.size(queue).ready)

    def _purge(self, queue: str) -> int:
        return int(self._transport.store.purge(queue))

    def queue_delete(self, queue: str, if_unused: bool = False, if_empty: bool = False, **kwargs: Any) -> None:
        """Delete a queue with everything in it, and its bindings."""
        if not self._transport.delete_queue(queue, if_empty=if_empty):
            return
        for binding in self._bindings_of(queue):
            self._transport.bindings.remove(*binding)
        self.state.queue_bindings_delete(queue)
        self._auto_delete.discard(queue)

    def _bindings_of(self, queue: str) -> list[tuple[str, str, str | None, str]]:
        """The bindings of a queue that this process has made, as `Bindings` takes them."""
        found = []
        for exchange, routing_key, arguments in list(self.state.queue_bindings(queue)):
            _, pattern, _ = self.typeof(exchange).prepare_bind(queue, exchange, routing_key, arguments)
            found.append((exchange, routing_key, pattern, queue))
        return found

    def _queue_bind(self, exchange: str, routing_key: str, pattern: str | None, queue: str) -> None:
        if self.typeof(exchange).type == "fanout":
            self._fanout_queues[queue] = (exchange, (routing_key or "").translate(_WILDCARD))
        self._transport.bind(exchange, routing_key, pattern, queue)

    def queue_unbind(
        self,
        queue: str,
        exchange: str | None = None,
        routing_key: str = "",
        arguments: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Undo `queue_bind`, for all processes."""
        exchange = exchange or "amq.direct"
        self.state.binding_delete(queue, exchange, routing_key)
        _, pattern, _ = self.typeof(exchange).prepare_bind(queue, exchange, routing_key, arguments)
        self._transport.declared.unbind(exchange, routing_key, pattern, queue)
        self._transport.bindings.remove(exchange, routing_key, pattern, queue)

    def get_table(self, exchange: str) -> list[tuple[str, str, str]]:
        """The bindings of an exchange, which all processes share; ours are made again if the broker forgot them."""
        table = list(self._transport.bindings.table(exchange))
        if self._transport.restore_bindings(exchange, table):
            table = list(self._transport.bindings.table(exchange))
        return table

    def prepare_queue_arguments(self, arguments: dict[str, Any] | None, **kwargs: Any) -> dict[str, Any]:
        """The arguments of a queue; ``Queue(expires=…)`` becomes ``x-expires``."""
        from kombu.transport.base import to_rabbitmq_queue_arguments

        prepared: dict[str, Any] = to_rabbitmq_queue_arguments(arguments or {}, **kwargs)
        return prepared

    # consuming

    def basic_consume(
        self, queue: str, no_ack: bool, callback: Callable[[Any], Any], consumer_tag: str, **kwargs: Any
    ) -> None:
        """Consume from a queue.  Several channels, and several consumers of one, share its messages."""
        if (kwargs.get("arguments") or {}).get("x-priority"):
            logger.warning("queue %r: the consumer argument x-priority has no effect here", queue)
        self._tag_to_queue[consumer_tag] = queue
        self._active_queues.append(queue)
        self._consumers.add(consumer_tag)
        self._consumed.add(queue)
        if queue in self._fanout_queues:
            self._consume_fanout(consumer_tag, queue, no_ack, callback)
            return
        subscription = Subscription(
            self, queue, consumer_tag, no_ack, callback, expires_ms=self._transport.end_of(queue)
        )
        self._subscriptions[consumer_tag] = subscription
        if subscription.expires_ms:
            self._holder.consumed.append(queue)
        self._transport.metronome.add(subscription)

    def _consume_fanout(self, consumer_tag: str, queue: str, no_ack: bool, callback: Any) -> None:
        def deliver(payload: dict[str, Any]) -> None:
            try:
                message = self.Message(payload, channel=self)
            except (AttributeError, LookupError, TypeError, ValueError) as exc:
                logger.warning("exchange %r: dropped a message that cannot be read: %r", exchange, exc)
                return
            callback(message)

        exchange, routing_key = self._fanout_queues[queue]
        topic = self._transport.fanout.topic(exchange, routing_key)
        self._fanouts[consumer_tag] = (topic, deliver)
        self._transport.fanout.subscribe(topic, deliver)

    def basic_cancel(self, consumer_tag: str) -> None:
        """Stop to consume; what was claimed and not delivered goes back to its place."""
        if consumer_tag not in self._consumers:
            return
        self._consumers.discard(consumer_tag)
        queue = self._tag_to_queue.pop(consumer_tag)
        self._active_queues.remove(queue)
        try:
            self._unsubscribe(consumer_tag)
        except unreachable as exc:
            # What stops half-way when a channel closes would leave its leases to be renewed for ever.
            if not self.closed:
                raise
            logger.debug("cannot cancel the consumer of queue %r in good order: %s", queue, exc)

    def _unsubscribe(self, consumer_tag: str) -> None:
        fanout = self._fanouts.pop(consumer_tag, None)
        if fanout is not None:
            self._transport.fanout.unsubscribe(*fanout)
            return
        subscription = self._subscriptions.pop(consumer_tag)
        if subscription.expires_ms:
            self._holder.consumed.remove(subscription.queue)
        undelivered = self._transport.metronome.remove(subscription)
        self.qos.release([message.delivery_tag for message in undelivered])

    def credit(self) -> int:
        """How many messages this channel takes now."""
        qos = self.qos
        if self.closed or not qos.can_consume():
            return 0
        # Celery's worker_disable_prefetch puts its own can_consume on the instance: it tells only "one more".
        if "can_consume" in vars(qos):
            return 1
        room = qos.can_consume_max_estimate()
        return self.options.claim_batch if room is None else int(room)

    def nearly_full(self) -> bool:
        """Whether it holds more than three quarters of its prefetch: with a prefetch of four per process or more,
        as many wait as run.
        """
        limit = self.qos.prefetch_count
        return bool(limit) and len(self.qos._delivered) > limit * 3 / 4

    def accept(self, subscription: Subscription, claimed: Claimed) -> LaneMessage | None:
        """Hold a claimed message; None: it could not be read, and is a dead letter now."""
        message = self._message(subscription.queue, claimed)
        if message is not None:
            self.qos.append(message, message.delivery_tag)
        return message

    def deliver(self, subscription: Subscription, message: LaneMessage) -> None:
        """Hand a message to its consumer, unless it was handed back meanwhile."""
        if message.delivery_tag not in self.qos._delivered:
            return
        if subscription.no_ack:
            self.qos.ack(message.delivery_tag)
        subscription.callback(message)

    def _message(self, queue: str, claimed: Claimed) -> LaneMessage | None:
        try:
            payload = envelope.load(claimed.envelope, claimed.body)
        except EnvelopeError as exc:
            logger.error("queue %r, message %s is a dead letter now: %s", queue, claimed.fence.tag, exc)
            reason = str(exc)
            self.qos.tell(lambda store, again: store.reject(queue, claimed.fence, requeue=False, reason=reason))
            return None
        properties = payload["properties"]
        info = properties.setdefault("delivery_info", {})
        info["redelivered"] = claimed.fence.attempt > 1
        properties["fairlanes"] = {"attempt": claimed.fence.attempt, "queue": queue, "lane": claimed.lane}
        properties["delivery_tag"] = self._delivery_tag(queue, claimed.fence.tag)
        message = LaneMessage(payload, channel=self)
        message.lease = Lease(queue, claimed.fence, claimed.lane, payload["headers"].get("id"))
        message.lease.owner, message.lease.holder = weakref.ref(self._transport), self._holder
        message.lease.ends = self._transport.end_of(queue) / 1000
        return message

    def _delivery_tag(self, queue: str, tag: str) -> str:
        """A topic publish puts one tag into several queues; this channel may consume from them all."""
        return f"{tag}@{queue}" if tag in self.qos._delivered else tag

    def basic_get(self, queue: str, no_ack: bool = False, **kwargs: Any) -> LaneMessage | None:
        """Get one message, or None."""
        while claimed := self._transport.store.claim(queue, 1, self._transport.metronome.lease_ms).claimed:
            if self._transport.keeper.goes_on(queue, claimed[0].fence):
                continue
            message = self._message(queue, claimed[0])
            if message is None:
                continue  # unreadable, and a dead letter now: the next one may do
            self.qos.append(message, message.delivery_tag)
            if no_ack:
                self.qos.ack(message.delivery_tag)
            return message
        return None

    def _get(self, queue: str, timeout: float | None = None) -> Any:
        raise Empty()  # kombu's polling is not used: see metronome

    def basic_reject(self, delivery_tag: str, requeue: bool = False) -> None:
        """A message failed; it comes back after its backoff (`requeue`), or is a dead letter."""
        self.qos.reject(delivery_tag, requeue=requeue)

    def basic_recover(self, requeue: bool = False) -> None:
        """Hand back everything this channel holds and has not started."""
        if not requeue:
            raise NotImplementedError("basic_recover(requeue=False) is not supported: use requeue=True")
        self.qos.restore_unacked()

    def drain_events(self, timeout: float | None = None, callback: Any = None) -> None:
        """Deliver one message of this channel's transport."""
        self._transport.draining.drain(timeout)

    def close(self) -> None:
        """Cancel all consumers and hand back what has not started; auto-delete queues go when they are empty."""
        if self.closed:
            return
        used = self._auto_delete & self._consumed
        # Closed, the channel knows no exchange types any more.
        bindings = [binding for queue in used for binding in self._bindings_of(queue)]
        self._collected.detach()
        super().close()
        self._drop_auto_delete(used, bindings)

    def _drop_auto_delete(self, queues: set[str], bindings: list[tuple[str, str, str | None, str]]) -> None:
        transport = self._transport
        if not queues or not transport.link.answers(CLOSE_SECONDS):
            return  # they end by themselves
        try:
            gone = {
                queue
                for queue in queues
                if queue not in transport.metronome.subscriptions and transport.delete_queue(queue, if_empty=True)
            }
            for binding in bindings:
                if binding[-1] in gone:
                    transport.bindings.remove(*binding)
                    transport.state.queue_bindings_delete(binding[-1])
        except unreachable as exc:
            logger.debug("cannot delete auto-delete queues now (%s); they end by themselves", exc)


def _is_reply(message: dict[str, Any]) -> bool:
    """Whether a message answers another one, as results of ``rpc://`` do."""
    properties = message["properties"]
    return (
        bool(properties.get("correlation_id")) and not properties.get("reply_to") and "task" not in message["headers"]
    )


def _abandon(keeper: Keeper, holder: Holder, process: int) -> None:
    # A fork's copy of the channel holds nothing.
    if os.getpid() == process:
        keeper.abandon(holder)


def _expires(queue: str, arguments: dict[str, Any]) -> int:
    value = arguments.get("x-expires")
    if value is None:
        return 0
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 1 <= value <= 1e15:
        raise OptionError(f"queue {queue!r}: x-expires is {value!r}; it must be milliseconds, 1 or more")
    return int(value)


def _lane_defaults(queue: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """The defaults of a queue's lanes that its arguments set, as the server stores them."""
    given = {name: arguments[x] for x, name in LANE_ARGUMENTS.items() if arguments.get(x) is not None}
    try:
        return checked_defaults(given)
    except OptionError as exc:
        raise OptionError(f"queue {queue!r}: {exc}") from exc


def _warn_of_ignored(queue: str, arguments: dict[str, Any]) -> None:
    ignored = [name for name in IGNORED_ARGUMENTS if arguments.get(name) is not None]
    if ignored:
        logger.warning("queue %r: %s has no effect here", queue, ", ".join(ignored))


def _cost(name: str | None, headers: dict[str, Any]) -> float:
    """Return what a message costs its lane: the header that `cost_header` names, or 1."""
    cost = headers.get(name) if name else None
    if cost is None:
        return 1.0
    low, high = COSTS
    if isinstance(cost, bool) or not isinstance(cost, (int, float)) or not low <= cost <= high:
        raise OptionError(f"header {name} is {cost!r}; a cost is a number from {low:g} to {high:,}")
    return float(cost)

"""fairlanes-transport: a kombu transport for Redis and Valkey that makes one Celery queue fair among many tenants.

Broker URLs:

* ``fairlanes://[user:password@]host:port/db``
* ``fairlaness://…`` the same over TLS; the server's certificate is verified
* ``fairlanes-sentinel://host:26379;fairlanes-sentinel://host2:26379/db``, with the option ``master_name``
* ``fairlanes-socket:///path/to/redis.sock``

Settings are ``broker_transport_options``: see `fairlanes_transport.options`.
"""

from __future__ import annotations

import logging
import sys
import weakref
from typing import Any

import redis
from kombu.transport import virtual
from redis.exceptions import NoPermissionError

from . import errors, keys
from .acks import Acks
from .addresses import Address
from .channel import Channel
from .connections import Link
from .declared import Declaration, Declared
from .draining import Draining
from .durable import Confirming
from .errors import BrokerUnavailable
from .fanout import Bindings, Fanout, add
from .keeper import Keeper, Lease
from .lane_settings import checked_defaults
from .metronome import Metronome
from .options import Options
from .park import Park
from .store import FailurePolicy, Store
from .turning import Turning

logger = logging.getLogger(__name__)

MIN_REDIS = (6, 2)

#: Options that are defaults of a queue's lanes -> the field on the server.
_LANE_OPTIONS = {
    "lane_weight": "weight",
    "lane_limit": "limit",
    "lane_rate": "rate",
    "lane_burst": "burst",
    "lane_max_size": "max_size",
    "fairness": "fairness",
}


class _ConnectionErrors:
    """The errors after which a connection is made anew.

    Reading them is also the first thing that a Celery worker's consumer does with this class, before it puts its
    bootsteps together: so ours gets in however the worker was started.
    """

    classes = virtual.Transport.connection_errors + errors.connection_errors

    def __get__(self, instance: Any, owner: Any = None) -> tuple[type[BaseException], ...]:
        if "celery.worker.consumer.consumer" in sys.modules:
            from . import worker

            worker.install()
        return self.classes


class Transport(virtual.Transport):
    """The transport of ``fairlanes://``."""

    Channel = Channel

    default_port = 6379  # type: ignore[assignment]
    polling_interval = None  # type: ignore[assignment]
    #: gossip, mingle, event fanout and ``worker_disable_prefetch`` are for this type only
    driver_type = "redis"
    driver_name = "redis"
    #: of the broker, where the URL's scheme does not say it
    kind = "tcp"

    implements = virtual.Transport.implements.extend(
        asynchronous=True, exchange_type=frozenset(["direct", "topic", "fanout"])
    )
    connection_errors = _ConnectionErrors()  # type: ignore[assignment]
    channel_errors = virtual.Transport.channel_errors

    client: Any
    options: Options
    link: Link
    store: Store
    publisher: Store
    keeper: Keeper
    fanout: Fanout
    bindings: Bindings
    metronome: Metronome
    draining: Draining
    acks: Acks
    lane_defaults: dict[str, Any]

    def __init__(self, client: Any, **kwargs: Any) -> None:
        super().__init__(client, **kwargs)
        self.fanout_queues: dict[str, tuple[str, str]] = {}
        #: queue -> ms without use after which it is gone; of all channels, like the bindings
        self.queue_ends: dict[str, int] = {}
        self.declared = Declared()
        self.turning: Turning | None = None
        #: a Celery worker consumes through this transport
        self.in_worker = False

    def driver_version(self) -> str:
        """Version of redis-py."""
        return str(redis.__version__)

    def establish_connection(self) -> Transport:
        """Connect.  Options are checked here, before anything is sent.

        Raises:
            OptionError: an option, or a part of the URL, cannot be used.
            redis.exceptions.RedisError, OSError: the broker does not answer.
        """
        options = self.options = Options.from_transport_options(self.client.transport_options)
        address = Address.from_conninfo(self.client, options, kind=self.kind)
        self.link = Link.shared(address, options)
        _check_server(self.link, options.global_keyprefix)
        self.lane_defaults = _lane_defaults(options)
        self.store = self.publisher = Store(self.link, options.global_keyprefix, _policy(options))
        if options.durable_publish:
            confirming = Confirming(self.link, options.durable_replicas, options.durable_timeout)
            self.publisher = Store(confirming, options.global_keyprefix)
        self.keeper = Keeper.shared(self.link, options.global_keyprefix, options.lease_seconds, self.store.policy)
        self.fanout = Fanout(self.link, options, address.db)
        self.bindings = Bindings(self.link, options)
        park = Park(self.link, self.store)
        self.metronome = Metronome(self.store, self.keeper, park, self.fanout, options)
        self.metronome.forgotten = self.restore_consumed
        self.draining = Draining(self.metronome)
        self.acks = Acks(self.store, self.keeper, self.metronome)
        super().establish_connection()
        return self

    def close_connection(self, connection: Any) -> None:
        """Close all channels, which hands back what has not started here, and leave."""
        try:
            super().close_connection(connection)
        finally:
            if self.turning is not None:
                self.turning.close()
            self.metronome.close()

    def drain_events(self, connection: Any, timeout: float | None = None, **kwargs: Any) -> None:
        """Deliver one message, or what fanout has brought.

        Raises:
            socket.timeout: nothing came in time.
        """
        self.draining.drain(timeout)

    def register_with_event_loop(self, connection: Any, loop: Any) -> None:
        """Work on Celery's event loop from now on."""
        if self.turning is not None:
            self.turning.close()
        self.turning = Turning(self.metronome, loop)

    def stop_turning(self) -> None:
        """The event loop will not turn again: send and read what is on its way.

        Raises:
            redis.exceptions.RedisError, OSError: the broker cannot be reached.
        """
        if self.turning is not None:
            self.turning.stop()

    def renews(self, lease: Lease) -> bool:
        """Whether the keeper should renew a lease; called by its thread.  A program of its own may take its time
        between two drains; a worker does not.
        """
        return lease.started or not self.in_worker or not self.metronome.hangs()

    # queues, as the channels see them

    def declare_queue(self, queue: str, expires_ms: int, *, durable: bool, defaults: dict[str, Any]) -> bool:
        """Make a queue exist; a durable one is listed, so that tools find it.  True: it is new."""
        self.declared.queues[queue] = Declaration(expires_ms, durable, defaults)
        new = self.store.declare(queue, expires_ms, **defaults)
        if durable:
            add(self.link, [("SADD", keys.queues(self.options.global_keyprefix), queue)])
        return new

    def end_of(self, queue: str) -> int:
        """Ms without use after which a queue is gone, 0: never; asks the server if nobody here has declared it."""
        if queue not in self.queue_ends:
            self.queue_ends[queue] = self.store.expires(queue)
        return self.queue_ends[queue]

    def delete_queue(self, queue: str, *, if_empty: bool = False) -> bool:
        """Delete a queue; False: it was not empty."""
        if not self.store.delete(queue, if_empty=if_empty):
            return False
        self.link.call("SREM", keys.queues(self.options.global_keyprefix), queue)
        self.declared.forget(queue)
        self.queue_ends.pop(queue, None)
        return True

    def bind(self, exchange: str, routing_key: str, pattern: str | None, queue: str) -> None:
        """Route what is published to an exchange to a queue, for all processes."""
        self.declared.bind(exchange, routing_key, pattern, queue)
        self.bindings.add(exchange, routing_key, pattern, queue, self.end_of(queue))

    def restore(self, queue: str, *, durable_only: bool = False) -> bool:
        """Declare and bind a queue again, if this connection has declared it and the broker has forgotten it.

        Args:
            durable_only: not one with an end: it has ended, perhaps, as it should.
        """
        declaration = self.declared.queues.get(queue)
        if declaration is None or (durable_only and declaration.expires_ms) or self.store.is_declared(queue):
            return False
        logger.warning("the broker has forgotten queue %r; it is declared again, with its bindings", queue)
        self.declare_queue(queue, declaration.expires_ms, durable=declaration.durable, defaults=declaration.defaults)
        for exchange, routing_key, pattern in self.declared.bindings_of(queue):
            self.bindings.add(exchange, routing_key, pattern, queue, declaration.expires_ms)
        return True

    def restore_bindings(self, exchange: str, table: list[tuple[str, str, str]]) -> bool:
        """Restore the queues whose bindings to an exchange are not in its table any more; True: there were some.

        A queue that is there was unbound by somebody, and stays so.
        """
        restored = False
        for binding in self.declared.missing(exchange, table):
            queue = binding[2]
            if self.restore(queue, durable_only=True):
                restored = True
            elif not restored and self.store.is_declared(queue):
                self.declared.unbind(exchange, *binding)
        return restored

    def restore_consumed(self, queue: str) -> None:
        """The broker does not know a queue that is consumed from here."""
        try:
            self.restore(queue)
        except errors.unreachable as exc:
            logger.debug("cannot declare queue %r again now: %s", queue, exc)

    def is_durable(self, queue: str) -> bool:
        """Whether the queue was declared to stay."""
        return bool(self.link.call("SISMEMBER", keys.queues(self.options.global_keyprefix), queue))


class TLSTransport(Transport):
    """The transport of ``fairlaness://``."""

    kind = "tls"


class SentinelTransport(Transport):
    """The transport of ``fairlanes-sentinel://``."""

    kind = "sentinel"
    default_port = 26379


class SocketTransport(Transport):
    """The transport of ``fairlanes-socket://``."""

    kind = "socket"


def _policy(options: Options) -> FailurePolicy:
    return FailurePolicy(
        backoff_base=options.backoff_base,
        backoff_factor=options.backoff_factor,
        backoff_max=options.backoff_max,
        max_failures=options.max_failures,
        dead_letter_max=options.dead_letter_max,
        dead_letter_ttl=options.dead_letter_ttl,
    )


def _lane_defaults(options: Options) -> dict[str, Any]:
    """What the options say otherwise than the defaults; nothing else is written to the server."""
    unset = Options()
    given = {
        field: getattr(options, name)
        for name, field in _LANE_OPTIONS.items()
        if getattr(options, name) != getattr(unset, name)
    }
    return checked_defaults(given)


#: Links whose server has been looked at.
_checked: weakref.WeakSet[Link] = weakref.WeakSet()


def _check_server(link: Link, prefix: str) -> None:
    """That the broker answers and takes writes; the first time also whether it can do what we need.

    A replica, or a server that cannot save, is found here, where kombu pauses before it tries again.

    Raises:
        BrokerUnavailable: the server cannot serve now, or is too old.
    """
    # Changes nothing, and is let through by a server that is full.
    link.call("SREM", keys.queues(prefix), "")
    if link in _checked:
        return
    info = _info(link)
    _checked.add(link)
    version = info.get("redis_version", "")
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if numbers and numbers < MIN_REDIS:
        raise BrokerUnavailable(f"{link} is Redis {version}; 6.2 or newer is needed")
    policy = info.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        logger.warning(
            "%s has maxmemory-policy %s: when it is full it deletes keys, and messages are lost. Set noeviction.",
            link, policy,
        )  # fmt: skip


def _info(link: Link) -> dict[str, str]:
    try:
        text = link.call("INFO").decode("utf-8", "replace")
    except NoPermissionError:
        link.connect()
        return {}
    pairs = (line.partition(":") for line in text.splitlines() if ":" in line)
    return {name: value for name, _, value in pairs}

"""The settings of the transport: ``broker_transport_options``, checked once, as one frozen dataclass.

Names carry their unit. Each field documents itself in its metadata, and :meth:`Options.table` gives what the
settings page of the manual is made from. What is not a setting here, but is one of kombu's Redis transport,
is named once in the log and has no effect; anything else is an :exc:`OptionError` that names the nearest
setting.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from . import keys
from .bounds import CHOICES, NUMBERS, YEAR_SECONDS
from .errors import OptionError

logger = logging.getLogger(__name__)

#: How long a claim stays ours without a sign of life. A worker renews its leases at a third of this, so it
#: bounds only how long the work of a dead worker waits.
LEASE_SECONDS = 60.0
#: How long a consumer waits in one blocking pop. Also the most that timed work is late after a consumer's
#: death.
PARK_SECONDS = 30.0
#: The most messages that one claim takes.
CLAIM_BATCH = 16
TENANT_HEADER = "tenant"
DEFAULT_TENANT = "default"
#: Wait after the n-th failure of a message: base * factor^(n-1), never more than the maximum.
BACKOFF_BASE_SECONDS = 1.0
BACKOFF_FACTOR = 2.0
BACKOFF_MAX_SECONDS = 300.0
MAX_FAILURES = 25
DEAD_LETTER_MAX = 10_000
DEAD_LETTER_TTL_SECONDS = 7 * 24 * 3600.0
DURABLE_TIMEOUT_SECONDS = 1.0
#: After this long without a turn of the event loop, unstarted messages are no longer renewed.
HUNG_LOOP_SECONDS = 600.0
#: On every socket that a command is sent on. Nothing on the main thread waits without an end.
SOCKET_TIMEOUT_SECONDS = 5.0
SOCKET_CONNECT_TIMEOUT_SECONDS = 5.0
MAX_CONNECTIONS = 10
HEALTH_CHECK_SECONDS = 30
#: Between routing key, pattern and queue in a binding, as in kombu's Redis transport: both read the same
#: sets.
BINDING_SEPARATOR = "\x06\x16"

_UNIT_MS = {"s": 1_000, "m": 60_000, "h": 3_600_000}
_RATE = re.compile(r"^\s*(?P<count>\d+(?:\.\d+)?)\s*(?:/\s*(?P<unit>[smh]))?\s*$")


class Rate(NamedTuple):
    """So many messages in so many milliseconds."""

    count: float  # type: ignore[assignment]  # hides tuple.count, which nobody calls
    per_ms: int


def parse_rate(value: str | int | float) -> Rate:
    """Read a rate as Celery writes it: ``'100/m'``; a bare number is per second.

    Raises:
        OptionError: it is not of that form, not above zero, or out of bounds.
    """
    match = None if isinstance(value, bool) else _RATE.match(str(value))
    if match is None or float(match["count"]) <= 0:
        raise OptionError(f"rate {value!r} is not of the form '100/s', '100/m' or '100/h' with a number above zero")
    rate = Rate(float(match["count"]), _UNIT_MS[match["unit"] or "s"])
    if not NUMBERS["rate"].hold(rate.count / rate.per_ms):
        raise OptionError(f"rate {value!r} is out of bounds: from one start in a year to a million in a second")
    return rate


Check = Callable[[Any], Any]
"""Takes the value of an option, returns it in its final type, raises ValueError that says what it must be."""


def _number(low: float, high: float | None = None, *, whole: bool = False, optional: bool = False) -> Check:
    """Make a check for a number between *low* and *high*, both included."""
    kind = "a whole number" if whole else "a number"
    bounds = f"from {low:.12g} to {high:.12g}" if high is not None else f"of at least {low:g}"
    must_be = f"must be {kind} {bounds}" + (" or None" if optional else "")

    def check(value: Any) -> Any:
        if value is None and optional:
            return None
        if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
            raise ValueError(must_be)
        # Written so that NaN fails too.
        if not (value >= low and (high is None or value <= high)):
            raise ValueError(must_be)
        return value if whole else float(value)

    return check


def _of_lane(name: str, *, optional: bool = False) -> Check:
    """Make a check for the number *name* of a lane."""
    low, high, whole = NUMBERS[name]
    return _number(low, high, whole=whole, optional=optional)


def _instance(must_be: str, *types: type, optional: bool = False) -> Check:
    """Make a check for an instance of one of *types*."""

    def check(value: Any) -> Any:
        if (value is None and optional) or isinstance(value, types):
            return value
        raise ValueError(f"must be {must_be}" + (" or None" if optional else ""))

    return check


def _choice(*names: str) -> Check:
    """Make a check for one of *names*."""

    def check(value: Any) -> Any:
        if value in names:
            return value
        raise ValueError("must be one of " + ", ".join(map(repr, names)))

    return check


def _text(value: Any) -> str:
    if isinstance(value, str) and value:
        return value
    raise ValueError("must be a string that is not empty")


def _optional_text(value: Any) -> str | None:
    return None if value is None else _text(value)


def _rate(value: Any) -> str | None:
    if value is None:
        return None
    parse_rate(value)
    return str(value)


def _callable(value: Any) -> Any:
    if value is None or callable(value) or (isinstance(value, str) and re.fullmatch(r"[\w.]+[.:]\w+", value)):
        return value
    raise ValueError("must be a callable, its dotted name ('package.module:function') or None")


def _keyprefix(value: Any) -> str:
    if isinstance(value, str):
        return keys.check_prefix(value)
    raise ValueError("must be a string without braces")


def _fanout_prefix(value: Any) -> bool | str:
    # kombu's Redis transport formats it: any other brace would fail there, or mean something else.
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and not re.search("[{}]", value.replace("{db}", "")):
        return value
    raise ValueError("must be True, False or a string, with no braces in it but those of {db}")


def _order(value: Any) -> Any:
    if callable(value):
        return value
    return _choice("round_robin", "sorted", "priority")(value)


_flag = _instance("True or False", bool)


def _option(default: Any, check: Check, doc: str, *, unit: str = "", secret: bool = False) -> Any:
    """Declare a field of :class:`Options` with its check and its line in the manual.

    Args:
        secret: the value may hold a password: neither an error nor ``repr()`` shows it.
    """
    return field(default=default, repr=not secret, metadata={"check": check, "doc": doc, "unit": unit})


class Row(NamedTuple):
    """One line of the settings table."""

    name: str
    type: str
    default: object
    unit: str
    doc: str


@dataclass(frozen=True)
class Options:
    """All settings of one transport. See :meth:`table` for what each means.

    Raises:
        OptionError: a value is of the wrong type or out of range.
    """

    # leases and consumers
    lease_seconds: float = _option(
        LEASE_SECONDS,
        _number(1, 86_400),
        "How long a claimed message stays with its worker without a sign of life. Live workers renew, so it "
        "bounds only how long the work of a dead worker waits, not how long a task may run.",
        unit="s",
    )
    park_seconds: float = _option(
        PARK_SECONDS,
        _number(1, 3600),
        "Longest wait of an idle consumer in one blocking pop; never more than half of `lease_seconds`.",
        unit="s",
    )
    claim_batch: int = _option(
        CLAIM_BATCH, _number(1, 1000, whole=True), "Most messages that one claim takes.", unit="messages"
    )
    hung_loop_seconds: float = _option(
        HUNG_LOOP_SECONDS,
        _number(1, YEAR_SECONDS),
        "Without a turn of the event loop for this long, and no task running on it, unstarted messages are "
        "no longer renewed and go to other workers.",
        unit="s",
    )
    eta_in_broker: bool = _option(
        True,
        _flag,
        "Keep messages with an `eta` or `countdown` in the broker until they are due, not in the worker.",
    )

    # tenants
    tenant_header: str = _option(TENANT_HEADER, _text, "Message header that names the tenant.")
    default_tenant: str = _option(DEFAULT_TENANT, _text, "Lane of messages without a tenant.")
    tenant_of: Callable[..., str | None] | str | None = _option(
        None,
        _callable,
        "Function of a message that returns its tenant when the header does not, or its dotted name.",
    )

    # lanes, where the queue does not say otherwise
    lane_weight: float = _option(1.0, _of_lane("weight"), "Share of a lane among the lanes of its queue.")
    lane_limit: int | None = _option(
        None,
        _of_lane("limit", optional=True),
        "Most tasks of a lane in flight; None: no limit.",
        unit="tasks",
    )
    lane_rate: str | None = _option(
        None, _rate, "Most starts of a lane per time, as in `'100/s'`, `'100/m'`, `'100/h'`; None: no limit."
    )
    lane_burst: float | None = _option(
        None,
        _of_lane("burst", optional=True),
        "Starts that a rested lane may make at once under `lane_rate`; None: 1, so that starts are spread evenly.",
        unit="tasks",
    )
    lane_max_size: int | None = _option(
        None,
        _of_lane("max_size", optional=True),
        "Most ready messages of a lane; a publish beyond it raises `LaneFull`. None: no limit.",
        unit="messages",
    )
    fairness: str = _option(
        "count",
        _choice(*CHOICES["fairness"]),
        "What a turn costs a lane: one per message (`'count'`), or worker time (`'time'`).",
    )
    cost_header: str | None = _option(
        None,
        _optional_text,
        "Message header that says how many turns the message costs its lane, from 0.01 to 1,000; "
        "None: no header is read, every message costs one.",
    )

    # failures
    backoff_base: float = _option(
        BACKOFF_BASE_SECONDS, _number(0, YEAR_SECONDS), "Wait after the first failure of a message.", unit="s"
    )
    backoff_factor: float = _option(BACKOFF_FACTOR, _number(1, 1000), "Growth of that wait with each further failure.")
    backoff_max: float = _option(BACKOFF_MAX_SECONDS, _number(0, YEAR_SECONDS), "Longest such wait.", unit="s")
    max_failures: int = _option(
        MAX_FAILURES,
        _number(0, 10**9, whole=True),
        "Expiries and requeues after which a message becomes a dead letter; 0: never.",
    )
    dead_letter_max: int = _option(
        DEAD_LETTER_MAX,
        _number(0, 10**9, whole=True),
        "Dead letters kept per queue; the oldest go first.",
        unit="messages",
    )
    dead_letter_ttl: float = _option(
        DEAD_LETTER_TTL_SECONDS, _number(1, 10 * YEAR_SECONDS), "How long a dead letter is kept.", unit="s"
    )
    deadletter_queue: str | None = _option(
        None,
        _instance("a queue name", str, optional=True),
        "Queue for messages that no binding routes, as in kombu.",
    )

    # durability
    durable_publish: bool = _option(
        False,
        _flag,
        "After each publish wait until the server confirms that it is safe; `NotConfirmed` otherwise.",
    )
    durable_replicas: int = _option(
        0, _number(0, 100, whole=True), "Replicas that must confirm a durable publish.", unit="replicas"
    )
    durable_timeout: float = _option(
        DURABLE_TIMEOUT_SECONDS, _number(0.001, 3600), "Longest wait for that confirmation.", unit="s"
    )

    # names on the server
    global_keyprefix: str = _option("", _keyprefix, "Put before every key and topic. Without braces.")
    fanout_prefix: bool | str = _option(
        True,
        _fanout_prefix,
        "Prefix of fanout topics: True for `/{db}.`, or a string; the same on every side.",
    )
    fanout_patterns: bool = _option(True, _flag, "Use routing keys as patterns in fanout exchanges.")
    sep: str = _option(
        BINDING_SEPARATOR, _text, "Separator inside binding sets; the same as in kombu's Redis transport."
    )
    queue_order_strategy: str | Callable[..., Any] = _option(
        "round_robin",
        _order,
        "Order in which the queues of a worker are served: `round_robin`, `sorted` or `priority`.",
    )

    # connections
    socket_timeout: float = _option(
        SOCKET_TIMEOUT_SECONDS,
        _number(0.05, 3600),
        "Longest wait for the reply to a command, and for a free connection; not for idle consumers.",
        unit="s",
    )
    socket_connect_timeout: float = _option(
        SOCKET_CONNECT_TIMEOUT_SECONDS,
        _number(0.05, 3600),
        "Longest wait for a connection to be made.",
        unit="s",
    )
    socket_keepalive: bool = _option(True, _flag, "Let the operating system find dead connections.")
    socket_keepalive_options: Mapping[int, int | bytes] | None = _option(
        None,
        _instance("a mapping of socket options", Mapping, optional=True),
        "TCP keepalive options; None: first probe after 10 s, then every 5 s, dead after 3.",
    )
    max_connections: int = _option(
        MAX_CONNECTIONS,
        _number(1, 100_000, whole=True),
        "Most pooled connections of one process to one broker. Callers wait for a free one.",
        unit="connections",
    )
    health_check_interval: float = _option(
        HEALTH_CHECK_SECONDS,
        _number(0, 86_400),
        "How long the fanout connection may be silent before it is checked; 0: it is not.",
        unit="s",
    )
    client_name: str | None = _option(
        None, _instance("a string", str, optional=True), "Name of our connections in `CLIENT LIST`."
    )
    credential_provider: object = _option(
        None,
        lambda value: value,
        "A redis-py `CredentialProvider`, or its dotted name, in place of a password.",
        secret=True,
    )
    master_name: str | None = _option(
        None,
        _instance("a string", str, optional=True),
        "Name of the master; needed with `fairlanes-sentinel://`.",
    )
    min_other_sentinels: int = _option(
        0, _number(0, whole=True), "Other sentinels that a sentinel must see for its answer to count."
    )
    sentinel_kwargs: Mapping[str, Any] | None = _option(
        None,
        _instance("a mapping", Mapping, optional=True),
        "Arguments of the connections to the sentinels: `username`, `password`, `ssl`, ... Where the server is reached "
        "over TLS they are too, with the same `ssl_...`; `ssl: False`: in plain text.",
        secret=True,
    )

    def __post_init__(self) -> None:
        for option in dataclasses.fields(self):
            value = getattr(self, option.name)
            try:
                # A frozen dataclass has no other way to normalise its own fields.
                object.__setattr__(self, option.name, option.metadata["check"](value))
            except ValueError as exc:
                shown = f"{option.name}={value!r}" if option.repr else option.name
                raise OptionError(f"option {shown}: {exc}") from None
        self._check_together()

    def _check_together(self) -> None:
        """Refuse values that are sound alone but not beside each other."""
        if self.backoff_max < self.backoff_base:
            raise OptionError(f"option backoff_max={self.backoff_max:g}: is below backoff_base={self.backoff_base:g}")
        if self.lane_burst is not None and self.lane_rate is None:
            raise OptionError(f"option lane_burst={self.lane_burst}: needs lane_rate")
        if self.durable_publish and self.durable_timeout >= self.socket_timeout:
            raise OptionError(
                f"option durable_timeout={self.durable_timeout:g}: must be below "
                f"socket_timeout={self.socket_timeout:g}, which ends the wait first"
            )

    @classmethod
    def from_transport_options(cls, mapping: Mapping[str, Any] | None) -> Options:
        """Build the options from a kombu connection's ``transport_options``. None as a value means the
        default.

        Raises:
            OptionError: a name is unknown, or a value cannot be used.
        """
        known = {option.name: option for option in dataclasses.fields(cls)}
        given = dict(mapping or {})
        without_effect = [name for name in given if name in _WITHOUT_EFFECT]
        unknown = [name for name in given if name not in known.keys() | _WITHOUT_EFFECT.keys() | _OF_KOMBU]
        if unknown:
            raise OptionError(_unknown_option(unknown[0], [*known, *_WITHOUT_EFFECT]))
        _log_without_effect(without_effect)
        return cls(**{name: value for name, value in given.items() if name in known and value is not None})

    @classmethod
    def table(cls) -> list[Row]:
        """Return a row for each option, in the order of the manual."""
        return [
            Row(option.name, str(option.type), option.default, option.metadata["unit"], option.metadata["doc"])
            for option in dataclasses.fields(cls)
        ]

    @property
    def park_time(self) -> float:
        """Seconds that one blocking pop may take: a park must end before a lost lease can be overdue for
        long.
        """
        return min(self.park_seconds, self.lease_seconds / 2)

    @property
    def rate(self) -> Rate | None:
        """The default rate of a lane, parsed."""
        return None if self.lane_rate is None else parse_rate(self.lane_rate)

    def fanout_keyprefix(self, db: int) -> str:
        """Return the prefix of fanout topics in database *db*, as kombu's Redis transport spells it."""
        if self.fanout_prefix is False:
            return ""
        return ("/{db}." if self.fanout_prefix is True else self.fanout_prefix).replace("{db}", str(db))

    def tenant_function(self) -> Callable[..., str | None] | None:
        """Return ``tenant_of`` as a callable, imported by its name on the first call.

        Raises:
            OptionError: the name cannot be imported, or is not callable.
        """
        if not isinstance(self.tenant_of, str):
            return self.tenant_of
        found: Callable[..., str | None] = import_named(self.tenant_of, "tenant_of")
        if not callable(found):
            raise OptionError(f"option tenant_of={self.tenant_of!r}: is not callable")
        return found


#: Options of kombu's Redis transport that mean nothing here, with what to say about them.
_WITHOUT_EFFECT: dict[str, str] = {
    "visibility_timeout": "not needed: leases are renewed while the worker lives; lease_seconds is ours",
    "ack_emulation": "",
    "keyprefix_fanout": "use fanout_prefix",
    "polling_interval": "",
    "priority_steps": "every priority from 0 to 9 is kept apart",
    "reauth_check_interval": "",
    "result_chord_ordered": "",
    "retry_on_timeout": "",
    "retry_policy": "",
    "sentinel_fanout_compat": "",
    "unacked_index_key": "",
    "unacked_key": "",
    "unacked_mutex_expire": "",
    "unacked_mutex_key": "",
    "unacked_restore_interval": "",
    "unacked_restore_limit": "",
    "unacked_restore_throttle": "",
}

#: What kombu itself reads from, or writes into, ``transport_options`` of any transport.
_OF_KOMBU = frozenset(
    {
        "body_encoding",
        "callback",
        "confirm_publish",
        "connect_retries_timeout",
        "errback",
        "failover_strategy",
        "interval_max",
        "interval_start",
        "interval_step",
        "max_retries",
        "on_revive",
        "retry_errors",
        "timeout",
    }
)

#: Names that this process has already mentioned in its log.
_mentioned: set[str] = set()


def _log_without_effect(names: Iterable[str]) -> None:
    """Name in the log, once per process, the options that have no effect."""
    new = sorted(set(names) - _mentioned)
    if not new:
        return
    _mentioned.update(new)
    hints = [f"{name} ({_WITHOUT_EFFECT[name]})" if _WITHOUT_EFFECT[name] else name for name in new]
    logger.info("broker_transport_options that have no effect with this transport: %s", ", ".join(hints))


def _unknown_option(name: str, names: Iterable[str]) -> str:
    return f"unknown option {name!r}{nearest(name, names) or ': see the settings page of the manual'}"


def nearest(name: str, names: Iterable[str]) -> str:
    """Return ``": did you mean …?"``, or nothing if no name is near."""
    close = difflib.get_close_matches(name, list(names), n=1, cutoff=0.6)
    return f": did you mean {close[0]!r}?" if close else ""


def import_named(name: str, option: str) -> Any:
    """Import ``'package.module:name'`` or ``'package.module.name'``, the value of *option*.

    Raises:
        OptionError: there is no such module or no such name in it.
    """
    module, _, attribute = name.rpartition(":" if ":" in name else ".")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as exc:
        raise OptionError(f"option {option}={name!r}: cannot be imported ({exc})") from exc

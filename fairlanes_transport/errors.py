"""Every error that this package raises, and the one place that reads the server's error replies.

There are two families, and the difference decides what kombu and Celery do:

* :exc:`FairlanesError`: the caller is told, nothing is retried. It derives from none of the classes that
  kombu counts as a connection error (``RedisError``, ``OSError``, ``KeyError``), or a full lane would look
  like a lost connection.
* :exc:`BrokerUnavailable`, :exc:`NoFreeConnection` and :exc:`AccessDenied`: the broker cannot serve now. They
  *are* connection errors, so kombu reconnects and looks the address up again.

The docstring of a class is its default message. The driver's own error is kept in ``__cause__``.
"""

from __future__ import annotations

import enum
import inspect
import re
from typing import Any

from redis import exceptions as driver

#: What counts as a lost connection: each error class of redis-py, whatever its bases, and each error of a
#: socket (``socket.timeout`` is an ``OSError``). A worker must reconnect on any of them, and never exit.
connection_errors: tuple[type[Exception], ...] = (
    driver.RedisError,
    OSError,
    *(
        error
        for error in vars(driver).values()
        if isinstance(error, type)
        and issubclass(error, Exception)
        and error.__module__ == driver.__name__
        and not issubclass(error, driver.RedisError)
    ),
)

#: The broker cannot be reached, or cannot serve, now: what was to be told can be told later.
unreachable: tuple[type[Exception], ...] = (driver.ConnectionError, driver.TimeoutError, OSError)


class Code(str, enum.Enum):
    """First word of an error reply made by our scripts: ``redis.error_reply('FLFULL 100 100')``."""

    FULL = "FLFULL"
    """The lane has reached its size limit: ``FLFULL <size> <max_size>``, both in messages."""
    ABSENT = "FLABSENT"
    """The queue was deleted, or never declared."""
    ARG = "FLARG"
    """An argument is of the wrong kind or out of range: a fault of the caller."""
    STATE = "FLSTATE"
    """The stored state contradicts itself: a fault of ours, or of somebody who writes to our keys."""


class _DefaultMessage(Exception):
    """Gives an exception its class docstring as the message when it is raised without one."""

    def __init__(self, message: str = "", *args: object) -> None:
        super().__init__(message or inspect.cleandoc(type(self).__doc__ or type(self).__name__), *args)


class FairlanesError(_DefaultMessage):
    """The operation could not be done."""


class OptionError(FairlanesError, ValueError):
    """An option has a value that cannot be used."""


class TenantError(FairlanesError, ValueError):
    """The tenant of a message is not a usable lane name."""


class QueueAbsent(FairlanesError):
    """The queue does not exist: it was deleted, or never declared."""


class NotConfirmed(FairlanesError):
    """The message was stored, but not confirmed in time as durable, and can be lost if the server fails
    now.
    """


class ServerFull(FairlanesError):
    """The server has reached its memory limit and refused the write: nothing was stored."""


class ClusterRefused(FairlanesError):
    """The server is a node of a cluster that keeps this queue on another node: connect to a server that
    has every key.
    """


class ScriptError(FairlanesError):
    """A script was refused by the server, or found its arguments or its state unusable."""


class LaneFull(FairlanesError):
    """The lane has reached its size limit: nothing was stored.

    Attributes:
        lane, queue: their names, or None where the caller did not give them.
        size, max_size: messages in the lane, and its limit.
    """

    def __init__(
        self,
        message: str = "",
        *,
        lane: str | None = None,
        queue: str | None = None,
        size: int | None = None,
        max_size: int | None = None,
    ) -> None:
        super().__init__(message or self._describe(lane, queue, size, max_size))
        self.lane, self.queue, self.size, self.max_size = lane, queue, size, max_size

    @staticmethod
    def _describe(lane: str | None, queue: str | None, size: int | None, max_size: int | None) -> str:
        named = f"lane {lane!r}" if lane is not None else "the lane"
        where = f" of queue {queue!r}" if queue is not None else ""
        count = f" ({size} messages, limit {max_size})" if max_size is not None else ""
        return f"{named}{where} is full{count}: nothing was stored"

    def __reduce__(self) -> tuple[Any, ...]:
        # Celery pickles what a task raises; the attributes must survive it.
        return type(self), self.args, vars(self)


class DeadLettered(FairlanesError):
    """The message of this task is a dead letter: it failed too often, by the death of its worker most likely."""


class _SpeakingError(driver.RedisError):
    """redis-py 8 shows its errors as ``network:ConnectionError``, which is what Celery logs: ours say what happened."""

    def __init__(self, message: str = "", *args: object) -> None:
        super().__init__(message or inspect.cleandoc(type(self).__doc__ or ""), *args)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"


class BrokerUnavailable(_SpeakingError, driver.ConnectionError):
    """The server answered, but cannot serve now (it is a replica, is loading, cannot save, ...): try
    again.
    """


class NoFreeConnection(_SpeakingError, driver.ConnectionError):
    """All connections to the server were in use for too long: raise max_connections."""


class AccessDenied(_SpeakingError, driver.NoPermissionError):
    """The server's access list forbids the user a command, a key or a channel: see the documentation for what is
    needed.
    """


#: First words of the replies of a server that is up but cannot serve now. redis-py strips the word from the
#: replies that it knows and gives them a class of their own, so both are needed.
_UNAVAILABLE_WORDS = frozenset(
    {
        "BUSY",
        "CLUSTERDOWN",
        "LOADING",
        "MASTERDOWN",
        "MISCONF",
        "NOGOODSLAVE",
        "NOQUORUM",
        "NOREPLICAS",
        "READONLY",
        "TRYAGAIN",
        "UNBLOCKED",
    }
)
_UNAVAILABLE_CLASSES = (
    driver.ReadOnlyError,
    driver.BusyLoadingError,
    driver.ClusterDownError,
    driver.MasterDownError,
    driver.TryAgainError,
)
_REDIRECTIONS = (driver.AskError, driver.MovedError, driver.ClusterCrossSlotError)

#: Redis 6.2 wraps what a command inside a script answered:
#: ``Error running script (call to f_<sha>): @user_script:7: @user_script: 7: -OOM command not allowed ...``
_WRAPPED = re.compile(r"^(?:ERR )?Error running script.*?: -?(?P<reply>[A-Z]{3,} .*)$", re.DOTALL)
_SIZES = re.compile(r"^(?P<size>\d+) (?P<max_size>\d+)\b")


def translate(exc: Exception, *, lane: str | None = None, queue: str | None = None) -> Exception:
    """Return the error to raise for *exc*, an error of redis-py.

    Arguments:
        exc: what redis-py raised, or left in the place of a reply.
        lane, queue: named in the error, where the caller knows them.

    Returns:
        a :exc:`BrokerUnavailable`, a :exc:`FairlanesError`, or *exc* itself if it is neither. The caller
        raises it ``from exc``.
    """
    if isinstance(exc, _UNAVAILABLE_CLASSES):
        return BrokerUnavailable(_text_of(exc))
    if isinstance(exc, driver.NoPermissionError) and not isinstance(exc, AccessDenied):
        return AccessDenied(_text_of(exc))
    if isinstance(exc, driver.OutOfMemoryError):
        return ServerFull(_about(ServerFull, _text_of(exc)))
    if isinstance(exc, _REDIRECTIONS):
        return ClusterRefused(_about(ClusterRefused, _text_of(exc)))
    if not isinstance(exc, driver.ResponseError):
        return exc
    return _translate_reply(exc, lane, queue)


def _translate_reply(exc: driver.ResponseError, lane: str | None, queue: str | None) -> Exception:
    """Classify a reply that redis-py has no class for, by its first word."""
    reply = str(exc)
    wrapped = _WRAPPED.match(reply)
    if wrapped:
        reply = wrapped["reply"]
    word, _, text = reply.partition(" ")
    if word in _UNAVAILABLE_WORDS:
        return BrokerUnavailable(reply)
    if word == "OOM":
        return ServerFull(_about(ServerFull, text))
    if word == Code.FULL.value:
        sizes = _SIZES.match(text)
        size, max_size = (int(sizes["size"]), int(sizes["max_size"])) if sizes else (None, None)
        return LaneFull(lane=lane, queue=queue, size=size, max_size=max_size)
    if word == Code.ABSENT.value:
        return QueueAbsent(f"queue {queue!r} does not exist" if queue is not None else "")
    if word in (Code.ARG.value, Code.STATE.value):
        return ScriptError(reply)
    return exc


def _text_of(exc: Exception) -> str:
    """Return the text of *exc* with the server's first word, which newer redis-py keeps beside the text."""
    word = getattr(exc, "status_code", None)
    text = str(exc)
    return f"{word} {text}" if word and not text.startswith(word) else text


def _about(error: type[Exception], text: str) -> str:
    """Return the default message of *error* followed by the server's own words."""
    return f"{inspect.cleandoc(error.__doc__ or '')} (server: {text})"

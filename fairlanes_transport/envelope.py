"""The envelope: a message's JSON part, beside its body.

The body is a field of its own, stored as bytes and delivered as bytes.  The envelope holds ``content-type``,
``content-encoding``, ``headers`` and ``properties``, as kombu names them; any producer, also one that is not
Python, can write it.
"""

from __future__ import annotations

import math
from datetime import datetime, timezone
from typing import Any
from uuid import UUID

from kombu.utils.json import dumps, loads

from .errors import TenantError

#: A tenant's name is 1 to this many bytes of UTF-8.
MAX_TENANT_BYTES = 256


class EnvelopeError(ValueError):
    """The envelope is no JSON object with headers and properties."""


def tenant_name(value: Any) -> str:
    """`value` as the name of a lane: a string, an int or a UUID, 1 to 256 bytes as text.

    Raises:
        TenantError: another type, empty, or too long.  Nothing has been stored then.
    """
    if isinstance(value, bool) or not isinstance(value, (str, int, UUID)):
        raise TenantError(f"tenant {value!r} is a {type(value).__name__}; a tenant is a string, an int or a UUID")
    name = str(value)
    try:
        size = len(name.encode())
    except UnicodeEncodeError as exc:
        raise TenantError(f"tenant {name!r} cannot be written as UTF-8") from exc
    if not 1 <= size <= MAX_TENANT_BYTES:
        raise TenantError(
            f"tenant {name[:40]!r} has {size} bytes; a tenant has 1 to {MAX_TENANT_BYTES}"
            if size
            else "the tenant is empty; leave the header out to use the default lane"
        )
    return name


def eta_ms(headers: dict[str, Any]) -> int:
    """The time (ms since the epoch) at which the ``eta`` header lets the message run; 0: at once.

    A naive time is UTC, whatever Celery's settings say: that is how Celery writes one.  What cannot be read as a
    time is 0: the message is delivered at once, and Celery decides.
    """
    eta = headers.get("eta")
    if not eta:
        return 0
    try:
        when = datetime.fromisoformat(eta.replace("Z", "+00:00")) if isinstance(eta, str) else eta
        if when.tzinfo is None:
            when = when.replace(tzinfo=timezone.utc)
        return math.ceil(when.timestamp() * 1000)  # never early
    except (ValueError, TypeError, AttributeError, OverflowError):
        return 0


def dump(message: dict[str, Any]) -> str:
    """The envelope of a kombu message dict, without its body."""
    return str(dumps({k: v for k, v in message.items() if k != "body"}))


def load(text: bytes, body: bytes) -> dict[str, Any]:
    """The kombu message dict of an envelope and a body.

    Raises:
        EnvelopeError: the envelope cannot be parsed; the message belongs to the dead letters.
    """
    try:
        message = loads(text)
    except ValueError as exc:
        raise EnvelopeError(f"the envelope is not JSON: {exc}") from exc
    if not isinstance(message, dict) or not isinstance(message.get("properties"), dict):
        raise EnvelopeError("the envelope is not a JSON object with properties")
    if not isinstance(message.get("headers"), dict):
        raise EnvelopeError("the envelope has no headers object")
    message["body"] = body
    return message

"""How a tool gets to a broker that it was given as a URL, a Celery app, a kombu connection, or a link."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..addresses import SCHEMES, Address
from ..connections import Link
from ..errors import OptionError
from ..options import Options
from ..scripts import Caller


def reach(broker: Any, options: dict[str, Any]) -> tuple[Caller, Options]:
    """Return what runs commands on the broker, and its options.

    Args:
        broker: a URL, a Celery app, a kombu connection, or what runs commands.
        options: as ``broker_transport_options``; they win over those of the app or connection.

    Raises:
        OptionError: the URL, or an option, cannot be used.
        redis.exceptions.RedisError: the broker cannot be reached.
    """
    if isinstance(broker, str):
        settings = Options.from_transport_options(options)
        return Link.first(Address.all_from_url(broker, settings), settings), settings
    if hasattr(broker, "connection_for_write"):
        broker = broker.connection_for_write()
    if hasattr(broker, "transport_options"):
        settings = Options.from_transport_options({**(broker.transport_options or {}), **options})
        return Link.first(_addresses(broker, settings), settings), settings
    if hasattr(broker, "call") and hasattr(broker, "pipeline"):
        return broker, Options.from_transport_options(options)
    raise OptionError(f"a broker is a URL, a Celery app or a kombu connection, not {type(broker).__name__}")


def _addresses(connection: Any, settings: Options) -> list[Address]:
    """The brokers of a kombu connection, in its order."""
    scheme = connection.transport_cls
    if isinstance(scheme, str) and scheme not in SCHEMES and not set(scheme) & set(".:"):
        raise OptionError(f"the broker is {scheme}://, which has no lanes: give a fairlanes:// or redis:// URL")
    first = Address.from_conninfo(connection, settings)
    if first.kind == "sentinel":
        return [first]
    others = [Address.all_from_url(url, settings) for url in (connection.alt or ())[1:]]
    return [first, *(address for some in others for address in some)]


def checked(replies: Sequence[Any]) -> list[Any]:
    """The replies of a pipeline; raises the first error among them."""
    for reply in replies:
        if isinstance(reply, Exception):
            raise reply
    return list(replies)

"""Unconnected redis-py connections to one address, with our rules set on them.

The rules: no retry inside the library, which would hide a loss; RESP2; bytes in and out; a time limit on
every wait, the handshake's included.
"""

from __future__ import annotations

import inspect
import socket
from collections.abc import Callable
from typing import Any

from redis import connection as driver
from redis import sentinel as driver_sentinel
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider
from redis.retry import Retry

from . import sentinels, tls
from .addresses import Address
from .options import Options

#: A connection as redis-py makes it. Its base class has the methods of all of them.
Connection = driver.AbstractConnection


class _CalledPassword(CredentialProvider):
    """A password that is a callable: asked anew for each connection, so that an expired one is replaced."""

    def __init__(self, username: str | None, password: Callable[[], str]) -> None:
        self.username, self.password = username, password

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        password = self.password()
        return (self.username, password) if self.username else (password,)


class Connector:
    """Makes unconnected redis-py connections to one address."""

    def __init__(self, address: Address, options: Options) -> None:
        self._address = address
        self._options = options
        self._class, self._kwargs = self._class_and_arguments()

    def _class_and_arguments(self) -> tuple[Any, dict[str, Any]]:
        """Return the connection class of redis-py and its arguments."""
        address = self._address
        kwargs = self._common_arguments()
        kwargs.update(address.tls or ())
        if address.kind == "socket":
            return driver.UnixDomainSocketConnection, {**kwargs, "path": address.path}
        kwargs.update(self._keepalive_arguments())
        if address.kind == "sentinel":
            return self._managed(kwargs)
        host, port = address.hosts[0]
        plain = address.tls is None
        return driver.Connection if plain else driver.SSLConnection, {**kwargs, "host": host, "port": port}

    def make(self, **overrides: Any) -> Connection:
        """Return a new, unconnected connection; *overrides* are arguments of redis-py's classes."""
        if overrides.get("socket_timeout", self) is None:
            # The socket is to wait without an end, but its handshakes (TLS, login, database) are not.
            overrides = {
                **overrides,
                "socket_timeout": self._options.socket_timeout,
                "redis_connect_func": _connect_then_wait_for_ever,
            }
        made: Connection = self._class(**{**self._kwargs, **overrides})
        return made

    def _common_arguments(self) -> dict[str, Any]:
        address, options = self._address, self._options
        arguments: dict[str, Any] = {
            "db": address.db,
            "socket_timeout": options.socket_timeout,
            "socket_connect_timeout": options.socket_connect_timeout,
            "client_name": options.client_name,
            "health_check_interval": 0,
            "retry": Retry(NoBackoff(), 0),
            "protocol": 2,
            "decode_responses": False,
            **_without_library_name(),
        }
        if address.credentials is not None:
            arguments["credential_provider"] = address.credentials
        elif callable(address.password):
            arguments["credential_provider"] = _CalledPassword(address.username, address.password)
        else:
            arguments.update(username=address.username, password=address.password)
        return arguments

    def _keepalive_arguments(self) -> dict[str, Any]:
        options = self._options
        given = options.socket_keepalive_options
        return {
            "socket_keepalive": options.socket_keepalive,
            "socket_keepalive_options": dict(given) if given is not None else _keepalive_defaults(),
        }

    def _of_sentinels(self) -> dict[str, Any]:
        """Return what is asked for of the connections to the sentinels."""
        of_server = None if self._address.tls is None else dict(self._address.tls)
        return sentinels.arguments(self._options.sentinel_kwargs or {}, of_server)

    def check(self) -> None:
        """Try the TLS settings, and warn of those that check nothing.

        Raises:
            OptionError: a file or a setting cannot be used.
        """
        sides = {str(self._address): dict(self._address.tls or ())}
        if self._address.kind == "sentinel":
            sides["the sentinels"] = self._of_sentinels()
        for where, arguments in sides.items():
            tls.check(arguments)
            tls.warn_unverified(where, arguments)

    def _managed(self, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Return class and arguments of connections that ask the sentinels where the master is."""
        address, options = self._address, self._options
        of_sentinels = {
            **{name: value for name, value in kwargs.items() if name.startswith("socket_")},
            "retry": Retry(NoBackoff(), 0),
            "protocol": 2,
            **self._of_sentinels(),
        }
        sentinel = sentinels.Sentinel(address.hosts, options.min_other_sentinels, of_sentinels)
        # Only the pool knows how its connections find the master. Kept for that, it never holds one itself.
        self._sentinel_pool = driver_sentinel.SentinelConnectionPool(
            address.master_name, sentinel, ssl=address.tls is not None, **kwargs
        )
        arguments: dict[str, Any] = self._sentinel_pool.connection_kwargs
        return self._sentinel_pool.connection_class, arguments


def _connect_then_wait_for_ever(connection: Any) -> None:
    """Log in with the timeout of a handshake, then take the timeout off."""
    connection.on_connect()
    connection._sock.settimeout(None)


def _without_library_name() -> dict[str, Any]:
    """Arguments that keep redis-py from naming itself to the server: two commands less per connection."""
    if "driver_info" in inspect.signature(driver.AbstractConnection.__init__).parameters:
        return {"driver_info": None}
    return {"lib_name": None, "lib_version": None}


def _keepalive_defaults() -> dict[int, int]:
    """TCP keepalive that finds a dead path within 25 s, as far as the system has the options."""
    wanted = {"TCP_KEEPIDLE": 10, "TCP_KEEPALIVE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
    return {getattr(socket, name): value for name, value in wanted.items() if hasattr(socket, name)}

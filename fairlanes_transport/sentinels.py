"""Sentinels, asked where the master is."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Mapping
from typing import Any

from redis import Redis
from redis import sentinel as driver
from redis.exceptions import RedisError

from . import tls
from .errors import OptionError
from .options import nearest

_ARGUMENTS = frozenset(inspect.signature(Redis.__init__).parameters) - {"self", "host", "port"}


class Sentinel(driver.Sentinel):
    """redis-py's sentinels, asked by one thread at a time, as an answer reorders their list.

    Its errors are of our own words: up to 7.3 redis-py shows the arguments of the connections, with their passwords.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._lock = threading.Lock()

    def discover_master(self, service_name: str) -> Any:
        """Return host and port of the master that the first sentinel to answer names.

        Raises:
            redis.sentinel.MasterNotFoundError: none names one; says of each why.
        """
        with self._lock:
            told = []
            for number, sentinel in enumerate(self.sentinels):
                where = "{host}:{port}".format_map(sentinel.connection_pool.connection_kwargs)
                try:
                    masters: Any = sentinel.sentinel_masters()
                except (RedisError, OSError) as exc:
                    told.append(f"{where} does not answer ({exc})")
                    continue
                state = masters.get(service_name)
                if state is None:
                    told.append(f"{where} knows no such master")
                elif not self.check_master_state(state, service_name):
                    told.append(f"{where} says that it is down, or sees too few other sentinels")
                else:
                    self.sentinels[0], self.sentinels[number] = sentinel, self.sentinels[0]
                    return state["ip"], state["port"]
        raise driver.MasterNotFoundError(f"no sentinel names the master {service_name!r}: {'; '.join(told)}")


def arguments(given: Mapping[str, Any], of_server: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the arguments of the connections to the sentinels.

    Args:
        given: the option ``sentinel_kwargs``.
        of_server: the TLS arguments of the server; None: it is reached in plain text. Its sentinels are then reached
            over TLS as well, with the same arguments, unless *given* says ``ssl=False``.

    Raises:
        OptionError: an argument is unknown, or its value cannot be used.
    """
    for name in given:
        if name not in _ARGUMENTS:
            raise OptionError(f"option sentinel_kwargs: unknown argument {name!r}{nearest(name, _ARGUMENTS)}")
    own = {name: value for name, value in given.items() if name.startswith("ssl_")}
    plain = {name: value for name, value in given.items() if name not in own and name != "ssl"}
    if not given.get("ssl", of_server is not None or bool(own)):
        return {**plain, "ssl": False}
    return {**plain, "ssl": True, **tls.verified({**(of_server or {}), **tls.arguments(own)})}

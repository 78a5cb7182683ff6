"""Celery result backends for our URL schemes: ``result_backend = 'fairlanes://…'``.

Results need no fairness, so these are Celery's own Redis backends; only the URL is put into the form that
they read. Celery finds them through the entry points of the group ``celery.result_backends``.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from celery.backends import redis as celery_redis

from . import sentinels, tls
from .addresses import Address


class RedisBackend(celery_redis.RedisBackend):  # type: ignore[misc]
    """``fairlanes://``."""

    def _params_from_url(self, url: str, defaults: dict[str, Any]) -> Any:
        return super()._params_from_url(_with_scheme(url, "redis"), defaults)


class TLSBackend(celery_redis.RedisBackend):  # type: ignore[misc]
    """``fairlaness://``: verified, where Celery's ``rediss://`` asks the user to choose."""

    def _params_from_url(self, url: str, defaults: dict[str, Any]) -> Any:
        if "ssl_cert_reqs=" not in url and "ssl_cert_reqs" not in defaults:
            url += ("&" if "?" in url else "?") + "ssl_cert_reqs=required"
        return super()._params_from_url(_with_scheme(url, "rediss"), defaults)


class SentinelBackend(celery_redis.SentinelBackend):  # type: ignore[misc]
    """``fairlanes-sentinel://``, with ``master_name`` in ``result_backend_transport_options``."""

    def _params_from_url(self, url: str, defaults: dict[str, Any]) -> Any:
        sentinels = [_with_scheme(part, "sentinel") for part in url.split(";") if part]
        params = super()._params_from_url(";".join(sentinels), defaults)
        # Celery reads database and login from the first sentinel alone; our broker URLs have them at any.
        for name in ("db", "username", "password"):
            given = [sentinel[name] for sentinel in params["hosts"] if sentinel.get(name)]
            if given:
                params[name] = given[0]
        return params

    def _get_sentinel_instance(self, **params: Any) -> sentinels.Sentinel:
        # As Celery does it, but that where the server is reached over TLS its sentinels are too.
        hosts = [(host["host"], host["port"]) for host in params.pop("hosts")]
        options = self._transport_options
        ssl = {name: value for name, value in params.items() if name.startswith("ssl_")}
        of_sentinels = sentinels.arguments(options.get("sentinel_kwargs") or {}, tls.arguments(ssl) if ssl else None)
        return sentinels.Sentinel(hosts, options.get("min_other_sentinels", 0), of_sentinels, **params)


class SocketBackend(celery_redis.RedisBackend):  # type: ignore[misc]
    """``fairlanes-socket:///path/to.sock/db``."""

    def _params_from_url(self, url: str, defaults: dict[str, Any]) -> Any:
        address = Address.from_url(url)
        login = "".join([quote(address.username or "", safe=""), ":", quote(str(address.password or ""), safe=""), "@"])
        return super()._params_from_url(
            f"socket://{login if login != ':@' else ''}{address.path}?virtual_host={address.db}", defaults
        )


def _with_scheme(url: str, scheme: str) -> str:
    return f"{scheme}://{url.partition('://')[2]}"

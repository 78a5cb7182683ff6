"""Where the broker is and how to log in: :class:`Address`, read from a URL or from a kombu connection.

The forms are those of kombu's Redis URLs, under our schemes. What cannot be understood is an
:exc:`~fairlanes_transport.errors.OptionError` that says what to do, and never has a password in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from redis.credentials import CredentialProvider

from . import tls
from .errors import OptionError
from .options import Options, import_named

DEFAULT_PORT = 6379
DEFAULT_SENTINEL_PORT = 26379
DEFAULT_HOST = "127.0.0.1"

#: Kind of broker by URL scheme. Ours first; the rest so that a tool takes the URL that somebody has at hand.
SCHEMES = {
    "fairlanes": "tcp",
    "fairlaness": "tls",
    "fairlanes-sentinel": "sentinel",
    "fairlanes-socket": "socket",
    "redis": "tcp",
    "rediss": "tls",
    "valkey": "tcp",
    "valkeys": "tls",
    "sentinel": "sentinel",
    "unix": "socket",
    "redis+socket": "socket",
}


@dataclass(frozen=True)
class Address:
    """Where one broker is and how to log in. Equal addresses share one :class:`Link`.

    ``str()`` of it is for logs: it never has the password in it.
    """

    kind: str
    """``tcp``, ``tls``, ``socket`` or ``sentinel``."""
    hosts: tuple[tuple[str, int], ...] = ()
    """Host and port of the server, or of each sentinel."""
    path: str = ""
    """Path of the unix socket."""
    db: int = 0
    username: str | None = None
    password: str | Callable[[], str] | None = field(default=None, repr=False)
    tls: tuple[tuple[str, Any], ...] | None = field(default=None, repr=False)
    """redis-py's ``ssl_*`` arguments, sorted; None: no TLS."""
    master_name: str | None = None
    credentials: CredentialProvider | None = field(default=None, repr=False)

    @classmethod
    def from_url(cls, url: str, options: Options | None = None) -> Address:
        """Read the URL of one broker; several sentinels, separated by ``;``, are one broker.

        Raises:
            OptionError: it cannot be understood, or names several brokers (see :meth:`all_from_url`).
        """
        addresses = cls.all_from_url(url, options)
        if len(addresses) > 1:
            raise OptionError(f"the URL names {len(addresses)} brokers, where one is wanted")
        return addresses[0]

    @classmethod
    def all_from_url(cls, url: str, options: Options | None = None) -> list[Address]:
        """Read a URL, or several separated by ``;``: brokers to be tried in turn.

        Raises:
            OptionError: a part cannot be understood. The message has no password in it.
        """
        options = options or Options()
        parts = [_Parts.parse(part) for part in url.split(";") if part.strip()]
        if not parts:
            raise OptionError("the broker URL is empty")
        sentinels = [part for part in parts if part.kind == "sentinel"]
        others = [_direct(part, options) for part in parts if part.kind != "sentinel"]
        return ([_behind_sentinels(sentinels, options)] if sentinels else []) + others

    @classmethod
    def from_conninfo(cls, conninfo: Any, options: Options, kind: str | None = None) -> Address:
        """Read a kombu ``Connection``, which has taken its URL apart already.

        Arguments:
            conninfo: has ``hostname``, ``port``, ``userid``, ``password``, ``virtual_host``, ``ssl``,
                ``alt``, ``credential_provider`` and ``transport_cls``.
            options: of the same connection.
            kind: of the broker; by default what the URL's scheme says.

        Raises:
            OptionError: the database, a TLS argument or the sentinel's master name cannot be used.
        """
        scheme = conninfo.transport_cls if isinstance(conninfo.transport_cls, str) else ""
        parts = _Parts(
            kind=kind or SCHEMES.get(scheme, "tcp"),
            host=conninfo.hostname,
            port=conninfo.port,
            username=conninfo.userid,
            password=conninfo.password,
            path=str(conninfo.virtual_host or ""),
            tls=_tls_of_conninfo(conninfo.ssl),
        )
        provider = getattr(conninfo, "credential_provider", None)
        if provider is not None:
            options = replace(options, credential_provider=provider)
        if parts.kind == "sentinel":
            return _behind_sentinels(_sentinels_of_conninfo(parts, conninfo.alt), options)
        return _direct(parts, options)

    def __str__(self) -> str:
        user = f"{self.username}@" if self.username else ""
        if self.kind == "socket":
            return f"fairlanes-socket://{user}{self.path}/{self.db}"
        hosts = ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self.hosts)
        if self.kind == "sentinel":
            return f"fairlanes-sentinel://{user}{hosts}/{self.db}?master_name={self.master_name}"
        return f"{'fairlanes' if self.kind == 'tcp' else 'fairlaness'}://{user}{hosts}/{self.db}"


_PERCENT_HINT = (
    "the broker URL cannot be understood. If its user or password has one of the characters # @ / : ? % [ ] "
    "in it, percent-encode them: urllib.parse.quote(password, safe='')"
)


@dataclass(frozen=True)
class _Parts:
    """A broker URL, taken apart."""

    kind: str
    host: str | None = None
    port: int | None = None
    username: str | None = None
    password: str | Callable[[], str] | None = field(default=None, repr=False)
    path: str = ""
    tls: Mapping[str, Any] | None = field(default=None, repr=False)
    db: str | None = None

    @classmethod
    def parse(cls, url: str) -> _Parts:
        scheme, separator, rest = url.strip().partition("://")
        if not separator or scheme not in SCHEMES:
            raise OptionError(
                f"a broker URL starts with one of {', '.join(f'{name}://' for name in list(SCHEMES)[:4])}"
            )
        kind = SCHEMES[scheme]
        try:
            # Parsed with the rules of http, as kombu does: other schemes may not have all the parts.
            parts = urlsplit("http://" + rest)
            host, port = parts.hostname, parts.port
        except ValueError:
            # The original names what it took for the port, which is the beginning of the password.
            raise OptionError(_PERCENT_HINT) from None
        if parts.fragment or "@" in parts.path or "@" in parts.query:
            raise OptionError(_PERCENT_HINT)
        query = _query(parts)
        db = query.pop("virtual_host", None) or query.pop("db", None)
        ssl = {name: query.pop(name) for name in list(query) if name.startswith("ssl_")}
        if query:
            raise OptionError(
                f"unknown part {next(iter(query))!r} in the query of the broker URL: only ssl_... and "
                "virtual_host are read there, other settings belong into broker_transport_options"
            )
        return cls(
            kind=kind,
            host=unquote(host) if host else None,
            port=port,
            username=unquote(parts.username or "") or None,
            password=unquote(parts.password or "") or None,
            path=unquote(parts.path),
            tls=tls.arguments(ssl) if ssl else None,
            db=db,
        )


def _query(parts: SplitResult) -> dict[str, str]:
    try:
        return dict(parse_qsl(parts.query, strict_parsing=bool(parts.query)))
    except ValueError:
        raise OptionError(_PERCENT_HINT) from None


def _direct(parts: _Parts, options: Options) -> Address:
    """Return the address of a server that needs no sentinel."""
    tls = _tls(parts)
    if parts.kind == "socket":
        path, db = _socket_path(parts)
        return Address("socket", path=path, db=db, **_login(parts, options))
    return Address(
        "tls" if tls is not None else "tcp",
        hosts=((parts.host or DEFAULT_HOST, parts.port or DEFAULT_PORT),),
        db=_database(parts.db if parts.db is not None else parts.path),
        tls=tls,
        **_login(parts, options),
    )


def _behind_sentinels(sentinels: Sequence[_Parts], options: Options) -> Address:
    """Return the address of a master that *sentinels* know. Login and database may stand at any one of
    them.
    """
    if not options.master_name:
        raise OptionError(
            "fairlanes-sentinel:// needs the name of the master: broker_transport_options = {'master_name': 'mymaster'}"
        )
    databases = {_database(part.db if part.db is not None else part.path) for part in sentinels} - {0}
    logins = {(part.username, part.password) for part in sentinels} - {(None, None)}
    if len(databases) > 1 or len(logins) > 1:
        raise OptionError("the sentinels of one broker URL name different databases or logins")
    tls = next((part.tls for part in sentinels if part.tls is not None), None)
    username, password = next(iter(logins), (None, None))
    first = replace(sentinels[0], username=username, password=password, tls=tls)
    return Address(
        "sentinel",
        hosts=tuple((part.host or DEFAULT_HOST, part.port or DEFAULT_SENTINEL_PORT) for part in sentinels),
        db=databases.pop() if databases else 0,
        tls=_tls(first),
        master_name=options.master_name,
        **_login(first, options),
    )


def _sentinels_of_conninfo(parts: _Parts, alternates: Iterable[object]) -> list[_Parts]:
    """Return every sentinel that kombu knows. Its list is kept in order, so that a switch does not change
    the address.
    """
    listed = [
        _Parts.parse(url)
        for url in alternates or ()
        if isinstance(url, str) and SCHEMES.get(url.partition("://")[0]) == "sentinel"
    ]
    if not listed:
        return [parts]
    return [replace(part, tls=part.tls if part.tls is not None else parts.tls) for part in listed]


def _login(parts: _Parts, options: Options) -> dict[str, Any]:
    """Return the login fields of an address. A credential provider stands in for user and password."""
    if options.credential_provider is not None:
        return {"credentials": _credential_provider(options.credential_provider)}
    return {"username": parts.username, "password": parts.password}


#: Providers made from a name or a class. Channels that give the same one must get one object, or they share
#: no link.
_providers: dict[object, CredentialProvider] = {}


def _credential_provider(given: Any) -> CredentialProvider:
    if isinstance(given, CredentialProvider):
        return given
    if isinstance(given, str):
        return _credential_provider(import_named(given, "credential_provider"))
    if isinstance(given, type) and issubclass(given, CredentialProvider):
        if given not in _providers:
            _providers[given] = given()
        return _providers[given]
    raise OptionError(
        f"option credential_provider: must be a redis.CredentialProvider or its dotted name, not {type(given).__name__}"
    )


def _database(given: str) -> int:
    """Read the number of a database as it stands in a URL: ``''``, ``'/'``, ``'3'`` or ``'/3'``."""
    text = given.removeprefix("/")
    if not text:
        return 0
    if "@" in text:
        raise OptionError(_PERCENT_HINT)
    if not (text.isascii() and text.isdigit()):
        raise OptionError(f"the database in the broker URL is a number from 0, not {text!r}")
    return int(text)


def _socket_path(parts: _Parts) -> tuple[str, int]:
    """Return the path of a unix socket and the database: ``/run/redis.sock``, ``/run/redis.sock/3``."""
    path = "/" + parts.path.removeprefix("/")
    if parts.host:
        raise OptionError(
            "fairlanes-socket:// needs an absolute path after three slashes: fairlanes-socket:///run/redis.sock"
        )
    if path == "/":
        raise OptionError("fairlanes-socket:// needs the path of the socket: fairlanes-socket:///run/redis.sock")
    if parts.db is not None:
        return path, _database(parts.db)
    parent, _, last = path.rpartition("/")
    # A socket may have a name of digits; then the database must be given in the query.
    if parent and last.isascii() and last.isdigit() and not Path(path).exists():
        return parent, int(last)
    return path, 0


def _tls_of_conninfo(given: Any) -> Mapping[str, Any] | None:
    """Return kombu's ``ssl``: False, True, or a mapping. An empty one is no TLS, as on kombu's redis
    transport.
    """
    if isinstance(given, Mapping) and given:
        return tls.arguments(given)
    return {} if given else None


def _tls(parts: _Parts) -> tuple[tuple[str, Any], ...] | None:
    """Return the TLS arguments of an address, verified unless the user says otherwise; None: plain text."""
    if parts.kind != "tls" and parts.tls is None:
        return None
    return tuple(sorted(tls.verified(parts.tls or {}).items()))

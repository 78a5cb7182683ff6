"""The TLS arguments of a connection, in redis-py's names (``ssl_ca_certs``, ...): read, checked, and warned of."""

from __future__ import annotations

import inspect
import logging
import ssl
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from redis.connection import SSLConnection

from .errors import OptionError

logger = logging.getLogger(__name__)

NAMES = frozenset(name for name in inspect.signature(SSLConnection.__init__).parameters if name.startswith("ssl_"))

_CERT_REQS = {
    ssl.CERT_NONE: "none",
    ssl.CERT_OPTIONAL: "optional",
    ssl.CERT_REQUIRED: "required",
    "CERT_NONE": "none",
    "CERT_OPTIONAL": "optional",
    "CERT_REQUIRED": "required",
    "none": "none",
    "optional": "optional",
    "required": "required",
    None: "none",
}
_FLAGS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
_VERSIONS = ("TLSv1_2", "TLSv1_3")

#: What this process has already been warned of.
_warned: set[str] = set()


def arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return *given* as ``ssl_*`` arguments of redis-py. Names without ``ssl_`` are accepted, as for AMQP brokers.

    Raises:
        OptionError: one is unknown, or its value cannot be used.
    """
    read: dict[str, Any] = {}
    for given_name, value in given.items():
        name = given_name if given_name.startswith("ssl_") else f"ssl_{given_name}"
        if name not in NAMES:
            raise OptionError(f"unknown TLS argument {name!r}: one of {', '.join(sorted(NAMES))}")
        reader = _READERS.get(name)
        read[name] = value if reader is None else reader(name, value)
        if isinstance(read[name], list):
            read[name] = tuple(read[name])  # addresses are compared, and hashed
    return read


def verified(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments with which the server's certificate and name are checked, unless *given* says otherwise."""
    made = {"ssl_cert_reqs": "required", **given}
    made.setdefault("ssl_check_hostname", made["ssl_cert_reqs"] != "none")
    return made


def check(given: Mapping[str, Any]) -> None:
    """Try the files and settings, so that what is wrong has its name in the error.

    Raises:
        OptionError: a file cannot be read or used, or OpenSSL refuses a setting.
    """
    for name in ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile"):
        _check_file(name, given.get(name))
    directory = given.get("ssl_ca_path")
    if directory is not None and not Path(directory).is_dir():
        raise OptionError(f"ssl_ca_path={str(directory)!r}: is no directory")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    _check_authorities(context, given)
    _check_own_certificate(context, given)
    for name, attribute in (("ssl_ciphers", context.set_ciphers), ("ssl_min_version", _set_minimum(context))):
        if given.get(name):
            _try(attribute, given[name], f"{name}={given[name]!s}")


def warn_unverified(where: str, given: Mapping[str, Any]) -> None:
    """Warn, once per process and place, that the other side is not checked."""
    if given.get("ssl_cert_reqs") == "none":
        what = "certificate is not checked (ssl_cert_reqs=none)"
    elif given.get("ssl_check_hostname") is False:
        what = "name is not checked (ssl_check_hostname=false)"
    else:
        return
    if where not in _warned:
        _warned.add(where)
        logger.warning("%s: the server's %s: whoever is on the way can read and change everything", where, what)


def _read_cert_reqs(name: str, value: Any) -> str:
    if isinstance(value, (str, int, type(None))) and value in _CERT_REQS:
        return _CERT_REQS[value]
    raise OptionError(f"{name} is 'required', 'optional' or 'none', not {value!r}")


def _read_flag(name: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in _FLAGS:
        return _FLAGS[value.lower()]
    raise OptionError(f"{name} is true or false, not {value!r}")


def _read_version(name: str, value: Any) -> ssl.TLSVersion | None:
    if value is None or isinstance(value, ssl.TLSVersion):
        return value
    for version in _VERSIONS:
        if str(value).replace(".", "_").lower() == version.lower():
            return ssl.TLSVersion[version]
    raise OptionError(f"{name} is {' or '.join(map(repr, _VERSIONS))}, not {value!r}")


def _read_verify_flags(name: str, value: Any) -> tuple[ssl.VerifyFlags, ...] | None:
    if value is None:
        return None
    flags = value.split(",") if isinstance(value, str) else value
    try:
        return tuple(flag if isinstance(flag, ssl.VerifyFlags) else ssl.VerifyFlags[flag.strip()] for flag in flags)
    except (AttributeError, KeyError, TypeError):
        known = ", ".join(flag.name for flag in ssl.VerifyFlags if flag.name)
        raise OptionError(f"{name} is a list of {known}, not {value!r}") from None


_READERS: Mapping[str, Callable[[str, Any], Any]] = {
    "ssl_cert_reqs": _read_cert_reqs,
    "ssl_check_hostname": _read_flag,
    "ssl_validate_ocsp": _read_flag,
    "ssl_validate_ocsp_stapled": _read_flag,
    "ssl_min_version": _read_version,
    "ssl_include_verify_flags": _read_verify_flags,
    "ssl_exclude_verify_flags": _read_verify_flags,
}


def _check_file(name: str, path: Any) -> None:
    if path is None:
        return
    try:
        with Path(path).open("rb") as file:
            file.read(1)
    except OSError as exc:
        raise OptionError(f"{name}={str(path)!r}: {exc.strerror}") from exc
    except TypeError:
        raise OptionError(f"{name} is the path of a file, not {type(path).__name__}") from None


def _check_authorities(context: ssl.SSLContext, given: Mapping[str, Any]) -> None:
    file, data = given.get("ssl_ca_certs"), given.get("ssl_ca_data")
    if file:
        _try(lambda path: context.load_verify_locations(cafile=path), file, f"ssl_ca_certs={str(file)!r}")
    if data:
        _try(lambda text: context.load_verify_locations(cadata=text), data, "ssl_ca_data")


def _check_own_certificate(context: ssl.SSLContext, given: Mapping[str, Any]) -> None:
    certificate, key = given.get("ssl_certfile"), given.get("ssl_keyfile")
    if key and not certificate:
        raise OptionError(f"ssl_keyfile={str(key)!r}: needs ssl_certfile")
    if not certificate:
        return
    shown = f"ssl_certfile={str(certificate)!r}" + (f", ssl_keyfile={str(key)!r}" if key else "")

    def load(_: object) -> None:
        # Without a password OpenSSL would ask for one at the terminal.
        context.load_cert_chain(certificate, key, password=lambda: given.get("ssl_password") or "")

    _try(load, None, shown)


def _set_minimum(context: ssl.SSLContext) -> Callable[[Any], None]:
    def put(version: Any) -> None:
        context.minimum_version = version

    return put


def _try(use: Callable[[Any], Any], value: Any, shown: str) -> None:
    try:
        use(value)
    except (ssl.SSLError, OSError, ValueError, TypeError) as exc:
        reason = getattr(exc, "reason", None) or exc
        raise OptionError(f"{shown}: OpenSSL cannot use it ({reason})") from exc

"""Broker URLs, and what kombu makes of them, read as addresses."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from typing import Any

import kombu
import kombu.transport
import pytest
from kombu import Connection
from redis.credentials import UsernamePasswordCredentialProvider

from fairlanes_transport import tls
from fairlanes_transport._register import TRANSPORTS
from fairlanes_transport.addresses import Address
from fairlanes_transport.errors import OptionError
from fairlanes_transport.options import Options

OF_SENTINEL = Options(master_name="mymaster")
SECRET = "s3cret"


@pytest.fixture
def conninfo(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Connection]:
    """kombu's own reading of a URL of ours. Only the URL is of interest, so any transport will do."""
    monkeypatch.setattr(kombu.transport, "_transport_cache", {})
    for scheme in TRANSPORTS:
        monkeypatch.setitem(kombu.transport.TRANSPORT_ALIASES, scheme, "kombu.transport.memory:Transport")
    return Connection


TCP = {"kind": "tcp", "hosts": (("127.0.0.1", 6379),), "db": 0}
VERIFIED = (("ssl_cert_reqs", "required"), ("ssl_check_hostname", True))

# The URL, and the fields of its address. Both readers, ours and kombu's, must come to the same.
URLS = [
    ("fairlanes://", TCP),
    ("fairlanes://h", {**TCP, "hosts": (("h", 6379),)}),
    ("fairlanes://h:1/2", {"hosts": (("h", 1),), "db": 2}),
    ("fairlanes://[::1]:7/2", {"hosts": (("::1", 7),), "db": 2}),
    ("fairlanes://user:pw@h", {"username": "user", "password": "pw"}),
    ("fairlanes://:p%23%40%2F%3A%3F%25@h", {"username": None, "password": "p#@/:?%"}),
    ("fairlaness://h:1/2", {"kind": "tls", "hosts": (("h", 1),), "tls": VERIFIED}),
    (
        "fairlaness://h?ssl_cert_reqs=none",
        {"kind": "tls", "tls": (("ssl_cert_reqs", "none"), ("ssl_check_hostname", False))},
    ),
    (
        "fairlaness://h?ssl_cert_reqs=CERT_OPTIONAL&ssl_ca_certs=/ca.pem",
        {
            "tls": (
                ("ssl_ca_certs", "/ca.pem"),
                ("ssl_cert_reqs", "optional"),
                ("ssl_check_hostname", True),
            )
        },
    ),
    ("fairlaness://h?ssl_check_hostname=false", {"tls": (VERIFIED[0], ("ssl_check_hostname", False))}),
    ("fairlanes-socket:///run/redis.sock", {"kind": "socket", "path": "/run/redis.sock", "db": 0}),
    ("fairlanes-socket:///run/redis.sock/3", {"path": "/run/redis.sock", "db": 3}),
    ("fairlanes-socket://u:pw@/run/x.sock", {"path": "/run/x.sock", "username": "u", "password": "pw"}),
    (
        "fairlanes-sentinel://a:1;fairlanes-sentinel://b:2/3",
        {"kind": "sentinel", "hosts": (("a", 1), ("b", 2)), "db": 3, "master_name": "mymaster"},
    ),
    (
        "fairlanes-sentinel://a;fairlanes-sentinel://u:pw@b",
        {"hosts": (("a", 26379), ("b", 26379)), "username": "u", "password": "pw"},
    ),
    ("fairlanes-sentinel://a/1", {"hosts": (("a", 26379),), "db": 1}),
]


def assert_fields(address: Address, fields: dict[str, Any]) -> None:
    assert {name: getattr(address, name) for name in fields} == fields


@pytest.mark.parametrize(("url", "fields"), URLS)
def test_a_url_is_read(url: str, fields: dict[str, Any]) -> None:
    assert_fields(Address.from_url(url, OF_SENTINEL), fields)


@pytest.mark.parametrize(("url", "fields"), URLS)
def test_kombus_reading_of_a_url_is_the_same_address(
    url: str, fields: dict[str, Any], conninfo: Callable[..., Connection]
) -> None:
    address = Address.from_conninfo(conninfo(url), OF_SENTINEL)
    assert_fields(address, fields)
    assert address == Address.from_url(url, OF_SENTINEL)


@pytest.mark.parametrize(
    ("url", "kind"), [("redis://h/1", "tcp"), ("rediss://h", "tls"), ("unix:///run/x.sock", "socket")]
)
def test_tools_take_the_urls_of_others(url: str, kind: str) -> None:
    assert Address.from_url(url).kind == kind


def test_the_database_of_a_socket_may_stand_in_the_query() -> None:
    assert_fields(Address.from_url("fairlanes-socket:///run/7?virtual_host=2"), {"path": "/run/7", "db": 2})


def test_several_brokers_are_tried_in_turn() -> None:
    first, second = Address.all_from_url("fairlanes://a;fairlaness://b/1")
    assert (first.hosts, second.hosts, second.kind) == ((("a", 6379),), (("b", 6379),), "tls")
    with pytest.raises(OptionError, match="names 2 brokers"):
        Address.from_url("fairlanes://a;fairlanes://b")


def test_the_address_stays_when_kombu_switches_sentinels(conninfo: Callable[..., Connection]) -> None:
    connection = conninfo("fairlanes-sentinel://a:1;fairlanes-sentinel://b:2/3")
    before = Address.from_conninfo(connection, OF_SENTINEL)
    connection.maybe_switch_next()
    assert connection.hostname == "b"
    assert Address.from_conninfo(connection, OF_SENTINEL) == before


def test_a_failover_to_another_server_is_another_address(conninfo: Callable[..., Connection]) -> None:
    connection = conninfo("fairlanes://a:1/1;fairlanes://b:2/1")
    connection.maybe_switch_next()
    assert Address.from_conninfo(connection, Options()).hosts == (("b", 2),)


@pytest.mark.parametrize(
    "url",
    [
        f"fairlanes://:{SECRET}#x@h/0",
        f"fairlanes://:{SECRET}/x@h:1/0",
        f"fairlanes://:123/{SECRET}@h:1/0",
        f"fairlanes://:123#{SECRET}@h:1/0",
        f"fairlanes://:{SECRET}?x@h:1/0",
        f"fairlanes://:[{SECRET}@h:1/0",
        f"fairlanes://:123?{SECRET}=x@h:1/0",
    ],
)
def test_an_unquoted_password_gives_a_hint_without_it(url: str) -> None:
    with pytest.raises(OptionError, match="percent-encode") as caught:
        Address.from_url(url)
    assert SECRET not in str(caught.value)
    # What urllib said would show a part of it in the traceback.
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("fairlanes://h/one", "'one'"),
        ("fairlanes://h/-1", "'-1'"),
        ("fairlanes://h?db=x", "'x'"),
        ("fairlanes://h?lease_seconds=3", "broker_transport_options"),
        ("fairlaness://h?ssl_cert_reqs=maybe", "'required', 'optional' or 'none'"),
        ("fairlaness://h?ssl_certificate=x", "unknown TLS argument 'ssl_certificate'"),
        ("fairlaness://h?ssl_min_version=SSLv3", "ssl_min_version is 'TLSv1_2' or 'TLSv1_3', not 'SSLv3'"),
        ("fairlaness://h?ssl_check_hostname=maybe", "ssl_check_hostname is true or false"),
        ("fairlanes-socket://", "path of the socket"),
        ("fairlanes-socket://run/redis.sock", "three slashes"),
        ("amqp://h", "starts with one of fairlanes://"),
        ("h:6379", "starts with one of"),
        (";", "empty"),
    ],
)
def test_what_cannot_be_understood_says_what_to_do(url: str, told: str) -> None:
    with pytest.raises(OptionError) as caught:
        Address.from_url(url)
    assert told in str(caught.value)


def test_sentinels_need_the_name_of_the_master() -> None:
    with pytest.raises(OptionError, match="master_name"):
        Address.from_url("fairlanes-sentinel://a")


def test_sentinels_of_one_broker_must_agree() -> None:
    with pytest.raises(OptionError, match="different databases"):
        Address.from_url("fairlanes-sentinel://a/1;fairlanes-sentinel://b/2", OF_SENTINEL)


@pytest.mark.parametrize(
    "url", [url for url, _ in URLS] + [f"fairlanes://u:{SECRET}@h/1", f"fairlaness://h?ssl_password={SECRET}"]
)
def test_no_password_is_shown(url: str) -> None:
    address = Address.from_url(url, OF_SENTINEL)
    for shown in (str(address), repr(address)):
        assert SECRET not in shown
        assert "p#@" not in shown


@pytest.mark.parametrize("given", [True, {"ssl_cert_reqs": ssl.CERT_REQUIRED}, {"cert_reqs": "required"}])
def test_celerys_broker_use_ssl_makes_it_tls(given: object, conninfo: Callable[..., Connection]) -> None:
    address = Address.from_conninfo(conninfo("fairlanes://h", ssl=given), Options())
    assert (address.kind, address.tls) == ("tls", VERIFIED)


@pytest.mark.parametrize("given", ["TLSv1_3", "TLSv1.3", "tlsv1_3", ssl.TLSVersion.TLSv1_3])
def test_the_least_version_of_tls(given: object, conninfo: Callable[..., Connection]) -> None:
    address = Address.from_conninfo(conninfo("fairlaness://h", ssl={"ssl_min_version": given}), Options())
    assert dict(address.tls or ())["ssl_min_version"] is ssl.TLSVersion.TLSv1_3


def test_flags_of_the_verification(conninfo: Callable[..., Connection]) -> None:
    name = "ssl_include_verify_flags"
    if name not in tls.NAMES:
        pytest.skip("redis-py has them since 7")
    for given in ("VERIFY_X509_STRICT", ["VERIFY_X509_STRICT"], [ssl.VerifyFlags.VERIFY_X509_STRICT]):
        address = Address.from_conninfo(conninfo("fairlaness://h", ssl={name: given}), Options())
        assert dict(address.tls or ())[name] == (ssl.VerifyFlags.VERIFY_X509_STRICT,)
    with pytest.raises(OptionError, match="is a list of VERIFY"):
        Address.from_conninfo(conninfo("fairlaness://h", ssl={name: "STRICT"}), Options())


@pytest.mark.parametrize("given", [None, False, {}])
def test_no_tls_settings_are_no_tls(given: object, conninfo: Callable[..., Connection]) -> None:
    # Tools such as celery-exporter set broker_use_ssl to an empty mapping when they are told nothing.
    address = Address.from_conninfo(conninfo("fairlanes://h", ssl=given), Options())
    assert (address.kind, address.tls) == ("tcp", None)


def test_sentinels_can_lead_to_a_master_with_tls(conninfo: Callable[..., Connection]) -> None:
    connection = conninfo("fairlanes-sentinel://a;fairlanes-sentinel://b", ssl={"ssl_cert_reqs": "none"})
    address = Address.from_conninfo(connection, OF_SENTINEL)
    assert (address.kind, dict(address.tls or ())["ssl_cert_reqs"]) == ("sentinel", "none")


PROVIDER = UsernamePasswordCredentialProvider("u", "p")


class Provider(UsernamePasswordCredentialProvider):
    """A provider that can be named."""


@pytest.mark.parametrize("given", [Provider, f"{__name__}.Provider", f"{__name__}:Provider"])
def test_a_named_credential_provider_is_made_once(given: object) -> None:
    options = Options(credential_provider=given)
    first, second = (Address.from_url("fairlanes://u:p@h", options) for _ in range(2))
    assert isinstance(first.credentials, UsernamePasswordCredentialProvider)
    assert (first, first.username, first.password) == (second, None, None)


@pytest.mark.skipif(kombu.VERSION[:3] < (5, 6, 1), reason="kombu takes credential providers since 5.6.1")
def test_a_credential_provider_may_be_given_to_kombu(conninfo: Callable[..., Connection]) -> None:
    connection = conninfo("fairlanes://h", credential_provider=PROVIDER)
    assert Address.from_conninfo(connection, Options()).credentials is PROVIDER


def test_something_else_is_no_credential_provider() -> None:
    with pytest.raises(OptionError, match="CredentialProvider or its dotted name, not int"):
        Address.from_url("fairlanes://h", Options(credential_provider=3))

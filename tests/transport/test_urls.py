"""Every form of broker URL, end to end on a server that asks for it; and no password where people look."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import redis
from kombu import Connection

from fairlanes_transport.errors import OptionError
from tests.harness import Server, missing
from tests.transport.conftest import ours, works

pytestmark = ours
ODD = "p@ss:w/o#r?d%[]&=+ \u00fc"
"""A password with everything that has a meaning in a URL."""


def silent(connection: Connection, password: str, caplog: pytest.LogCaptureFixture) -> None:
    """Assert that a password is nowhere that people look."""
    transport = connection.transport
    looked = [
        connection.as_uri(),
        repr(connection),
        str(connection.as_uri(include_password=False)),
        repr(transport.link),
        str(transport.link.address),
        repr(transport.link.address),
        repr(transport.options),
        caplog.text,
    ]
    for text in looked:
        assert password not in text
        assert quote(password, safe="") not in text


@pytest.fixture
def start(fresh_server: Callable[..., Server]) -> Callable[..., Server]:
    """A function that starts a server with arguments of its own."""
    return fresh_server


@pytest.mark.parametrize("password", ["secret", ODD])
def test_a_password(
    start: Callable[..., Server], connect_to: Callable[..., Connection], password: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    server = start("--requirepass", password)
    connection = connect_to(f"fairlanes://:{quote(password, safe='')}@127.0.0.1:{server.port}/0")
    works(connection)
    silent(connection, password, caplog)


def test_a_wrong_password(
    start: Callable[..., Server], connect_to: Callable[..., Connection], caplog: pytest.LogCaptureFixture
) -> None:
    server = start("--requirepass", "secret")
    for url in (f"fairlanes://:sesame@127.0.0.1:{server.port}", f"fairlanes://127.0.0.1:{server.port}"):
        connection = connect_to(url)
        with pytest.raises(connection.connection_errors) as caught:
            connection.connect()
        assert "sesame" not in str(caught.value)
    assert "sesame" not in caplog.text


def test_a_user(
    start: Callable[..., Server], connect_to: Callable[..., Connection], caplog: pytest.LogCaptureFixture
) -> None:
    """With the least that an ACL has to allow."""
    server = start()
    server.client().execute_command(
        "ACL", "SETUSER", "worker", "on", ">" + ODD, "resetkeys", "~fairlanes:*", "~_kombu*", "allchannels",
        "+@all", "-@admin", "-@dangerous", "+client|unblock", "+client|id", "+client|setname", "+info",
    )  # fmt: skip
    connection = connect_to(f"fairlanes://worker:{quote(ODD, safe='')}@127.0.0.1:{server.port}/0")
    works(connection)
    silent(connection, ODD, caplog)
    assert {client["user"] for client in server.client().client_list() if client["cmd"] in ("blpop", "psubscribe")} <= {
        "worker"
    }


def test_a_database(start: Callable[..., Server], connect_to: Callable[..., Connection]) -> None:
    server = start()
    for url in (f"fairlanes://127.0.0.1:{server.port}/5", f"fairlanes://127.0.0.1:{server.port}//5"):
        works(connect_to(url))
    assert server.client(5).exists("fairlanes:2:queues")
    assert not server.client(0).exists("fairlanes:2:queues")


@pytest.mark.parametrize("url", ["fairlanes://127.0.0.1:{port}/five", "fairlanes://127.0.0.1:{port}/-1"])
def test_a_database_that_is_none(start: Callable[..., Server], connect_to: Callable[..., Connection], url: str) -> None:
    with pytest.raises(OptionError, match="database"):
        connect_to(url.format(port=start().port)).connect()


def test_keyword_arguments_in_place_of_a_url(start: Callable[..., Server]) -> None:
    server = start("--requirepass", ODD)
    with Connection(
        transport="fairlanes", hostname="127.0.0.1", port=server.port, password=ODD, virtual_host="2"
    ) as connection:
        works(connection)
    assert server.client(2, password=ODD).exists("fairlanes:2:queues")


def test_ipv6(start: Callable[..., Server], connect_to: Callable[..., Connection]) -> None:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        missing("no IPv6 here")
    server = start("--bind", "127.0.0.1 ::1")
    works(connect_to(f"fairlanes://[::1]:{server.port}/1"))


def test_a_unix_socket(
    start: Callable[..., Server],
    connect_to: Callable[..., Connection],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = tmp_path / "broker.sock"
    start("--unixsocket", str(path), "--requirepass", "hunter2")
    works(connect_to(f"fairlanes-socket://:hunter2@{path}"))
    connection = connect_to(f"fairlanes-socket://:hunter2@{path}/3")
    works(connection)
    silent(connection, "hunter2", caplog)
    with redis.Redis(unix_socket_path=str(path), password="hunter2", db=3) as client:
        assert client.exists("fairlanes:2:queues")


# ------------------------------------------------------------------- failover lists


def test_the_second_broker_of_a_list(start: Callable[..., Server], connect_to: Callable[..., Connection]) -> None:
    server = start()
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        down = closed.getsockname()[1]
    connection = connect_to(f"fairlanes://127.0.0.1:{down}/0;fairlanes://127.0.0.1:{server.port}/4")
    connection.ensure_connection(max_retries=4, interval_start=0, interval_step=0)
    works(connection)
    assert server.client(4).exists("fairlanes:2:queues")
    assert not server.client(0).exists("fairlanes:2:queues")


def test_over_to_the_second_broker_while_publishing(
    start: Callable[..., Server], connect_to: Callable[..., Connection]
) -> None:
    first, second = start(), start()
    connection = connect_to(f"fairlanes://127.0.0.1:{first.port}/0;fairlanes://127.0.0.1:{second.port}/0")
    policy = {"max_retries": 5, "interval_start": 0, "interval_step": 0.1}
    connection.Producer().publish(1, routing_key="q", retry=True, retry_policy=policy)
    first.kill()
    connection.Producer().publish(2, routing_key="q", retry=True, retry_policy=policy)
    assert connection.default_channel.basic_get("q", no_ack=True).payload == 2


def test_a_list_with_passwords_is_printed_without_them(
    start: Callable[..., Server], connect_to: Callable[..., Connection], caplog: pytest.LogCaptureFixture
) -> None:
    server = start("--requirepass", "hunter2")
    connection = connect_to(f"fairlanes://:hunter2@127.0.0.1:{server.port}/0;fairlanes://:hunter3@127.0.0.1:1/0")
    works(connection)
    silent(connection, "hunter2", caplog)
    silent(connection, "hunter3", caplog)


@pytest.mark.parametrize("options", [{"lease_second": 5}, {"park_seconds": "x"}, {"claim_batch": 0}])
def test_a_wrong_option_is_one_clear_error(
    start: Callable[..., Server], connect_to: Callable[..., Connection], options: dict[str, Any]
) -> None:
    with pytest.raises(OptionError, match=next(iter(options))):
        connect_to(start().url("fairlanes"), **options).connect()


def test_options_of_kombus_transport_are_ignored(
    start: Callable[..., Server], connect_to: Callable[..., Connection], caplog: pytest.LogCaptureFixture
) -> None:
    """To move over is only the URL."""
    options = {
        "visibility_timeout": 43200, "fanout_prefix": True, "fanout_patterns": True, "priority_steps": [0, 5],
        "queue_order_strategy": "priority", "socket_keepalive": True, "retry_on_timeout": True, "sep": ":",
        "unacked_key": "x", "max_retries": 3, "interval_start": 0, "interval_step": 0.2, "interval_max": 0.5,
    }  # fmt: skip
    works(connect_to(start().url("fairlanes"), **options))

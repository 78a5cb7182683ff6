"""TLS to the server, and to its sentinels, on real servers."""

from __future__ import annotations

import contextlib
import logging
import re
import socket
import subprocess
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from kombu import Connection
from redis.exceptions import ConnectionError as DriverConnectionError

from fairlanes_transport import tls as tls_arguments
from fairlanes_transport.addresses import Address
from fairlanes_transport.connections import Link
from fairlanes_transport.errors import OptionError
from fairlanes_transport.guard import GuardedProcess
from fairlanes_transport.options import Options
from tests.harness import Server, missing, need_redis
from tests.transport.conftest import ours, works

pytestmark = ours

# ------------------------------------------------------------------- TLS


class TLSServer(Server):
    """A server with a second, encrypted port."""

    def __init__(self, kind: str, directory: Path, *args: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.tls_port = probe.getsockname()[1]
        files = {"cert-file": "server.crt", "key-file": "server.key", "ca-cert-file": "ca.crt"}
        tls = [x for name, file in files.items() for x in (f"--tls-{name}", str(directory / file))]
        super().__init__(kind, "--tls-port", str(self.tls_port), *tls, *args)


@pytest.fixture(params=["no", "yes"])
def tls(request: pytest.FixtureRequest, certificates: Path) -> Iterator[TLSServer]:
    """A server that speaks TLS, with and without asking for the client's certificate."""
    from fairlanes_transport.embedded import EmbeddedServerError

    for kind in ("redis", "valkey"):
        server = TLSServer(kind, certificates, "--tls-auth-clients", request.param)
        try:
            server.start()
        except EmbeddedServerError as error:
            server.close()
            if "tls" not in str(error).lower():
                raise
            continue
        yield server
        server.close()
        return
    missing("neither server speaks TLS")


def test_tls(tls: TLSServer, certificates: Path, connect_to: Callable[..., Connection]) -> None:
    asks = tls.args[-1] == "yes"
    own = f"&ssl_certfile={certificates}/client.crt&ssl_keyfile={certificates}/client.key" if asks else ""
    works(connect_to(f"fairlaness://localhost:{tls.tls_port}/1?ssl_ca_certs={certificates}/ca.crt{own}"))
    assert tls.client(1).exists("fairlanes:2:queues")


def test_tls_by_settings(tls: TLSServer, certificates: Path) -> None:
    """Celery's ``broker_use_ssl``."""
    names = {"ssl_ca_certs": "ca.crt", "ssl_certfile": "client.crt", "ssl_keyfile": "client.key"}
    ssl: dict[str, Any] = {name: str(certificates / file) for name, file in names.items()}
    for url in (f"fairlaness://127.0.0.1:{tls.tls_port}/0", f"fairlanes://127.0.0.1:{tls.tls_port}/0"):
        with Connection(url, ssl=ssl) as connection:
            works(connection)


def test_tls_verifies_by_itself(tls: TLSServer, connect_to: Callable[..., Connection]) -> None:
    """A certificate of a CA that the system does not know is refused, unless one asks for no check."""
    url = f"fairlaness://localhost:{tls.tls_port}/0"
    connection = connect_to(url)
    with pytest.raises(connection.connection_errors):
        connection.connect()
    if tls.args[-1] == "no":
        works(connect_to(f"{url}?ssl_cert_reqs=none"))


def test_the_least_version_is_asked_for(
    tls: TLSServer, certificates: Path, connect_to: Callable[..., Connection]
) -> None:
    own = f"&ssl_certfile={certificates}/client.crt&ssl_keyfile={certificates}/client.key"
    url = f"fairlaness://localhost:{tls.tls_port}/0?ssl_ca_certs={certificates}/ca.crt{own}"
    connection = connect_to(f"{url}&ssl_min_version=TLSv1_3")
    works(connection)
    sock = connection.transport.metronome.park.connection._sock
    assert sock.version() == "TLSv1.3"


# what is wrong has its name in the error


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"ssl_ca_certs": "gone.pem"}, r"ssl_ca_certs='.*gone\.pem': No such file"),
        ({"ssl_ca_certs": "names"}, r"ssl_ca_certs='.*names': OpenSSL cannot use it"),
        ({"ssl_certfile": "gone.crt"}, r"ssl_certfile='.*gone\.crt': No such file"),
        ({"ssl_certfile": "client.crt", "ssl_keyfile": "gone.key"}, r"ssl_keyfile='.*gone\.key': No such file"),
        (
            {"ssl_certfile": "client.crt", "ssl_keyfile": "server.key"},
            r"ssl_certfile='.*', ssl_keyfile='.*server\.key': .*MISMATCH",
        ),
        ({"ssl_certfile": "client.crt", "ssl_keyfile": "names"}, r"ssl_keyfile='.*names': OpenSSL cannot use it"),
        ({"ssl_certfile": "client.crt", "ssl_keyfile": "locked.key"}, r"ssl_keyfile='.*locked\.key': OpenSSL"),
        ({"ssl_keyfile": "client.key"}, r"ssl_keyfile='.*': needs ssl_certfile"),
        ({"ssl_ca_path": "ca.crt"}, r"ssl_ca_path='.*ca\.crt': is no directory"),
    ],
)
def test_a_wrong_file_is_named(certificates: Path, given: dict[str, str], told: str) -> None:
    ssl = {name: str(certificates / file) for name, file in given.items()}
    with pytest.raises(OptionError, match=told), Connection("fairlaness://127.0.0.1:1", ssl=ssl) as connection:
        connection.connect()


def test_a_wrong_setting_is_named() -> None:
    with pytest.raises(OptionError, match="ssl_ciphers=NONE-SUCH: OpenSSL cannot use it"):
        Link(Address.from_url("fairlaness://127.0.0.1:1?ssl_ciphers=NONE-SUCH"))
    with pytest.raises(OptionError, match="ssl_ca_data: OpenSSL cannot use it"):
        Link(Address.from_url("fairlaness://127.0.0.1:1?ssl_ca_data=s3cret"))


@pytest.mark.parametrize(("query", "told"), [("ssl_cert_reqs=none", "certificate"), ("ssl_check_hostname=no", "name")])
def test_who_is_not_checked_is_said_once(
    query: str, told: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls_arguments, "_warned", set())
    for timeout in (1.0, 2.0):
        Link(Address.from_url(f"fairlaness://127.0.0.1:1?{query}"), Options(socket_timeout=timeout))
    (record,) = caplog.records
    assert (record.levelno, "127.0.0.1:1" in record.getMessage()) == (logging.WARNING, True)
    assert f"the server's {told} is not checked" in record.getMessage()


def test_who_is_checked_gives_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    Link(Address.from_url("fairlaness://127.0.0.1:1"))
    assert caplog.records == []


# ------------------------------------------------------------------- sentinels


class Listener:
    """Takes connections, keeps the first bytes that it is sent, and hangs up."""

    def __init__(self) -> None:
        self._sock = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._sock.getsockname()[1]
        self.heard = b""
        self._thread = threading.Thread(target=self._hear, daemon=True)
        self._thread.start()

    def _hear(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._sock.accept()
                with connection:
                    self.heard = self.heard or connection.recv(4096)

    def close(self) -> bytes:
        """Stop; return what was heard."""
        self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
        self._thread.join(10)
        return self.heard


@pytest.mark.parametrize(
    ("query", "kwargs", "encrypted"),
    [
        ("?ssl_ca_certs={ca}", {}, True),
        ("", {"ssl": True}, True),
        ("", {"ssl_ca_certs": "{ca}"}, True),
        ("?ssl_ca_certs={ca}", {"ssl": False}, False),
        ("", {}, False),
    ],
)
def test_what_sentinels_are_sent_first(certificates: Path, query: str, kwargs: dict[str, Any], encrypted: bool) -> None:
    """Over TLS nothing but the hello of TLS goes out in plain text: no login."""
    listener, ca = Listener(), str(certificates / "ca.crt")
    kwargs = {name: value.format(ca=ca) if isinstance(value, str) else value for name, value in kwargs.items()}
    options = Options(master_name="mymaster", sentinel_kwargs={"password": "of-the-sentinels", **kwargs})
    url = f"fairlanes-sentinel://:secret@127.0.0.1:{listener.port}/0{query.format(ca=ca)}"
    with pytest.raises(DriverConnectionError, match="no sentinel names the master"):
        Link(Address.from_url(url, options), options).connect()
    heard = listener.close()
    assert heard[:2] == b"\x16\x03" if encrypted else b"AUTH" in heard
    assert (b"of-the-sentinels" in heard) is not encrypted


@pytest.fixture
def site(certificates: Path, tmp_path: Path) -> Iterator[Callable[[bool], tuple[TLSServer, int]]]:
    """A function that starts a master with TLS and a sentinel, with TLS alone or in plain text: (master, port)."""
    started: list[Any] = []

    def start(encrypted: bool) -> tuple[TLSServer, int]:
        server = TLSServer("redis", certificates, "--tls-auth-clients", "no", "--requirepass", "secret")
        started.append(server)
        server.start()
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            port = unused.getsockname()[1]
        files = {"cert-file": "server.crt", "key-file": "server.key", "ca-cert-file": "ca.crt"}
        conf = tmp_path / "sentinel.conf"
        lines = [
            f"port {0 if encrypted else port}", f"tls-port {port if encrypted else 0}", "tls-auth-clients no",
            "tls-replication yes", *(f"tls-{name} {certificates / file}" for name, file in files.items()),
            f"dir {tmp_path}", "requirepass of-the-sentinels",
            f"sentinel monitor mymaster 127.0.0.1 {server.tls_port} 1", "sentinel auth-pass mymaster secret",
        ]  # fmt: skip
        conf.write_text("\n".join(lines) + "\n")
        process = GuardedProcess([need_redis(), str(conf), "--sentinel"], stdout=subprocess.DEVNULL)
        started.append(process)
        return server, port

    yield start
    for one in reversed(started):
        if isinstance(one, GuardedProcess):
            one.kill()
        one.close()


@pytest.mark.parametrize("encrypted", [True, False])
def test_sentinels_over_tls(
    site: Callable[[bool], tuple[TLSServer, int]],
    certificates: Path,
    connect_to: Callable[..., Connection],
    caplog: pytest.LogCaptureFixture,
    encrypted: bool,
) -> None:
    """Server and sentinels over TLS; or the sentinels in plain text, where one says so."""
    caplog.set_level(logging.DEBUG)
    server, port = site(encrypted)
    plain = {} if encrypted else {"ssl": False}
    connection = connect_to(
        f"fairlanes-sentinel://:secret@127.0.0.1:{port}/1?ssl_ca_certs={certificates}/ca.crt",
        master_name="mymaster",
        sentinel_kwargs={"password": "of-the-sentinels", **plain},
    )
    connection.ensure_connection(max_retries=20, interval_start=0.2, interval_step=0)
    works(connection)
    assert server.client(1, password="secret").exists("fairlanes:2:queues")
    assert "of-the-sentinels" not in caplog.text + repr(connection.transport.options)


def test_no_sentinel_answers(connect_to: Callable[..., Connection], caplog: pytest.LogCaptureFixture) -> None:
    """The error names the sentinels, and shows no password, whichever redis-py is installed."""
    caplog.set_level(logging.DEBUG)
    connection = connect_to(
        "fairlanes-sentinel://u:p4ss@127.0.0.1:1;fairlanes-sentinel://127.0.0.1:2",
        master_name="mymaster",
        sentinel_kwargs={"username": "watch", "password": "s3cret"},
    )
    with pytest.raises(connection.connection_errors) as caught:
        connection.connect()
    shown = "".join(traceback.format_exception(caught.value)) + caplog.text
    assert "s3cret" not in shown
    assert "p4ss" not in shown
    assert re.search("no sentinel names the master 'mymaster': 127.0.0.1:1 does not answer .*127.0.0.1:2", shown)


def test_the_result_backend_shows_no_password_of_its_sentinels() -> None:
    app = Celery(broker="memory://", backend="fairlanes-sentinel://:p4ss@127.0.0.1:1", set_as_current=False)
    app.conf.result_backend_transport_options = {
        "master_name": "mymaster",
        "sentinel_kwargs": {"password": "s3cret"},
        "retry_policy": {"max_retries": 0},
    }
    with pytest.raises(DriverConnectionError) as caught:
        app.backend.client.get("x")
    shown = "".join(traceback.format_exception(caught.value))
    assert "no sentinel names the master 'mymaster'" in shown
    assert "s3cret" not in shown
    assert "p4ss" not in shown


def test_the_result_backend_sends_its_sentinels_no_login_in_plain_text(certificates: Path) -> None:
    listener = Listener()
    app = Celery(broker="memory://", backend=f"fairlanes-sentinel://127.0.0.1:{listener.port}", set_as_current=False)
    app.conf.redis_backend_use_ssl = {"ssl_cert_reqs": "required", "ssl_ca_certs": str(certificates / "ca.crt")}
    app.conf.result_backend_transport_options = {
        "master_name": "mymaster",
        "sentinel_kwargs": {"password": "of-the-sentinels"},
        "retry_policy": {"max_retries": 0},
    }
    with pytest.raises(DriverConnectionError):
        app.backend.client.get("x")
    assert listener.close()[:2] == b"\x16\x03"


@pytest.mark.parametrize(
    ("kwargs", "told"),
    [
        ({"pasword": "s3cret"}, "option sentinel_kwargs: unknown argument 'pasword': did you mean 'password'?"),
        ({"ssl_cert_reqs": "maybe"}, "ssl_cert_reqs is 'required'"),
        ({"ssl": True, "ssl_ca_certs": "/gone.pem"}, "ssl_ca_certs='/gone.pem': No such file"),
    ],
)
def test_wrong_arguments_of_sentinels_are_named(
    connect_to: Callable[..., Connection], kwargs: dict[str, Any], told: str
) -> None:
    connection = connect_to("fairlanes-sentinel://127.0.0.1:1", master_name="m", sentinel_kwargs=kwargs)
    with pytest.raises(OptionError, match=re.escape(told)):
        connection.connect()

"""The pool of command connections, against real servers: replies, losses, limits, forks, failovers."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import redis
from redis import exceptions as driver
from redis.credentials import StreamingCredentialProvider

from fairlanes_transport.connections import IDLE_CHECK_SECONDS, Address, Link
from fairlanes_transport.embedded import EmbeddedServerError
from fairlanes_transport.errors import (
    BrokerUnavailable,
    LaneFull,
    NoFreeConnection,
    QueueAbsent,
    ScriptError,
    ServerFull,
)
from fairlanes_transport.options import Options
from tests.harness import Server, need_redis, wait_for


@pytest.fixture
def make_link(server: Server) -> Iterator[Callable[..., Link]]:
    """A function that makes a link of its own to ``server``, with options."""
    made: list[Link] = []

    def make(url: str = "", **options: Any) -> Link:
        chosen = Options(**options)
        link = Link(Address.from_url(url or server.url("fairlanes"), chosen), chosen)
        made.append(link)
        return link

    yield make
    for link in made:
        link.close()


def clients(server: Server, name: str = "") -> list[dict[str, str]]:
    """Return the server's clients but the one that asks, those with the given name if one is given."""
    client = server.client()
    own = str(client.client_id())
    listed: list[dict[str, str]] = client.client_list()
    return [each for each in listed if each["id"] != own and (not name or each["name"] == name)]


# -- replies


def test_replies_are_bytes_and_numbers(make_link: Callable[..., Link]) -> None:
    link = make_link()
    assert link.call("SET", "k", b"\xff\x00") == b"OK"
    assert link.call("GET", "k") == b"\xff\x00"
    assert link.call("INCRBY", "n", 3) == 3
    assert link.call("GET", "absent") is None
    assert link.call("EVAL", "return {1, {KEYS[1]}, false}", 1, "k") == [1, [b"k"], None]


def test_the_database_is_that_of_the_url(make_link: Callable[..., Link], server: Server) -> None:
    make_link(server.url("fairlanes", db=3)).call("SET", "here", 1)
    assert server.client(db=3).exists("here")


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        ("FLFULL 3 3", LaneFull),
        ("FLABSENT", QueueAbsent),
        ("FLARG negative", ScriptError),
        ("OOM command not allowed", ServerFull),
    ],
)
def test_an_error_reply_is_typed_and_keeps_the_connection(
    make_link: Callable[..., Link], reply: str, error: type[Exception]
) -> None:
    link = make_link()
    link.connect()
    before = link.call("CLIENT", "ID")
    with pytest.raises(error) as caught:
        link.call("EVAL", f"return redis.error_reply('{reply}')", 0)
    assert isinstance(caught.value.__cause__, driver.ResponseError)
    assert link.call("CLIENT", "ID") == before


def test_an_error_inside_a_reply_is_raised(make_link: Callable[..., Link]) -> None:
    with pytest.raises(QueueAbsent):
        make_link().call("EVAL", "return {1, {redis.error_reply('FLABSENT')}}", 0)


def test_an_unknown_script_is_the_drivers_own_error(make_link: Callable[..., Link]) -> None:
    with pytest.raises(driver.NoScriptError):
        make_link().call("EVALSHA", "0" * 40, 0)


def test_a_pipeline_answers_in_order_with_errors_in_place(make_link: Callable[..., Link]) -> None:
    link = make_link()
    full = ("EVAL", "return redis.error_reply('FLFULL 1 1')", 0)
    first, error, last = link.pipeline([("SET", "k", "v"), full, ("GET", "k")])
    assert (first, last) == (b"OK", b"v")
    assert isinstance(error, LaneFull)
    with pytest.raises(LaneFull):
        link.pipeline([full, ("SET", "k", "after")], raise_on_error=True)
    assert link.call("GET", "k") == b"after"
    assert link.pipeline([]) == []


def test_a_big_pipeline_passes(make_link: Callable[..., Link]) -> None:
    value = b"x" * 20_000
    commands = [("SET", f"k{n}", value) for n in range(200)]
    assert make_link().pipeline(commands) == [b"OK"] * 200


# -- the pool


def test_one_link_for_each_broker_and_shape(server: Server) -> None:
    address = Address.from_url(server.url("fairlanes"))
    link = Link.shared(address)
    try:
        assert Link.shared(Address.from_url(server.url("redis")), Options(lease_seconds=5)) is link
        assert Link.shared(address, Options(max_connections=3)) is not link
    finally:
        link.close()
    assert Link.shared(address) is not link


def test_one_connection_serves_one_thread(make_link: Callable[..., Link], server: Server) -> None:
    link = make_link(client_name="counted")
    for _ in range(20):
        link.call("PING")
    assert len(clients(server, "counted")) == 1


def test_connecting_costs_no_more_commands_than_it_must(server: Server) -> None:
    chosen = Options()
    link = Link(Address.from_url(server.url("fairlanes", db=1)), chosen)
    before = server.client().info("commandstats")
    link.connect()
    after = server.client().info("commandstats")
    link.close()
    sent = {name for name, stats in after.items() if stats["calls"] > before.get(name, {"calls": 0})["calls"]}
    assert sent == {"cmdstat_select", "cmdstat_ping", "cmdstat_info"}


def test_threads_share_no_more_than_max_connections(make_link: Callable[..., Link], server: Server) -> None:
    link = make_link(max_connections=3, client_name="bounded")

    def work(n: int) -> list[int]:
        return [link.call("EVAL", "redis.call('INCR', KEYS[1]) return tonumber(ARGV[1])", 1, "n", n)] * 2

    with ThreadPoolExecutor(12) as pool:
        assert [answer[0] for answer in pool.map(work, range(300))] == list(range(300))
    assert link.call("GET", "n") == b"300"
    assert len(clients(server, "bounded")) <= 3


def test_who_finds_no_free_connection_waits_until_one_comes_back(make_link: Callable[..., Link]) -> None:
    link = make_link(max_connections=1)
    held = threading.Thread(target=link.call, args=("BLPOP", "never", "0.4"))
    held.start()
    wait_for(lambda: not link._idle and link._open == 1, 2, "connection in use")
    assert link.call("PING") == b"PONG"
    held.join()


def test_who_finds_no_free_connection_for_too_long_is_told(make_link: Callable[..., Link]) -> None:
    link = make_link(max_connections=1, socket_timeout=0.5)
    held = threading.Thread(target=link.call, args=("BLPOP", "never", "0.4"))
    link.options = Options(max_connections=1, socket_timeout=0.1)
    held.start()
    wait_for(lambda: not link._idle and link._open == 1, 2, "connection in use")
    with pytest.raises(NoFreeConnection, match="raise max_connections"):
        link.call("PING")
    held.join()
    assert link.call("PING") == b"PONG"


# -- losses


def test_a_killed_connection_is_raised_and_then_replaced(make_link: Callable[..., Link], server: Server) -> None:
    link = make_link(client_name="victim")
    before = link.call("CLIENT", "ID")
    server.client().client_kill_filter(_id=before)
    with pytest.raises(driver.ConnectionError):
        link.call("PING")
    assert link.call("CLIENT", "ID") != before


def test_an_idle_connection_that_the_server_closed_is_replaced_in_silence(
    make_link: Callable[..., Link], server: Server
) -> None:
    link = make_link()
    before = link.call("CLIENT", "ID")
    server.client().client_kill_filter(_id=before)
    time.sleep(IDLE_CHECK_SECONDS + 0.1)
    assert link.call("CLIENT", "ID") != before


def test_an_idle_connection_in_order_is_kept(make_link: Callable[..., Link]) -> None:
    link = make_link()
    before = link.call("CLIENT", "ID")
    time.sleep(IDLE_CHECK_SECONDS + 0.1)
    assert link.call("CLIENT", "ID") == before


def test_a_late_reply_is_never_read_by_the_next_command(make_link: Callable[..., Link]) -> None:
    link = make_link(socket_timeout=0.1)
    with pytest.raises(driver.TimeoutError):
        link.call("BLPOP", "never", "0.3")
    assert link.call("ECHO", "mine") == b"mine"
    time.sleep(0.4)
    assert link.call("ECHO", "mine") == b"mine"


class Interrupted(BaseException):
    """As KeyboardInterrupt, or gevent's Timeout."""


@pytest.mark.parametrize("command", ["call", "pipeline"])
def test_a_call_that_was_interrupted_leaves_no_reply_behind(
    make_link: Callable[..., Link], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    link = make_link(max_connections=1)
    link.connect()
    connection = link._idle[0][0]

    def interrupted(*_args: Any, **_kwargs: Any) -> None:
        raise Interrupted

    monkeypatch.setattr(connection, "read_response", interrupted)
    with pytest.raises(Interrupted):
        link.call("ECHO", "old") if command == "call" else link.pipeline([("ECHO", "old")])
    assert connection._sock is None
    assert link.call("ECHO", "new") == b"new"


def test_a_broker_that_is_away_is_a_connection_error_and_leaks_no_slot() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    link = Link(Address.from_url(f"fairlanes://127.0.0.1:{port}"), Options(max_connections=2))
    for _ in range(5):
        with pytest.raises(driver.ConnectionError):
            link.connect()
    assert link._open == 0


def test_a_restart_costs_one_error(fresh_server: Callable[..., Server]) -> None:
    server = fresh_server()
    link = Link(Address.from_url(server.url("fairlanes")))
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda _: link.call("EVAL", "return 1", 0), range(30)))
    server.restart()
    with pytest.raises(driver.ConnectionError):
        link.call("PING")
    assert link.call("PING") == b"PONG"
    link.close()


def test_a_master_that_became_a_replica_is_left_by_every_connection(
    fresh_server: Callable[..., Server],
) -> None:
    server = fresh_server()
    link = Link(Address.from_url(server.url("fairlanes")))
    before = link.call("CLIENT", "ID")
    generation = link.generation
    server.client().execute_command("REPLICAOF", "127.0.0.1", "1")
    with pytest.raises(BrokerUnavailable, match=r"READONLY|read only"):
        link.call("SET", "k", 1)
    assert link.generation > generation
    assert not link._idle
    (refused,) = link.pipeline([("SET", "k", 1)])
    assert isinstance(refused, BrokerUnavailable)
    server.client().execute_command("REPLICAOF", "NO", "ONE")
    assert link.call("SET", "k", 1) == b"OK"
    assert link.call("CLIENT", "ID") != before
    link.close()


def test_a_full_server_is_told_from_a_lost_one(fresh_server: Callable[..., Server]) -> None:
    server = fresh_server()
    link = Link(Address.from_url(server.url("fairlanes")))
    server.client().config_set("maxmemory", 1)
    with pytest.raises(ServerFull):
        link.call("SET", "k", 1)
    with pytest.raises(ServerFull):
        link.call("EVAL", "return redis.call('SET', KEYS[1], 1)", 1, "k")
    assert link.call("PING") == b"PONG"
    link.close()


def test_disconnect_takes_connections_in_use_when_they_come_back(
    make_link: Callable[..., Link], server: Server
) -> None:
    link = make_link(client_name="leaving")
    held = threading.Thread(target=link.call, args=("BLPOP", "never", "0.3"))
    held.start()
    wait_for(lambda: len(clients(server, "leaving")) == 1, 2, "connection in use")
    link.disconnect()
    held.join()
    wait_for(lambda: not clients(server, "leaving"), 2, "all closed")
    assert link._open == 0


# -- long-lived connections


def test_a_dedicated_connection_is_outside_the_pool(make_link: Callable[..., Link], server: Server) -> None:
    link = make_link(max_connections=1)
    parked = link.dedicated(socket_timeout=None, client_name="parked")
    assert not clients(server, "parked")
    parked.connect()
    assert parked._sock.gettimeout() is None
    assert (parked.health_check_interval, str(parked.protocol)) == (0, "2")
    assert link.call("PING") == b"PONG"
    parked.send_command("BLPOP", "never", "0.2")
    assert parked.read_response() is None
    parked.disconnect()


def test_a_silent_server_does_not_hold_the_handshake_of_an_endless_wait() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"fairlanes://127.0.0.1:{silent.getsockname()[1]}/1"
        link = Link(Address.from_url(url), Options(socket_timeout=0.2))
        with pytest.raises(driver.TimeoutError):
            link.dedicated(socket_timeout=None).connect()


def test_new_credentials_reach_the_next_connection(server: Server) -> None:
    class Rotating(StreamingCredentialProvider):
        callback: Any = None
        asked = 0

        def get_credentials(self) -> tuple[str, str]:
            self.asked += 1
            return ("default", "any")

        def on_next(self, callback: Any) -> None:
            self.callback = callback

        def on_error(self, callback: Any) -> None: ...

        def is_streaming(self) -> bool:
            return True

    server.client().execute_command("ACL", "SETUSER", "default", "nopass")
    provider = Rotating()
    options = Options(credential_provider=provider)
    link = Link(Address.from_url(server.url("fairlanes"), options), options)
    link.connect()
    generation = link.generation
    link.connect()
    assert provider.asked == 1
    provider.callback("token")
    assert link.generation > generation
    link.connect()
    assert provider.asked == 2
    link.close()


def test_a_callable_password_is_asked_for_each_connection(server: Server) -> None:
    asked: list[int] = []

    def password() -> str:
        asked.append(1)
        return "any"

    address = Address.from_url(server.url("fairlanes"))
    link = Link(Address(address.kind, address.hosts, username="default", password=password))
    link.connect()
    link.disconnect()
    link.connect()
    link.close()
    assert len(asked) == 2


# -- forks and greenlets


def in_child(function: Callable[[], object]) -> int:
    """Run *function* in a forked child; returns its exit status, 0 if it returned something true."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            status = 0 if function() else 2
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_forked_child_uses_connections_of_its_own(make_link: Callable[..., Link]) -> None:
    link = make_link(max_connections=1)
    before = link.call("CLIENT", "ID")
    parked = link.dedicated(socket_timeout=None)
    parked.connect()

    def child() -> bool:
        return link.call("CLIENT", "ID") != before and parked._sock is None

    assert in_child(child) == 0
    assert link.call("CLIENT", "ID") == before
    parked.send_command("PING")
    assert parked.read_response() == b"PONG"
    parked.disconnect()


def test_a_fork_while_every_connection_is_in_use(make_link: Callable[..., Link]) -> None:
    link = make_link(max_connections=1)
    held = threading.Thread(target=link.call, args=("BLPOP", "never", "0.5"))
    held.start()
    wait_for(lambda: not link._idle and link._open == 1, 2, "connection in use")
    assert in_child(lambda: link.call("PING") == b"PONG") == 0
    held.join()
    assert link.call("PING") == b"PONG"


@pytest.mark.parametrize("library", ["gevent", "eventlet"])
def test_greenlets_share_the_pool(library: str, server: Server) -> None:
    pytest.importorskip(library)
    patch = {
        "gevent": "from gevent import monkey; monkey.patch_all(); import gevent; spawn = gevent.spawn\n"
        "join = lambda jobs: gevent.joinall(jobs, raise_error=True)",
        "eventlet": "import eventlet; eventlet.monkey_patch(); spawn = eventlet.spawn\n"
        "join = lambda jobs: [job.wait() for job in jobs]",
    }[library]
    code = f"""
{patch}
import time
from fairlanes_transport.connections import Address, Link
from fairlanes_transport.options import Options
link = Link(Address.from_url({server.url("fairlanes")!r}), Options(max_connections=4))
started = time.monotonic()
join([spawn(link.call, 'BLPOP', f'never{{n}}', '0.3') for n in range(8)])
assert 0.5 < time.monotonic() - started < 2, time.monotonic() - started
print(link.call('PING'))
"""
    command = [sys.executable, "-W", "ignore", "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (result.stdout, result.returncode) == ("b'PONG'\n", 0), result.stderr


# -- other ways to the server


def test_a_unix_socket(fresh_server: Callable[..., Server], tmp_path: Path) -> None:
    path = tmp_path / "x.sock"
    fresh_server("--unixsocket", str(path))
    link = Link(Address.from_url(f"fairlanes-socket://{path}/2"))
    link.call("SET", "k", 1)
    assert b"db=2" in link.call("CLIENT", "INFO")
    link.close()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate for ``localhost``, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl to make a certificate")
    directory = tmp_path_factory.mktemp("tls")
    cert, key = directory / "cert.pem", directory / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    command += ["-keyout", str(key), "-out", str(cert), "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=DNS:localhost"]
    subprocess.run(command, check=True, capture_output=True)
    return cert, key


@pytest.fixture
def tls_port(fresh_server: Callable[..., Server], certificate: tuple[Path, Path]) -> int:
    """The TLS port of a server."""
    cert, key = certificate
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port: int = unused.getsockname()[1]
    try:
        fresh_server(
            *("--tls-port", str(port), "--tls-cert-file", str(cert), "--tls-key-file", str(key)),
            *("--tls-auth-clients", "no"),
        )
    except EmbeddedServerError as exc:
        pytest.skip(f"this server has no TLS: {exc}")
    return port


def test_tls_is_verified(tls_port: int, certificate: tuple[Path, Path]) -> None:
    known = Link(Address.from_url(f"fairlaness://localhost:{tls_port}/1?ssl_ca_certs={certificate[0]}"), Options())
    assert known.call("PING") == b"PONG"
    time.sleep(IDLE_CHECK_SECONDS + 0.1)
    before = known.generation
    assert known.call("PING") == b"PONG"
    assert known.generation == before
    known.close()
    with pytest.raises(driver.ConnectionError, match=r"(?i)certificate"):
        Link(Address.from_url(f"fairlaness://localhost:{tls_port}")).connect()
    with pytest.raises(driver.ConnectionError, match=r"(?i)hostname|IP address"):
        Link(Address.from_url(f"fairlaness://127.0.0.1:{tls_port}?ssl_ca_certs={certificate[0]}")).connect()
    unverified = Link(Address.from_url(f"fairlaness://127.0.0.1:{tls_port}?ssl_cert_reqs=none"))
    unverified.connect()
    unverified.close()


def test_the_first_broker_that_answers_is_taken(server: Server) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        away = f"fairlanes://127.0.0.1:{unused.getsockname()[1]}"
    link = Link.first(Address.all_from_url(f"{away};{server.url('fairlanes')}"))
    assert link.address.hosts[0][1] == server.port
    link.close()
    with pytest.raises(driver.ConnectionError):
        Link.first(Address.all_from_url(away))


class Sentinels:
    """A master, a replica and a sentinel."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.master, self.replica = Server("redis"), Server("redis")
        self.master.start()
        self.replica.start()
        self.replica.client().execute_command("REPLICAOF", "127.0.0.1", str(self.master.port))
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            self.port: int = unused.getsockname()[1]
        config = directory / "sentinel.conf"
        config.write_text(
            f"port {self.port}\ndir {directory}\n"
            f"sentinel monitor mymaster 127.0.0.1 {self.master.port} 1\n"
            "sentinel down-after-milliseconds mymaster 500\nsentinel failover-timeout mymaster 2000\n"
        )
        self.process = subprocess.Popen(
            [need_redis(), str(config), "--sentinel"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self.client = redis.Redis(port=self.port, decode_responses=True)
        wait_for(self._sees_replica, 30, "the sentinel sees master and replica")

    def _sees_replica(self) -> bool:
        try:
            return bool(self.client.execute_command("SENTINEL", "REPLICAS", "mymaster"))
        except redis.RedisError:
            return False

    def close(self) -> None:
        self.client.close()
        self.process.kill()
        self.process.wait()
        self.master.close()
        self.replica.close()


@pytest.fixture
def sentinels(tmp_path: Path) -> Iterator[Sentinels]:
    """A master, a replica and a sentinel."""
    started = Sentinels(tmp_path)
    yield started
    started.close()


def test_sentinels_lead_to_the_master_also_after_a_failover(sentinels: Sentinels) -> None:
    options = Options(master_name="mymaster", socket_timeout=1.0)
    url = f"fairlanes-sentinel://127.0.0.1:1;fairlanes-sentinel://127.0.0.1:{sentinels.port}/1"
    link = Link(Address.from_url(url, options), options)
    assert link.call("SET", "k", 1) == b"OK"
    assert sentinels.master.client(db=1).exists("k")
    generation = link.generation
    sentinels.master.kill()

    def follows() -> bool:
        try:
            return bool(link.call("SET", "k", 2) == b"OK")
        except (redis.RedisError, OSError):
            return False

    wait_for(follows, 40, "the link follows to the new master")
    assert sentinels.replica.client(db=1).get("k") == b"2"
    assert link.generation > generation
    link.close()

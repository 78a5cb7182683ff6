"""Fixtures: servers of each kind, clients over fakeredis and real servers, workers and senders. See
``harness.py``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import fakeredis
import pytest
import redis
from hypothesis import settings

from fairlanes_transport.connections import Address, Link
from fairlanes_transport.store import Store
from tests.harness import BINARIES, Backend, FakeLink, Sender, Server, Worker, missing

settings.register_profile("dev", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.register_profile("nightly", deadline=None, max_examples=10_000, print_blob=True)  # 100 times the default
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "dev"))

KINDS = sorted(BINARIES)


@pytest.fixture(scope="session")
def _servers() -> Iterator[dict[str, Server]]:
    """The shared server of each kind, started when a test first asks for it."""
    servers: dict[str, Server] = {}
    yield servers
    for server in servers.values():
        server.close()


def _clean_server(kind: str, servers: dict[str, Server]) -> Server:
    if kind not in servers:
        servers[kind] = Server(kind)
    server = servers[kind]
    if not server.running():
        server.restart()
    server.client().flushall()
    return server


@pytest.fixture(params=KINDS)
def server(request: pytest.FixtureRequest, _servers: dict[str, Server]) -> Server:
    """An empty server, once per kind. It is shared: a test that changes its settings or kills it takes
    fresh_server.
    """
    return _clean_server(request.param, _servers)


@pytest.fixture(params=KINDS)
def fresh_server(request: pytest.FixtureRequest) -> Iterator[Callable[..., Server]]:
    """A function that starts a server of the test's own, once per kind: ``fresh_server("--appendonly",
    "yes")``.
    """
    started: list[Server] = []

    def start(*args: str) -> Server:
        server = Server(request.param, *args)
        started.append(server)
        server.start()
        return server

    yield start
    for server in started:
        server.close()


@pytest.fixture(params=["fakeredis", *KINDS])
def backend(request: pytest.FixtureRequest, _servers: dict[str, Server]) -> Iterator[Backend]:
    """An empty database with a client and a link: on fakeredis, and on each kind of server."""
    if request.param == "fakeredis":
        fake = fakeredis.FakeServer(version=(7,), server_type="redis")
        with fakeredis.FakeRedis(server=fake, protocol=2) as client:
            yield Backend("fakeredis", client, FakeLink(client))
        return
    server = _clean_server(request.param, _servers)
    link = Link(Address.from_url(server.url("fairlanes")))
    yield Backend(request.param, server.client(), link)
    link.close()


@pytest.fixture
def any_client(backend: Backend) -> redis.Redis:
    """The client of ``backend``."""
    return backend.client


@pytest.fixture
def link(backend: Backend) -> Link | FakeLink:
    """The link of ``backend``."""
    return backend.link


@pytest.fixture
def store(backend: Backend) -> Store:
    """A store on ``backend``, on the server's clock; ``store.now = ms`` sets a clock of your own."""
    return Store(backend.link)


@pytest.fixture
def worker(server: Server) -> Iterator[Callable[..., Worker]]:
    """A function that starts a worker on ``server`` and returns it when it is ready; arguments as for
    Worker.
    """
    started: list[Worker] = []

    def start(*flags: str, **options: object) -> Worker:
        worker = Worker(server, *flags, **options)  # type: ignore[arg-type]
        started.append(worker)
        return worker.wait_ready()

    yield start
    for worker in started:
        worker.close()


@pytest.fixture
def sender(server: Server) -> Iterator[Sender]:
    """A Celery app that sends to ``server``."""
    with Sender(server) as sender:
        yield sender


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a CA, a server's and a client's certificate (for ``localhost`` and 127.0.0.1)."""
    openssl = shutil.which("openssl") or missing("no openssl on PATH")
    directory = tmp_path_factory.mktemp("tls")

    def run(*args: str) -> None:
        subprocess.run([openssl, *args], cwd=directory, check=True, capture_output=True)

    run("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", "ca.key", "-out", "ca.crt", "-days", "2",
        "-subj", "/CN=test ca", "-addext", "keyUsage=critical,keyCertSign,cRLSign")  # fmt: skip
    (directory / "names").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
    for name in ("server", "client"):
        run(
            "req",
            "-newkey",
            "rsa:2048",
            "-nodes",
            "-keyout",
            f"{name}.key",
            "-out",
            f"{name}.csr",
            "-subj",
            f"/CN={name}",
        )
        run("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial",
            "-out", f"{name}.crt", "-days", "2", "-extfile", "names")  # fmt: skip
    run("rsa", "-aes128", "-in", "client.key", "-out", "locked.key", "-passout", "pass:secret")
    return directory

"""Fixtures of the fault tests: a server of the test's own, a proxy before it, and workers that see only the proxy."""

from __future__ import annotations

import collections
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fairlanes_transport.connections import Address, Link
from fairlanes_transport.store import Store
from tests.faults.proxy import Proxy
from tests.harness import BINARIES, Sender, Server, Worker, recorded

POOLS = ("prefork", "threads", "solo", "gevent")
LEASE = 3
#: Of the server, where its kind makes no difference.
KIND = os.environ.get("FAIRLANES_FAULTS_KIND", "valkey")


class Path:
    """A server as it looks from the far side of a proxy."""

    def __init__(self, server: Server, proxy: Proxy) -> None:
        self.server, self.proxy, self.port = server, proxy, server.port

    def url(self, scheme: str = "fairlanes", db: int = 0) -> str:
        """Return the broker URL."""
        return f"{scheme}://127.0.0.1:{self.proxy.port}/{db}"


class Site:
    """A server, the workers and senders on it, and what became of the tasks."""

    def __init__(self, server: Server, path: Path | None = None, **options: Any) -> None:
        self.server = server
        self.path = path
        self.options = {"lease_seconds": LEASE, "client_name": "worker", **options}
        self.workers: list[Worker] = []
        self.senders: list[Sender] = []
        link = Link(Address.from_url(server.url("fairlanes")))
        self.link = link
        self.store = Store(link)

    def worker(self, *flags: str, ready: bool = True, name: str = "", straight: bool = False, **kwargs: Any) -> Worker:
        """Start a worker of ``tests.apps.faults`` and wait until it is ready; ``straight``: not through the proxy."""
        options = {**self.options, **kwargs.pop("options", {})}
        conf = {"broker_transport_options": options, **kwargs.pop("conf", {})}
        name = name or f"w{len(self.workers)}"
        worker = Worker(
            self.server if straight else self.path or self.server,  # type: ignore[arg-type]
            "-n", f"{name}@here", *flags, app="tests.apps.faults", conf=conf, **kwargs,
        )  # fmt: skip
        self.workers.append(worker)
        return worker.wait_ready(60) if ready else worker

    @property
    def sender(self) -> Sender:
        """A sender straight to the server, made on first use."""
        if not self.senders:
            self.senders.append(Sender(self.server, "fairlanes"))
        return self.senders[0]

    def send(self, task: str, *args: Any, tenant: Any = "a", **options: Any) -> str:
        """Send a task of ``tests.apps.faults``; returns its id."""
        return str(self.sender.send(f"faults.{task}", *args, tenant=tenant, **options).id)

    def starts(self) -> dict[int, int]:
        """Task number -> how often it was started."""
        return dict(collections.Counter(each["i"] for each in recorded(self.server, "started")))

    def ends(self) -> dict[int, int]:
        """Task number -> how often it was finished."""
        return dict(collections.Counter(each["i"] for each in recorded(self.server, "done")))

    def sizes(self) -> tuple[int, int, int, int]:
        """(ready, leased, delayed, dead) of the queue."""
        sizes = self.store.size("celery")
        return sizes.ready, sizes.leased, sizes.delayed, sizes.dead

    def clients(self, name: str = "worker") -> list[dict[str, str]]:
        """The server's connections of workers."""
        listed: list[dict[str, str]] = self.server.client().client_list()
        return [each for each in listed if each["name"] == name]

    def total(self, name: str) -> int:
        """One of the queue's totals, such as ``expired``."""
        return int(self.server.client().hget("fairlanes:2:{celery}:totals", name) or 0)

    def close(self) -> None:
        """Kill the workers, close the rest."""
        for worker in self.workers:
            worker.close()
        for sender in self.senders:
            sender.close()
        self.link.close()


@pytest.fixture
def site() -> Iterator[Callable[..., Site]]:
    """A function that starts a server and returns its Site: arguments are the server's, keywords ``kind``, ``proxied``
    and transport options.
    """
    sites: list[Site] = []
    proxies: list[Proxy] = []
    servers: list[Server] = []

    def make(*args: str, kind: str = KIND, proxied: bool = False, **options: Any) -> Site:
        server = Server(kind, *args)
        servers.append(server)
        server.start()
        path = None
        if proxied:
            proxies.append(Proxy(server.port))
            path = Path(server, proxies[-1])
        sites.append(Site(server, path, **options))
        return sites[-1]

    yield make
    for each in sites:
        each.close()
    for proxy in proxies:
        proxy.close()
    for server in servers:
        server.close()


@pytest.fixture(params=sorted(BINARIES))
def kind(request: pytest.FixtureRequest) -> str:
    """Each kind of server, for what servers do."""
    return str(request.param)

"""The server's own time: per message that plain kombu publishes and consumes, and per script.

The server counts a script's time with all that is called in it, and under one name for all scripts; so each
script is measured in a phase of its own.
"""

from __future__ import annotations

from collections.abc import Callable

from fairlanes_transport.connections import Address, Link
from fairlanes_transport.store import Fence, Store
from tests.benchmarks.raw import LANES, PREFETCH
from tests.benchmarks.report import Benchmark, Figure, each
from tests.benchmarks.rig import BASELINE, OURS, Process, Rig
from tests.harness import Server

LEASE_MS = 60_000
BATCH = 16
#: What the benchmark asks itself.
OWN = ("info", "config|resetstat")


def _micros(server: Server, work: Callable[[], object], only: str = "") -> float:
    """Microseconds that the server spends on the commands of `work`."""
    client = server.client()
    client.config_resetstat()
    work()
    stats = client.info("commandstats")
    names = {name.removeprefix("cmdstat_"): float(stat["usec"]) for name, stat in stats.items()}
    return sum(usec for name, usec in names.items() if name not in OWN and only in ("", name))


def _measure(rig: Rig, scheme: str) -> dict[str, float]:
    n, queue = rig.count(4000), "raw"
    # Within scripts every command is counted a second time.
    only = "evalsha" if scheme == OURS else ""
    with rig.server() as server:
        url = server.url(scheme)
        common = {"url": url, "queue": queue, "n": n}
        Process("publish", url=url, queue=queue, n=10, lanes=1).result()  # scripts are loaded
        Process("consume", url=url, queue=queue, n=10, prefetch=PREFETCH).result()
        figures = {
            "publish": _micros(server, lambda: Process("publish", **common, lanes=LANES).result(), only) / n,
            "deliver and ack": _micros(server, lambda: Process("consume", **common, prefetch=PREFETCH).result(), only)
            / n,
        }
        return figures if scheme == BASELINE else {**figures, **_by_script(server, n)}


def _by_script(server: Server, n: int) -> dict[str, float]:
    link = Link(Address.from_url(server.url(OURS)))
    store = Store(link)
    queue, half, fences = "scripts", n // 2 // BATCH * BATCH, list[Fence]()

    def enqueue() -> None:
        for number in range(2 * half):
            store.enqueue(queue, f"tag{number}", f"t{number % LANES}", "{}", b"body")

    def claim(times: int, batch: int) -> None:
        for _ in range(times):
            fences.extend(claimed.fence for claimed in store.claim(queue, batch, LEASE_MS).claimed)

    def ack(times: int, batch: int) -> None:
        for _ in range(times):
            store.ack(queue, [fences.pop() for _ in range(batch)])

    try:
        store.declare(queue)
        enqueue_us = _micros(server, enqueue, "evalsha") / (2 * half)
        phases = {
            "claim of 1": (lambda: claim(half, 1)),
            f"claim of {BATCH}": (lambda: claim(half // BATCH, BATCH)),
            "ack of 1": (lambda: ack(half, 1)),
            f"ack of {BATCH}": (lambda: ack(half // BATCH, BATCH)),
        }
        return {
            "enqueue": enqueue_us,
            **{name: _micros(server, phase, "evalsha") / half for name, phase in phases.items()},
        }
    finally:
        link.close()


_UNIT = "us of the server per message"
SCRIPTS = Benchmark(
    "server",
    {
        name: Figure(_UNIT)
        for name in (
            "publish",
            "deliver and ack",
            "enqueue",
            "claim of 1",
            f"claim of {BATCH}",
            "ack of 1",
            f"ack of {BATCH}",
        )
    },
    each(_measure),
)

"""What the benchmarks run on: servers, workers and processes of their own, and counters of what servers do."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import platform
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import redis

from fairlanes_transport import keys, scripts
from fairlanes_transport.guard import GuardedProcess
from fairlanes_transport.lanes.api import Lanes
from tests.apps.settings import PORT, environment
from tests.harness import ROOT, Server, Worker

OURS, BASELINE = "fairlanes", "redis"
SCHEMES = (OURS, BASELINE)
APP = "tests.benchmarks.app"
QUEUE = "celery"
ALONE = ("--without-gossip", "--without-mingle", "--without-heartbeat")
"""Flags of a worker that talks to no other."""

_LOOK_SECONDS = 0.01


class Rig:
    """Makes what a benchmark needs.

    Args:
        kind: of the servers.
        scale: of counts and durations.
    """

    def __init__(self, kind: str, scale: float) -> None:
        self.kind = kind
        self.scale = scale

    def count(self, n: int) -> int:
        """So many, scaled; at least 10."""
        return max(10, round(n * self.scale))

    def seconds(self, seconds: float) -> float:
        """So long, scaled; at least 3 seconds."""
        return max(3.0, seconds * self.scale)

    def about(self) -> dict[str, Any]:
        """The machine and the versions."""
        with self.server() as server, server.client(0, decode_responses=True) as client:
            info = client.info("server")
        name = "valkey_version" if "valkey_version" in info else "redis_version"
        return {
            "python": platform.python_version(),
            "system": f"{platform.system()} {platform.machine()}",
            "cpus": os.cpu_count(),
            "load": os.getloadavg()[0],
            "server": f"{self.kind} {info[name]}",
            "scale": self.scale,
            **{package: version(package) for package in ("fairlanes-transport", "celery", "kombu", "redis")},
        }

    def server(self) -> Server:
        """An empty server that is not started."""
        return Server(self.kind)

    @contextlib.contextmanager
    def broker(self) -> Iterator[tuple[Server, Server]]:
        """A broker, and a server for what tasks note, so that nobody but the transport talks to the broker."""
        with self.server() as broker, self.server() as records:
            yield broker, records

    def worker(self, broker: Server, records: Server, scheme: str, *flags: str, **options: Any) -> Worker:
        """A Celery worker; enter it to wait until it is ready."""
        return Worker(
            broker, *flags, app=APP, scheme=scheme, env={PORT: str(records.port)}, **{"prefetch": 4, **options}
        )


@contextlib.contextmanager
def closing_quietly(started: list[Worker]) -> Iterator[None]:
    """Kill workers afterwards, without showing their logs if all went well."""
    try:
        yield
    except BaseException:
        for worker in started:
            worker.close()
        raise
    with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
        for worker in started:
            worker.close()


@contextlib.contextmanager
def workers(started: list[Worker]) -> Iterator[list[Worker]]:
    """Wait until all are ready; close them afterwards."""
    with closing_quietly(started):
        for worker in started:
            worker.wait_ready(60)
        yield started


# ---------------------------------------------------------------- processes


class Process:
    """A function of `tests.benchmarks.processes` in a process of its own.

    Args:
        function: its name.
        arguments: JSON types.
    """

    def __init__(self, function: str, **arguments: Any) -> None:
        command = [sys.executable, "-m", "tests.benchmarks.processes", function, json.dumps(arguments)]
        env = {**environment("", 0, {}), "PYTHONPATH": str(ROOT)}
        self._process = GuardedProcess(command, env=env, cwd=str(ROOT), stdout=subprocess.PIPE)
        self.pid = self._process.pid

    def result(self) -> Any:
        """Wait for the end and return what the function returned.

        Raises:
            RuntimeError: it failed; with its output.
        """
        with self._process:
            assert self._process.output is not None
            output = self._process.output.read().decode(errors="replace")
            if self._process.wait(30) != 0:
                raise RuntimeError(f"a process of the benchmark failed:\n{output}")
        return json.loads(output.splitlines()[-1])

    def wait_ready(self, timeout: float = 30.0) -> None:
        """Return when it has said ``ready``.

        Raises:
            RuntimeError: it ended before.
        """
        assert self._process.output is not None
        for line in self._process.output:
            if line.strip() == b"ready":
                return
            sys.stderr.buffer.write(line)
        raise RuntimeError("a process of the benchmark ended before it was ready")

    def close(self) -> None:
        """Kill it."""
        self._process.close()

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def cpu_seconds(*groups: int) -> float | None:
    """CPU time of the processes of these groups so far; None where the system has no ``/proc``."""
    if not Path("/proc/self/stat").exists():
        return None
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[2]) in groups:
                ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


# ---------------------------------------------------------------- servers


def backlog(server: Server, scheme: str, queue: str = QUEUE) -> int:
    """Messages that are not acked."""
    client = server.client()
    if scheme == BASELINE:
        return int(client.llen(queue)) + int(client.hlen("unacked"))
    return int(client.hlen(keys.part(keys.base(queue), "message")))


@contextlib.contextmanager
def held_back(server: Server, scheme: str, queue: str) -> Iterator[str]:
    """Publish in the block to the queue that is given; what was published is there all at once when it ends."""
    if scheme == BASELINE:
        hidden = f"{queue}-hidden"
        yield hidden
        server.client().rename(hidden, queue)  # wakes who waits for the new name
    else:
        lanes = Lanes(server.url(scheme))
        lanes.pause(queue)
        yield queue
        lanes.resume(queue)


def drained(left: Callable[[], int], total: int, groups: Iterable[int], timeout: float = 120.0) -> dict[str, float]:
    """How fast a backlog is worked off, between its first tenth and its last.

    Args:
        left: how much there is to do.
        total: how much there was.
        groups: process groups that work on it.

    Returns:
        ``rate``, messages per second; ``cpu``, microseconds per message that the groups took (where the system
        tells).
    """
    began: tuple[float, int, float | None] | None = None
    deadline = time.monotonic() + timeout
    while True:
        now, remaining = time.perf_counter(), left()
        if began is None and remaining <= total * 0.9:
            began = now, remaining, cpu_seconds(*groups)
        if began is not None and remaining <= total * 0.1:
            done, cpu = began[1] - remaining, cpu_seconds(*groups)
            spent = {} if cpu is None or began[2] is None else {"cpu": (cpu - began[2]) / done * 1e6}
            return {"rate": done / (now - began[0]), **spent}
        if time.monotonic() > deadline:
            raise RuntimeError(f"{remaining} of {total} messages are left after {timeout:.0f} s")
        time.sleep(_LOOK_SECONDS)


class Commands:
    """What clients asked a server in a while: use it as a context.

    Attributes:
        by_name: command -> how often a client sent it; a script counts once, what it calls does not.
        scripts: the same of our scripts.
        all: commands that the server carried out, those inside scripts included.
        trips: how often the server found something to read from a client: a pipeline counts once.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._own = server.client().client_info()["addr"].encode()
        self.by_name: Counter[str] = Counter()
        self.scripts: Counter[str] = Counter()
        self.all = 0
        self.trips = 0
        self._ours = 0
        self._ended = False

    @property
    def sent(self) -> int:
        """Commands that clients sent."""
        return self.by_name.total()

    def details(self, n: int) -> dict[str, float]:
        """What was sent per message, by name."""
        return {
            **{f"of these {name}": count / n for name, count in sorted(self.by_name.items())},
            **{f"of these {name}.lua": count / n for name, count in sorted(self.scripts.items())},
        }

    def start(self) -> Commands:
        """Begin to count."""
        self._client = redis.Redis(port=self._server.port, socket_timeout=None)
        self._connection = self._client.connection_pool.get_connection()
        self._connection.send_command("MONITOR")
        self._connection.read_response()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        self._before = self._stats()
        return self

    def stop(self) -> None:
        """End the count."""
        self._server.client().echo(_END)
        self._thread.join(30)
        if not self._ended:
            raise RuntimeError("the count of commands broke off")
        after = self._stats()
        self._connection.disconnect()
        self._client.close()
        # What the benchmark asked itself, by the client that the server keeps; of the two INFO the first is
        # counted by MONITOR, and in the second's figures.
        self.all = after[0] - self._before[0] - self._ours
        self.trips = after[1] - self._before[1] - self._ours

    def __enter__(self) -> Commands:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def _stats(self) -> tuple[int, int]:
        stats = self._server.client().info("stats")
        return stats["total_commands_processed"], stats["total_reads_processed"]

    def _read(self) -> None:
        """Count the lines of MONITOR: ``time [db address] "COMMAND" "argument" ...``."""
        while not self._ended:
            _, _, line = self._connection.read_response().partition(b" [")
            where, _, command = line.partition(b"] ")
            if where.endswith(b" " + self._own):
                self._ours += 1
                self._ended = _END in command
            elif not where.endswith(b" lua"):
                words = command.split(b'"', 4)
                self._count(words[1].upper().decode(), words)

    def _count(self, name: str, words: list[bytes]) -> None:
        self.by_name[name] += 1
        if name == "EVALSHA":
            self.scripts[script_name(words[3].decode())] += 1


_END = b"benchmark: the count ends"


@functools.cache
def script_name(digest: str) -> str:
    """The script with this digest."""
    return next((name for name in scripts.names() if scripts.load(name).digest == digest), "other")


def connections(server: Server, among: Callable[[dict[str, Any]], bool] = lambda _: True) -> int:
    """How many connections a server has, without our own."""
    client = server.client()
    own = client.client_id()
    return sum(1 for other in client.client_list() if int(other["id"]) != own and among(other))

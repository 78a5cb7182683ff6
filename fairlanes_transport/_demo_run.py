"""What ``fairlanes demo`` and ``fairlanes drill`` run: workers, the record that they write, and a sender."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
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
        self._stack = contextlib.ExitStack()
        self._tail = b""
        self.workers: list[GuardedProcess] = []
        """Those that were started and not killed."""

    def __enter__(self) -> Stage:
        with contextlib.ExitStack() as stack:
            directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="fairlanes-record-"))
            self._path = Path(directory, "record")
            self._log: IO[bytes] = stack.enter_context(Path(directory, "log").open("a+b"))
            self._record: IO[bytes] = stack.enter_context(self._path.open("w+b", buffering=0))
            stack.callback(self._close_workers)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def start_worker(self, name: str = "demo") -> GuardedProcess:
        """Start a worker.  `read` tells when it is ready."""
        from fairlanes_transport import _demo_app
        from fairlanes_transport.guard import GuardedProcess

        # Celery's own variables in the user's shell are for the user's app: left in, they would win over ours.
        # The URL may hold a password, so it is not among the arguments, which everybody on the machine can read.
        env = {key: value for key, value in os.environ.items() if not key.startswith("CELERY_")}
        env |= {"CELERY_BROKER_URL": self._url, _demo_app.RECORD_ENV: str(self._path)}
        env[_demo_app.CONF_ENV] = json.dumps(self._conf)
        celery = (sys.executable, "-m", "celery", "-A", _demo_app.__name__, "worker")
        command = [*celery, "-n", f"{name}@%h", *WORKER_FLAGS, *self._flags]
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
        """What was noted since the last call: see `_demo_app.note`.  If there is nothing, pause for so many seconds."""
        data = self._record.read()
        if not data:
            time.sleep(pause)
            return []
        *lines, self._tail = (self._tail + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def check(self, deadline: float, what: str) -> None:
        """Raise DemoFailed if a worker has ended or the time (monotonic) is up."""
        for worker in self.workers:
            code = worker.poll()
            if code is not None:
                raise DemoFailed(f"the worker ended with exit code {code}; its log ends:\n{self._log_tail()}")
        if time.monotonic() > deadline:
            raise DemoFailed(f"{what} in time; the worker's log ends:\n{self._log_tail()}")

    def _log_tail(self) -> str:
        self._log.seek(0)
        return self._log.read()[-_LOG_TAIL_BYTES:].decode(errors="replace")

    def _close_workers(self) -> None:
        while self.workers:
            self.workers.pop().close()


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

    from fairlanes_transport._demo_app import NUMBER, TASK

    app = Celery("fairlanes-demo", set_as_current=False)
    app.conf.update(conf or {})
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

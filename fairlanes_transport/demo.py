"""``fairlanes demo``: the same flood on ``redis://`` and on ``fairlanes://``, and how long the other tenants
wait.

A private Valkey server, a real ``celery worker``, one tenant that floods the queue, and a few quiet ones just
after. Between the two runs only the broker URL differs.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Any, Protocol

import click

from fairlanes_transport._demo_figures import Start, fairness, percentile, waits
from fairlanes_transport.errors import FairlanesError

if TYPE_CHECKING:
    import redis
    from rich.console import Console
    from rich.table import Table

    from fairlanes_transport.embedded import EmbeddedServer
    from fairlanes_transport.guard import GuardedProcess

__all__ = ["FLOOD", "DemoFailed", "Plan", "Progress", "Result", "command", "run_demo", "summary"]

FLOOD = "flood"
"""Name of the tenant that floods the queue."""

WORKER_FLAGS = (
    *("--pool", "prefork", "-c", "2", "--prefetch-multiplier", "1", "-l", "WARNING"),
    *("--without-mingle", "--without-gossip"),
)
"""Flags of both runs' workers. Mingle and gossip only cost a lone worker time at its start."""

_RECORD_DB = 9
_BATCH = 500
_LOOK_SECONDS = 0.5
_READY_SECONDS = 30.0
_LOG_TAIL_BYTES = 3000
_PLAIN_SECONDS = 1.0


class DemoFailed(FairlanesError):
    """A run did not finish."""


@dataclass(frozen=True)
class Plan:
    """What a demo sends."""

    flood: int = 2000
    """Tasks of the tenant that floods, sent first."""
    quiet: int = 20
    """Tasks of each quiet tenant, sent just after, in turn."""
    tenants: tuple[str, ...] = ("acme", "bolt", "cargo", "delta", "ember")
    """The quiet tenants."""
    task_ms: float = 5.0
    """How long a task takes, in ms."""
    schemes: tuple[str, ...] = ("redis", "fairlanes")
    """Schemes of the broker URL, one run each."""
    run_seconds: float = 60.0
    """How long one run may take before it has failed."""

    @functools.cached_property
    def totals(self) -> dict[str, int]:
        """Tasks of each tenant, the flood first."""
        return {FLOOD: self.flood, **dict.fromkeys(self.tenants, self.quiet)}

    def tasks(self) -> Iterator[tuple[str, int]]:
        """Yield (tenant, number) of each task in the order in which they are sent."""
        yield from ((FLOOD, number) for number in range(self.flood))
        yield from ((tenant, number) for number in range(self.quiet) for tenant in self.tenants)


@dataclass(frozen=True)
class Result:
    """One finished run: every task of the plan was started, the first start of each is here."""

    scheme: str
    starts: list[Start] = field(repr=False)

    def fairness(self, plan: Plan) -> float | None:
        """Return Jain's index of the service the tenants got while all of them had tasks waiting."""
        return fairness(self.starts, list(plan.totals))


class Progress(Protocol):
    """What a demo tells while it runs."""

    def begin(self, scheme: str) -> None:
        """A run starts."""

    def update(self, sent: int, started: Counter[str]) -> None:
        """So many tasks were sent in all, and started per tenant."""

    def end(self) -> None:
        """The run is over, however it went. Called once after each begin."""


# ---------------------------------------------------------------- running


def run_demo(plan: Plan, progress: Progress) -> list[Result]:
    """Run the plan once on each scheme, on an embedded server of its own, and return what was measured.

    When this returns or raises, and also when this process dies, neither server nor worker is left.

    Raises:
        DemoFailed: a run did not finish; the text holds the end of the worker's log.
        EmbeddedServerError: the embedded server's package is missing, or the server did not start.
    """
    from fairlanes_transport.embedded import EmbeddedServer

    with EmbeddedServer() as server:
        return [_run(scheme, db, plan, server, progress) for db, scheme in enumerate(plan.schemes)]


def _run(scheme: str, db: int, plan: Plan, server: EmbeddedServer, progress: Progress) -> Result:
    url = server.url(scheme, db)
    progress.begin(scheme)
    try:
        with server.client(_RECORD_DB) as record, tempfile.TemporaryFile() as log:
            record.flushdb()
            with _worker(url, server.url("redis", _RECORD_DB), log) as worker:
                watch = _Watch(plan, worker, log, record, progress)
                watch.wait_ready()
                _send(plan, url, watch.sent)
                return Result(scheme, watch.wait_all_started())
    finally:
        progress.end()


def _worker(broker: str, record: str, log: IO[bytes]) -> GuardedProcess:
    """Start the worker. It is killed when the demo is done with it: there is nothing left to finish then."""
    from fairlanes_transport import _demo_app
    from fairlanes_transport.guard import GuardedProcess

    # Celery's own variables in the user's shell are for the user's app: left in, they would win over ours.
    env = {name: value for name, value in os.environ.items() if not name.startswith("CELERY_")}
    env[_demo_app.RECORD_ENV] = record
    celery = (sys.executable, "-m", "celery", "-b", broker, "-A", _demo_app.__name__)
    return GuardedProcess([*celery, "worker", *WORKER_FLAGS], env=env, stdout=log)


def _send(plan: Plan, url: str, sent: Callable[[], None]) -> None:
    """Send every task through one connection and one producer."""
    from celery import Celery

    seconds = plan.task_ms / 1000
    app = Celery("fairlanes-demo", set_as_current=False)
    try:
        with app.connection_for_write(url) as connection, app.amqp.Producer(connection) as producer:
            for tenant, number in plan.tasks():
                args = (tenant, number, time.time(), seconds)
                app.send_task(
                    "demo.work", args, headers={"tenant": tenant}, producer=producer, ignore_result=True
                )
                sent()
    finally:
        app.close()


class _Watch:
    """Follows one run: how many tasks were sent, and which the worker says it has started."""

    def __init__(
        self, plan: Plan, worker: GuardedProcess, log: IO[bytes], record: redis.Redis, progress: Progress
    ) -> None:
        self._plan = plan
        self._worker = worker
        self._log = log
        self._record = record
        self._progress = progress
        self._deadline = time.monotonic() + plan.run_seconds
        self._sent = 0
        # By task, not a list: a transport may start a task twice, and that must not pass for two tasks.
        self._starts: dict[tuple[str, int], Start] = {}
        self._started: Counter[str] = Counter()

    def wait_ready(self) -> None:
        """Return when the worker is ready."""
        from fairlanes_transport._demo_app import READY

        deadline = time.monotonic() + _READY_SECONDS
        while self._record.blpop([READY], timeout=_LOOK_SECONDS) is None:
            self._check(deadline, "the worker did not get ready")

    def sent(self) -> None:
        """Count one more task as sent; now and then take in what has started meanwhile."""
        from fairlanes_transport._demo_app import STARTS

        self._sent += 1
        if self._sent % 50 == 0:
            self._take(self._record.lpop(STARTS, _BATCH) or [])

    def wait_all_started(self) -> list[Start]:
        """Return every task's first start once all have started."""
        from fairlanes_transport._demo_app import STARTS

        total = sum(self._plan.totals.values())
        while len(self._starts) < total:
            popped = self._record.blmpop(_LOOK_SECONDS, 1, STARTS, direction="LEFT", count=_BATCH)
            self._take(popped[1] if popped else [])
            self._check(self._deadline, f"only {len(self._starts)} of {total} tasks were started")
        return list(self._starts.values())

    def _take(self, entries: Any) -> None:
        """Take in what was popped from the list of starts, a list of bytes."""
        for entry in entries:
            start = Start(*json.loads(entry))
            if self._starts.setdefault((start.tenant, start.number), start) is start:
                self._started[start.tenant] += 1
        self._progress.update(self._sent, self._started)

    def _check(self, deadline: float, what: str) -> None:
        """Raise DemoFailed if the worker has ended or the time is up."""
        code = self._worker.poll()
        if code is not None:
            raise DemoFailed(f"the worker ended with exit code {code}; its log ends:\n{self._log_tail()}")
        if time.monotonic() > deadline:
            raise DemoFailed(f"{what} in time; the worker's log ends:\n{self._log_tail()}")

    def _log_tail(self) -> str:
        self._log.seek(0)
        return self._log.read()[-_LOG_TAIL_BYTES:].decode(errors="replace")


# ---------------------------------------------------------------- showing


class LiveProgress:
    """A bar per tenant on a terminal."""

    def __init__(self, plan: Plan, console: Console) -> None:
        self._plan = plan
        self._console = console

    def begin(self, scheme: str) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bars

        columns = (
            TextColumn("{task.description:>9}"),
            BarColumn(40),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        self._console.print(f"\n[bold]{scheme}://[/bold]")
        self._bars = Bars(*columns, console=self._console)
        self._sending = self._bars.add_task("sent", total=sum(self._plan.totals.values()))
        self._ids = {tenant: self._bars.add_task(tenant, total=n) for tenant, n in self._plan.totals.items()}
        self._bars.start()

    def update(self, sent: int, started: Counter[str]) -> None:
        self._bars.update(self._sending, completed=sent)
        for tenant, bar in self._ids.items():
            self._bars.update(bar, completed=started[tenant])

    def end(self) -> None:
        self._bars.stop()


class PlainProgress:
    """A line a second, for a pipe or a log."""

    def __init__(self, plan: Plan, write: Callable[[str], object] = print) -> None:
        self._plan = plan
        self._write = write
        self._scheme = ""
        self._next = 0.0

    def begin(self, scheme: str) -> None:
        self._scheme = scheme
        self._next = 0.0
        self._write(f"{scheme}://  starting a worker")

    def update(self, sent: int, started: Counter[str]) -> None:
        total = sum(self._plan.totals.values())
        if time.monotonic() < self._next and started.total() < total:
            return
        self._next = time.monotonic() + _PLAIN_SECONDS
        counts = "  ".join(f"{tenant} {started[tenant]}/{n}" for tenant, n in self._plan.totals.items())
        self._write(f"{self._scheme}://  sent {sent}/{total}  started: {counts}")

    def end(self) -> None:
        pass


def table(plan: Plan, results: Sequence[Result]) -> Table:
    """Return the waits of every tenant on every scheme, and the fairness of each run."""
    from rich.table import Table

    shown = Table(title="Seconds from sending a task to its start", title_justify="left", show_footer=True)
    shown.add_column("tenant", footer="Jain's index")
    shown.add_column("tasks", justify="right")
    for result in results:
        index = result.fairness(plan)
        shown.add_column(
            f"{result.scheme}://\np50", justify="right", footer="-" if index is None else f"{index:.3f}"
        )
        shown.add_column("\np95", justify="right")
        shown.add_column("\nmax", justify="right")
    for tenant, tasks in plan.totals.items():
        cells = [f"{wait:.2f}" for result in results for wait in _three(result, tenant)]
        shown.add_row(tenant, str(tasks), *cells)
    return shown


def _three(result: Result, tenant: str) -> tuple[float, float, float]:
    ordered = waits(result.starts, [tenant])
    return percentile(ordered, 50), percentile(ordered, 95), ordered[-1]


JAIN_LINE = (
    "Jain's index: of the tasks started per tenant while every tenant had tasks waiting; "
    "1 = equal service, {floor:.3f} = one tenant got all of it."
)
"""The line under the table."""


def summary(plan: Plan, results: Sequence[Result]) -> str:
    """Return the outcome in one sentence."""
    medians = [percentile(waits(result.starts, plan.tenants), 50) for result in results]
    told = [f"{result.scheme}:// {median:.2f} s" for result, median in zip(results, medians, strict=True)]
    return f"The quiet tenants' tasks waited (median): on {', on '.join(told)}."


def show(plan: Plan, console: Console) -> None:
    """Run the plan and print progress, table and outcome. Raises as :func:`run_demo`."""
    progress = LiveProgress(plan, console) if console.is_terminal else PlainProgress(plan, _line)
    results = run_demo(plan, progress)
    console.print()
    console.print(table(plan, results))
    for line in (JAIN_LINE.format(floor=1 / len(plan.totals)), summary(plan, results)):
        console.print(line, highlight=False, soft_wrap=not console.is_terminal)


def _line(text: str) -> None:
    print(text, flush=True)


@click.command("demo")
@click.option(
    "--flood", default=Plan.flood, show_default=True, type=click.IntRange(1), help="Tasks of the flood."
)
@click.option(
    "--quiet", default=Plan.quiet, show_default=True, type=click.IntRange(1), help="Tasks of each other."
)
@click.option("--task-ms", default=Plan.task_ms, show_default=True, type=float, help="How long a task takes.")
@click.option(
    "--scheme", "schemes", multiple=True, default=Plan.schemes, show_default=True, help="Broker to run on."
)
def command(flood: int, quiet: int, task_ms: float, schemes: tuple[str, ...]) -> None:
    """One tenant floods, five wait: the same worker on redis:// and on fairlanes://.

    Starts a private Valkey server and a real celery worker, takes about half a minute, and leaves nothing
    behind.
    """
    try:
        import celery  # noqa: F401
        from rich.console import Console
    except ModuleNotFoundError as error:
        raise click.ClickException(
            f"the demo needs the package {error.name}: pip install 'fairlanes-transport[demo]'"
        ) from error
    try:
        show(Plan(flood=flood, quiet=quiet, task_ms=task_ms, schemes=schemes), Console())
    except FairlanesError as error:
        raise click.ClickException(str(error)) from error

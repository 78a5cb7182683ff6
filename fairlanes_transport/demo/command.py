"""``fairlanes demo``: the same flood on ``redis://`` and on ``fairlanes://``, and how long the other tenants
wait.

A private Valkey server, a real ``celery worker``, one tenant that floods the queue, and a few quiet ones just
after. Between the two runs only the broker URL differs.
"""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import click

from fairlanes_transport.demo.figures import Start, fairness
from fairlanes_transport.demo.run import DemoFailed, Stage, sender
from fairlanes_transport.demo.show import JAIN_LINE, LiveProgress, PlainProgress, summary, table
from fairlanes_transport.errors import FairlanesError

if TYPE_CHECKING:
    from rich.console import Console

    from fairlanes_transport.embedded import EmbeddedServer

__all__ = ["FLOOD", "DemoFailed", "Plan", "Progress", "Result", "command", "run_demo", "summary"]

FLOOD = "flood"
"""Name of the tenant that floods the queue."""

WORKER_FLAGS = ("--pool", "prefork", "-c", "2", "--prefetch-multiplier", "1")
"""Flags of both runs' workers."""


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
        with Stage(url, WORKER_FLAGS) as stage:
            watch = _Watch(plan, stage, progress)
            # It is killed when the demo is done with it: there is nothing left to finish then.
            stage.wait_ready([stage.start_worker()])
            with sender(url, plan.task_ms / 1000) as send:
                for tenant, number in plan.tasks():
                    send(tenant, number)
                    watch.sent()
            return Result(scheme, watch.wait_all_started())
    finally:
        progress.end()


class _Watch:
    """Follows one run: how many tasks were sent, and which the worker says it has started."""

    def __init__(self, plan: Plan, stage: Stage, progress: Progress) -> None:
        self._plan = plan
        self._stage = stage
        self._progress = progress
        self._deadline = time.monotonic() + plan.run_seconds
        self._sent = 0
        # By task, not a list: a transport may start a task twice, and that must not pass for two tasks.
        self._starts: dict[tuple[str, int], Start] = {}
        self._started: Counter[str] = Counter()

    def sent(self) -> None:
        """Count one more task as sent; now and then take in what has started meanwhile."""
        self._sent += 1
        if self._sent % 50 == 0:
            self._take(self._stage.read(pause=0.0))

    def wait_all_started(self) -> list[Start]:
        """Return every task's first start once all have started."""
        total = sum(self._plan.totals.values())
        while len(self._starts) < total:
            self._take(self._stage.read())
            self._stage.check(self._deadline, f"only {len(self._starts)} of {total} tasks were started")
        return list(self._starts.values())

    def _take(self, entries: list[list[Any]]) -> None:
        """Take in what was noted."""
        for what, _, at, *rest in entries:
            if what == "start":
                tenant, number, sent = rest
                start = Start(tenant, number, sent, at)
                if self._starts.setdefault((start.tenant, start.number), start) is start:
                    self._started[start.tenant] += 1
        self._progress.update(self._sent, self._started)


# ---------------------------------------------------------------- the command


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
@click.option("--flood", default=Plan.flood, show_default=True, type=click.IntRange(1), help="Tasks of the flood.")
@click.option("--quiet", default=Plan.quiet, show_default=True, type=click.IntRange(1), help="Tasks of each other.")
@click.option("--task-ms", default=Plan.task_ms, show_default=True, type=float, help="How long a task takes.")
@click.option("--scheme", "schemes", multiple=True, default=Plan.schemes, show_default=True, help="Broker to run on.")
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

"""How ``fairlanes demo`` shows a run: progress, the table of waits, and the outcome in a sentence."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from fairlanes_transport.demo.figures import percentile, waits

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from fairlanes_transport.demo.command import Plan, Result

_PLAIN_SECONDS = 1.0


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
        shown.add_column(f"{result.scheme}://\np50", justify="right", footer="-" if index is None else f"{index:.3f}")
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

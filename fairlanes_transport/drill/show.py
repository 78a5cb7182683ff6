"""How ``fairlanes drill`` shows its outcome: a table, JSON, a picture."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fairlanes_transport.demo.figures import percentile
from fairlanes_transport.drill.figures import Facts, Record, Verdict
from fairlanes_transport.errors import FairlanesError

__all__ = ["check", "data", "draw", "show"]


class PackageMissing(FairlanesError):
    """A package that this needs is not installed."""


def check(plot: Path | None) -> None:
    """See, before the drill, whether what it needs is installed.

    Raises:
        PackageMissing: it is not.
    """
    try:
        import celery  # noqa: F401
        import rich  # noqa: F401
    except ModuleNotFoundError as exc:
        raise PackageMissing(
            f"the drill needs the package {exc.name}: pip install 'fairlanes-transport[demo]'"
        ) from exc
    if plot is not None:
        try:
            import matplotlib  # noqa: F401
        except ModuleNotFoundError as exc:
            raise PackageMissing("--plot needs matplotlib: pip install 'fairlanes-transport[plot]'") from exc


def rows(facts: Facts, record: Record, verdict: Verdict) -> Iterator[dict[str, Any]]:
    """Yield what is to be told of each tenant, the flood first."""
    total = sum(facts.weights[tenant] for tenant in facts.unlimited)
    for tenant, weight in facts.weights.items():
        waits = sorted(wait for _, wait in record.waits(tenant))
        ahead, bound = verdict.ahead.get(tenant, (None, None))
        yield {
            "tenant": tenant,
            "weight": weight,
            "limit": facts.limits.get(tenant),
            "sent": sum(1 for task in record.sent if task[0] == tenant),
            "started": len(waits),
            "wait_p50": percentile(waits, 50) if waits else None,
            "wait_p95": percentile(waits, 95) if waits else None,
            "wait_max": waits[-1] if waits else None,
            "ahead": ahead,
            "ahead_bound": bound,
            "peak": verdict.peaks.get(tenant),
            "share": verdict.shares.get(tenant),
            "due_share": weight / total if tenant in facts.unlimited else None,
        }


def data(facts: Facts, record: Record, verdict: Verdict) -> dict[str, Any]:
    """The outcome for JSON; durations in seconds, shares from 0 to 1."""
    return {
        "ok": not verdict.broken,
        "broken": verdict.broken,
        "spread": verdict.spread,
        "spread_bound": verdict.spread_bound,
        "kills": len(record.kills),
        "tenants": list(rows(facts, record, verdict)),
    }


def show(facts: Facts, record: Record, verdict: Verdict) -> None:
    """Print the outcome."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column("tenant")
    for name in ("weight", "tasks", "p50", "p95", "max", "ahead", "running", "share", "due"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows(facts, record, verdict):
        table.add_row(
            row["tenant"], f"{row['weight']:g}", str(row["started"]),
            *(_number(row[name], ".2f") for name in ("wait_p50", "wait_p95", "wait_max")),
            _of(row["ahead"], row["ahead_bound"]), _of(row["peak"], row["limit"]),
            *(_number(row[name], ".1%") for name in ("share", "due_share")),
        )  # fmt: skip
    console = Console()
    console.print(table)
    for line in lines(record, verdict):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def lines(record: Record, verdict: Verdict) -> Iterator[str]:
    """Yield the outcome in words."""
    yield "p50, p95, max: waits in seconds. ahead: most tasks that started while one waited, of those that might."
    killed = f", with {len(record.kills)} workers killed" if record.kills else ""
    yield f"Claims by weight differed by {verdict.spread:.3g} turns, of {verdict.spread_bound:g} allowed{killed}."
    yield from (f"BROKEN  {text}" for text in verdict.broken)
    if not verdict.broken:
        yield "Every bound holds."


def _of(value: int | None, most: int | None) -> str:
    return "" if value is None else f"{value} of {most}"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def draw(path: Path, facts: Facts, record: Record, verdict: Verdict) -> None:
    """Draw wait per tenant over time, and share beside weight."""
    from matplotlib.figure import Figure  # no pyplot: that would look for a display

    figure = Figure(figsize=(10, 7), layout="constrained")
    above, below = figure.subplots(2, 1, height_ratios=(2, 1))
    began = min((claim.at for claim in record.claims), default=0.0)
    for tenant in facts.weights:
        points = [(max(0.0, at - began), wait) for at, wait in record.waits(tenant)]
        style = {"color": "lightgray", "zorder": 0} if tenant == facts.flood else {}
        above.plot(*zip(*points, strict=True), ".", label=tenant, **style) if points else None
    for at, _ in record.kills:
        above.axvline(at - began, color="red", linewidth=1, linestyle=":")
    above.set(xlabel="sent, seconds after the first claim (dotted: a worker was killed)", ylabel="wait, seconds")
    above.legend(loc="upper right", fontsize="small")
    shown = [row for row in rows(facts, record, verdict) if row["due_share"] is not None]
    places = range(len(shown))
    below.bar([at - 0.2 for at in places], [row["share"] or 0.0 for row in shown], 0.4, label="share of the claims")
    below.bar([at + 0.2 for at in places], [row["due_share"] for row in shown], 0.4, label="due by weight")
    below.set_xticks(list(places), [f"{row['tenant']}\nweight {row['weight']:g}" for row in shown])
    below.legend(loc="upper right", fontsize="small")
    figure.savefig(path, dpi=120)

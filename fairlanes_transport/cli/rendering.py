"""Tables for people: `views` as rich prints them."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import click

from ..lanes.views import DeadLetter, Delayed, LaneStats, Lease, QueueStats, Settings, Waiting

if TYPE_CHECKING:
    from rich.console import Console

_PIPE_COLUMNS = 400


def console() -> Console:
    """Where tables go.  Into a pipe they are as wide as they need."""
    try:
        from rich.console import Console
    except ModuleNotFoundError as exc:
        hint = "tables need rich: pip install 'fairlanes-transport[cli]'; or use --json"
        raise click.ClickException(hint) from exc
    return Console(width=None if sys.stdout.isatty() else _PIPE_COLUMNS, highlight=False)


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print a table; a column whose name ends in ``>`` is aligned to the right."""
    out = console()
    from rich.table import Table
    from rich.text import Text

    made = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for name in columns:
        right = name.endswith(">")
        made.add_column(name.rstrip(">"), justify="right" if right else "left", no_wrap=right)
    for row in rows:
        # Text: a tenant's name is no markup.
        made.add_row(*(Text(printable(cell)) for cell in row))
    out.print(made)


def printable(value: Any) -> str:
    """A cell; names are other people's data, so nothing in them may steer the terminal."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:g}"
    return "".join(c if c.isprintable() else "\ufffd" for c in str(value))


def duration(seconds: float | None) -> str:
    """``350ms``, ``12s``, ``3m05s``, ``7h02m``, ``4d06h``."""
    if seconds is None:
        return "-"
    if seconds < 1:
        return f"{seconds * 1000:.0f}ms"
    if seconds < 10:
        return f"{seconds:.1f}s"
    whole = int(seconds)
    for unit, small, size, of in (("m", "s", 60, 1), ("h", "m", 3600, 60), ("d", "h", 86_400, 3600)):
        if whole < size * (60 if unit == "m" else 24) or unit == "d":
            return f"{whole}s" if whole < size else f"{whole // size}{unit}{whole % size // of:02}{small}"
    return f"{whole}s"


def ago(at: float) -> str:
    """How long ago a time was, by this machine's clock."""
    return duration(max(0.0, time.time() - at))


def ahead(at: float) -> str:
    """How far ahead a time is; ``overdue`` if it has passed."""
    left = at - time.time()
    return duration(left) if left >= 0 else "overdue"


def settings(own: Settings) -> str:
    """Settings in one line; those that are set."""
    parts = []
    for name in ("weight", "limit", "rate", "burst", "max_size"):
        value = getattr(own, name)
        if value is not None:
            off = value == 0 and name in ("limit", "max_size")
            parts.append(f"{name}={'none' if off else f'{value:g}' if isinstance(value, float) else value}")
    return " ".join(parts + (["paused"] if own.paused else [])) or "-"


def queues(stats: Sequence[QueueStats]) -> None:
    """A table of queues."""
    table(
        ["QUEUE", "READY>", "IN FLIGHT>", "DELAYED>", "DEAD>", "LANES>", "STATE", "DEFAULTS"],
        [
            (
                q.queue, q.ready, q.in_flight, q.delayed, q.dead, q.lanes, "paused" if q.paused else "open",
                settings(q.defaults),
            )
            for q in stats
        ],
    )  # fmt: skip


def lanes(stats: Sequence[LaneStats]) -> None:
    """A table of lanes."""
    table(
        ["LANE", "READY>", "IN FLIGHT>", "LIMIT>", "WEIGHT>", "SHARE>", "WAIT>", "STATE", "CONFIGURED"],
        [
            (
                lane.lane, lane.ready, lane.in_flight, lane.limit, lane.weight,
                "-" if lane.share is None else f"{lane.share:.1%}", duration(lane.oldest_wait), lane.state,
                settings(lane.own),
            )
            for lane in stats
        ],
    )  # fmt: skip


def waiting(messages: Sequence[Waiting]) -> None:
    """A table of ready messages."""
    table(
        ["TASK ID", "TASK", "PRIORITY>", "ATTEMPTS>", "FAILURES>", "PUBLISHED>"],
        [(m.task_id, m.task, m.priority, m.attempt, m.failures, f"{ago(m.published)} ago") for m in messages],
    )


def leases(messages: Sequence[Lease]) -> None:
    """A table of leases."""
    table(
        ["LANE", "TASK ID", "TASK", "ATTEMPT>", "FAILURES>", "DEADLINE>", "KIND", "TAG"],
        [
            (
                m.lane, m.task_id, m.task, m.attempt, m.failures, ahead(m.deadline),
                "slot" if m.slot else "lease", m.tag,
            )
            for m in messages
        ],
    )  # fmt: skip


def delayed(messages: Sequence[Delayed]) -> None:
    """A table of delayed messages."""
    table(
        ["LANE", "TASK ID", "TASK", "FAILURES>", "DUE IN>", "TAG"],
        [(m.lane, m.task_id, m.task, m.failures, ahead(m.due), m.tag) for m in messages],
    )


def dead(messages: Sequence[DeadLetter]) -> None:
    """A table of dead letters."""
    table(
        ["LANE", "TASK ID", "TASK", "ATTEMPTS>", "DIED>", "REASON", "TAG"],
        [(m.lane, m.task_id, m.task, m.attempt, f"{ago(m.died)} ago", m.reason, m.tag) for m in messages],
    )

"""``fairlanes top``: a queue's lanes, live.  Each refresh reads a bounded number of lanes."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

import click

from ..errors import FairlanesError, connection_errors
from ..lanes.api import Lanes
from ..lanes.watch import Look, Row, Watch, as_json
from . import rendering
from .base import answer, complete_queue, steering

if TYPE_CHECKING:
    from rich.console import RenderableType

#: Key -> (column's name, what to sort by); the highest first, names from the first.
SORTS: Final[dict[str, tuple[str, Callable[[Row], float]]]] = {
    "b": ("backlog", lambda row: row.stats.ready),
    "f": ("in flight", lambda row: row.stats.in_flight),
    "w": ("wait", lambda row: row.stats.oldest_wait or 0.0),
    "r": ("rate", lambda row: row.rate),
    "s": ("served", lambda row: row.served or 0.0),
    "d": ("deficit", lambda row: (row.stats.share or 0.0) - (row.served or 0.0)),
    "n": ("name", lambda row: 0.0),
}
KEYS: Final = "sort: b f w r s d n  i inverse  j k select  p pause lane  space freeze  q quit"
#: Lines around the lanes: two of title, one of column names, one of keys, one of messages.
_FRAME: Final = 5
#: What ends a command, but not a view that is up.
_SHOWN: Final[tuple[type[Exception], ...]] = (FairlanesError, *connection_errors)
_ARROWS: Final = {"\x1b[A": "k", "\x1b[B": "j", "\x1bOA": "k", "\x1bOB": "j"}


class Screen:
    """What is shown, and what the keys do.  Knows no terminal."""

    def __init__(self, lanes: Lanes, queue: str, sort: str = "b") -> None:
        self.lanes, self.queue, self.sort = lanes, queue, sort
        self.inverse = self.frozen = False
        self.selected = 0
        self.message = ""
        self.look: Look | None = None
        self._watch = Watch(lanes, queue)
        self._height = 0

    def refresh(self) -> None:
        """Look again, unless the view is frozen.  A broker that fails is shown, and asked again next time."""
        if self.frozen:
            return
        try:
            self.look = self._watch.look(tuple(row.stats.lane for row in self.rows(self._height)))
        except _SHOWN as exc:
            if self.look is None:
                raise
            self.message = f"no answer: {exc}"
        else:
            self.message = "" if self.message.startswith("no answer") else self.message

    def rows(self, height: int) -> list[Row]:
        """The first so many lanes, in the chosen order."""
        if self.look is None:
            return []
        of = SORTS[self.sort][1]
        rows = sorted(self.look.rows, key=lambda row: (-of(row), row.stats.lane), reverse=self.inverse)
        return rows[:height]

    def press(self, key: str) -> bool:
        """Do what a key says; False: leave."""
        key = _ARROWS.get(key, key)
        shown = self.rows(self._height)
        if key in ("q", "\x03", "\x04"):
            return False
        if key in SORTS:
            self.sort, self.inverse = key, False
        elif key == "i":
            self.inverse = not self.inverse
        elif key == " ":
            self.frozen = not self.frozen
        elif key in ("j", "k"):
            self.selected = max(0, min(self.selected + (1 if key == "j" else -1), len(shown) - 1))
        elif key == "p" and shown:
            self._toggle_pause(shown[min(self.selected, len(shown) - 1)])
        return True

    def _toggle_pause(self, row: Row) -> None:
        lane, paused = row.stats.lane, row.stats.paused
        try:
            (self.lanes.resume if paused else self.lanes.pause)(self.queue, lane)
        except _SHOWN as exc:
            self.message = f"{lane}: {exc}"
        else:
            self.message = f"{lane} {'resumed' if paused else 'paused'}"
        self.refresh()

    def render(self, height: int) -> RenderableType:
        """The whole screen, `height` lines."""
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        self._height = max(1, height - _FRAME)
        look, shown = self.look, self.rows(self._height)
        if look is None:
            return Text("looking ...")
        q = look.queue
        state = ("PAUSED  " if q.paused else "") + ("FROZEN  " if self.frozen else "")
        order = SORTS[self.sort][0] + (" (inverse)" if self.inverse else "")
        title = f"{state}{q.queue}  {look.rate:.1f}/s  by {order}"
        sizes = (
            f"ready {q.ready}  in flight {q.in_flight}  delayed {q.delayed}  dead {q.dead}  "
            f"lanes {q.lanes} ({len(shown)} shown)"
        )
        table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), expand=True, header_style="reverse")
        table.add_column("LANE", ratio=1, no_wrap=True, overflow="ellipsis")
        for name in ("READY", "FLIGHT", "WEIGHT", "SHARE", "SERVED", "RATE/S", "WAIT"):
            table.add_column(name, justify="right", no_wrap=True, min_width=6)
        table.add_column("STATE", no_wrap=True, min_width=7)
        for i, row in enumerate(shown):
            table.add_row(*map(Text, _cells(row)), style="reverse" if i == self.selected else "")

        def line(text: str, style: str = "") -> Text:
            return Text(rendering.printable(text), style=style, no_wrap=True, overflow="ellipsis")

        return Group(line(title, "bold"), line(sizes), table, line(KEYS, "dim"), line(self.message, "bold"))


def _cells(row: Row) -> list[str]:
    lane = row.stats
    rate = f"{row.rate:.1f}" if row.rate < 1000 else _short(row.rate)
    return [
        rendering.printable(lane.lane), _short(lane.ready), _short(lane.in_flight), f"{lane.weight:g}"[:6],
        _percent(lane.share), _percent(row.served), rate, rendering.duration(lane.oldest_wait), lane.state,
    ]  # fmt: skip


def _percent(part: float | None) -> str:
    return "-" if part is None else f"{part:.1%}"


def _short(number: float) -> str:
    """At most six characters: ``99999``, ``1234k``, ``56M``."""
    if number < 100_000:
        return f"{number:.0f}"
    return f"{number / 1000:.0f}k" if number < 10_000_000 else f"{number / 1_000_000:.0f}M"


# ----------------------------------------------------------------------------------------------- the terminal


@contextlib.contextmanager
def _keyboard() -> Iterator[Callable[[float], str]]:
    """A function that waits so many seconds for a key and returns it, or ''."""
    import termios
    import tty

    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)

    def key(seconds: float) -> str:
        ready, _, _ = select.select([fd], [], [], max(0.0, seconds))
        # An arrow is three bytes that come together; '' at the end of input, which ends the view.
        return (os.read(fd, 3).decode(errors="replace") or "q") if ready else ""

    try:
        tty.setcbreak(fd)
        yield key
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


def _live(screen: Screen, interval: float) -> None:
    from rich.live import Live

    out = rendering.console()
    with _keyboard() as key, Live(console=out, screen=True, auto_refresh=False) as live:
        while True:
            screen.refresh()
            until = time.monotonic() + interval
            while True:
                live.update(screen.render(out.size.height), refresh=True)
                pressed = key(until - time.monotonic())
                if not pressed:
                    break
                if not screen.press(pressed):
                    return


@steering("top")
@click.argument("queue", required=False, shell_complete=complete_queue)
@click.option(
    "--interval",
    type=click.FloatRange(0.1, 3600),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="Between two looks.",
)
@click.option(
    "--sort",
    type=click.Choice(list(SORTS)),
    default="b",
    show_default=True,
    help="; ".join(f"{key}: {name}" for key, (name, _) in SORTS.items()) + ".",
)
def top(lanes: Lanes, as_json_: bool, *, queue: str | None, interval: float, sort: str) -> None:
    """Watch QUEUE's lanes: backlog, in flight, share by weight and share served, rate, wait.

    Into a pipe, or with --json, one measurement over the interval is printed.
    """
    if queue is None:
        names = lanes.queues()
        if len(names) != 1:
            raise click.UsageError(f"which queue? one of: {', '.join(names) or '(there is none)'}")
        queue = names[0]
    screen = Screen(lanes, queue, sort)
    if not as_json_ and sys.stdin.isatty() and sys.stdout.isatty():
        return _live(screen, interval)
    screen.refresh()
    time.sleep(interval)
    screen.refresh()
    assert screen.look is not None
    look = screen.look
    whole = screen.render(len(look.rows) + _FRAME)
    return answer(as_json_, as_json(look), lambda: rendering.console().print(whole))

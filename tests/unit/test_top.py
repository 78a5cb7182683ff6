"""``fairlanes top``: what it measures, how it draws, what its keys do, in a real terminal too."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
import time

import pytest
from rich.console import Console

from fairlanes_transport.cli.top import KEYS, Screen
from fairlanes_transport.errors import QueueAbsent
from fairlanes_transport.lanes.watch import Watch
from tests.harness import ROOT
from tests.unit.rig import Command, Rig


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The watch's clock: one number, which the test moves."""
    now = [0.0]
    monkeypatch.setattr("fairlanes_transport.lanes.watch.time.monotonic", lambda: now[0])
    return now


def serve(rig: Rig, n: int) -> None:
    """Claim and finish messages."""
    for _ in range(n):
        rig.store.ack("q", [m.fence for m in rig.store.claim("q", 1, 60_000).claimed])


def test_it_measures_what_each_lane_is_served(rig: Rig, clock: list[float]) -> None:
    for lane in ("heavy", "light"):
        for _ in range(60):
            rig.send("t", lane)
    rig.lanes.set("q", "heavy", weight=3)
    watch = Watch(rig.lanes, "q")
    first = watch.look()
    assert (first.rate, {row.stats.share for row in first.rows}) == (0.0, {0.75, 0.25})
    assert {row.served for row in first.rows} == {None}
    serve(rig, 40)
    rig.send("t", "heavy")
    clock[0] += 2
    look = watch.look()
    rows = {row.stats.lane: row for row in look.rows}
    assert look.rate == pytest.approx(20)
    assert (rows["heavy"].rate, rows["light"].rate) == (pytest.approx(15), pytest.approx(5))
    assert (rows["heavy"].served, rows["light"].served) == (pytest.approx(0.75), pytest.approx(0.25))
    clock[0] += 2
    assert watch.look().rate < 20


def test_an_emptied_lane_was_served_what_it_had_and_then_goes(rig: Rig, clock: list[float]) -> None:
    for _ in range(10):
        rig.send("t", "gone")
    watch = Watch(rig.lanes, "q")
    watch.look()
    claimed = rig.store.claim("q", 10, 60_000).claimed
    clock[0] += 1
    (row,) = watch.look().rows
    assert (row.rate, row.stats.in_flight) == (pytest.approx(10), 10)
    rig.store.ack("q", [m.fence for m in claimed])
    assert watch.look().rows == ()


def test_released_messages_were_not_served(rig: Rig, clock: list[float]) -> None:
    for _ in range(10):
        rig.send("t")
    watch = Watch(rig.lanes, "q")
    watch.look()
    rig.store.release("q", [m.fence for m in rig.store.claim("q", 5, 60_000).claimed])
    clock[0] += 1
    look = watch.look()
    assert (look.rate, look.rows[0].rate) == (0, 0)


def test_many_lanes_are_read_in_turns(rig: Rig) -> None:
    for n in range(25):
        rig.send("t", f"l{n:02}")
    watch = Watch(rig.lanes, "q", lanes_per_look=10)
    assert [len(watch.look().rows) for _ in range(4)] == [10, 20, 25, 25]
    rig.lanes.purge("q", "l24")
    assert [len(watch.look(also=("l24", "nobody")).rows) for _ in range(5)][-1] == 24


def draw(screen: Screen, width: int = 80, height: int = 24) -> list[str]:
    """The lines that a terminal of that size shows."""
    out = Console(width=width, height=height, file=io.StringIO(), color_system=None)
    out.print(screen.render(height))
    assert isinstance(out.file, io.StringIO)
    return out.file.getvalue().splitlines()


def screen_of(rig: Rig) -> Screen:
    """A screen that has looked once."""
    screen = Screen(rig.lanes, "q")
    screen.render(24)
    screen.refresh()
    return screen


def test_a_thousand_lanes_fit_80_columns(rig: Rig) -> None:
    for n in range(1000):
        rig.send("t", f"tenant-with-a-rather-long-name-{n:04}")
    rig.lanes.set("q", "tenant-with-a-rather-long-name-0000", weight=0.123456, limit=7)
    screen = screen_of(rig)
    before = time.perf_counter()
    lines = draw(screen)
    assert time.perf_counter() - before < 2
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    assert "lanes 1000 (19 shown)" in lines[1]
    assert " ".join(lines[2].split()) == "LANE READY FLIGHT WEIGHT SHARE SERVED RATE/S WAIT STATE"
    assert KEYS in lines[22]
    assert len(draw(screen, 40, 10)) <= 10


def test_keys_sort(rig: Rig) -> None:
    for lane, n in {"a": 1, "b": 3, "c": 2}.items():
        for _ in range(n):
            rig.send("t", lane)
    rig.store.claim("q", 1, 60_000)
    screen = screen_of(rig)

    def order() -> str:
        return "".join(row.stats.lane for row in screen.rows(10))

    assert order() == "bca"
    for keys, expected in {"n": "abc", "ni": "cba", "f": "abc", "b": "bca", "bi": "acb", "s": "abc"}.items():
        assert all(screen.press(key) for key in keys)
        assert order() == expected, keys
    assert "by served" in draw(screen)[0]
    assert not screen.press("q")
    assert not screen.press("\x03")


def test_keys_select_and_pause_a_lane(rig: Rig) -> None:
    for lane in "ab":
        rig.send("t", lane)
    screen = screen_of(rig)
    draw(screen)
    for key in ("n", "k", "\x1b[B", "j", "p"):
        assert screen.press(key)
    assert rig.lanes.lane("q", "b").paused
    assert draw(screen)[-1] == "b paused"
    assert "paused" in draw(screen)[4]
    screen.press("p")
    assert not rig.lanes.lane("q", "b").paused


def test_space_freezes_the_view(rig: Rig) -> None:
    screen = screen_of(rig)
    screen.press(" ")
    rig.send("t")
    screen.refresh()
    assert draw(screen)[0].startswith("FROZEN")
    assert "ready 0" in draw(screen)[1]
    screen.press(" ")
    screen.refresh()
    assert "ready 1" in draw(screen)[1]


def test_a_broker_that_fails_is_shown_and_asked_again(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = screen_of(rig)
    call = rig.link.call
    with monkeypatch.context() as patch:
        patch.setattr(rig.link, "call", lambda *_: (_ for _ in ()).throw(ConnectionResetError("lost")))
        screen.refresh()
        assert draw(screen)[-1] == "no answer: lost"
    assert rig.link.call == call
    screen.refresh()
    assert "no answer" not in "".join(draw(screen))
    with pytest.raises(QueueAbsent):
        Screen(rig.lanes, "x").refresh()


# the command


def test_one_measurement_into_a_pipe(command: Command) -> None:
    command.send("t")
    measured = command.json("top", "q", "--interval", "0.1")
    assert [(lane["lane"], lane["ready"], lane["state"]) for lane in measured["lanes"]] == [("a", 1, "ready")]
    assert "LANE" in command.run("top", "--interval", "0.1", "--sort", "w").output
    command.run("top", "absent", code=1)
    command.lanes.declare("other")
    assert "q" in command.run("top", code=2).output


def run_in_terminal(command: Command, keys: bytes, seconds: float = 20.0) -> tuple[int, str]:
    """Run ``fairlanes top`` in a terminal, press keys once it shows lanes; (exit code, output)."""
    master, slave = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
    arguments = [sys.executable, "-m", "fairlanes_transport.cli", "-b", command.url, "top", "q"]
    process = subprocess.Popen(arguments, stdin=slave, stdout=slave, stderr=slave, cwd=ROOT, env=environment)
    os.close(slave)
    output = b""
    try:
        os.set_blocking(master, False)
        until, pressed = time.monotonic() + seconds, False
        while process.poll() is None and time.monotonic() < until:
            try:
                output += os.read(master, 65536)
            except BlockingIOError:
                time.sleep(0.01)
            except OSError:  # the other side is closed
                break
            if not pressed and b"quit" in output:
                os.write(master, keys)
                pressed = True
        return process.wait(5), output.decode(errors="replace")
    finally:
        process.kill()
        process.wait()
        os.close(master)


def test_in_a_terminal(command: Command) -> None:
    command.send("t", "acme")
    code, output = run_in_terminal(command, b"q")
    assert code == 0, output
    assert "acme" in output
    assert "\x1b[?1049h" in output  # a screen of its own,
    assert "\x1b[?1049l" in output  # which is left at the end

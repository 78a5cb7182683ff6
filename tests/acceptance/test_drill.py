"""``fairlanes drill`` on the real thing, with small numbers: it tells a broken bound from one that holds, and
leaves nothing behind.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.harness import ROOT, SCHEME, Server, need_valkey, wait_for

pytestmark = [
    pytest.mark.acceptance,
    pytest.mark.skipif(SCHEME != "fairlanes", reason="the drill has its own control group"),
]

WORKER = re.compile(r" -n drill\d+-\d+@")
"""What the command line of a drill's worker holds."""

SMALL = ("--seconds", "2", "--burst", "10", "--flood", "200", "--tenant", "acme", "--tenant", "bolt")


@pytest.fixture(autouse=True)
def _no_leftovers(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Put what the drill writes under this test's directory, and find nothing of it afterwards."""
    for name in ("FAIRLANES_BROKER", "CELERY_BROKER_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    yield
    wait_for(lambda: not processes(str(tmp_path)), 10, "the end of the server")
    wait_for(lambda: not list(tmp_path.glob("fairlanes-*")), 5, "the end of the directories")


def processes(text: str) -> list[str]:
    """Return the command lines on this machine that hold ``text``."""
    listing = subprocess.run(["ps", "-eww", "-o", "args="], capture_output=True, text=True, check=True).stdout
    return [line for line in listing.splitlines() if text in line]


def workers() -> list[str]:
    """Return the command lines of drills' workers."""
    return [line for line in processes(" -n drill") if WORKER.search(line)]


def start(*options: str, broker: Server | None = None) -> subprocess.Popen[str]:
    """Start the command line in a process group of its own."""
    on = () if broker is None else ("-b", broker.url())
    return subprocess.Popen(
        [sys.executable, "-m", "fairlanes_transport.cli", *on, "drill", *options],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


def drill(*options: str, broker: Server | None = None) -> tuple[int, str, str]:
    """Run the drill; return exit code, output and errors."""
    with start(*options, broker=broker) as process:
        output, errors = process.communicate(timeout=110)
    return process.returncode, output, errors


def outcome(*options: str, broker: Server | None = None) -> tuple[int, dict[str, Any]]:
    """Run the drill; return exit code and its JSON."""
    code, output, errors = drill(*SMALL, "--json", *options, broker=broker)
    assert output, errors
    return code, json.loads(output)


def is_clean(server: Server) -> bool:
    """Whether the server holds nothing, and no worker of a drill is there."""
    return not server.client().keys("*") and not workers()


def test_the_bounds_hold_with_weights_and_limits_on_an_embedded_server() -> None:
    need_valkey()
    code, told = outcome("--weight", "acme=3", "--limit", "bolt=1", "-c", "3")
    assert (code, told["ok"], told["broken"]) == (0, True, [])
    assert told["spread"] <= told["spread_bound"] == 1
    flood, acme, bolt = told["tenants"]
    assert (flood["weight"], acme["weight"], acme["due_share"]) == (1, 3, 0.75)
    assert acme["share"] == pytest.approx(0.75, abs=0.1)
    assert (bolt["limit"], bolt["peak"], bolt["share"]) == (1, 1, None)
    assert 0 <= acme["ahead"] <= acme["ahead_bound"]
    for row in (acme, bolt):
        assert row["sent"] == row["started"] > 10


def test_the_control_group_breaks_them() -> None:
    need_valkey()
    code, told = outcome("--control")
    assert (code, told["ok"]) == (1, False)
    assert any(text.startswith("share: ") for text in told["broken"])
    assert any(text.startswith("ahead: ") for text in told["broken"])


def test_a_bound_of_ones_own_is_broken() -> None:
    need_valkey()
    code, output, _ = drill(*SMALL, "--ahead", "0", "--max-wait", "0.001")
    assert code == 1
    assert re.search(r"BROKEN  ahead: \d+ tasks started ahead of one of acme; at most 0", output), output
    assert re.search(r"BROKEN  wait: a task of bolt waited \d+\.\d+ s; at most 0\.001", output), output


def test_on_a_broker_of_ones_own_with_kills_nothing_is_left(server: Server) -> None:
    need_valkey()
    code, told = outcome("--seconds", "7", "--kill-every", "3", "--lease", "2", "--workers", "2", broker=server)
    assert (code, told["broken"]) == (0, [])
    assert told["kills"] >= 1
    wait_for(lambda: is_clean(server), 5, "a clean server")


def test_a_queue_that_exists_is_not_touched(server: Server) -> None:
    from fairlanes_transport.lanes.api import Lanes

    Lanes(server.url()).declare("mine")
    before = server.client().keys("*")
    code, _, errors = drill(*SMALL, "--queue", "mine", broker=server)
    assert (code, "queue 'mine' exists" in errors) == (2, True)
    assert server.client().keys("*") == before


def test_a_worker_that_does_not_start_is_exit_code_1(server: Server) -> None:
    code, _, errors = drill(*SMALL, "--pool", "nosuchpool", broker=server)
    assert (code, "Error: the worker ended with exit code" in errors) == (1, True)
    wait_for(lambda: is_clean(server), 5, "a clean server")


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_however_it_is_ended_nothing_is_left(signum: signal.Signals, server: Server) -> None:
    with start("--seconds", "60", "--queue", "interrupted", broker=server) as process:
        assert process.stderr is not None
        next(line for line in process.stderr if "started" in line)
        assert workers()
        os.killpg(process.pid, signum)
        process.communicate(timeout=20)
    assert process.returncode == (1 if signum == signal.SIGINT else 128 + signum)
    wait_for(lambda: is_clean(server), 5, "a clean server")


def test_after_a_kill_the_queue_ends_by_itself(server: Server) -> None:
    with start("--seconds", "60", "--queue", "killed", broker=server) as process:
        assert process.stderr is not None
        next(line for line in process.stderr if "started" in line)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=20)
    client = server.client()
    wait_for(lambda: not workers(), 10, "the end of the workers")
    assert client.keys("*"), "what is left"
    # The keys of lanes end later than the queue, which ends ten minutes after its last use.
    assert all(0 < client.pttl(key) <= 3 * 600_000 for key in client.keys("*"))
    client.flushall()


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (("--weight", "nobody=3"), "no tenant nobody"),
        (("--weight", "acme"), "not TENANT=NUMBER"),
        (("--limit", "acme=0"), "1 or more"),
        (("--tenant", "flood"), "flood is the tenant that floods"),
        (("--control", "--kill-every", "5"), "--control without --kill-every"),
    ],
)
def test_wrong_usage(options: tuple[str, ...], error: str) -> None:
    code, _, errors = drill(*options)
    assert (code, error in errors) == (2, True), errors

"""``fairlanes demo`` on the real thing, with smaller numbers: what it measures, and that it leaves nothing
behind.
"""

from __future__ import annotations

import os
import pathlib
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator

import pytest

from fairlanes_transport.demo.command import FLOOD, DemoFailed, Plan, run_demo, summary
from fairlanes_transport.demo.figures import waits
from tests.harness import ROOT, SCHEME, need_valkey, wait_for

pytestmark = pytest.mark.acceptance

SCHEMES = tuple(dict.fromkeys(("redis", SCHEME)))
SMALL = Plan(flood=1500, quiet=10, schemes=SCHEMES)


@pytest.fixture(autouse=True)
def _valkey() -> None:
    need_valkey()


@pytest.fixture(autouse=True)
def _no_leftovers(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Put the demo's server under this test's directory, and find neither it nor a worker of it
    afterwards.
    """
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    yield
    wait_for(lambda: not processes(str(tmp_path)), 10, "the end of the server")
    assert not list(tmp_path.glob("fairlanes-*"))


def processes(text: str) -> list[str]:
    """Return the command lines on this machine that hold ``text``."""
    listing = subprocess.run(["ps", "-eww", "-o", "args="], capture_output=True, text=True, check=True).stdout
    return [line for line in listing.splitlines() if text in line]


class Recorder:
    """A Progress that remembers what it was told."""

    def __init__(self) -> None:
        self.runs: list[str] = []
        self.ended = 0
        self.last: tuple[int, Counter[str]] = 0, Counter()

    def begin(self, scheme: str) -> None:
        self.runs.append(scheme)

    def update(self, sent: int, started: Counter[str]) -> None:
        self.last = sent, started.copy()

    def end(self) -> None:
        self.ended += 1


def test_each_scheme_runs_every_task_and_only_fair_lanes_spare_the_quiet() -> None:
    progress = Recorder()
    results = run_demo(SMALL, progress)

    assert tuple(result.scheme for result in results) == tuple(progress.runs) == SCHEMES
    assert progress.ended == len(SCHEMES)
    assert progress.last == (1550, Counter(SMALL.totals))
    for result in results:
        assert Counter(start.tenant for start in result.starts) == SMALL.totals
        index = result.fairness(SMALL)
        assert index is not None
        flood_end = waits(result.starts, [FLOOD])[-1]
        quiet_end = waits(result.starts, SMALL.tenants)[-1]
        if result.scheme == "redis":
            assert index < 0.3
        else:
            assert index > 0.9
            assert quiet_end < flood_end / 2
    assert summary(SMALL, results).startswith("The quiet tenants' tasks waited (median): on redis://")


def test_a_run_that_does_not_finish_is_an_error_with_the_workers_log() -> None:
    progress = Recorder()
    with pytest.raises(DemoFailed, match=r"the worker ended with exit code [\s\S]*nosuchscheme"):
        run_demo(Plan(schemes=("nosuchscheme",)), progress)
    assert progress.ended == 1


def test_a_run_that_takes_too_long_is_an_error() -> None:
    with pytest.raises(DemoFailed, match=r"only \d+ of 450 tasks were started in time"):
        run_demo(Plan(flood=400, quiet=10, schemes=("redis",), run_seconds=0.1), Recorder())


def demo(*options: str) -> subprocess.Popen[str]:
    """Start the command line in a process group of its own, its output in a pipe."""
    return subprocess.Popen(
        [sys.executable, "-m", "fairlanes_transport.cli", "demo", *options],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def test_into_a_pipe_it_writes_plain_lines_and_the_table() -> None:
    with demo("--flood", "200", "--quiet", "5", "--scheme", "redis") as process:
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    assert "redis://  sent 225/225  started: flood 200/200  acme 5/5" in output
    assert re.search(r"│ flood +│ +200 │ +\d+\.\d\d │", output), output
    assert "The quiet tenants' tasks waited (median): on redis://" in output
    assert "\x1b" not in output


def test_a_failed_run_is_exit_code_1() -> None:
    with demo("--scheme", "nosuchscheme") as process:
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "Error: the worker ended with exit code" in output


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_however_it_is_ended_no_worker_is_left(signum: signal.Signals) -> None:
    with demo("--flood", "5000", "--scheme", "redis") as process:
        assert process.stdout is not None
        next(line for line in process.stdout if "sent" in line)
        worker = f" -n demo-{process.pid}@"
        assert processes(worker)
        os.killpg(process.pid, signum)
        process.communicate(timeout=20)
    assert process.returncode == (1 if signum == signal.SIGINT else -signum)
    wait_for(lambda: not processes(worker), 10, f"the end of the worker after {signum.name}")

"""Measure ``fairlanes://`` beside ``redis://``: ``python -m tests.benchmarks [NAME ...]``.

Every benchmark runs both in turn, round by round (A B A B), on servers of its own.  Shown are the medians of the
rounds, and the median of their ratios.  ``--json FILE`` keeps everything; ``--check`` exits with 1 if a target is
missed.  What the figures mean is in ``docs/explanation/performance.md``.

These are no tests: their figures depend on the machine and on what else it does.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import pytest

from tests.benchmarks import busy, clock, connections, idle, latency, raw, scripts, wake
from tests.benchmarks.report import Benchmark, Report
from tests.benchmarks.rig import SCHEMES, Rig
from tests.harness import BINARIES

BENCHMARKS: dict[str, Benchmark] = {
    benchmark.name: benchmark
    for benchmark in (
        idle.IDLE,
        wake.HERD,
        wake.CHAIN,
        latency.LATENCY,
        raw.RAW,
        busy.MESSAGES,
        *busy.POOLS,
        clock.CLOCK,
        connections.CONNECTIONS,
        scripts.SCRIPTS,
    )
}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of: {', '.join(BENCHMARKS)} (default: all)")
    parser.add_argument("--rounds", type=int, default=3, help="pairs per benchmark (default: %(default)s)")
    parser.add_argument("--scale", type=float, default=1.0, help="of counts and durations; 0.2 is a quick look")
    parser.add_argument("--server", choices=sorted(BINARIES), default="redis", help="kind of the servers")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a target is missed")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.names if name not in BENCHMARKS]
    if unknown:
        parser.error(f"no benchmark {', '.join(unknown)}; there are {', '.join(BENCHMARKS)}")
    return arguments


def main() -> int:
    """Run what was asked for; return the exit code."""
    arguments = _arguments()
    rig = Rig(arguments.server, arguments.scale)
    report = Report(rig.about())
    for name in arguments.names or BENCHMARKS:
        benchmark = BENCHMARKS[name]
        started = time.monotonic()
        for number in range(arguments.rounds):
            print(f"{name}: round {number + 1} of {arguments.rounds}", file=sys.stderr, flush=True)
            report.add(benchmark, benchmark.run(rig, SCHEMES))
        print(f"{name}: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
        if arguments.json:  # after each benchmark: a long run that is ended keeps what it has
            arguments.json.write_text(json.dumps(report.data(), indent=1) + "\n")
    print(report.table())
    missed = report.missed()
    for line in missed:
        print(f"missed: {line}", file=sys.stderr)
    return 1 if missed and arguments.check else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (pytest.skip.Exception, pytest.fail.Exception) as error:
        sys.exit(str(error))

"""``fairlanes doctor``: the invariants of a queue on a live server, with ``--repair``."""

from __future__ import annotations

import click

from ..lanes.api import Lanes
from ..lanes.checkup import Finding
from ..lanes.doctor import Doctor, Report
from . import rendering
from .base import FAILED, answer, complete_queue, steering


@steering("doctor")
@click.argument("queues", nargs=-1, metavar="[QUEUE]...", shell_complete=complete_queue)
@click.option("--repair", is_flag=True, help="Mend what is found; what can still run is kept.")
def doctor(lanes: Lanes, as_json: bool, *, queues: tuple[str, ...], repair: bool) -> int:
    """Look for anything that contradicts itself in QUEUE, or in all durable queues.

    Safe on a server under load.  Exit code 1: something was found, and is not repaired.
    """
    reports = [Doctor(lanes).check(queue, repair=repair) for queue in queues or lanes.queues()]
    sound = all(report.sound for report in reports)
    answer(as_json, {"sound": sound, "queues": reports}, lambda: _print(reports))
    return 0 if sound else FAILED


def _print(reports: list[Report]) -> None:
    for report in reports:
        looked = f"{report.lanes} lanes, {report.messages} messages"
        verdict = f"{len(report.findings)} findings" if report.findings else "sound"
        click.echo(rendering.printable(f"{report.queue}: {verdict} ({looked})"))
        for finding in report.findings:
            click.echo(f"  {_line(finding)}")
        for reason in report.skipped:
            click.echo(rendering.printable(f"  not looked at: {reason}"))


def _line(finding: Finding) -> str:
    named = (("lane", finding.lane), ("tag", finding.tag))
    where = "".join(f", {name} {value}" for name, value in named if value)
    done = " (repaired)" if finding.repaired else ""
    return rendering.printable(f"{finding.kind.value}{where}: {finding.what}{done}")

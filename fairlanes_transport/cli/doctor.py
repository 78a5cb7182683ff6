"""``fairlanes doctor``: the invariants of a queue on a live server, with ``--repair``, and what puts it at risk."""

from __future__ import annotations

import click

from ..lanes.api import Lanes
from ..lanes.checkup import Finding
from ..lanes.doctor import Doctor, Report, Surroundings
from . import rendering
from .base import FAILED, answer, complete_queue, steering


@steering("doctor")
@click.argument("queues", nargs=-1, metavar="[QUEUE]...", shell_complete=complete_queue)
@click.option("--repair", is_flag=True, help="Mend what is found; what can still run is kept.")
@click.option("--strict", is_flag=True, help="Exit code 1 for warnings too.")
def doctor(lanes: Lanes, as_json: bool, *, queues: tuple[str, ...], repair: bool, strict: bool) -> int:
    """Look for anything that contradicts itself in QUEUE, or in all durable queues, and warn of what puts it at risk.

    Safe on a server under load.  Exit code 1: something was found, and is not repaired.  Warnings are of the server
    and of what else is on it; they change the exit code with --strict only.
    """
    doctor, names = Doctor(lanes), queues or lanes.queues()
    reports = [doctor.check(queue, repair=repair) for queue in names]
    around = doctor.look_around(names)
    sound = all(report.sound for report in reports)
    data = {"sound": sound, "queues": reports, "warnings": around.warnings, "skipped": around.skipped}
    answer(as_json, data, lambda: _print(reports, around))
    return 0 if sound and not (strict and around.warnings) else FAILED


def _print(reports: list[Report], around: Surroundings) -> None:
    for report in reports:
        looked = f"{report.lanes} lanes, {report.messages} messages"
        verdict = f"{len(report.findings)} findings" if report.findings else "sound"
        click.echo(rendering.printable(f"{report.queue}: {verdict} ({looked})"))
        for finding in report.findings:
            click.echo(f"  {_line(finding)}")
        for reason in report.skipped:
            click.echo(rendering.printable(f"  not looked at: {reason}"))
    for warning in around.warnings:
        click.echo(rendering.printable(f"warning: {warning.risk.value}: {warning.what}"))
    for reason in around.skipped:
        click.echo(rendering.printable(f"not looked at: {reason}"))


def _line(finding: Finding) -> str:
    named = (("lane", finding.lane), ("tag", finding.tag))
    where = "".join(f", {name} {value}" for name, value in named if value)
    done = " (repaired)" if finding.repaired else ""
    return rendering.printable(f"{finding.kind.value}{where}: {finding.what}{done}")

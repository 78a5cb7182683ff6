"""The operator's commands: see and steer lanes.  One function per command, in the order of the manual."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import click

from ..lane_settings import SETTINGS
from ..lanes.api import Lanes
from ..lanes.views import LaneStats, Message
from . import rendering
from .base import (
    FAILED,
    answer,
    complete_queue,
    complete_tenant,
    confirmed,
    limit_option,
    maybe_tenant,
    queue_argument,
    start_option,
    steering,
    tenant_argument,
    yes_option,
)


def _count(value: str) -> int | str:
    """A whole number, or ``none``."""
    return value if value == "none" else int(value)


_count.__name__ = "whole number"  # what click says of a value that is none


def _lane_line(lane: LaneStats) -> str:
    in_force = f"weight {lane.weight:g}, limit {lane.limit or 'none'}, rate {lane.rate or 'none'}"
    own = rendering.settings(lane.own)
    return f"{rendering.printable(lane.lane)}: {in_force}, {lane.state}; configured: {own}"


def _listed(lane: LaneStats) -> dict[str, Any]:
    """A lane as JSON shows it."""
    return {**dataclasses.asdict(lane), "state": lane.state}


# ------------------------------------------------------------------------------------------------ lanes


@steering("lanes")
@click.argument("queue", required=False, shell_complete=complete_queue)
@maybe_tenant
@click.option("--top", type=click.IntRange(1), metavar="K", help="The K lanes with the most ready messages.")
@click.option("--after", default="", metavar="LANE", help="Continue after this lane.")
@limit_option
@click.option("--configured", is_flag=True, help="Only lanes with settings of their own.")
def lanes(
    lanes: Lanes, as_json: bool, *, queue: str | None, tenant: str | None, top: int | None, after: str,
    limit: int, configured: bool,
) -> None:  # fmt: skip
    """Show queues; of QUEUE its lanes, in the order of their names; of TENANT its lane."""
    if queue is None:
        stats = [lanes.snapshot(name) for name in lanes.queues()]
        data = {"queues": [{**dataclasses.asdict(q), "backlog": q.backlog} for q in stats]}
        return answer(as_json, data, lambda: rendering.queues(stats))
    following = None
    if tenant is not None:
        shown: Sequence[LaneStats] = [lanes.lane(queue, tenant)]
    elif top is not None:
        shown = lanes.top(queue, top)
    else:
        page = lanes.lanes(queue, after=after, limit=limit, busy=not configured)
        shown, following = page.lanes, page.next
    answer(
        as_json,
        {"lanes": [_listed(lane) for lane in shown], "next": following},
        lambda: rendering.lanes(shown),
    )
    if following is not None and not as_json:
        click.echo(f"There are more: --after {following}", err=True)
    return None


@steering("set")
@queue_argument
@tenant_argument
@click.option("--weight", type=float, metavar="W", help="Share among the queue's lanes, 0.001 to 1000.")
@click.option("--limit", type=_count, metavar="N", help="Most tasks in flight; none: whatever the default.")
@click.option("--rate", metavar="RATE", help="Most starts per time: 5/s, 100/m, 1000/h; none.")
@click.option("--burst", type=float, metavar="N", help="Starts that a rested lane may make at once.")
@click.option("--max-size", type=_count, metavar="N", help="Most ready messages; none: whatever the default.")
@click.option("--create", is_flag=True, help="Make the queue exist, if no worker or sender has yet.")
def set_(lanes: Lanes, as_json: bool, *, queue: str, tenant: str, create: bool, **settings: Any) -> None:
    """Set what is given of a tenant's lane, in force at once on every worker."""
    given = {name: value for name, value in settings.items() if value is not None}
    if not given:
        raise click.UsageError("give one setting at least, such as --weight 3")
    if create:
        lanes.declare(queue)
    lane = lanes.set(queue, tenant, **given)
    answer(as_json, _listed(lane), _lane_line(lane))


@steering("unset")
@queue_argument
@tenant_argument
@click.argument("names", nargs=-1, type=click.Choice([name.replace("_", "-") for name in SETTINGS]))
def unset(lanes: Lanes, as_json: bool, *, queue: str, tenant: str, names: tuple[str, ...]) -> None:
    """Let the queue's defaults be in force again: for the settings named, or for all."""
    lane = lanes.unset(queue, tenant, *(name.replace("-", "_") for name in names))
    answer(as_json, _listed(lane), _lane_line(lane))


def _paused(lanes: Lanes, as_json: bool, queue: str, tenant: str | None, *, paused: bool) -> None:
    (lanes.pause if paused else lanes.resume)(queue, tenant)
    what = f"queue {queue}" if tenant is None else f"lane {tenant} of queue {queue}"
    done = "paused: what is claimed is finished, nothing more is claimed" if paused else "resumed"
    answer(as_json, {"queue": queue, "tenant": tenant, "paused": paused}, f"{rendering.printable(what)} {done}")


@steering("pause")
@queue_argument
@maybe_tenant
def pause(lanes: Lanes, as_json: bool, *, queue: str, tenant: str | None) -> None:
    """Let nothing more be claimed from QUEUE, or from one lane of it."""
    _paused(lanes, as_json, queue, tenant, paused=True)


@steering("resume")
@queue_argument
@maybe_tenant
def resume(lanes: Lanes, as_json: bool, *, queue: str, tenant: str | None) -> None:
    """End a pause of QUEUE, or of one lane of it."""
    _paused(lanes, as_json, queue, tenant, paused=False)


# ------------------------------------------------------------------------------------------------ messages


def _messages(as_json: bool, messages: Sequence[Message], render: Callable[[Any], None], whole: bool = False) -> None:
    """Print messages; headers and body hold other people's data, so only when they are asked for."""
    shown = [{k: v for k, v in vars(message).items() if whole or k not in ("headers", "body")} for message in messages]
    answer(as_json or whole, {"messages": shown}, lambda: render(messages))


@steering("peek")
@queue_argument
@tenant_argument
@start_option
@limit_option
@click.option("--body", is_flag=True, help="With headers and body, as JSON.")
def peek(lanes: Lanes, as_json: bool, *, queue: str, tenant: str, start: int, limit: int, body: bool) -> None:
    """Show a lane's ready messages in the order in which they will be served; changes nothing."""
    _messages(as_json, lanes.peek(queue, tenant, start=start, limit=limit), rendering.waiting, body)


@steering("purge")
@queue_argument
@maybe_tenant
@yes_option
def purge(lanes: Lanes, as_json: bool, *, queue: str, tenant: str | None, yes: bool) -> None:
    """Remove the ready and delayed messages of QUEUE, or of one lane of it."""
    stats = lanes.snapshot(queue)
    all_of_it = f"all {stats.ready} ready and {stats.delayed} delayed messages"
    what = all_of_it if tenant is None else f"the ready and delayed messages of lane {tenant}"
    confirmed(yes, f"Remove {rendering.printable(what)} of queue {rendering.printable(queue)} for good?")
    removed = lanes.purge(queue, tenant)
    answer(as_json, {"removed": removed}, f"{removed} messages removed")


@steering("move")
@queue_argument
@tenant_argument
@click.argument("to", shell_complete=complete_queue)
@yes_option
def move(lanes: Lanes, as_json: bool, *, queue: str, tenant: str, to: str, yes: bool) -> None:
    """Move a lane's ready and delayed messages to the queue TO.  Can be repeated if it was interrupted."""
    confirmed(yes, rendering.printable(f"Move lane {tenant} from queue {queue} to queue {to}?"))
    moved = lanes.move(queue, tenant, to)
    answer(as_json, {"moved": moved}, f"{moved} messages moved")


@steering("leases")
@queue_argument
@start_option
@limit_option
def leases(lanes: Lanes, as_json: bool, *, queue: str, start: int, limit: int) -> None:
    """Show what workers hold, the earliest deadline first."""
    _messages(as_json, lanes.leases(queue, start=start, limit=limit), rendering.leases)


@steering("delayed")
@queue_argument
@start_option
@limit_option
def delayed(lanes: Lanes, as_json: bool, *, queue: str, start: int, limit: int) -> None:
    """Show what is due later, the next one first."""
    _messages(as_json, lanes.delayed(queue, start=start, limit=limit), rendering.delayed)


@steering("cancel")
@queue_argument
@click.argument("task_id")
def cancel(lanes: Lanes, as_json: bool, *, queue: str, task_id: str) -> int:
    """Remove a task's delayed or waiting messages.  Exit code 1: there was none to remove."""
    done = lanes.cancel(queue, task_id)
    left = f"; {done.left} left: held by a worker (revoke the task), or dead" if done.left else ""
    answer(as_json, done, f"{done.removed} messages removed{left}")
    return 0 if done.removed else FAILED


# ----------------------------------------------------------------------------------------------- dead letters


@steering("dead")
@queue_argument
@start_option
@limit_option
@click.option("--body", is_flag=True, help="With headers and body, as JSON.")
def dead(lanes: Lanes, as_json: bool, *, queue: str, start: int, limit: int, body: bool) -> None:
    """Show dead letters, the oldest first."""
    _messages(as_json, lanes.dead(queue, start=start, limit=limit), rendering.dead, body)


def _which(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options that say which dead letters are meant."""
    for option in (
        click.option("--all", "everything", is_flag=True, help="All that are dead now."),
        click.option("--tenant", metavar="TENANT", shell_complete=complete_tenant, help="Those of one lane."),
        click.option("--tag", metavar="TAG", help="This one."),
    ):
        command = option(command)
    return command


def _one_of(tag: str | None, tenant: str | None, everything: bool) -> str:
    """What was chosen, in words."""
    if (tag is not None) + (tenant is not None) + everything != 1:
        raise click.UsageError("give one of --tag TAG, --tenant TENANT, --all")
    if everything:
        return "all dead letters"
    return f"dead letter {tag}" if tag is not None else f"the dead letters of {tenant}"


@steering("redrive")
@queue_argument
@_which
def redrive(lanes: Lanes, as_json: bool, *, queue: str, tag: str | None, tenant: str | None, everything: bool) -> int:
    """Make dead letters ready again.  Exit code 1: there was none."""
    _one_of(tag, tenant, everything)
    done = lanes.redrive(queue, tag=tag, tenant=tenant)
    answer(as_json, {"redriven": done}, f"{done} messages redriven")
    return 0 if done else FAILED


@steering("drop")
@queue_argument
@_which
@yes_option
def drop(
    lanes: Lanes,
    as_json: bool,
    *,
    queue: str,
    tag: str | None,
    tenant: str | None,
    everything: bool,
    yes: bool,
) -> int:
    """Drop dead letters for good.  Exit code 1: there was none."""
    what = _one_of(tag, tenant, everything)
    confirmed(yes, rendering.printable(f"Drop {what} of queue {queue} for good?"))
    done = lanes.drop(queue, tag=tag, tenant=tenant)
    answer(as_json, {"dropped": done}, f"{done} messages dropped")
    return 0 if done else FAILED

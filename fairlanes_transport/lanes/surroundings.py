"""What around the queues puts their messages at risk: settings of the server, and queues that nobody here serves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from redis.exceptions import NoPermissionError, ResponseError

from .. import keys
from ..options import BINDING_SEPARATOR
from ..scripts import Caller
from .replies import raw, text

#: Layouts that are looked for: some versions before and after ours.
_LAYOUTS = range(max(0, keys.LAYOUT - 20), keys.LAYOUT + 20)
#: Priorities in the names of kombu's lists.
_PRIORITIES = (3, 6, 9)


class Risk(str, Enum):
    """What is at risk. The value is what the doctor calls it."""

    EVICTION = "the server may evict keys"
    """With any policy but noeviction a full server deletes keys, and messages with them."""
    NOT_ON_DISK = "no append-only file"
    """A restart loses what was stored since the last snapshot, or everything."""
    NO_REPLICA = "no replica"
    """If the machine is lost, so are the messages."""
    IS_REPLICA = "this is a replica"
    """What is seen here may be old, and nothing can be changed."""
    OTHER_LAYOUT = "queues of another layout"
    """Another version of the package keeps its queues on the same server; neither sees the other's messages."""
    KOMBU_LIST = "messages in a list of kombu's Redis transport"
    """A worker or sender on redis:// uses a queue of the same name; workers here do not see these messages."""


@dataclass(frozen=True)
class Advice:
    """One thing that puts messages at risk, though nothing is broken."""

    risk: Risk
    #: in words, with the value that was found, and what to do
    what: str
    queue: str | None = None


@dataclass(frozen=True)
class Surroundings:
    """What was found, and what the server did not let us see."""

    warnings: tuple[Advice, ...]
    skipped: tuple[str, ...] = ()


def look_around(commands: Caller, prefix: str, queues: Iterable[str]) -> Surroundings:
    """Look at the server, and at what else it holds.

    Args:
        queues: whose namesakes are looked for, besides Celery's default queue.
    """
    found: list[Advice] = []
    skipped: list[str] = []
    try:
        found += _of_server(_info(commands))
    except NoPermissionError as exc:
        skipped.append(f"settings of the server: {exc}")
    found += _of_layouts(commands, prefix)
    found += _of_kombu(commands, prefix, sorted({*queues, "celery"}), skipped)
    return Surroundings(tuple(found), tuple(skipped))


def _info(commands: Caller) -> dict[str, str]:
    lines = text(commands.call("INFO")).splitlines()
    return {name: value for name, _, value in (line.partition(":") for line in lines)}


def _of_server(info: dict[str, str]) -> Iterator[Advice]:
    policy = info.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        yield Advice(Risk.EVICTION, f"maxmemory-policy is {policy}: set noeviction")
    if info.get("aof_enabled", "1") == "0":
        yield Advice(Risk.NOT_ON_DISK, "appendonly is no: a restart loses messages; set appendonly yes")
    if info.get("role") == "slave":
        yield Advice(Risk.IS_REPLICA, f"of {info.get('master_host')}:{info.get('master_port')}")
    elif info.get("connected_slaves", "1") == "0":
        yield Advice(Risk.NO_REPLICA, "no replica is connected: messages are on one machine only")


def _of_layouts(commands: Caller, prefix: str) -> Iterator[Advice]:
    others = [layout for layout in _LAYOUTS if layout != keys.LAYOUT]
    asked = [("SMEMBERS", raw(keys.queues(prefix, layout))) for layout in others]
    for layout, names in zip(others, commands.pipeline(asked), strict=True):
        if isinstance(names, Exception) or not names:
            continue
        shown = ", ".join(sorted(map(text, names))[:5]) + (", ..." if len(names) > 5 else "")
        what = f"layout {layout} has {len(names)} queues ({shown}), this version reads layout {keys.LAYOUT}"
        yield Advice(Risk.OTHER_LAYOUT, what)


def _of_kombu(commands: Caller, prefix: str, queues: list[str], skipped: list[str]) -> Iterator[Advice]:
    for queue in queues:
        lists = [queue, *(f"{queue}{BINDING_SEPARATOR}{priority}" for priority in _PRIORITIES)]
        lengths = commands.pipeline([("LLEN", raw(prefix + name)) for name in lists])
        denied = next((reply for reply in lengths if isinstance(reply, NoPermissionError)), None)
        if denied is not None:
            skipped.append(f"lists of kombu: {denied}")
            return
        count = sum(length for length in lengths if isinstance(length, int))
        if count:
            yield Advice(
                Risk.KOMBU_LIST,
                f"list {queue!r} holds {count} messages: start a worker on redis:// to finish them, or move them",
                queue,
            )
    unacked: Any = commands.pipeline([("HLEN", raw(f"{prefix}unacked"))])[0]
    if not isinstance(unacked, ResponseError) and unacked:
        yield Advice(Risk.KOMBU_LIST, f"{unacked} messages are held by workers on redis:// (hash 'unacked')")

"""Move a lane's messages to another queue.

Two queues are two Cluster slots, so no script can do it in one step.  Each batch is stored in the other queue
first, on hold as delayed messages, then removed here, then set free there: at no time is a message in no
queue, and unless the move is interrupted none is served twice.  After a crash in between, the held messages
become due by themselves; a second call finds the known ids and goes on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .browse import Browser
from .replies import raw, text

#: How long a stored message is on hold: far longer than a batch takes.
HOLD_MS = 60_000
_ARRIVAL = 2**49


@dataclass(frozen=True)
class _Moved:
    tag: str
    priority: int
    cost: float
    envelope: bytes
    body: bytes
    #: ms since the epoch; 0: ready
    due: int


def move(browser: Browser, queue: str, lane: str, to: str, batch: int) -> int:
    """Move ready and delayed messages that were there when this began; returns how many.

    Attempts and failures start over; so does the place in the lane, in the old order.

    Raises:
        LaneFull: the other lane is full; what was stored before that has moved.
    """
    pulse = browser.store.pulse(queue)
    state = dict(zip(pulse[13][::2], pulse[13][1::2], strict=True))
    began, arrivals = int(pulse[0]), int(state.get(b"arrivals", 0))
    moved = _move_all(browser, queue, lane, to=to, batch=batch, part="ready", before=arrivals)
    return moved + _move_all(browser, queue, lane, to=to, batch=batch, part="delayed", before=began)


def _move_all(browser: Browser, queue: str, lane: str, *, to: str, batch: int, part: str, before: int) -> int:
    """Page through the lane's ready, or the queue's delayed messages; what is left in place is passed."""
    key = browser.key(queue, part, lane if part == "ready" else "")
    passed, moved = 0, 0
    while flat := browser.commands.call("ZRANGE", key, passed, passed + batch - 1, "WITHSCORES"):
        some = _wanted(browser, queue, lane, flat, part=part, before=before)
        done = _move_batch(browser, queue, lane, to, some)
        moved += done
        passed += len(flat) // 2 - done
    return moved


def _wanted(browser: Browser, queue: str, lane: str, flat: list[bytes], *, part: str, before: int) -> list[_Moved]:
    """The messages on the page that are the lane's, were there before, and are whole."""
    wanted = []
    records = browser.records(queue, flat[::2], "body")
    for tag, score, found in zip(flat[::2], flat[1::2], records, strict=True):
        record, envelope, body = found
        if None in found:
            continue
        _, _, priority, _, cost, born, _, _, name = record.split(b" ", 8)
        age = int(float(score)) % _ARRIVAL if part == "ready" else int(born)
        if name == raw(lane) and age <= before:
            due = int(float(score)) if part == "delayed" else 0
            wanted.append(_Moved(text(tag), int(priority), float(cost), envelope, body, due))
    return wanted


def _move_batch(browser: Browser, queue: str, lane: str, to: str, some: list[_Moved]) -> int:
    store = browser.store
    hold = int(store.pulse(to)[0]) + HOLD_MS
    stored: list[_Moved] = []
    new: set[str] = set()
    try:
        for message in some:
            if _put(browser, to, lane, message, hold):
                new.add(message.tag)
            stored.append(message)
    finally:
        tags = [m.tag for m in stored]
        removed = dict(zip(tags, store.cancel(queue, tags), strict=True))
        # Claimed here in the meantime: it runs here.
        store.cancel(to, [tag for tag, gone in removed.items() if not gone and tag in new])
        store.reschedule(to, [(m.tag, m.due) for m in stored if removed[m.tag]])
    return sum(bool(gone) for gone in removed.values())


def _put(browser: Browser, to: str, lane: str, message: _Moved, hold: int) -> Any:
    return browser.store.enqueue(
        to, message.tag, lane, message.envelope, message.body, priority=message.priority, cost=message.cost,
        due_ms=max(message.due, hold),
    )  # fmt: skip

"""Move a lane's messages to another queue.

Two queues are two Cluster slots, so no script can do it in one step.  Each batch is stored in the other queue
first, on hold as delayed messages, then removed here, then set free there: at no time is a message in no
queue, and unless the move is interrupted none is served twice.  After a crash in between, the held messages
become due by themselves; a second call finds the known ids and goes on.

A moved message gets an id of its own, made from the queue that it left and the id that it had there.  So what the
other queue knows under the old id (its own copy of a topic publish, finished or dead perhaps) is another message,
and what it knows under the new one was stored there by a move.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

from .browse import Browser
from .reach import checked
from .replies import raw, text

#: How long a stored message is on hold: far longer than a batch takes.
HOLD_MS = 60_000
#: Bytes of payload that are fetched at a time; one message at least.
FETCHED_AT_ONCE = 1_000_000
_ARRIVAL = 2**49


@dataclass(frozen=True)
class _Found:
    """A message to be moved."""

    tag: bytes
    priority: int
    cost: float
    #: ms since the epoch; 0: ready
    due: int


def moved_tag(queue: str, tag: str) -> str:
    """Return the id, in the queue that it comes to, of a message that leaves `queue`."""
    return hashlib.sha256(f"{queue}\0{tag}".encode(errors="surrogateescape")).hexdigest()[:32]


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
        done = 0
        for some in _in_pieces(browser, queue, _wanted(browser, queue, lane, flat, part=part, before=before)):
            done += _move_batch(browser, queue, lane, to, some)
        moved += done
        passed += len(flat) // 2 - done
    return moved


def _wanted(browser: Browser, queue: str, lane: str, flat: list[bytes], *, part: str, before: int) -> list[_Found]:
    """The messages on the page that are the lane's and were there before."""
    wanted = []
    records = browser.commands.call("HMGET", browser.key(queue, "message"), *flat[::2])
    for tag, score, record in zip(flat[::2], flat[1::2], records, strict=True):
        if record is None:
            continue
        _, _, priority, _, cost, born, _, _, name = record.split(b" ", 8)
        age = int(float(score)) % _ARRIVAL if part == "ready" else int(born)
        if name == raw(lane) and age <= before:
            due = int(float(score)) if part == "delayed" else 0
            wanted.append(_Found(tag, int(priority), float(cost), due))
    return wanted


def _in_pieces(browser: Browser, queue: str, wanted: list[_Found]) -> Iterator[list[_Found]]:
    """Divide messages by the size of their payloads, so that the fetch of a piece is bounded."""
    parts = [browser.key(queue, part) for part in ("envelope", "body")]
    sizes = iter(checked(browser.commands.pipeline([("HSTRLEN", key, each.tag) for each in wanted for key in parts])))
    piece: list[_Found] = []
    room = FETCHED_AT_ONCE
    for message, envelope, body in zip(wanted, sizes, sizes, strict=True):
        if piece and envelope + body > room:
            yield piece
            piece, room = [], FETCHED_AT_ONCE
        piece.append(message)
        room -= envelope + body
    if piece:
        yield piece


def _move_batch(browser: Browser, queue: str, lane: str, to: str, some: list[_Found]) -> int:
    store = browser.store
    hold = int(store.pulse(to)[0]) + HOLD_MS
    payloads = checked(
        browser.commands.pipeline(
            [("HMGET", browser.key(queue, part), *(each.tag for each in some)) for part in ("envelope", "body")]
        )
    )
    stored: list[tuple[str, _Found]] = []
    try:
        for message, envelope, body in zip(some, *payloads, strict=True):
            if envelope is None or body is None:
                continue  # gone meanwhile, or damaged: the doctor's business
            tag = text(message.tag)
            store.enqueue(
                to, moved_tag(queue, tag), lane, envelope, body, priority=message.priority, cost=message.cost,
                due_ms=max(message.due, hold),
            )  # fmt: skip
            stored.append((tag, message))
    finally:
        removed = store.cancel(queue, [tag for tag, _ in stored])
        there = [
            (moved_tag(queue, tag), message.due, gone) for (tag, message), gone in zip(stored, removed, strict=True)
        ]
        # Claimed here in the meantime: it runs here.
        store.cancel(to, [tag for tag, _, gone in there if not gone])
        store.reschedule(to, [(tag, due) for tag, due, gone in there if gone])
    return sum(map(bool, removed))

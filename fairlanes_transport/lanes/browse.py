"""Pages of a queue's lanes and messages, by plain read commands.

A page is bounded, whatever the queue holds.  Messages come and go while pages are read: what is gone between
two commands is left out, and pages by position may skip or repeat a message.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from .. import keys
from ..scripts import Caller
from ..store import Store
from .reach import checked
from .replies import common, headers_of, lane_stats, raw, text
from .views import DeadLetter, Delayed, LaneStats, Lease, Waiting

#: The most that one call reads.
MOST = 1000
#: Lanes that one script run looks at: about a millisecond of the server's time.
LANES_AT_ONCE = 50
#: Envelopes per step of a search.
SEARCHED_AT_ONCE = 200


class Browser:
    """Reads one server's queues."""

    def __init__(self, commands: Caller, store: Store) -> None:
        self.commands = commands
        self.store = store

    def key(self, queue: str, part: str, lane: str = "") -> Any:
        """The key of a part of the queue, or of one of its lanes; of many lanes see `lane_keys`."""
        if lane:
            return self.lane_keys(queue, part, [lane])[0]
        return raw(keys.part(keys.base(queue, self.store.prefix), part))

    def lane_keys(self, queue: str, part: str, names: Iterable[str]) -> list[bytes]:
        """The keys of a part of these lanes, in this life of the queue."""
        base, life = keys.base(queue, self.store.prefix), self.store.life(queue)
        return [raw(keys.part(base, part, name, life)) for name in names]

    # lanes

    def names(self, queue: str, after: str, limit: int, parts: tuple[str, ...]) -> tuple[list[str], bool]:
        """(Names of lanes after `after` in one of the indexes, in byte order; whether there are more)."""
        found = self._between(queue, b"(" + raw(after) if after else b"-", b"+", limit + 1, parts)
        return found[:limit], len(found) > limit

    def beginning(self, queue: str, prefix: str, limit: int) -> list[str]:
        """Names of lanes that begin with `prefix`, in byte order."""
        start, stop = (b"[" + raw(prefix), b"(" + raw(prefix) + b"\xff") if prefix else (b"-", b"+")
        return self._between(queue, start, stop, limit, ("lanes", "configured"))[:limit]

    def _between(self, queue: str, start: bytes, stop: bytes, limit: int, parts: tuple[str, ...]) -> list[str]:
        """The first names of each index in a range, together in byte order."""
        commands = [("ZRANGEBYLEX", self.key(queue, p), start, stop, "LIMIT", 0, limit) for p in parts]
        return [text(name) for name in sorted(set().union(*checked(self.commands.pipeline(commands))))]

    def lanes(self, queue: str, names: list[str]) -> list[LaneStats]:
        """These lanes; those of one script run at one moment."""
        stats: list[LaneStats] = []
        for i in range(0, len(names), LANES_AT_ONCE):
            some = names[i : i + LANES_AT_ONCE]
            now, seen = self.store.lanes(queue, [raw(name) for name in some])
            stats += [lane_stats(name, now, one) for name, one in zip(some, seen, strict=True)]
        return stats

    def backlogs(self, queue: str, names: list[str]) -> list[int]:
        """Ready messages of these lanes: far cheaper than all that there is to know of them."""
        return checked(self.commands.pipeline([("ZCARD", key) for key in self.lane_keys(queue, "ready", names)]))

    def own_weights(self, queue: str) -> dict[str, float]:
        """The weights of all lanes that have one of their own; 0 for a paused one, which takes no share."""
        weights: dict[str, float] = {}
        after, more = "", True
        while more:
            names, more = self.names(queue, after, MOST, ("configured",))
            commands = [("HMGET", key, "weight", "paused") for key in self.lane_keys(queue, "settings", names)]
            found = zip(names, checked(self.commands.pipeline(commands)), strict=True)
            for name, (weight, paused) in found:
                if weight is not None or paused == b"1":
                    weights[name] = 0.0 if paused == b"1" else float(weight)
            after = names[-1] if names else ""
        return weights

    # messages

    def records(self, queue: str, tags: list[bytes], *parts: str) -> list[list[Any]]:
        """Per tag its record, envelope, and what stands in further hashes; None for what is not there."""
        if not tags:
            return []
        commands = [("HMGET", self.key(queue, part), *tags) for part in ("message", "envelope", *parts)]
        return [list(found) for found in zip(*checked(self.commands.pipeline(commands)), strict=True)]

    def _page(self, queue: str, key: bytes, start: int, limit: int, *parts: str) -> Iterator[Any]:
        """Per message on the page: score, the common fields, headers, and what stands in `parts`."""
        stop = start + min(limit, MOST) - 1
        reply = self.commands.call("ZRANGE", key, start, stop, "WITHSCORES") if stop >= start else []
        tags, scores = reply[::2], reply[1::2]
        found = self.records(queue, tags, *parts)
        for tag, score, (record, envelope, *more) in zip(tags, scores, found, strict=True):
            headers, task_id = headers_of(envelope)
            try:
                fields = common(text(tag), record or b"", headers, task_id)
            except ValueError:  # gone meanwhile, or damaged: the doctor's business
                continue
            yield float(score), fields, headers, more

    def ready(self, queue: str, lane: str, start: int, limit: int) -> list[Waiting]:
        """Ready messages of one lane, in the order in which they will be served."""
        page = self._page(queue, self.key(queue, "ready", lane), start, limit, "body")
        return [Waiting(**fields, headers=headers, body=more[0] or b"") for _, fields, headers, more in page]

    def leases(self, queue: str, start: int, limit: int) -> list[Lease]:
        """Claimed messages and running slots, the earliest deadline first."""
        page = self._page(queue, self.key(queue, "leases"), start, limit, "message")
        return [
            Lease(**fields, deadline=score / 1000, slot=more[0].split(b" ", 7)[6] == b"1")
            for score, fields, _, more in page
        ]

    def delayed(self, queue: str, start: int, limit: int) -> list[Delayed]:
        """Messages that are due later, the next one first."""
        page = self._page(queue, self.key(queue, "delayed"), start, limit)
        return [Delayed(**fields, due=score / 1000) for score, fields, _, _ in page]

    def dead(self, queue: str, start: int, limit: int) -> list[DeadLetter]:
        """Dead letters, the oldest first."""
        page = self._page(queue, self.key(queue, "dead"), start, limit, "reasons", "body")
        return [
            DeadLetter(
                **fields, died=score / 1000, reason=(more[0] or b"").decode(errors="replace"),
                headers=headers, body=more[1] or b"",
            )
            for score, fields, headers, more in page
        ]  # fmt: skip

    # searches

    def tags_of_task(self, queue: str, task_id: str) -> Iterator[list[str]]:
        """Tags of the messages of a task, in some steps: every envelope is looked at.

        A task has several while a retry waits and the first message is not acknowledged.
        """
        spellings = {task_id.encode(), json.dumps(task_id)[1:-1].encode()}
        cursor: Any = b"0"
        while True:
            cursor, flat = self.commands.call("HSCAN", self.key(queue, "envelope"), cursor, "COUNT", SEARCHED_AT_ONCE)
            yield [
                text(tag)
                for tag, envelope in zip(flat[::2], flat[1::2], strict=True)
                if any(s in envelope for s in spellings) and headers_of(envelope)[1] == task_id
            ]
            if int(cursor) == 0:
                return

"""The invariants of a queue, looked for on a live server, and mended on request.

Everything is read in bounded pages, and judged from replies that are one moment each; so a healthy queue has
no finding, whatever its load.  What comes and goes during the look may or may not be looked at.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from redis.exceptions import ResponseError

from .. import keys
from ..envelope import tenant_name
from ..errors import TenantError
from .api import Lanes
from .browse import LANES_AT_ONCE, Browser
from .checkup import RECORD, Finding, Kind, imbalance, judge_lane, judge_message, judge_token
from .reach import checked
from .replies import headers_of, pairs, raw, text
from .surroundings import Risk, Surroundings, look_around

__all__ = ["Doctor", "Finding", "Kind", "Report", "Risk", "Surroundings"]

#: Things looked at per command.
PAGE: Final = 100
#: A token is in nobody's hand for longer than this (seconds); a consumer claims at once after it popped one.
PATIENCE: Final = 1.0
_LOOKS: Final = 20


@dataclass(frozen=True)
class Report:
    """What was looked at, and what was found."""

    queue: str
    findings: tuple[Finding, ...]
    lanes: int
    messages: int
    #: checks that the server did not let us make
    skipped: tuple[str, ...] = ()

    @property
    def sound(self) -> bool:
        """Nothing is wrong now."""
        return all(finding.repaired for finding in self.findings)


class Doctor:
    """Looks after one broker's queues.

    Args:
        lanes: the broker. Its options ``tenant_header`` and ``default_tenant`` say in which lane a message belongs
            whose record is lost.
        patience: seconds that a wake token may be missing before that is a finding.
    """

    def __init__(self, lanes: Lanes, *, patience: float = PATIENCE) -> None:
        self.lanes = lanes
        self.store = lanes.store
        self.browser: Browser = lanes.browser
        self.patience = patience

    def check(self, queue: str, *, repair: bool = False) -> Report:
        """Look at the whole queue.

        Args:
            repair: mend what is found.  Whatever can still run is kept, rather once too often than lost.

        Raises:
            QueueAbsent: the queue was never declared.
        """
        self.lanes.snapshot(queue)
        if repair:
            self.store.clear_ruins(queue)
        return _Visit(self, queue, repair).report()

    def look_around(self, queues: Iterable[str]) -> Surroundings:
        """Look for what puts these queues at risk: the server's settings, and messages that nobody here serves."""
        return look_around(self.browser.commands, self.store.prefix, queues)


class _Visit:
    """One look at one queue."""

    def __init__(self, doctor: Doctor, queue: str, repair: bool) -> None:
        self.doctor, self.queue, self.repair = doctor, queue, repair
        self.store, self.browser = doctor.store, doctor.browser
        self.findings: list[Finding] = []
        self.met: set[tuple[Kind, str | None]] = set()
        self.skipped: list[str] = []
        self.messages = 0
        #: running slots: records without a payload
        self.slots = 0
        self.damaged: list[tuple[str, str]] = []

    def report(self) -> Report:
        """Look: messages first, as their repair places their lanes; the books last."""
        names = self._names()
        for tags in self._recorded():
            self.messages += len(tags)
            self._examine(tags)
        for tags in self._unrecorded(names):
            self._examine(tags)
        ordered = sorted(names)
        for i in range(0, len(ordered), LANES_AT_ONCE):
            self._examine_lanes(ordered[i : i + LANES_AT_ONCE])
        self._examine_untold()
        self._examine_token()
        self._examine_books()
        return Report(self.queue, tuple(self.findings), len(names), self.messages, tuple(self.skipped))

    def _found(self, kind: Kind, what: str, *, repaired: bool, **where: str) -> None:
        finding = Finding(self.queue, kind, what, repaired=repaired, **where)
        # A message is met in each of its sets.
        if finding.tag is None or (kind, finding.tag) not in self.met:
            self.findings.append(finding)
            self.met.add((kind, finding.tag))

    # walking

    def _scan(self, command: str, part: str, lane: str = "", cursor: Any = None) -> Iterator[list[Any]]:
        """The pages of a hash, set or sorted set, from `cursor` on; what is there throughout is seen."""
        if cursor is not None and int(cursor) == 0:
            return
        key = self.browser.key(self.queue, part, lane)
        while cursor is None or int(cursor) != 0:
            cursor, page = self.browser.commands.call(command, key, cursor or 0, "COUNT", PAGE)
            if page:
                yield page

    def _names(self) -> set[str]:
        """Every lane that anything of is there."""
        names = {
            text(name)
            for part in ("ring", "waiting", "lanes", "configured")
            for page in self._scan("ZSCAN", part)
            for name in page[::2]
        }
        return names | self._names_in_keys()

    def _names_in_keys(self) -> set[str]:
        """Lanes that have a key, in an index or not; reports keys that are none of ours."""
        base = keys.base(self.queue, self.store.prefix)
        pattern = raw("".join(f"\\{c}" if c in "*?[]^\\" else c for c in base) + "*")
        names: set[str] = set()
        cursor: Any = b"0"
        life = self.store.life(self.queue)
        while True:
            try:
                cursor, page = self.browser.commands.call("SCAN", cursor, "MATCH", pattern, "COUNT", 1000)
            except ResponseError as exc:
                self.skipped.append(f"keys without an index: {exc}")
                return names
            for key in page:
                split = keys.split(text(key).removeprefix(base))
                if split is None:
                    self._found(Kind.UNKNOWN_KEY, repr(text(key)), repaired=False)
                elif split[2] is not None and split[1] == life:
                    names.add(split[2])
            if int(cursor) == 0:
                return names

    def _recorded(self) -> Iterator[list[tuple[str, str]]]:
        """(Tag, lane) of all messages that have a record; what is damaged is kept for later."""
        for page in self._scan("HSCAN", "message"):
            whole = []
            for tag, record in zip(page[::2], page[1::2], strict=True):
                match = RECORD.fullmatch(record)
                if match:
                    whole.append((text(tag), text(match[2])))
                    self.slots += match[1] == b"1"
                else:
                    self.damaged.append((text(tag), ""))
            yield whole

    def _unrecorded(self, names: Iterable[str]) -> Iterator[list[tuple[str, str]]]:
        """(Tag, lane or '') of what stands in a set without a sound record that names this lane.

        Lanes come first: what is found there is known to be the lane's.
        """
        ordered = sorted(names)
        for i in range(0, len(ordered), LANES_AT_ONCE):
            for found in self._in_lanes(ordered[i : i + LANES_AT_ONCE]):
                yield self._without_record(found)
        for part in ("leases", "delayed", "dead"):
            for page in self._scan("ZSCAN", part):
                yield self._without_record([(tag, "") for tag in page[::2]])
        yield self.damaged
        pulse = self.store.pulse(self.queue)
        # A hash is walked with its values, so payloads only where there are more of them than of messages.
        for part, size in (("envelope", pulse[6]), ("body", pulse[7])):
            if size > pulse[5] - self.slots:
                for page in self._scan("HSCAN", part):
                    yield self._without_record([(tag, "") for tag in page[::2]])

    def _in_lanes(self, names: list[str]) -> Iterator[list[tuple[bytes, str]]]:
        """(Tag, lane) of what is ready or in flight in these lanes; short ones go in one round trip."""
        kinds = (("ZSCAN", "ready", 2), ("SSCAN", "flight", 1))
        scans = [(command, part, step, name) for name in names for command, part, step in kinds]
        found = zip(*(self.browser.lane_keys(self.queue, part, names) for _, part, _ in kinds), strict=True)
        commands = [
            (command, key, 0, "COUNT", PAGE)
            for of_lane in found
            for (command, _, _), key in zip(kinds, of_lane, strict=True)
        ]
        first: list[tuple[bytes, str]] = []
        for (command, part, step, name), (cursor, page) in zip(
            scans, checked(self.browser.commands.pipeline(commands)), strict=True
        ):
            first += [(tag, name) for tag in page[::step]]
            for more in self._scan(command, part, name, cursor):
                yield [(tag, name) for tag in more[::step]]
        yield first

    def _without_record(self, found: list[tuple[bytes, str]]) -> list[tuple[str, str]]:
        if not found:
            return []
        key = self.browser.key(self.queue, "message")
        records = self.browser.commands.call("HMGET", key, *(tag for tag, _ in found))
        return [
            (text(tag), lane)
            for (tag, lane), record in zip(found, records, strict=True)
            if record is None or (lane and text(record.split(b" ", 8)[-1]) != lane)
        ]

    # judging and mending

    def _examine(self, tags: list[tuple[str, str]]) -> None:
        seen = self.store.messages(self.queue, tags)
        for (tag, lane), one in zip(tags, seen, strict=True):
            wrong = list(judge_message(lane, one))
            if wrong and self.repair:
                self.store.repair_messages(self.queue, [(tag, lane or self._tenant(tag))])
            for kind, what in wrong:
                self._found(kind, what, repaired=self.repair, tag=tag, lane=lane)

    def _tenant(self, tag: str) -> str:
        """The lane that a message without a record belongs to."""
        envelope = self.browser.commands.call("HGET", self.browser.key(self.queue, "envelope"), raw(tag))
        options = self.doctor.lanes.options
        try:
            return tenant_name(headers_of(envelope)[0].get(options.tenant_header))
        except TenantError:
            return options.default_tenant

    def _examine_lanes(self, names: list[str]) -> None:
        now, seen = self.store.lanes(self.queue, [raw(name) for name in names])
        for name, one in zip(names, seen, strict=True):
            wrong = list(judge_lane(now, one))
            if wrong and self.repair:
                self.store.repair_lanes(self.queue, [name])
            for kind, what in wrong:
                self._found(kind, what, repaired=self.repair, lane=name)

    def _examine_untold(self) -> None:
        """Who is to be told of a dead letter is told of one that is there.  Untold is looked at again last: both change
        at one moment.
        """
        untold, dead = (self.browser.key(self.queue, part) for part in ("untold", "dead"))
        for page in self._scan("ZSCAN", "untold"):
            tags = page[::2]
            commands = [("ZSCORE", key, tag) for key in (dead, untold) for tag in tags]
            scores = checked(self.browser.commands.pipeline(commands))
            for tag, died, told in zip(tags, scores, scores[len(tags) :], strict=False):
                if died is None and told is not None:
                    if self.repair:
                        self.browser.commands.call("ZREM", untold, tag)
                    self._found(
                        Kind.UNTOLD, "it is to be told of, but is not dead", repaired=self.repair, tag=text(tag)
                    )

    def _examine_token(self) -> None:
        """A consumer may have popped the token and not claimed yet: look until patience ends."""
        for look in range(_LOOKS):
            wrong = list(judge_token(self.store.pulse(self.queue)))
            if not any(kind is Kind.TOKEN_MISSING for kind, _ in wrong):
                break
            if look < _LOOKS - 1:
                time.sleep(self.doctor.patience / _LOOKS)
        if wrong and self.repair:
            self.store.repair_lanes(self.queue, [])
        for kind, what in wrong:
            self._found(kind, what, repaired=self.repair)

    def _examine_books(self) -> None:
        pulse = self.store.pulse(self.queue)
        missing = imbalance(pulse)
        if not missing:
            return
        if self.repair:
            # What is missing is gone: as if purged.  What happens meanwhile changes both sides alike.
            self.browser.commands.call("HINCRBY", self.browser.key(self.queue, "totals"), "purged", missing)
        what = f"{abs(missing)} messages {'lost' if missing > 0 else 'too many'}: {pairs(pulse[14])}"
        self._found(Kind.BOOKS, what, repaired=self.repair)

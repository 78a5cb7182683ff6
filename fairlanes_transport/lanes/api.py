"""Read and steer a queue's lanes: what the ``fairlanes`` command, remote control and metrics are made of.

::

    lanes = Lanes("fairlanes://localhost")           # or Lanes(app)
    lanes.set("celery", "acme", weight=3, limit=10, rate="100/m")
    lanes.top("celery", 5)                           # the longest lanes, with their shares

Every call is bounded: it reads or changes a page, or walks in pages and never holds the server up.  What
walks the whole queue says so.  What is changed acts on the backlog at once and on every worker.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable, Iterator
from typing import Any, Final

from .. import keys
from ..envelope import tenant_name
from ..errors import OptionError, QueueAbsent
from ..lane_settings import SETTINGS, checked_settings, unknown_setting
from ..store import Store
from .browse import MOST, Browser
from .moving import move
from .reach import checked, reach
from .replies import queue_stats, raw, text
from .views import Cancelled, DeadLetter, Delayed, LaneStats, Lease, Page, QueueStats, Waiting

__all__ = ["Lanes"]

#: Messages per step of redrive, drop and move.
BATCH: Final = 100


class Lanes:
    """The lanes of one broker.  Tenants are named as in messages: a string, an int or a UUID.

    Args:
        broker: a URL, a Celery app, a kombu connection, or what runs commands (``call`` and ``pipeline``).
        options: as ``broker_transport_options``.

    Raises:
        OptionError: the URL, or an option, cannot be used.
        redis.exceptions.RedisError: the broker cannot be reached; so does every method.
        QueueAbsent: every method that takes a queue, if it was never declared.
        TenantError: every method that takes a tenant, if it is none.
    """

    def __init__(self, broker: Any, **options: Any) -> None:
        commands, self.options = reach(broker, options)
        self.store = Store(commands, self.options.global_keyprefix)
        self.browser = Browser(commands, self.store)

    # queues

    def queues(self) -> list[str]:
        """Names of all durable queues, sorted.  Others (``x-expires``, auto-delete) are not listed."""
        names: set[str] = set()
        cursor: Any = b"0"
        while True:
            cursor, some = self.browser.commands.call(
                "SSCAN", raw(keys.queues(self.store.prefix)), cursor, "COUNT", MOST
            )
            names.update(map(text, some))
            if int(cursor) == 0:
                return sorted(names)

    def snapshot(self, queue: str) -> QueueStats:
        """The queue as a whole, at one moment."""
        self._known(queue)
        return queue_stats(queue, self.store.pulse(queue))

    def autoscale(self, queue: str) -> int:
        """The number that an autoscaler follows: ready messages and those in flight."""
        return self.snapshot(queue).backlog

    def declare(self, queue: str) -> bool:
        """Make a durable queue exist before its first worker or sender does; True if it is new."""
        if self.store.exists(queue):
            return False
        self.browser.commands.call("SADD", raw(keys.queues(self.store.prefix)), raw(queue))
        return self.store.declare(queue)

    def pause(self, queue: str, tenant: Any = None) -> None:
        """Let no more messages be claimed from the queue, or from one lane.  What is claimed is finished."""
        self._pause(queue, tenant, True)

    def resume(self, queue: str, tenant: Any = None) -> None:
        """End a pause, of the queue or of one lane."""
        self._pause(queue, tenant, False)

    def _pause(self, queue: str, tenant: Any, paused: bool) -> None:
        self._known(queue)
        if tenant is None:
            self.store.pause(queue, paused=paused)
        else:
            self.store.configure(queue, tenant_name(tenant), paused=paused)

    # lanes

    def lanes(
        self, queue: str, *, after: str = "", limit: int = 100, busy: bool = True, configured: bool = True
    ) -> Page:
        """A page of lanes, in the order of their names' bytes.

        Args:
            after: where the last page ended (`Page.next`).
            limit: lanes on the page, at most 1,000.
            busy: with lanes that have ready or leased messages.
            configured: with lanes that have settings of their own.
        """
        self._known(queue)
        parts = (("lanes",) if busy else ()) + (("configured",) if configured else ())
        names, more = self.browser.names(queue, after, _limit(limit), parts) if parts else ([], False)
        stats = self.browser.lanes(queue, names)
        whole = not after and not more and busy
        return Page(tuple(shared(stats) if whole else stats), names[-1] if more else None)

    def names(self, queue: str, prefix: str = "", *, limit: int = 100) -> list[str]:
        """Names of lanes that begin with `prefix`, in the order of their bytes."""
        self._known(queue)
        return self.browser.beginning(queue, prefix, _limit(limit))

    def lane(self, queue: str, tenant: Any) -> LaneStats:
        """One lane; also one that has no messages and no settings."""
        self._known(queue)
        return self.browser.lanes(queue, [tenant_name(tenant)])[0]

    def each_lane(self, queue: str, *, step: int = 500) -> Iterator[LaneStats]:
        """All lanes, page by page."""
        after: str | None = ""
        while after is not None:
            page = self.lanes(queue, after=after, limit=step)
            yield from page.lanes
            after = page.next

    def top(self, queue: str, k: int = 20, *, key: Callable[[LaneStats], float] | None = None) -> list[LaneStats]:
        """The `k` lanes with the most ready messages, with their shares.  Walks through all lanes.

        Args:
            key: what to rank by instead, the highest first; this takes several times as long.
        """
        if key is not None:
            every = list(self.each_lane(queue))
            weights = sum(map(_contends, every))
            return shared(heapq.nlargest(k, every, key=key), weights)
        default = self.snapshot(queue).defaults.weight or 1.0
        own = self.browser.own_weights(queue)
        weights = 0.0

        def walk() -> Iterator[tuple[int, str]]:
            nonlocal weights
            after, more = "", True
            while more:
                names, more = self.browser.names(queue, after, MOST, ("lanes",))
                for name, ready in zip(names, self.browser.backlogs(queue, names), strict=True):
                    weights += own.get(name, default) if ready else 0
                    yield ready, name
                after = names[-1] if names else ""

        # Equal backlogs in the order of names.
        best = heapq.nsmallest(k, ((-ready, name) for ready, name in walk()))
        return shared(self.browser.lanes(queue, [name for _, name in best]), weights)

    def set(self, queue: str, tenant: Any, **settings: Any) -> LaneStats:
        """Set what is given, in force at once; returns the lane as it is now.

        Args:
            settings: ``weight`` (0.001 to 1000); ``limit``, most tasks in flight; ``rate``, such as
                ``"100/m"``; ``burst``, starts that a rested lane may make at once (1 unless it is
                set); ``max_size``, most ready messages; ``paused``.  ``"none"`` as
                limit, rate or max_size: no such bound here, whatever the queue's default.

        Raises:
            OptionError: a setting is unknown or out of range; nothing was changed.
        """
        lane = tenant_name(tenant)
        values = checked_settings(settings)
        return self._configure(queue, lane, values)

    def unset(self, queue: str, tenant: Any, *names: str) -> LaneStats:
        """Let the queue's defaults be in force again, for the settings named or for all; returns the lane."""
        for name in names:
            if name not in SETTINGS:
                raise unknown_setting(name)
        return self._configure(queue, tenant_name(tenant), dict.fromkeys(names or SETTINGS))

    def _configure(self, queue: str, lane: str, settings: dict[str, Any]) -> LaneStats:
        # Read first: who may not read the lane is told so before anything is in force.
        self.lane(queue, lane)
        self.store.configure(queue, lane, **settings)
        return self.lane(queue, lane)

    def throttle(self, queue: str, tenant: Any, seconds: float, *, shorten: bool = False) -> float:
        """Take the lane off the ring for a while; returns the seconds now left.

        Args:
            shorten: an end that lies later moves to this one; with 0 seconds the throttle ends.
        """
        lane = tenant_name(tenant)
        if not 0 <= seconds <= 366 * 86_400:
            raise OptionError(f"a throttle lasts 0 seconds to a year, not {seconds!r}")
        self._known(queue)
        return self.store.throttle(queue, lane, round(seconds * 1000), shorten=shorten) / 1000

    # messages

    def peek(self, queue: str, tenant: Any, *, start: int = 0, limit: int = 10) -> list[Waiting]:
        """Ready messages of one lane in the order in which they will be served; changes nothing."""
        self._known(queue)
        return self.browser.ready(queue, tenant_name(tenant), start, _limit(limit))

    def leases(self, queue: str, *, start: int = 0, limit: int = 100) -> list[Lease]:
        """Claimed messages and running slots, the earliest deadline first."""
        self._known(queue)
        return self.browser.leases(queue, start, _limit(limit))

    def delayed(self, queue: str, *, start: int = 0, limit: int = 100) -> list[Delayed]:
        """Messages that are due later, the next one first."""
        self._known(queue)
        return self.browser.delayed(queue, start, _limit(limit))

    def dead(self, queue: str, *, start: int = 0, limit: int = 100) -> list[DeadLetter]:
        """Dead letters, the oldest first."""
        self._known(queue)
        return self.browser.dead(queue, start, _limit(limit))

    def purge(self, queue: str, tenant: Any = None) -> int:
        """Remove the ready and delayed messages that are there now, of one lane or all; returns how many."""
        self._known(queue)
        return self.store.purge(queue, "" if tenant is None else tenant_name(tenant))

    def move(self, queue: str, tenant: Any, to: str) -> int:
        """Move a lane's ready and delayed messages that are there now to another queue; returns how many.

        Nothing is lost at any time, and a call that was interrupted can be made again.  Attempts and failures
        start over.  A message that the other queue has already, from a topic exchange, is then there once.

        Raises:
            LaneFull: the other lane is full; what was stored before that has moved.
        """
        if queue == to:
            raise OptionError(f"queue {queue!r} is where the messages are already")
        lane = tenant_name(tenant)
        self._known(queue)
        self._known(to)
        return move(self.browser, queue, lane, to, BATCH)

    def cancel(self, queue: str, task_id: str) -> Cancelled:
        """Remove the delayed and ready messages of a task.  Looks at every message of the queue."""
        self._known(queue)
        answers = [
            answer for tags in self.browser.tags_of_task(queue, task_id) for answer in self.store.cancel(queue, tags)
        ]
        return Cancelled(answers.count(True), answers.count(False))

    def redrive(self, queue: str, *, tag: str | None = None, tenant: Any = None) -> int:
        """Make dead letters ready again: one, a lane's, or all that are dead now; returns how many."""
        return self._each_dead(queue, tag, tenant, self.store.redrive)

    def drop(self, queue: str, *, tag: str | None = None, tenant: Any = None) -> int:
        """Drop dead letters for good: one, a lane's, or all that are dead now; returns how many."""
        return self._each_dead(queue, tag, tenant, self.store.drop_dead)

    def _each_dead(self, queue: str, tag: str | None, tenant: Any, act: Callable[[str, list[str]], int]) -> int:
        self._known(queue)
        if tag is not None:
            return act(queue, [tag])
        lane = None if tenant is None else raw(tenant_name(tenant))
        until = int(self.store.pulse(queue)[0])
        key, done, passed = self.browser.key(queue, "dead"), 0, 0
        while True:
            flat = self.browser.commands.call("ZRANGE", key, passed, passed + BATCH - 1, "WITHSCORES")
            tags = [tag for tag, died in zip(flat[::2], flat[1::2], strict=True) if float(died) <= until]
            if not tags:
                return done
            records = checked(self.browser.commands.pipeline([("HMGET", self.browser.key(queue, "message"), *tags)]))[0]
            chosen = [
                text(tag)
                for tag, record in zip(tags, records, strict=True)
                if record is not None and lane in (None, record.split(b" ", 8)[-1])
            ]
            acted = act(queue, chosen)
            done += acted
            passed += len(tags) - acted

    def _known(self, queue: str) -> None:
        if not self.store.exists(queue):
            raise QueueAbsent(f"queue {queue!r} does not exist: it was deleted, or never declared")


# ------------------------------------------------------------------------------------------------ helpers


def shared(lanes: list[LaneStats], weights: float | None = None) -> list[LaneStats]:
    """The lanes with their shares of `weights` (default: their own sum); an empty or paused one has none."""
    total = sum(map(_contends, lanes)) if weights is None else weights
    return [dataclasses.replace(lane, share=_contends(lane) / total if _contends(lane) else None) for lane in lanes]


def _contends(lane: LaneStats) -> float:
    """The weight with which a lane takes part now."""
    return lane.weight if lane.ready and not lane.paused else 0.0


def _limit(limit: int) -> int:
    if not 1 <= limit <= MOST:
        raise OptionError(f"a page has 1 to {MOST} entries, not {limit!r}")
    return limit

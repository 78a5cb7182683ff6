"""What ``fairlanes drill`` computes from its records, and the bounds that it holds them against.

The bounds count messages and not seconds, so that they hold on a slow and busy machine too.

Share
    The claims of two lanes that both have messages waiting, each divided by its lane's weight, differ by at most 1
    divided by the smaller weight, after every claim.  A lane with a limit leaves the ring when it has reached it,
    and takes no part.
Ahead
    Between the sending of a quiet tenant's task and its start, other tasks start: at most as many as the other lanes'
    turns allow, and those that workers had prefetched.  With ``p`` own tasks waiting (itself included), weight ``w``
    and the other lanes' weights ``v``, that is the sum of ``ceil(p * v / w) + 1``, and ``p - 1`` of its own, and twice
    what all workers together may prefetch.  A lane with a limit waits for itself, and takes no part.
Limit
    Of a lane with a limit, no more tasks run at once.
Recovery
    What a killed worker held is claimed again within its lease and some seconds.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = ["Claim", "Facts", "Record", "Verdict", "judge"]

Task = tuple[str, int]
"""A tenant, and the number of one of its tasks."""

RECOVERY_SECONDS = 10.0
"""How much longer than its lease a message may be lost with a killed worker: another has to start first."""


class Claim(NamedTuple):
    """A message that a worker got."""

    tenant: str
    number: int
    attempt: int
    at: float
    worker: int

    @property
    def task(self) -> Task:
        """Which."""
        return self.tenant, self.number


@dataclass(frozen=True)
class Facts:
    """What the drill asked for, as far as the bounds depend on it.

    Attributes:
        flood: the tenant that floods; the others are quiet.
        weights: of all tenants.
        limits: of those that have one.
        workers: how many there are.
        prefetch: messages that one worker takes at most.
        lease: seconds.
        ahead: most tasks that may start ahead of a quiet tenant's; None: what the turns allow.
        max_wait: longest wait of a quiet tenant's task in seconds; None: whatever.
    """

    flood: str
    weights: Mapping[str, float]
    limits: Mapping[str, int] = field(default_factory=dict)
    workers: int = 1
    prefetch: int = 2
    lease: float = 60.0
    ahead: int | None = None
    max_wait: float | None = None

    @property
    def unlimited(self) -> list[str]:
        """The tenants without a limit."""
        return [tenant for tenant in self.weights if tenant not in self.limits]


@dataclass
class Record:
    """What happened.  Times in seconds since the epoch."""

    sent: dict[Task, float] = field(default_factory=dict)
    claims: list[Claim] = field(default_factory=list)
    starts: dict[Task, float] = field(default_factory=dict)
    """The first start of each task."""
    runs: list[tuple[float, int, str, int]] = field(default_factory=list)
    """Starts and ends of tasks: when, +1 or -1, tenant, worker."""
    kills: list[tuple[float, int]] = field(default_factory=list)
    """When which worker was killed."""

    def waits(self, tenant: str) -> list[tuple[float, float]]:
        """When each started task of the tenant was sent, and how long it waited, in seconds.  What was sent before
        the first worker was there waits from the first claim on.
        """
        began = min((claim.at for claim in self.claims), default=0.0)
        return sorted(
            (max(at, began), max(0.0, self.starts[task] - max(at, began)))
            for task, at in self.sent.items()
            if task[0] == tenant and task in self.starts
        )


@dataclass(frozen=True)
class Verdict:
    """How the record compares to the bounds.

    Attributes:
        spread: the largest difference of two lanes' claims by weight, in units of its bound without allowance.
        spread_bound: how large it may be: 1, and more where workers were killed or do not see each other's order.
        ahead: tenant -> the most tasks that started ahead of one of its own, and how many might have.
        peaks: tenant with a limit -> most tasks that ran at once.
        shares: tenant -> share of the claims while all lanes without a limit had messages; empty if they never had.
        broken: what breaks a bound, in words; empty if all is well.
    """

    spread: float
    spread_bound: float
    ahead: Mapping[str, tuple[int, int]]
    peaks: Mapping[str, int]
    shares: Mapping[str, float]
    broken: tuple[str, ...]


def judge(facts: Facts, record: Record) -> Verdict:
    """Hold the record against the bounds."""
    spread, pair = worst_spread(facts, record)
    # Claims of a worker that was killed may not have been noted, and the claims of two workers are put in order
    # by the time of their receipt.
    allowed = 1.0 + (facts.workers - 1 + len(record.kills)) * facts.prefetch
    ahead = {tenant: worst_ahead(facts, record, tenant) for tenant in facts.unlimited if tenant != facts.flood}
    peaks = {tenant: peak(record, tenant) for tenant in facts.limits}
    broken = []
    if spread > allowed + 1e-9:
        broken.append(f"share: the claims of {pair[0]} and {pair[1]} differ by {spread:.3g} turns; at most {allowed:g}")
    broken += [
        f"ahead: {most} tasks started ahead of one of {tenant}; at most {bound}"
        for tenant, (most, bound) in ahead.items()
        if most > bound
    ]
    broken += [
        f"limit: {most} tasks of {tenant} ran at once; at most {facts.limits[tenant]}"
        for tenant, most in peaks.items()
        if most > facts.limits[tenant]
    ]
    broken += _slow_recoveries(facts, record) + _long_waits(facts, record) + _not_started(facts, record)
    return Verdict(spread, allowed, ahead, peaks, contended_shares(facts, record), tuple(broken))


# ---------------------------------------------------------------- share


def worst_spread(facts: Facts, record: Record) -> tuple[float, tuple[str, str]]:
    """Return the largest difference of two lanes' claims by weight, in units of its bound, and which two it is of.

    The bound is one message for equal weights, else 1/v + 1/w (docs/explanation/fairness.md).

    Claims count from the first one on, when all lanes are filled, until either lane may have run dry.
    """
    slack = (facts.workers - 1 + len(record.kills)) * facts.prefetch
    worst, of = 0.0, ("", "")
    weights = facts.weights
    for pair in itertools.combinations(facts.unlimited, 2):
        served = Counter(dict.fromkeys(pair, 0))
        v, w = (weights[tenant] for tenant in pair)
        bound = 1 / v if v == w else 1 / v + 1 / w
        for backlogs, claim in _backlogs(record):
            if any(backlogs[tenant] <= slack for tenant in pair):
                break
            served[claim.tenant] += 1
            one, other = (served[tenant] / weights[tenant] for tenant in pair)
            if abs(one - other) / bound > worst:
                worst, of = abs(one - other) / bound, pair
    return worst, of


def contended_shares(facts: Facts, record: Record) -> dict[str, float]:
    """Each lane's part of the claims while all lanes without a limit had messages, from the first claim on."""
    served: Counter[str] = Counter()
    for backlogs, claim in _backlogs(record):
        if any(backlogs[tenant] <= 0 for tenant in facts.unlimited):
            break
        if claim.tenant in facts.unlimited:
            served[claim.tenant] += 1
    return {tenant: served[tenant] / served.total() for tenant in facts.unlimited} if served else {}


def _backlogs(record: Record) -> list[tuple[Counter[str], Claim]]:
    """Each claim in order, with what every lane had waiting just before it, as far as is known for sure."""
    sent = sorted((at, task[0]) for task, at in record.sent.items())
    waiting: Counter[str] = Counter()
    claimed: set[Task] = set()
    told, result = 0, []
    for claim in sorted(record.claims, key=lambda claim: claim.at):
        while told < len(sent) and sent[told][0] <= claim.at:
            waiting[sent[told][1]] += 1
            told += 1
        result.append((waiting.copy(), claim))
        if claim.task not in claimed:
            claimed.add(claim.task)
            waiting[claim.tenant] -= 1
    return result


# ---------------------------------------------------------------- ahead


def worst_ahead(facts: Facts, record: Record, tenant: str) -> tuple[int, int]:
    """The most tasks that started between the sending of one of the tenant's tasks and its start, and how many
    might have; of all its tasks the one that is closest to its bound, or furthest beyond.
    """
    starts = sorted(record.starts.values())
    own_sent = sorted(at for task, at in record.sent.items() if task[0] == tenant)
    own_starts = sorted(at for task, at in record.starts.items() if task[0] == tenant)
    lost = _recoveries(record)
    worst = (0, ahead_bound(facts, tenant, 1))
    for task, at in record.sent.items():
        start = record.starts.get(task)
        if task[0] != tenant or start is None:
            continue
        count = bisect_right(starts, start) - 1 - bisect_right(starts, at) if start > at else 0
        # What started while a killed worker held it was not its lane's turn.
        count -= sum(bisect_right(starts, again) - bisect_right(starts, first) for first, again in lost.get(task, ()))
        position = bisect_right(own_sent, at) - bisect_right(own_starts, at)
        bound = ahead_bound(facts, tenant, max(1, position))
        if count - bound > worst[0] - worst[1]:
            worst = count, bound
    return worst


def ahead_bound(facts: Facts, tenant: str, position: int) -> int:
    """How many tasks may start ahead of the tenant's, if it is the `position`-th of its lane."""
    if facts.ahead is not None:
        return facts.ahead
    weight = facts.weights[tenant]
    turns = sum(math.ceil(position * v / weight) + 1 for other, v in facts.weights.items() if other != tenant)
    return turns + position - 1 + 2 * facts.workers * facts.prefetch


# ---------------------------------------------------------------- limits, kills, and what never started


def peak(record: Record, tenant: str) -> int:
    """Most tasks of the tenant that ran at once.  What a killed worker ran ended with it."""
    running: Counter[int] = Counter()
    most = 0
    # What ends at a moment ends before what starts at the same one.
    events = [(at, change, worker) for at, change, whose, worker in record.runs if whose == tenant]
    for _, change, worker in sorted(events + [(at, -math.inf, worker) for at, worker in record.kills]):
        running[worker] = 0 if change == -math.inf else running[worker] + int(change)
        most = max(most, running.total())
    return most


def _recoveries(record: Record) -> dict[Task, list[tuple[float, float]]]:
    """When tasks were lost with a killed worker before they had started (if it was noted), and claimed again."""
    claims: dict[Task, list[Claim]] = defaultdict(list)
    for claim in record.claims:
        claims[claim.task].append(claim)
    killed = {worker: at for at, worker in record.kills}
    lost: dict[Task, list[tuple[float, float]]] = {}
    for task, of_task in claims.items():
        if of_task[-1].attempt > 1:
            times = []
            for first, again in itertools.pairwise(of_task):
                times.append((first.at, again.at))
            if of_task[0].attempt > 1:
                # It was lost so soon that nothing was noted: with the last worker that was killed before.
                deaths = [at for at in killed.values() if at <= of_task[0].at]
                times.append((record.sent.get(task, 0.0) if not deaths else max(deaths), of_task[0].at))
            lost[task] = times
    return lost


def _slow_recoveries(facts: Facts, record: Record) -> list[str]:
    killed = {worker: at for at, worker in record.kills}
    most = facts.lease + RECOVERY_SECONDS
    claims: dict[Task, Claim] = {}
    slow = []
    for claim in record.claims:
        before = claims.get(claim.task)
        claims[claim.task] = claim
        if before is not None and before.worker in killed and claim.at - killed[before.worker] > most:
            took = claim.at - killed[before.worker]
            slow.append(f"recovery: a task of {claim.tenant} came back {took:.1f} s after the kill; at most {most:g}")
    return slow


def _long_waits(facts: Facts, record: Record) -> list[str]:
    if facts.max_wait is None:
        return []
    longest = {
        tenant: max((wait for _, wait in record.waits(tenant)), default=0.0)
        for tenant in facts.weights
        if tenant != facts.flood
    }
    return [
        f"wait: a task of {tenant} waited {wait:.2f} s; at most {facts.max_wait:g}"
        for tenant, wait in longest.items()
        if wait > facts.max_wait
    ]


def _not_started(facts: Facts, record: Record) -> list[str]:
    missing = Counter(
        tenant for tenant, number in record.sent if tenant != facts.flood and (tenant, number) not in record.starts
    )
    return [f"lost: {count} tasks of {tenant} were not started" for tenant, count in missing.items()]

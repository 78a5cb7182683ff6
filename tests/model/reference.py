"""A scheduler in plain Python, told from the design and not from the scripts: what the store is compared with."""

from collections import Counter
from collections.abc import Callable
from itertools import count
from math import ceil, inf
from types import SimpleNamespace
from typing import Any

from fairlanes_transport.store import Answer, FailurePolicy, Fence
from tests.model.turns import Turns

#: ms: how late a lane with work may be and make up for it, and the shortest time that a rate holds a lane
#: (lua/include/ring.lua)
CARRY, NAP = 100, 20


class Reference:
    """One queue; `waits(tag)` is how long a failed message waits: random, so checked to be in its bounds."""

    def __init__(self, policy: FailurePolicy, waits: Callable[[str], int], grace: int) -> None:
        self.policy, self.waits, self.grace = policy, waits, grace
        #: place: ready, leased, slot, delayed or dead; time: deadline, due time or time of death; roles: who, until
        self.messages, self.settings = dict[str, Any](), dict[str, dict[str, Any]]()
        self.throttles, self.waiting = (dict[str, int]() for _ in range(2))
        self.finished, self.previous, self.finished_since = set[str](), set[str](), -inf
        self.paused, self.arrivals, self.totals = False, count(1), Counter[str]()
        self.turns, self.roles = Turns(), dict[str, tuple[str, int]]()
        self.allowed = dict[str, float]()
        self.seen, self.no_lease_before = inf, 0

    def tags(self, *places: str, lane: str | None = None, until: float = inf) -> list[str]:
        found = ((t, m) for t, m in self.messages.items() if m.place in places and lane in (None, m.lane))
        at = {tag: m.order if m.place == "ready" else m.time for tag, m in found}
        return [tag for tag in sorted(at, key=lambda tag: (at[tag], tag)) if until == inf or at[tag] <= until]

    def setting(self, lane: str, name: str, default: Any = None) -> Any:
        return self.settings.get(lane, {}).get(name, default)

    @property
    def ring(self) -> dict[str, int]:
        return self.turns.tags

    def weight(self, lane: str) -> float:
        return float(self.setting(lane, "weight", 1))

    def cost(self, lane: str) -> float:
        """What the lane's next message costs."""
        return float(self.messages[self.tags("ready", lane=lane)[0]].cost)

    def next_start(self, lane: str, now: int, *, idle: bool = False) -> float:
        rate, burst, at = self.setting(lane, "rate"), self.setting(lane, "burst", 1), self.allowed.get(lane)
        late = 0 if at is None or idle else max(0, CARRY - (burst - 1) / rate)
        return max(min(at or 0, now + burst / rate), now - late)

    def held_until(self, lane: str, now: int) -> int:
        """When throttle and rate let the lane back."""
        until, rate = self.throttles.get(lane, 0), self.setting(lane, "rate")
        free = rate and ceil(self.next_start(lane, now) - (self.setting(lane, "burst", 1) - 1) / rate - 0.01)
        return max(until, free, now + NAP if rate * NAP >= 1 else 0) if rate and free > now else until

    def settle(self, lane: str, now: int) -> None:
        """Put the lane on the ring, among those that wait for a time, or on neither."""
        free = len(self.tags("leased", "slot", lane=lane)) < self.setting(lane, "limit", inf)
        ready = self.tags("ready", lane=lane)
        servable = ready if free and not self.setting(lane, "paused") else []
        if servable and self.setting(lane, "rate"):
            self.allowed[lane] = self.next_start(lane, now, idle=len(servable) == 1)
        until = self.held_until(lane, now)
        self.waiting.pop(lane, None)
        if not servable or until > now:
            self.turns.leave(lane, works=bool(ready))
        elif lane not in self.ring:
            self.turns.join(lane, self.cost(lane), self.weight(lane))
        if servable and until > now:
            self.waiting[lane] = until
            self.falls_due(until)

    def make_ready(self, tag: str, now: int) -> None:
        m = self.messages[tag]
        m.place, m.order = "ready", m.order or (m.priority, next(self.arrivals))
        self.settle(m.lane, now)

    def falls_due(self, at: int) -> None:
        if at < self.roles.get("keeper", ("", 0))[1]:
            del self.roles["keeper"]

    def need(self) -> bool:
        timed = "keeper" not in self.roles and (self.waiting or self.tags("delayed"))
        return not self.paused and bool(self.ring or timed)

    def keep(self, consumer: str, parks: bool, now: int) -> int | None:
        others = {role: held for role, held in self.roles.items() if held[0] != consumer}
        if not parks:
            self.roles = others
            return None
        taken = [r for r, (who, at) in self.roles.items() if who != consumer and at + self.grace > now]
        leases = [self.messages[t].time for t in self.tags("leased", "slot")]
        if leases and self.in_grace(now):
            leases = [max(min(leases), self.no_lease_before)]
        ahead = [self.messages[t].time for t in self.tags("delayed")] + leases + [*self.waiting.values()]
        if "keeper" in taken and "deputy" not in taken:
            self.roles["deputy"] = (consumer, self.roles["keeper"][1] + self.grace)
            return self.roles["deputy"][1] - now
        if "keeper" in taken:
            return None
        self.roles = others | {"keeper": (consumer, max(min(ahead, default=0), now))}
        return self.roles["keeper"][1] - now if ahead else self.roles.pop("keeper") and None

    def see(self, lease: int, now: int) -> None:
        if now - self.seen > lease * 2 / 3:
            self.no_lease_before = now + min(5_000, lease // 6)
        if self.seen == inf or not 0 <= now - self.seen <= lease / 12:
            self.seen = now

    def in_grace(self, now: int) -> bool:
        return now < self.no_lease_before <= now + 5_000

    def sweep(self, now: int) -> tuple[int, int]:
        late = [] if self.in_grace(now) else self.tags("leased", "slot", until=now)[:100]
        for tag in late:
            if self.messages[tag].place == "slot":
                self.remove(tag, "freed", now)
            else:
                self.totals["expired"] += 1
                self.fail(tag, now, at_once=self.messages[tag].failures == 0)
        for tag in (due := self.tags("delayed", until=now)[:100]):
            self.make_ready(tag, now)
        for _, lane in sorted((at, lane) for lane, at in self.waiting.items() if at <= now)[:100]:
            self.settle(lane, now)
        self.trim(now)
        return len(late), len(due)

    def remove(self, tag: str, why: str, now: int) -> None:
        self.totals[why] += 1
        self.settle(self.messages.pop(tag).lane, now)

    def trim(self, now: int) -> None:
        dead, old = self.tags("dead"), self.tags("dead", until=now - self.policy.dead_letter_ttl * 1000)
        for tag in (dead[: max(0, len(dead) - self.policy.dead_letter_max)] or old)[:100]:
            self.totals["trimmed"] += bool(self.messages.pop(tag))

    def finish(self, tag: str, now: int) -> None:
        if now - self.finished_since >= 300_000:
            self.previous, self.finished, self.finished_since = self.finished, set(), now
        self.finished.add(tag)

    def fail(self, tag: str, now: int, *, at_once: bool = False, fatal: bool = False) -> None:
        m, policy = self.messages[tag], self.policy
        m.failures += not fatal
        if fatal or m.failures >= policy.max_failures > 0:
            m.place, m.time = "dead", now
            self.totals["died"] += 1
            self.trim(now)
        elif at_once:
            m.place = "ready"
        else:
            full = min(policy.backoff_max, policy.backoff_base * policy.backoff_factor ** (m.failures - 1)) * 1000
            m.place, m.time = "delayed", now + self.waits(tag)
            assert full // 2 <= m.time - now <= full, f"{tag} waits {m.time - now} ms, not {full / 2} to {full}"
            self.falls_due(m.time)
        self.settle(m.lane, now)

    def enqueue(self, tag: str, lane: str, priority: int, due: int, cost: float, *, now: int) -> bool:
        if tag in self.messages or tag in self.finished | self.previous:
            return False
        self.messages[tag] = SimpleNamespace(lane=lane, priority=priority, cost=cost, place="delayed", time=due,
                                             order=None, attempt=0, failures=0, token="-")  # fmt: skip
        self.totals["enqueued"] += 1
        self.falls_due(due) if due > now else self.make_ready(tag, now)
        return True

    def claim(self, n: int, lease: int, token: str, now: int) -> list[str]:
        self.sweep(now)
        taken: list[str] = []
        while len(taken) < n and self.ring and not self.paused:
            lane = self.turns.head()
            if self.turns.pay_more(lane, self.cost(lane), self.weight(lane)):
                continue
            taken += self.tags("ready", lane=lane)[:1]
            m = self.messages[taken[-1]]
            m.place, m.time, m.attempt, m.token = "leased", now + lease, m.attempt + 1, token
            if self.setting(lane, "rate"):
                self.allowed[lane] = self.next_start(lane, now) + 1 / self.setting(lane, "rate")
            more = bool(self.tags("ready", lane=lane))
            self.turns.serve(lane, m.cost, self.cost(lane) if more else None, self.weight(lane))
            self.settle(lane, now)
        self.totals["claimed"] += len(taken)
        return taken

    def check(self, fence: Fence, *places: str) -> Answer:
        m = self.messages.get(fence.tag)
        if m is None or (m.place == "slot" and ("slot" not in places or (m.attempt, m.token) != fence[1:])):
            return Answer.GONE
        return Answer.DONE if m.place in places and (m.attempt, m.token) == fence[1:] else Answer.STALE

"""The state machine: one random step at a time on the store and on the reference, and they must stay the same.

It plays producers, consumers that die, lose replies, lose tokens and come back with stale fences, and an operator.
All time is passed in.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from math import inf
from typing import Any

import pytest
import redis
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from fairlanes_transport import scripts
from fairlanes_transport.errors import LaneFull
from fairlanes_transport.store import Answer, FailurePolicy, Fence, WillPark
from tests.model.reference import Reference
from tests.model.turns import CIRCLE
from tests.scripts.bench import Bench, ClientLink

POLICY = FailurePolicy(
    backoff_base=2.0, backoff_factor=3.0, backoff_max=5.0, max_failures=3, dead_letter_max=2, dead_letter_ttl=60.0
)
#: ms after which a deputy misses the keeper (lua/include/wake.lua)
GRACE = 50
LANES = ["a", "b", "two words"]
CONSUMERS = ["c1", "c2", "c3"]

lanes = st.sampled_from(LANES)
consumers = st.sampled_from(CONSUMERS)
picks = st.integers(0, 15)
several = st.lists(picks, min_size=1, max_size=3)
lossy = st.sampled_from([False] * 5 + [True])
Draw = Callable[[st.SearchStrategy[Any]], Any]
#: Settings by which a lane is bounded; real time may let a bucket or a throttle end, so theirs are long.
bounds = st.fixed_dictionaries(
    {
        "weight": st.sampled_from([None, 2, 3, 0.5, 7]),
        "limit": st.sampled_from([None, 1, 2, 3]),
    },
    optional={
        "rate": st.sampled_from([None, "1/30000", "2/45000"]),
        "burst": st.sampled_from([None, 1, 2, 3]),
        "paused": st.sampled_from([False, False, True]),
    },
)


#: What can happen, as often as it should.
ACTIONS = [
    *["claim"] * 6, *["enqueue"] * 4, *["ack"] * 4, *["pass_time_to_what_is_next"] * 3, *["reject"] * 3,
    *["configure"] * 2, *["release"] * 2, *["finish"] * 2, "enqueue_again", "enqueue_into_a_full_lane", "extend",
    "rearm", "pop_the_token_and_die", "pass_time", "outage", "expire", "pause", "throttle", "redrive", "purge",
    "cancel", "delete", "end",
]  # fmt: skip


class Losing(ClientLink):
    """A link whose next reply can be lost on the way, after the server did what it was asked."""

    lose = False

    def call(self, *args: Any) -> Any:
        reply = super().call(*args)
        if self.lose:
            self.lose = False
            raise redis.exceptions.ConnectionError("the reply was lost")
        return reply


class QueueMachine(RuleBasedStateMachine):
    """One queue, its reference, and everything that can happen to it."""

    #: makes a client on an empty database
    connect: Callable[[], redis.Redis]

    def __init__(self) -> None:
        super().__init__()
        self.bench = Bench(type(self).connect(), policy=POLICY)
        self.store, self.queue = self.bench.store, self.bench.queue
        self.link = self.store.caller = Losing(self.bench.client)
        self.ref = Reference(POLICY, self.wait_of, GRACE)
        self.tags: list[str] = []
        self.fences: list[Fence] = []
        self.token_out = False

    @property
    def now(self) -> int:
        return self.bench.now

    def wait_of(self, tag: str) -> int:
        """How long the store lets a failed message wait: the one thing that is random."""
        due = self.bench.client.zscore(self.bench.key("delayed"), tag)
        assert due is not None, f"{tag} failed and should wait"
        return int(due) - self.now

    def pick(self, numbers: list[int]) -> list[Fence]:
        """Fences that somebody got: for even numbers one that is current, else any; or one that nobody ever had."""
        live = [fence for fence in self.fences if self.ref.check(fence, "leased", "slot") == Answer.DONE]
        forged = (live or self.fences or [Fence("t0", 1, "")])[-1]._replace(token="forged")
        known = [*self.fences[-7:], forged]
        chosen = [live if live and n % 2 == 0 else known for n in numbers]
        return [fences[-1 - n // 2 % len(fences)] for fences, n in zip(chosen, numbers, strict=True)]

    def rearmed(self, need: bool | None = None) -> None:
        """A script has run that ends in `rearm`."""
        self.token_out = False
        if need is not None:
            assert need == self.ref.need(), f"need is {need}, should be {self.ref.need()}"

    # One rule with a choice, and not a rule for each thing that can happen: hypothesis leaves half of the rules out
    # of an example, and a queue without claims, or without time, shows little.

    @initialize(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        for _ in range(data.draw(st.integers(0, 2), label="configured lanes")):
            self.configure(data.draw)
        for _ in range(data.draw(st.integers(1, 3), label="filled lanes")):
            self.enqueue(data.draw)

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        """Something happens."""
        name = data.draw(st.sampled_from(ACTIONS), label="action")
        getattr(self, name)(data.draw)

    # producers

    def enqueue(self, draw: Draw) -> None:
        lane, n = draw(lanes), draw(st.integers(1, 4))
        priority = draw(st.sampled_from([0, 0, 0, 5, 9]))
        delay = draw(st.sampled_from([0, 0, 0, 1_000, 5_000, 40_000]))
        cost = draw(st.sampled_from([1, 1, 1, 2.5, 0.25, 100]))
        for _ in range(n):
            tag = f"t{len(self.tags)}"
            self.tags.append(tag)
            assert self.bench.put(tag, lane, priority=priority, delay=delay, cost=cost)
            assert self.ref.enqueue(tag, lane, priority, self.now + delay if delay else 0, cost, now=self.now)
            self.rearmed()

    def enqueue_again(self, draw: Draw) -> None:
        lane, tag = draw(lanes), self.tags[-1 - draw(picks) % len(self.tags)]
        stored = self.bench.put(tag, lane)
        assert stored == self.ref.enqueue(tag, lane, 0, 0, 1.0, now=self.now), f"{tag} was stored twice"
        if stored:
            self.rearmed()

    def enqueue_into_a_full_lane(self, draw: Draw) -> None:
        lane = draw(lanes)
        size = len(self.ref.tags("ready", lane=lane))
        self.store.configure(self.queue, lane, max_size=max(1, size))
        if size:
            with pytest.raises(LaneFull):
                self.bench.put("too much", lane)
        self.store.configure(self.queue, lane, max_size=None)
        self.ref.settle(lane, self.now)
        self.rearmed()

    # consumers

    def claim(self, draw: Draw) -> None:
        consumer, n = draw(consumers), draw(st.sampled_from([0, 1, 1, 2, 4, 16]))
        lease, parks = draw(st.sampled_from([5_000, 20_000, 60_000])), draw(st.sampled_from(list(WillPark)))
        popped, lost = draw(st.booleans()), draw(lossy)
        if popped:
            self.bench.drop_token()
        self.link.lose = lost
        # A message in a lane that is paused or full to its limit is nothing to serve and nothing to keep the time of.
        idle = not (self.ref.ring or self.ref.waiting or self.ref.tags("leased", "slot", "delayed", "dead"))
        turn = None
        try:
            turn = self.store.claim(self.queue, n, lease, consumer=consumer, will_park=parks)
        except redis.exceptions.ConnectionError:
            records = self.bench.state().message
        if not idle:
            self.ref.see(lease, self.now)
        taken = self.ref.claim(n, lease, "?", self.now)
        parking = parks == WillPark.YES or (parks == WillPark.IF_NOT_FULL and len(taken) < n)
        due_in = self.ref.keep(consumer, parking, self.now)
        if idle:
            self.ref.roles, due_in = {}, None
        if turn is None:
            for tag in taken:
                self.ref.messages[tag].token = records[tag].token
            self.rearmed()
            return
        claimed = [message.fence.tag for message in turn.claimed]
        assert claimed == taken, f"claimed {claimed}, should be {taken}"
        for message in turn.claimed:
            m = self.ref.messages[message.fence.tag]
            m.token = message.fence.token
            assert (message.fence.attempt, message.failures, message.lane) == (m.attempt, m.failures, m.lane)
            assert message.body == message.fence.tag.encode()
        self.fences += [message.fence for message in turn.claimed]
        assert turn.due_in == due_in, f"the keeper is to come in {turn.due_in}, should be {due_in}"
        self.rearmed(turn.need)

    def ack(self, draw: Draw) -> None:
        numbers, keep_slot, consumer = draw(several), draw(st.sampled_from([True, True, False])), draw(consumers)
        parks, lost = draw(st.booleans()), draw(lossy)
        fences = self.pick(numbers)
        answers = tuple(self.reference_ack(fence, keep_slot) for fence in fences)
        self.link.lose = lost
        turn = None
        with contextlib.suppress(redis.exceptions.ConnectionError):
            turn = self.store.ack(self.queue, fences, keep_slot=keep_slot, consumer=consumer, will_park=parks)
        due_in = self.ref.keep(consumer, parks and not self.ref.ring, self.now)
        if turn:
            assert turn.answers == answers, f"ack of {fences} says {turn.answers}, should be {answers}"
            assert turn.due_in == due_in, f"the keeper is to come in {turn.due_in}, should be {due_in}"
        self.rearmed(turn.need if turn else None)

    def reference_ack(self, fence: Fence, keep_slot: bool) -> Answer:
        if self.ref.check(fence, "slot") == Answer.DONE:  # sent again: its reply was lost
            if keep_slot:
                return Answer.SLOT
            self.ref.settle(self.ref.messages.pop(fence.tag).lane, self.now)
            return Answer.DONE
        answer = self.ref.check(fence, "leased", "ready", "delayed")
        if answer != Answer.DONE:
            return answer
        m = self.ref.messages[fence.tag]
        self.ref.finish(fence.tag, self.now)
        if keep_slot and m.place == "leased" and self.ref.setting(m.lane, "limit"):
            m.place = "slot"
            self.ref.totals["acked"] += 1
            return Answer.SLOT
        self.ref.remove(fence.tag, "acked", self.now)
        return answer

    def extend(self, draw: Draw) -> None:
        fences, lease = self.pick(draw(several)), draw(st.sampled_from([5_000, 60_000]))
        answers = tuple(self.ref.check(fence, "leased", "slot") for fence in fences)
        for fence, answer in zip(fences, answers, strict=True):
            if answer == Answer.DONE:
                self.ref.messages[fence.tag].time = self.now + lease
        self.ref.see(lease, self.now)
        assert self.store.extend(self.queue, fences, lease) == answers

    def release(self, draw: Draw) -> None:
        fences, answers = self.pick(draw(several)), []
        for fence in fences:
            answers.append(self.ref.check(fence, "leased"))
            if answers[-1] == Answer.DONE:
                self.ref.make_ready(fence.tag, self.now)
                self.ref.totals["released"] += 1
        assert self.store.release(self.queue, fences) == tuple(answers)
        self.rearmed()

    def reject(self, draw: Draw) -> None:
        (fence,), requeue = self.pick([draw(picks)]), draw(st.sampled_from([True, True, False]))
        answer = self.store.reject(self.queue, fence, requeue=requeue, reason="rejected")
        assert answer == self.ref.check(fence, "leased"), f"reject of {fence} says {answer!r}"
        if answer == Answer.DONE:
            self.ref.totals["rejected"] += 1
            self.ref.fail(fence.tag, self.now, fatal=not requeue)
        self.rearmed()

    def finish(self, draw: Draw) -> None:
        fences = self.pick(draw(several))
        for fence in fences:
            m = self.ref.messages.get(fence.tag)
            if m and m.place == "slot" and (m.attempt, m.token) == fence[1:]:
                self.ref.messages.pop(fence.tag)
                self.ref.settle(m.lane, self.now)
        self.rearmed(self.store.finish(self.queue, fences))

    def rearm(self, draw: Draw) -> None:
        consumer = draw(st.sampled_from([*CONSUMERS, ""]))
        self.ref.keep(consumer, False, self.now)
        self.rearmed(self.store.rearm(self.queue, consumer))

    def pop_the_token_and_die(self, _draw: Draw) -> None:
        self.token_out |= self.bench.drop_token()

    # time

    def tick(self, ms: int, *, away: bool = False) -> None:
        self.bench.tick(ms, away=away)
        if not away and self.ref.seen != inf:
            self.ref.seen = self.now

    def outage(self, draw: Draw) -> None:
        self.tick(draw(st.sampled_from([4_000, 15_000, 45_000])), away=True)

    def pass_time(self, draw: Draw) -> None:
        self.tick(draw(st.sampled_from([1, 500, 1_000, 5_000, 20_000, 30_000, 60_000, 301_000])))

    def pass_time_to_what_is_next(self, draw: Draw) -> None:
        times = [m.time for m in self.ref.messages.values() if m.place in ("leased", "slot", "delayed")]
        ahead = [at for at in (*times, *self.ref.waiting.values()) if at > self.now]
        late = draw(st.sampled_from([0, 0, 0, -1, GRACE, GRACE + 1]))
        self.tick(max(0, min(ahead) - self.now + late) if ahead else 0)

    def expire(self, _draw: Draw) -> None:
        swept = self.store.expire(self.queue)
        assert swept == self.ref.sweep(self.now), f"swept {swept}"
        self.rearmed()

    # the operator

    def configure(self, draw: Draw) -> None:
        lane, settings = draw(lanes), draw(bounds)
        self.store.configure(self.queue, lane, **settings)
        ref, old = self.ref, {"weight": 1, "burst": 1, **self.ref.settings.get(lane, {})}
        starts = None
        if lane in ref.allowed and "rate" in old:
            starts = min(old["burst"], old["burst"] - (ref.next_start(lane, self.now) - self.now) * old["rate"])
        own = {**ref.settings.get(lane, {}), **settings}
        if settings.get("rate"):
            of, per = settings["rate"].split("/")
            own["rate"] = float(of) / float(per)
        own = ref.settings[lane] = {name: value for name, value in own.items() if value}
        new = {"weight": 1, "burst": 1, **own}
        if "rate" not in new:
            ref.allowed.pop(lane, None)
        elif starts is not None and (new["rate"], new["burst"]) != (old.get("rate"), old["burst"]):
            ref.allowed[lane] = self.now + (new["burst"] - min(starts, new["burst"])) / new["rate"]
        if new["weight"] != old["weight"]:
            ref.turns.weigh(lane, old["weight"], new["weight"])
        ref.settle(lane, self.now)
        self.rearmed()

    def pause(self, draw: Draw) -> None:
        paused = draw(st.booleans())
        self.ref.paused = paused
        self.rearmed(self.store.pause(self.queue, paused=paused))

    def throttle(self, draw: Draw) -> None:
        lane, ms, shorten = draw(lanes), draw(st.sampled_from([30_000, 50_000, 0])), draw(st.booleans())
        until = self.now + ms if shorten else max(self.now + ms, self.ref.throttles.get(lane, 0))
        assert self.store.throttle(self.queue, lane, ms, shorten=shorten) == until - self.now
        self.ref.throttles[lane] = until
        self.ref.settle(lane, self.now)
        self.rearmed()

    def redrive(self, draw: Draw) -> None:
        tags = sorted({*self.tags[-1:], *self.ref.tags("dead")[: draw(st.integers(1, 3))]})
        dead = [tag for tag in tags if tag in self.ref.tags("dead")]
        for tag in dead:
            m = self.ref.messages[tag]
            m.attempt, m.failures, m.token = m.attempt + 1, 0, "-"
            self.ref.make_ready(tag, self.now)
        assert self.store.redrive(self.queue, tags) == len(dead)
        self.rearmed()

    def cancel(self, draw: Draw) -> None:
        tag = self.tags[-1 - draw(picks) % len(self.tags)]
        m = self.ref.messages.get(tag)
        answer = None if m is None else m.place in ("ready", "delayed")
        if answer:
            self.ref.remove(tag, "cancelled", self.now)
        assert self.store.cancel(self.queue, [tag]) == (answer,)
        self.rearmed()

    def purge(self, draw: Draw) -> None:
        lane, step = draw(st.sampled_from([*LANES, ""])), draw(st.sampled_from([1, 2, 1_000]))
        gone = self.ref.tags("ready", lane=lane or None) + self.ref.tags("delayed", lane=lane or None)
        assert self.store.purge(self.queue, lane, step=step) == len(gone)
        for tag in gone:
            self.ref.remove(tag, "purged", self.now)
        self.rearmed()

    def delete(self, draw: Draw) -> None:
        """Whole, or by somebody who dies after the first step; half of them only if it is empty."""
        if_empty, dies = draw(st.sampled_from([True, True, True, False])), draw(st.booleans())
        if if_empty and any(m.place != "dead" for m in self.ref.messages.values()):
            assert not self.store.delete(self.queue, if_empty=True)
            return
        if dies:
            base = self.bench.key("queue")[: -len("queue")]
            scripts.load("delete").run(self.store.caller, base, int(if_empty), 0)
        else:
            assert self.store.delete(self.queue, if_empty=if_empty)
        self.begin_anew()

    def end(self, draw: Draw) -> None:
        """A queue with an end is not used for so long; then one is declared again, with an end or without."""
        state = self.bench.state()
        expires = int(state.queue.get("expires", 0))
        if expires:
            own = [
                self.bench.key(name) for name in state.ttl if ":" not in name and name not in ("finished", "previous")
            ]
            self.bench.client.delete(*own)
            self.begin_anew(keep_finished=True)
        if draw(st.sampled_from([True, False, False])):
            self.store.declare(self.queue, draw(st.sampled_from([0, 600_000])))

    def begin_anew(self, *, keep_finished: bool = False) -> None:
        """The queue is gone: nothing of it comes back, but what it remembers of what was finished."""
        old = self.ref
        self.ref = Reference(POLICY, self.wait_of, GRACE)
        if keep_finished:
            self.ref.finished, self.ref.previous = old.finished, old.previous
        self.token_out = False

    # after every step

    @invariant()
    def same(self) -> None:
        state, ref = self.bench.check(token_out=self.token_out), self.ref
        have = {lane: sorted(tags, key=tags.__getitem__) for lane, tags in state.ready.items()}
        assert have == {lane: found for lane in LANES if (found := ref.tags("ready", lane=lane))}
        for part, places in (("leases", ("leased", "slot")), ("delayed", ("delayed",)), ("dead", ("dead",))):
            assert getattr(state, part) == {tag: ref.messages[tag].time for tag in ref.tags(*places)}, part
        for tag, record in state.message.items():
            m = ref.messages[tag]
            assert (record.attempt, record.failures, record.token) == (m.attempt, m.failures, m.token), record
            assert (record.lane, record.slot) == (m.lane, m.place == "slot"), record
        assert state.ring == ref.ring, "ring"
        kept = {lane: (int(lap) * CIRCLE + int(tag), float(paid)) for lane, (lap, tag, paid) in state.places().items()}
        assert kept == ref.turns.kept, "kept"
        assert state.waiting == ref.waiting, "waiting"
        roles = {r: (state.queue[r], int(state.queue[f"{r}_until"])) for r in ("keeper", "deputy") if r in state.queue}
        assert roles == ref.roles, "keeper and deputy"
        assert (state.finished, state.previous) == (ref.finished, ref.previous), "finished"
        assert {name: state.totals.get(name, 0) for name in ref.totals} == ref.totals, "totals"

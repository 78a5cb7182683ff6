"""Bugs planted in the scripts: each must be found by the model, or by the script test that is named.

A bug is a piece of a composed script (comments are gone there) and what stands in its place.  Where the text is not
found any more, the script has changed: plant the bug anew.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from fairlanes_transport import scripts
from tests.model.machine import QueueMachine
from tests.model.test_model import fake_client
from tests.scripts import (
    test_ack,
    test_claim,
    test_declare,
    test_delete,
    test_enqueue,
    test_expire,
    test_finish,
    test_purge,
    test_redrive,
    test_reject,
)
from tests.scripts.bench import Bench


@dataclass(frozen=True)
class Bug:
    """What is wrong, in which script ('' = in each that has the text), and how."""

    name: str
    script: str
    right: str
    wrong: str
    #: the script test that finds it; None: the model does
    found_by: Callable[[Bench], None] | None = None


BUGS = [
    # the fence
    Bug("claim does not raise the attempt", "claim", "r.attempt + 1, ARGV[4]", "math.max(1, r.attempt), ARGV[4]"),
    Bug("claim keeps the old token", "claim", "r.attempt + 1, ARGV[4]", "r.attempt + 1, 'same'"),
    Bug("ack does not check the token", "ack", "r.attempt == attempt and r.token == token", "r.attempt == attempt"),
    Bug("ack does not check the attempt", "ack", "r.attempt == attempt and r.token == token", "r.token == token",
        test_ack.test_the_attempt_counts),
    Bug("release and others do not check the token", "", " or r.token ~= token or not", " or not"),
    Bug("a lost lease can be extended", "extend", " or not redis.call('ZSCORE', K.leases, tag) then", " then"),
    Bug("a late ack leaves the message ready", "ack", "redis.call('ZREM', K.ready .. r.lane, tag)", "1"),
    Bug("a late ack leaves the message delayed", "ack", "redis.call('ZREM', K.delayed, tag)", "1"),
    Bug("a dead message can be acked", "ack", "+ redis.call('ZREM', K.delayed, tag) == 0 then", "< 0 then",
        test_ack.test_a_dead_message_cannot_be_acked),
    Bug("redrive does not raise the attempt", "redrive", "r.attempt + 1, 0, '-'", "r.attempt, 0, r.token",
        test_redrive.test_the_old_fence_is_stale),
    Bug("an ack of a running slot counts for anybody", "ack", "if not current then return -1 end", "",
        test_ack.test_an_ack_by_somebody_else_frees_no_slot),
    Bug("an ack that is sent again frees a slot in use", "ack", "if keep_slot then return 2 end", ""),
    Bug("finish frees the slot of another", "finish", " and r.token == ARGV[i + 2]", "",
        test_finish.test_another_token_frees_nothing),
    # conservation
    Bug("claim makes no lease", "claim", "redis.call('ZADD', K.leases, deadline, tag)", ""),
    Bug("an expired lease stays in flight", "", "redis.call('SREM', K.flight .. r.lane, tag)", ""),
    Bug("the body is left behind", "", "redis.call('HDEL', K.body, tag)", ""),
    Bug("a known tag is stored again", "enqueue", "redis.call('HEXISTS', K.message, tag) == 1 or ", ""),
    Bug("a finished tag is stored again", "ack", "redis.call('SADD', K.finished, unpack(tags))", ""),
    Bug("what was finished is forgotten after five minutes at once", "", "redis.call('RENAME', K.finished, K.previous)",
        "redis.call('UNLINK', K.finished)", test_ack.test_what_was_finished_is_known_for_five_minutes),
    Bug("no grace after an outage", "", "if in_grace(q, now) then return 0 end", ""),
    Bug("the keeper comes before the grace is over", "", "if at and key == K.leases and in_grace(q, now)", "if false"),
    Bug("a message that was seen gives no grace", "claim", "see(q, tonumber(ARGV[3]), now)", "do end"),
    Bug("a renewal is no use of the queue", "extend", "see(q, tonumber(ARGV[2]), now)", "do end",
        test_expire.test_where_others_renew_a_dead_workers_lease_is_taken_at_once),
    Bug("a dead letter is not counted", "", "count('died', 1)", ""),
    Bug("a trimmed dead letter is not counted", "", "count('trimmed', #tags)", "",
        test_reject.test_no_more_dead_letters_than_their_number),
    Bug("a running slot that expires is redelivered", "", "      if r.slot then", "      if false then",
        lambda bench: test_finish.test_a_slot_that_expires_is_freed_and_nothing_is_redelivered(
            bench, test_finish.make_slot(bench))),
    Bug("an early ack in a bounded lane keeps no slot", "ack", "if leased and keep_slot", "if false and keep_slot"),
    Bug("an ack twice in one call is done twice", "ack", " or handled[tag] then", " then"),
    Bug("a lane's name ends at a zero byte", "", "r.slot and '1' or '0') .. r.token .. ' ' .. r.lane",
        "r.slot and '1' or '0') .. r.token .. ' ' .. string.format('%s', r.lane)",
        lambda bench: test_enqueue.test_a_lane_may_have_any_name(bench, "zero\x00byte")),
    Bug("purge takes what arrived later", "purge", "string.format('%.0f', low + before)",
        "string.format('%.0f', 2 ^ 53)", lambda bench: test_purge.test_what_arrives_meanwhile_stays(bench, 1)),
    Bug("purge takes what was delayed later", "purge", "r.born <= born and ", "",
        lambda bench: test_purge.test_what_arrives_meanwhile_stays(bench, 1)),
    Bug("purge ends before all delayed are gone", "purge", "if #tags == most then done = 0 end", ""),
    # failures
    Bug("expiry does not count", "", "r.failures = r.failures + 1\n        expired", "expired"),
    Bug("a release counts as a failure", "release",
        "end_lease(tag, r)\n", "end_lease(tag, r) r.failures = 1 r.score = 0\n"),
    Bug("the first expiry waits", "", "r.failures > 1 and backoff", "backoff"),
    Bug("the second expiry does not wait", "", "r.failures > 1 and backoff", "r.failures > 2 and backoff",
        test_expire.test_the_second_failure_waits_and_the_last_is_the_end),
    Bug("one failure too many", "", "r.failures >= policy.max_failures", "r.failures > policy.max_failures",
        test_reject.test_backoff_grows_to_its_cap_then_the_message_dies),
    Bug("backoff does not grow", "", "policy.factor ^ (failures - 1)", "1",
        test_reject.test_backoff_grows_to_its_cap_then_the_message_dies),
    Bug("backoff has no cap", "", "math.min(policy.cap, ", "math.max(0, ",
        test_reject.test_backoff_grows_to_its_cap_then_the_message_dies),
    Bug("one dead letter too many", "", "redis.call('ZCARD', K.dead) - policy.dead_max",
        "redis.call('ZCARD', K.dead) - policy.dead_max - 1", test_reject.test_no_more_dead_letters_than_their_number),
    Bug("dead letters do not age", "", "'-inf', now - policy.dead_ttl", "'-inf', 0",
        test_reject.test_no_dead_letter_older_than_its_ttl),
    # order and share
    Bug("release loses the place", "release", "    make_ready(q, tag, r)", "    r.score = 0 make_ready(q, tag, r)"),
    Bug("a backoff loses the place", "",
        "  save_record(tag, r)\n  if wait", "  r.score = 0 save_record(tag, r)\n  if wait"),
    Bug("priorities are upside down", "", "r.priority * 2 ^ 49", "(9 - r.priority) * 2 ^ 49"),
    Bug("weights are ignored", "claim", "math.ceil(cost * UNIT / weight)", "math.ceil(cost * UNIT)"),
    Bug("a lane that was served keeps its place", "", "redis.call('ZADD', K.ring, at, lane)", "do end"),
    Bug("cost is ignored", "claim", "return r and r.cost or 1", "return 1"),
    Bug("a lane joins at once, before its turn", "", "local lead = step(cost, s.weight)\n  local lap",
        "local lead = 0\n  local lap"),
    Bug("a lane joins at the end of the ring", "", "local lead = step(cost, s.weight)\n  local lap",
        "local lead = 100 * UNIT\n  local lap"),
    Bug("two lanes join at the same base", "", "(q.last + 1) % CIRCLE", "q.last"),
    Bug("a base lies behind the virtual time", "", "ahead(q, base) >= LEAD and q.vt or base", "base"),
    Bug("virtual time is not kept", "claim", "  q.vt = tag\n", ""),
    Bug("the ring's state is not saved", "", "if changed then redis.call('HSET', K.queue, unpack(changed)) end", ""),
    Bug("a lane that leaves with work loses its place", "claim", "  keep(q, lane, lap_of(q, at), at, cost)\n", ""),
    Bug("a lane that is taken off with work loses its place", "",
        "      if ready > 0 then keep(q, lane, lap_of(q, tag), tag, reserved(q, lane)) end\n", ""),
    Bug("a lane that comes back pays again", "", "lead - step(paid, s.weight)", "lead"),
    Bug("an empty lane keeps its place", "", "      redis.call('HDEL', K.kept, lane)\n", ""),
    Bug("a dearer message is served for the price of a cheap one", "claim", "if r and r.cost > paid then",
        "if false then"),
    Bug("what was paid too much is lost", "claim", "credit > 0 and step(credit, s.weight) or 0", "0"),
    Bug("what a lane has paid is not noted", "", "redis.call('HSET', K.reserved, lane, string.format('%.17g', cost))",
        "do end"),
    Bug("weights on the ring are not counted", "", "q.own_weight = q.own_weight + sign",
        "q.own_weight = q.own_weight - 0"),
    Bug("a weight change waits for the next turn", "configure", "new.weight ~= old.weight then", "false then"),
    Bug("a weight change forgets who left with work", "configure", "elseif lap and", "elseif false and"),
    # the ring
    Bug("the limit is off by one where a lane joins", "", "flight >= s.limit", "flight > s.limit"),
    Bug("the limit is off by one where a lane was served", "", "lane) >= s.limit\n", "lane) > s.limit\n"),
    Bug("place leaves a lane on the ring", "", "      leave_ring(q, s, lane)\n    elseif", "    elseif"),
    Bug("an empty lane stays on the ring", "claim", "== 0 then\n    leave_ring(q, s, lane)\n", "== 0 then\n"),
    Bug("place leaves a lane waiting", "", "    redis.call('ZREM', K.waiting, lane)\n    if not tag", "    if not tag"),
    Bug("an ack does not let the lane back", "ack", "offer(q, r.lane, now)", "do end"),
    Bug("an expiry does not let the lane back", "", "      place(q, r.lane, now)\n    else", "    else"),
    Bug("a due message does not join", "", "    if not placed[lane] then place(q, lane, now) end\n", ""),
    Bug("an empty lane stays in the index", "", "    redis.call('ZREM', K.lanes, lane)\n", ""),
    Bug("a paused lane is served", "", " and not s.paused and", " and"),
    Bug("a paused queue is served", "claim", "dearer < 64 and not q.paused", "dearer < 64"),
    Bug("a throttle is ignored", "", "tonumber(redis.call('GET', K.throttle .. lane) or 0)", "0"),
    Bug("a rate is ignored", "claim", "if s.rate then spend_start(s, lane, now) end", ""),
    Bug("a rested lane has more than its burst", "", "now - carry)", "now - 30000)",
        test_claim.test_a_rested_lane_has_its_burst_and_no_more),
    # the wake protocol
    Bug("two tokens", "", "if need and not armed then", "if need then"),
    Bug("a token without need stays", "", "elseif armed and not need then", "elseif false then"),
    Bug("a paused queue wakes", "", "local need = not q.paused and (", "local need = ("),
    Bug("a delayed message wakes nobody", "",
        "redis.call('EXISTS', K.delayed, K.waiting)", "redis.call('EXISTS', K.waiting)"),
    Bug("a waiting lane wakes nobody", "",
        "redis.call('EXISTS', K.delayed, K.waiting)", "redis.call('EXISTS', K.delayed)"),
    Bug("an enqueue wakes nobody", "enqueue", "rearm(q)\ntouch", "touch"),
    Bug("a sooner time leaves the keeper asleep", "",
        "if q.keeper and at < q.keeper_until then leave_role(q) end", ""),
    Bug("a busy keeper stays keeper", "", "if q.keeper == consumer then leave_role(q) end", ""),
    Bug("the keeper is pushed aside", "",
        "if q.keeper and q.keeper ~= consumer and q.keeper_until + GRACE > now then",
        "if false then"),
    Bug("a dead keeper is waited for", "", "q.keeper_until + GRACE > now then", "true then"),
    Bug("the keeper ignores deadlines", "", "{ K.delayed, K.waiting, K.leases }", "{ K.delayed, K.waiting }"),
    Bug("a keeper stays over an empty queue", "claim", "  if q.keeper or q.deputy then\n", "  if false then\n",
        test_claim.test_a_keeper_that_finds_the_queue_empty_is_none),
    # ends
    Bug("idle lanes of a queue with an end lose it", "", "time + span * 0.6 then break", "0 then break",
        test_declare.test_a_queue_with_many_lanes_ends_whole),
    Bug("a queue outlives its lanes", "", "if first then left = ", "if false then left = ",
        test_declare.test_the_queue_never_outlives_a_lane),
    Bug("a queue that begins anew finds the settings of the last one", "declare", "    new_life(q)\n", "",
        test_declare.test_settings_do_not_come_back_in_the_next_life),
    Bug("a deleted queue's throttles come back", "", "redis.call('ZADD', K.throttled, now + period, lane)", "do end",
        test_delete.test_a_throttle_does_not_come_back),
    Bug("an end that was taken back comes", "declare", "    redis.call('PERSIST', key)\n", "",
        test_declare.test_a_queue_that_no_longer_ends_loses_nothing),
    Bug("more than a hundred are swept", "",
        "K.delayed, '-inf', now, 'LIMIT', 0, 100", "K.delayed, '-inf', now, 'LIMIT', 0, 1000",
        test_claim.test_a_sweep_moves_at_most_a_hundred_due_messages),
]  # fmt: skip


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Callable[[Bug], None]:
    """A function that plants a bug, for the rest of the test."""

    def plant(bug: Bug) -> None:
        names = [bug.script] if bug.script else scripts.names()
        planted = {}
        for script in map(scripts.load, names):
            source = script.source.replace(bug.right, bug.wrong)
            if source != script.source:
                digest = hashlib.sha1(source.encode()).hexdigest()
                planted[script.name] = dataclasses.replace(script, source=source, digest=digest)
        assert planted, f"nowhere stands: {bug.right}"
        load = scripts.load
        monkeypatch.setattr(scripts, "load", lambda name: planted.get(name) or load(name))

    return plant


def run_model(examples: int = 400, steps: int = 40) -> None:
    """The model on fakeredis, the same each time; stops at the first thing that it finds."""
    machine = type("Machine", (QueueMachine,), {"connect": staticmethod(fake_client)})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            derandomize=True,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.timeout(300)
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_it_is_found(bug: Bug, plant: Callable[[Bug], None]) -> None:
    plant(bug)
    # A bug that does not compile would be found by anybody.
    with pytest.raises((AssertionError, pytest.fail.Exception)) as found:
        if bug.found_by:
            bug.found_by(Bench(fake_client()))
        else:
            run_model()
    print(f"{bug.name}: {str(found.value)[:200]}")


def test_names_are_unique() -> None:
    assert len({bug.name for bug in BUGS}) == len(BUGS)

"""The Python API to read and steer lanes, on fakeredis and on real servers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery
from kombu import Connection

from fairlanes_transport import Lanes
from fairlanes_transport.errors import LaneFull, OptionError, QueueAbsent, ServerFull, TenantError
from fairlanes_transport.lanes.doctor import Doctor
from fairlanes_transport.lanes.views import Cancelled, Settings
from fairlanes_transport.store import FailurePolicy, Store
from tests.harness import Server, wait_for
from tests.unit.rig import Rig, bury

# getting there


def test_a_url_an_app_and_a_connection_lead_to_the_same_broker(server: Server) -> None:
    url = server.url("fairlanes")
    options = {"global_keyprefix": "p:"}
    by_url = Lanes(url, **options)
    by_url.declare("q")
    app = Celery(broker=url, broker_transport_options=options, set_as_current=False)
    assert Lanes(app).queues() == ["q"]
    assert Lanes(Connection(url, transport_options=options)).queues() == ["q"]
    assert Lanes(Connection(url), **options).queues() == ["q"]
    assert Lanes(url).queues() == []
    assert Lanes(f"fairlanes://127.0.0.1:1;{url}").queues() == []


def test_what_is_no_broker_is_refused() -> None:
    with pytest.raises(OptionError, match="not int"):
        Lanes(7)
    with pytest.raises(OptionError, match="unknown option"):
        Lanes("fairlanes://", leese_seconds=3)


def test_an_unknown_queue_is_an_error_and_leaves_nothing(rig: Rig) -> None:
    lanes = rig.lanes
    for call in (
        lambda: lanes.snapshot("x"), lambda: lanes.lanes("x"), lambda: lanes.set("x", "a", weight=2),
        lambda: lanes.unset("x", "a"), lambda: lanes.pause("x"), lambda: lanes.resume("x", "a"),
        lambda: lanes.throttle("x", "a", 1), lambda: lanes.peek("x", "a"), lambda: lanes.purge("x"),
        lambda: lanes.move("q", "a", "x"), lambda: lanes.move("x", "a", "q"), lambda: lanes.leases("x"),
        lambda: lanes.delayed("x"), lambda: lanes.dead("x"), lambda: lanes.cancel("x", "t"),
        lambda: lanes.redrive("x"), lambda: lanes.drop("x"), lambda: lanes.top("x"),
        lambda: lanes.lane("x", 1),
    ):  # fmt: skip
        with pytest.raises(QueueAbsent, match="'x' does not exist"):
            call()
    assert not [key for key in rig.client.scan_iter() if b"{x}" in key]


@pytest.mark.parametrize("tenant", ["", None, 1.5, True, "x" * 257])
def test_what_is_no_tenant_is_refused(rig: Rig, tenant: Any) -> None:
    with pytest.raises(TenantError):
        rig.lanes.set("q", tenant, weight=2)


# queues and lanes


def test_snapshot_and_autoscale(rig: Rig) -> None:
    for lane in ("a", "a", "b"):
        rig.send("t", lane)
    rig.store.claim("q", 1, 60_000)
    stats = rig.lanes.snapshot("q")
    assert (stats.ready, stats.in_flight, stats.lanes, rig.lanes.autoscale("q")) == (2, 1, 2, 3)


def test_pages_of_lanes(rig: Rig) -> None:
    names = [f"lane{n:03}" for n in range(25)]
    for name in names[:20]:
        rig.send("t", name)
    for name in names[15:]:
        rig.lanes.set("q", name, weight=2)
    seen: list[str] = []
    after: str | None = ""
    while after is not None:
        page = rig.lanes.lanes("q", after=after, limit=7)
        assert len(page.lanes) <= 7
        seen += [lane.lane for lane in page.lanes]
        after = page.next
    assert seen == names
    assert [lane.lane for lane in rig.lanes.each_lane("q", step=4)] == names
    assert [lane.lane for lane in rig.lanes.lanes("q", busy=False).lanes] == names[15:]
    assert [lane.lane for lane in rig.lanes.lanes("q", configured=False).lanes] == names[:20]
    with pytest.raises(OptionError):
        rig.lanes.lanes("q", limit=0)


def test_top_ranks_and_shares(rig: Rig) -> None:
    for lane, n in {"a": 1, "b": 5, "c": 3}.items():
        for _ in range(n):
            rig.send("t", lane)
    rig.lanes.set("q", "b", weight=2)
    rig.lanes.set("q", "empty", weight=100)
    top = rig.lanes.top("q", 2)
    assert [(lane.lane, lane.ready, lane.share) for lane in top] == [("b", 5, 0.5), ("c", 3, 0.25)]
    rig.lanes.pause("q", "a")
    assert [lane.share for lane in rig.lanes.top("q", 3)] == [2 / 3, 1 / 3, None]
    assert [lane.share for lane in rig.lanes.lanes("q").lanes] == [None, 2 / 3, 1 / 3, None]
    by_weight = rig.lanes.top("q", 1, key=lambda lane: lane.weight)
    assert [(lane.lane, lane.share) for lane in by_weight] == [("empty", None)]


# settings


def test_set_and_unset(rig: Rig) -> None:
    lane = rig.lanes.set("q", 7, weight=2.5, limit=10, rate="100/m", max_size=99)
    assert (lane.lane, lane.weight, lane.limit, lane.rate, lane.burst, lane.max_size) == (
        "7", 2.5, 10, "100/m", 1, 99,
    )  # fmt: skip
    assert rig.lanes.set("q", 7, rate="5/s", burst=2).burst == 2
    lane = rig.lanes.unset("q", 7, "rate", "burst", "limit")
    assert lane.own == Settings(weight=2.5, max_size=99)
    assert rig.lanes.set("q", 7, limit="none", weight=None).own == Settings(limit=0, max_size=99)
    assert rig.lanes.unset("q", 7).own == Settings()
    assert rig.check().configured == {}


@pytest.mark.parametrize(
    "settings",
    [
        {"weight": 0}, {"weight": 1001}, {"weight": "3"}, {"weight": "none"}, {"limit": 0}, {"limit": 2.5},
        {"limit": True}, {"rate": "fast"}, {"rate": 0}, {"burst": 0}, {"max_size": 0}, {"wait": 1},
        {"weight": float("nan")},
    ],
)  # fmt: skip
def test_bad_settings_are_refused(rig: Rig, settings: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        rig.lanes.set("q", "a", **settings)
    assert rig.check().settings == {}


def test_unset_of_what_does_not_exist_is_refused(rig: Rig) -> None:
    with pytest.raises(OptionError, match="unknown setting"):
        rig.lanes.unset("q", "a", "wait")


def test_every_setting_of_a_lane_passes_the_script(rig: Rig) -> None:
    for settings in (
        {"weight": 0.001},
        {"weight": 1000},
        {"rate": "0.5/h"},
        {"rate": "1000000/s"},
        {"burst": 1.5},
    ):
        rig.lanes.set("q", "a", **settings)


def test_pause_resume_throttle(rig: Rig) -> None:
    rig.send("t")
    rig.lanes.pause("q", "a")
    assert rig.lanes.lane("q", "a").state == "paused"
    rig.lanes.resume("q", "a")
    rig.lanes.pause("q")
    assert rig.lanes.snapshot("q").paused
    rig.lanes.resume("q")
    assert rig.lanes.throttle("q", "a", 30) == 30
    assert rig.lanes.lane("q", "a").state == "blocked"
    assert rig.lanes.throttle("q", "a", 0, shorten=True) == 0
    assert rig.lanes.lane("q", "a").state == "ready"
    with pytest.raises(OptionError):
        rig.lanes.throttle("q", "a", -1)


# messages


def test_peek_leases_delayed_dead(rig: Rig) -> None:
    rig.send("t1", priority=3)
    rig.send("t2", due_ms=rig.later())
    rig.send("t3")
    (peeked, last) = rig.lanes.peek("q", "a")
    assert (peeked.task_id, peeked.task, peeked.body, peeked.lane) == ("t3", "t.run", b"[]", "a")
    assert (last.task_id, last.priority) == ("t1", 3)
    assert [m.task_id for m in rig.lanes.peek("q", "a", start=1, limit=5)] == ["t1"]
    (claimed,) = rig.store.claim("q", 1, 60_000).claimed
    (lease,) = rig.lanes.leases("q")
    assert (lease.task_id, lease.lane, lease.attempt, lease.slot) == ("t3", "a", 1, False)
    assert 55 < lease.deadline - lease.published < 65
    (delayed,) = rig.lanes.delayed("q")
    assert delayed.task_id == "t2"
    assert delayed.due - delayed.published == pytest.approx(3600, abs=5)
    rig.store.reject("q", claimed.fence, requeue=False, reason="no such task")
    (dead,) = rig.lanes.dead("q")
    assert (dead.task_id, dead.reason, dead.body, dead.headers["task"]) == (
        "t3",
        "no such task",
        b"[]",
        "t.run",
    )
    assert rig.lanes.leases("q") == rig.lanes.dead("q", start=1) == []


def test_a_dead_letter_says_where_when_how_often_and_why(rig: Rig) -> None:
    """Two leases run out, and the third claim is refused."""
    sent = rig.later(0)
    tag = rig.send("t", "acme", priority=4)
    patient = Store(rig.link, policy=FailurePolicy(backoff_base=0.01, backoff_max=0.01))
    for n in range(3):
        claimed = wait_for(lambda n=n: patient.claim("q", 1, 1 if n < 2 else 60_000).claimed, 5, "the message")
    before = rig.later(0)
    patient.reject("q", claimed[0].fence, requeue=False, reason="no such task: 'ü'")
    after = rig.later(0)
    (dead,) = rig.lanes.dead("q")
    assert (dead.tag, dead.task_id, dead.task, dead.lane, dead.priority) == (tag, "t", "t.run", "acme", 4)
    assert (dead.attempt, dead.failures, dead.reason) == (3, 2, "no such task: 'ü'")
    assert before <= dead.died * 1000 <= after
    assert sent <= dead.published * 1000 <= before


def test_a_running_slot_is_listed_as_one(rig: Rig) -> None:
    rig.lanes.set("q", "a", limit=2)
    rig.send("t")
    fences = [m.fence for m in rig.store.claim("q", 1, 60_000).claimed]
    rig.store.ack("q", fences, keep_slot=True)
    (lease,) = rig.lanes.leases("q")
    assert (lease.slot, lease.task_id, lease.lane) == (True, "", "a")


def test_cancel_by_task_id(rig: Rig) -> None:
    rig.send("held")
    rig.store.claim("q", 1, 60_000)
    rig.send("held", due_ms=rig.later())
    rig.send("ready")
    for n in range(450):
        rig.send(f"other{n}", lane=f"l{n % 5}")
    assert rig.lanes.cancel("q", "ready") == Cancelled(removed=1, left=0)
    assert rig.lanes.cancel("q", "held") == Cancelled(removed=1, left=1)
    assert rig.lanes.cancel("q", "nobody") == Cancelled(removed=0, left=0)
    assert rig.lanes.snapshot("q").ready == 450
    rig.check()


def test_redrive_and_drop(rig: Rig) -> None:
    a, b = bury(rig, "a", 130), bury(rig, "b", 120)
    assert rig.lanes.redrive("q", tag=a[0]) == 1
    assert rig.lanes.redrive("q", tag=a[0]) == 0
    assert rig.lanes.redrive("q", tenant="b") == 120
    assert rig.lanes.drop("q", tag=b[0]) == 0
    assert rig.lanes.drop("q", tenant="b") == 0
    assert rig.lanes.drop("q", tenant="a") == 129
    rig.check()
    stats = rig.lanes.snapshot("q")
    assert (stats.ready, stats.dead) == (121, 0)
    bury(rig, "c", 3)
    assert rig.lanes.redrive("q") == 124
    rig.check()


def test_purge(rig: Rig) -> None:
    for lane in "aab":
        rig.send("t", lane)
    rig.send("t", "a", due_ms=rig.later())
    assert rig.lanes.purge("q", "a") == 3
    assert rig.lanes.purge("q") == 1
    rig.check()


# moving


def test_move(rig: Rig) -> None:
    rig.lanes.declare("other")
    for n in range(250):
        rig.send(f"t{n:03}", priority=n % 2)
    rig.send("b", "b")
    due = rig.later()
    rig.send("late", due_ms=due)
    rig.send("late b", "b", due_ms=due)
    order = [m.task_id for m in rig.lanes.peek("q", "a", limit=1000)]
    assert rig.lanes.move("q", "a", "other") == 251
    rig.check()
    rig.check("other")
    assert [m.task_id for m in rig.lanes.peek("other", "a", limit=1000)] == order
    assert [(m.task_id, m.due) for m in rig.lanes.delayed("other")] == [("late", due / 1000)]
    here = rig.lanes.snapshot("q")
    assert (here.ready, here.delayed) == (1, 1)
    with pytest.raises(OptionError):
        rig.lanes.move("q", "a", "q")


def test_move_and_move_back(rig: Rig) -> None:
    rig.lanes.declare("other")
    rig.send("t")
    assert rig.lanes.move("q", "a", "other") == 1
    assert rig.lanes.move("other", "a", "q") == 1
    assert [m.task_id for m in rig.lanes.peek("q", "a")] == ["t"]


def test_move_into_a_full_lane_loses_nothing(rig: Rig) -> None:
    rig.lanes.declare("other")
    for n in range(5):
        rig.send(f"t{n}")
    rig.lanes.set("other", "a", max_size=2)
    for n in range(2):
        rig.send(f"u{n}", queue="other")
    with pytest.raises(LaneFull):
        rig.lanes.move("q", "a", "other")
    assert (rig.lanes.snapshot("q").ready, rig.lanes.snapshot("other").ready) == (5, 2)
    rig.check()
    rig.check("other")


def test_what_is_claimed_during_a_move_runs_here_alone(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.lanes.declare("other")
    for n in range(3):
        rig.send(f"t{n}")
    enqueue = rig.lanes.store.enqueue

    def enqueue_and_claim(queue: str, tag: str, *args: Any, **options: Any) -> bool:
        stored = enqueue(queue, tag, *args, **options)
        rig.store.claim("q", 1, 60_000)
        return stored

    monkeypatch.setattr(rig.lanes.store, "enqueue", enqueue_and_claim)
    assert rig.lanes.move("q", "a", "other") == 0
    assert (rig.lanes.snapshot("q").in_flight, rig.lanes.snapshot("other").backlog) == (3, 0)
    assert rig.lanes.snapshot("other").delayed == 0
    rig.check()
    rig.check("other")


def test_an_interrupted_move_can_be_made_again(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.lanes.declare("other")
    for n in range(3):
        rig.send(f"t{n}")
    with monkeypatch.context() as patch:
        patch.setattr(rig.lanes.store, "cancel", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            rig.lanes.move("q", "a", "other")
    assert (rig.lanes.snapshot("q").ready, rig.lanes.snapshot("other").delayed) == (3, 3)
    assert rig.lanes.move("q", "a", "other") == 3
    assert [m.task_id for m in rig.lanes.peek("other", "a")] == ["t0", "t1", "t2"]
    assert rig.lanes.snapshot("q").ready == 0
    rig.check("other")


@pytest.mark.parametrize("fate", ["waits", "is finished", "is dead"])
def test_a_move_loses_nothing_where_the_other_queue_knows_the_id(rig: Rig, fate: str) -> None:
    """A topic publish puts one id into two queues; each has its own copy."""
    rig.lanes.declare("other")
    for queue in ("q", "other"):
        rig.store.enqueue(queue, "same", "a", '{"headers": {"id": "t"}}', b"x")
    if fate != "waits":
        (claimed,) = rig.store.claim("other", 1, 60_000).claimed
        if fate == "is dead":
            rig.store.reject("other", claimed.fence, requeue=False, reason="x")
        else:
            rig.store.ack("other", [claimed.fence])
    assert rig.lanes.move("q", "a", "other") == 1
    there = rig.lanes.snapshot("other")
    assert (there.ready, there.dead) == (1 + (fate == "waits"), int(fate == "is dead"))
    assert rig.lanes.snapshot("q").ready == 0
    rig.check("other")


def test_a_move_that_is_killed_and_made_again_runs_nothing_twice(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what was stored there, one has run meanwhile, and one is dead."""
    rig.lanes.declare("other")
    for n in range(3):
        rig.send(f"t{n}")
    with monkeypatch.context() as patch:
        patch.setattr(rig.lanes.store, "cancel", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            rig.lanes.move("q", "a", "other")
    held = [m.tag for m in rig.lanes.delayed("other")]
    rig.store.reschedule("other", [(tag, 0) for tag in held[:2]])
    ran, died = rig.store.claim("other", 2, 60_000).claimed
    rig.store.ack("other", [ran.fence])
    rig.store.reject("other", died.fence, requeue=False, reason="x")
    assert rig.lanes.move("q", "a", "other") == 3
    there = rig.lanes.snapshot("other")
    assert (rig.lanes.snapshot("q").ready, there.ready, there.delayed, there.dead) == (0, 1, 0, 1)
    rig.check("other")


def test_a_move_fetches_no_more_than_a_megabyte_at_a_time(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing of other lanes, whose delayed messages are on the same pages."""
    rig.lanes.declare("other")
    due = rig.later()
    for n in range(6):
        rig.store.enqueue("q", f"big{n}", "a", "{}", bytes(400_000), due_ms=due)
        rig.store.enqueue("q", f"foreign{n}", "b", "{}", bytes(400_000), due_ms=due)
    fetched = []
    pipeline = rig.lanes.browser.commands.pipeline

    def measured(commands: Any, **options: Any) -> Any:
        replies = pipeline(commands, **options)
        fetched.append(sum(len(v) for reply in replies if isinstance(reply, list) for v in reply if v))
        return replies

    monkeypatch.setattr(rig.lanes.browser.commands, "pipeline", measured)
    assert rig.lanes.move("q", "a", "other") == 6
    assert max(fetched) <= 1_000_000
    assert sum(fetched) < 7 * 400_000


# a server without memory


def test_a_full_server_lets_the_operator_act(fresh_server: Callable[..., Server]) -> None:
    server = fresh_server()
    rig = Rig(server.client())
    bury(rig, "dead", 3)
    for n in range(5):
        rig.send(f"t{n}")
    rig.send("late", due_ms=rig.later())
    rig.lanes.declare("other")
    server.client().config_set("maxmemory", 1)
    with pytest.raises(ServerFull):
        rig.send("more")
    rig.lanes.set("q", "a", weight=2, limit=3)
    rig.lanes.unset("q", "a", "weight")
    rig.lanes.throttle("q", "a", 5)
    rig.lanes.throttle("q", "a", 0, shorten=True)
    rig.lanes.pause("q")
    rig.lanes.resume("q")
    assert rig.lanes.redrive("q", tenant="dead") == 3
    assert rig.lanes.cancel("q", "t0").removed == 1
    with pytest.raises(ServerFull):
        rig.lanes.move("q", "a", "other")
    assert rig.lanes.purge("q", "a") == 5
    assert rig.lanes.snapshot("q").ready == 3
    assert Doctor(rig.lanes).check("q", repair=True).findings == ()
    server.client().config_set("maxmemory", 0)
    rig.check()
    rig.link.close()

"""What people do with `celery worker`, on every pool: one worker per pool for most of it."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from celery import VERSION as CELERY_VERSION
from celery import Celery
from celery.result import AsyncResult

from fairlanes_transport.connections import Address, Link
from fairlanes_transport.store import Store
from tests.apps.settings import RECORD_DB, environment
from tests.harness import ROOT, SCHEME, Sender, Server, Worker, recorded, wait_done, wait_for
from tests.invariants import check, dump
from tests.transport.conftest import Monitor

pytestmark = [
    pytest.mark.acceptance,
    pytest.mark.skipif(SCHEME != "fairlanes", reason="about this transport"),
]

POOLS = ("prefork", "threads", "solo", "gevent", "eventlet")
#: Of the server: the transport's own tests cover each kind.
KIND = os.environ.get("FAIRLANES_WORKERS_KIND", "valkey")
OPTIONS = {"backoff_base": 0.1, "backoff_max": 0.2, "max_failures": 3}
NAME = "one@here"
#: A time is kept in whole milliseconds.
GRAIN = 0.001
#: A process's sitecustomize: its clock is wrong, and the one that only ever counts is not.
WRONG_CLOCK = """
import datetime
import time

real_time, real_datetime = time.time, datetime.datetime


class Known(type(real_datetime)):
    def __instancecheck__(cls, instance):
        return isinstance(instance, real_datetime)


class WrongDatetime(real_datetime, metaclass=Known):
    @classmethod
    def now(cls, tz=None):
        return cls.fromtimestamp(time.time(), tz)

    @classmethod
    def utcnow(cls):
        return cls.now(datetime.timezone.utc).replace(tzinfo=None)


time.time = lambda: real_time() + {ahead}
datetime.datetime = WrongDatetime
"""
#: An option that is not used here, with something in it that nobody is to see.
HIDDEN = {"sentinel_kwargs": {"password": "hunter2"}}


class Stage(NamedTuple):
    """A server with a worker on it, and somebody who sends."""

    server: Server
    worker: Worker
    sender: Sender
    pool: str

    @property
    def app(self) -> Celery:
        """The sender's app."""
        return self.sender.app

    def send(self, task: str, *args: Any, **options: Any) -> AsyncResult[Any]:
        """Send a task."""
        return self.sender.send(task, *args, **options)

    def done(self, n: int, timeout: float = 30) -> list[dict[str, Any]]:
        """Wait until `n` tasks are done."""
        return wait_done(self.server, n, timeout)

    def settled(self, queue: str = "celery") -> None:
        """Assert that nothing of a queue's messages is left, and that it is sound."""
        client = self.server.client()
        wait_for(
            lambda: not any((state := dump(client, queue)).leases or state.ready or state.delayed for _ in "1"),
            15,
            f"the end of queue {queue}",
        )
        check(client, queue, token_out=True)

    def ask(self, command: str, *args: Any, **kwargs: Any) -> Any:
        """Return what the worker answers to a control command."""
        control = self.app.control
        answers = getattr(control, command)(*args, reply=True, timeout=10, limit=1, destination=[NAME], **kwargs)
        assert answers, f"no answer to {command}"
        return answers[0][NAME]

    def inspect(self, command: str, *args: Any) -> Any:
        """Return what the worker says of itself."""
        inspect = self.app.control.inspect([NAME], timeout=10, limit=1)
        answers = getattr(inspect, command)(*args)
        assert answers, f"no answer to inspect {command}"
        return answers[NAME]


@contextlib.contextmanager
def on_stage(pool: str, *flags: str, **options: Any) -> Iterator[Stage]:
    """A server, a worker of the tests' app, and a sender."""
    conf = {
        "broker_transport_options": {**OPTIONS, **HIDDEN, **options.pop("transport", {})},
        **options.pop("conf", {}),
    }
    with Server(KIND) as server:
        worker = Worker(server, "-n", NAME, *flags, app="tests.apps.faults", pool=pool, conf=conf, **options)
        with worker, Sender(server) as sender:
            yield Stage(server, worker, sender, pool)


@pytest.fixture(scope="module", params=POOLS)
def shared(request: pytest.FixtureRequest) -> Iterator[Stage]:
    """The worker of a pool."""
    concurrency = 1 if request.param == "solo" else 3
    conf = {"worker_pool_restarts": True}
    with on_stage(request.param, "-Q", "celery,other", concurrency=concurrency, prefetch=2, conf=conf) as stage:
        yield stage


@pytest.fixture
def stage(shared: Stage) -> Iterator[Stage]:
    """The worker of a pool, with empty records; after the test its queues are sound."""
    shared.server.client(RECORD_DB).flushdb()
    yield shared
    if shared.worker.poll() is None:
        shared.settled()


# ------------------------------------------------------------------- tasks


def test_tasks_run_once_and_are_acked(stage: Stage) -> None:
    for i in range(40):
        stage.send("add", i, i, tenant=f"t{i % 3}")
    assert sorted(task["x"] for task in stage.done(40)) == list(range(40))
    stage.settled()
    assert len(recorded(stage.server, "started")) == 40


def test_late_acks(stage: Stage) -> None:
    for i in range(12):
        stage.send("late", "t", i, 0.02, tenant=f"t{i % 2}")
    assert sorted(task["i"] for task in stage.done(12)) == list(range(12))


def test_a_task_that_fails_is_gone(stage: Stage) -> None:
    for i in range(5):
        stage.send("fail", "t", i)
    wait_done(stage.server, 5, 20, "started")


@pytest.mark.parametrize("countdown", [0.0, 0.4])
def test_retries(stage: Stage, countdown: float) -> None:
    stage.send("retrying", "t", 1, 3, countdown, tenant="t")
    stage.done(1)
    started = recorded(stage.server, "started")
    assert [task["retries"] for task in started] == [0, 1, 2, 3]
    gaps = [b["t"] - a["t"] for a, b in itertools.pairwise(started)]
    assert min(gaps) >= countdown - 0.05
    assert max(gaps) < countdown + 0.6
    assert {task["tenant"] for task in started} == {"t"}


def dead(stage: Stage, n: int) -> dict[str, str]:
    """Wait for dead letters; return their reasons, and remove them."""
    client = stage.server.client()
    wait_for(lambda: len(dump(client, "celery").dead) >= n, 20, f"{n} dead letters")
    reasons = check(client, "celery", token_out=True).reasons
    store = Store(Link(Address.from_url(stage.server.url("fairlanes"))))
    store.drop_dead("celery", list(reasons))
    store.caller.close()  # type: ignore[attr-defined]
    return reasons


def test_reject(stage: Stage) -> None:
    stage.send("faults.refuse", 1, False)
    assert len(dead(stage, 1)) == 1
    assert len(recorded(stage.server, "started")) == 1


def test_requeue_until_it_is_buried(stage: Stage) -> None:
    stage.send("faults.refuse", 1, True)
    dead(stage, 1)
    assert [task["attempt"] for task in recorded(stage.server, "started")] == [1, 2, 3]


def test_an_unknown_task_becomes_a_dead_letter_with_its_reason(stage: Stage) -> None:
    stage.send("nobody.knows.it", 1)
    (reason,) = dead(stage, 1).values()
    assert "unknown task" in reason


def test_what_cannot_be_decoded_becomes_a_dead_letter(stage: Stage) -> None:
    with stage.app.connection_for_write() as connection:
        producer = connection.Producer()
        producer.publish(b"\xff\x00", routing_key="celery", content_type="application/json", content_encoding="utf-8")
        producer.publish(b"\x80", routing_key="celery", content_type="application/x-python-serialize")
        producer.publish({"no": "task"}, routing_key="celery")
    reasons = dead(stage, 3)
    assert len(reasons) == 3
    stage.send("mark", "t", 1)
    stage.done(1)


def test_a_countdown_waits_in_the_broker(stage: Stage) -> None:
    sent = time.time()
    stage.send("mark", "t", 1, countdown=1.5, tenant="t")
    client = stage.server.client()
    wait_for(lambda: len(dump(client, "celery").delayed) == 1, 5, "the delayed message")
    assert stage.inspect("scheduled") == []
    assert stage.inspect("reserved") == []
    (task,) = stage.done(1)
    assert 1.5 - GRAIN <= task["t"] - sent < 2


def test_many_that_are_due_at_once(stage: Stage) -> None:
    sent = []
    for i in range(30):
        sent.append(time.time())
        stage.send("mark", "t", i, countdown=1, tenant=f"t{i % 4}")
    tasks = stage.done(30)
    assert sorted(task["i"] for task in tasks) == list(range(30))
    assert all(1 - GRAIN <= task["t"] - sent[task["i"]] < 2 for task in tasks)


def test_protocol_1_waits_in_the_worker(stage: Stage) -> None:
    """Its time is in the body, which is not read: it is on time, and runs once."""
    with Sender(stage.server, task_protocol=1) as sender:
        sent = time.time()
        sender.send("mark", "t", 1, countdown=1, tenant="t")
        (task,) = stage.done(1)
    assert 1 - GRAIN <= task["t"] - sent < 2
    stage.settled()
    assert len(recorded(stage.server, "started")) == 1


def test_two_queues(stage: Stage) -> None:
    for i in range(20):
        stage.send("mark", "t", i, queue="other" if i % 2 else "celery")
    assert sorted(task["i"] for task in stage.done(20)) == list(range(20))
    stage.settled("other")


def test_priorities_of_tasks(stage: Stage) -> None:
    for i in range(10):
        stage.send("mark", "t", i, priority=9 - i)
    stage.done(10)


def test_a_backlog_is_served_by_lanes_in_turn(stage: Stage) -> None:
    if stage.pool != "solo":
        pytest.skip("the order of starts is exact on one process only")
    stage.send("sleepy", "hold", 0, 0.5, tenant="hold")
    for i in range(60):
        stage.send("mark", "flood", i, tenant="flood")
    for i in range(5):
        stage.send("mark", "quiet", i, tenant="quiet")
    tasks = [task["tenant"] for task in stage.done(66) if task["tenant"] != "hold"]
    assert max(i for i, tenant in enumerate(tasks) if tenant == "quiet") < 16


# ------------------------------------------------------------------- remote control


def test_inspect(stage: Stage) -> None:
    assert stage.inspect("ping") == {"ok": "pong"}
    stats = stage.inspect("stats")
    assert stats["broker"]["transport"] == "fairlanes"
    assert stats["broker"]["port"] == stage.server.port
    assert "hunter2" not in str(stats)
    assert {queue["name"] for queue in stage.inspect("active_queues")} >= {"celery", "other"}
    assert "basic.add" in str(stage.inspect("registered"))
    if stage.pool == "solo":
        return  # deaf while a task runs
    stage.send("sleepy", "t", 1, 3, tenant="t")
    wait_for(lambda: recorded(stage.server, "started"), 10, "the start")
    assert [task["name"] for task in stage.inspect("active")] == ["basic.sleepy"]
    stage.done(1)


def test_reserved(stage: Stage) -> None:
    if stage.pool == "solo":
        pytest.skip("deaf while a task runs")
    for i in range(10):
        stage.send("sleepy", "t", i, 1, tenant="t")
    wait_for(lambda: len(recorded(stage.server, "started")) >= 3, 10, "the first starts")
    held = len(stage.inspect("active")) + len(stage.inspect("reserved"))
    assert 3 <= held <= 9  # three run, and at most six (the prefetch) are held unacked
    stage.done(10)


def consumed(stage: Stage) -> set[str]:
    """The queues that the worker consumes from.  It answers before it has done what it was told."""
    return {queue["name"] for queue in stage.inspect("active_queues")}


def test_consumers_come_and_go_while_parked(stage: Stage) -> None:
    for i in range(3):
        stage.ask("add_consumer", f"extra{i}")
        stage.send("mark", "t", i, queue=f"extra{i}")
        stage.done(i + 1)
    for i in range(3):
        stage.ask("cancel_consumer", f"extra{i}")
        wait_for(lambda i=i: f"extra{i}" not in consumed(stage), 10, "the end of the consumer")
        stage.send("mark", "t", 10 + i, queue=f"extra{i}")
    stage.send("mark", "t", 99)
    stage.done(4)
    assert {task["i"] for task in recorded(stage.server)} == {0, 1, 2, 99}
    for i in range(3):
        stage.ask("add_consumer", f"extra{i}")
    stage.done(7)
    for i in range(3):
        stage.ask("cancel_consumer", f"extra{i}")
        stage.settled(f"extra{i}")


def test_rate_limit(stage: Stage) -> None:
    stage.ask("rate_limit", "basic.mark", "4/s")
    for i in range(8):
        stage.send("mark", "t", i)
    first, *_, last = stage.done(8)
    assert last["t"] - first["t"] > 0.7
    stage.ask("rate_limit", "basic.mark", 0)
    stage.send("mark", "t", 9)
    stage.done(9)


def test_revoke(stage: Stage) -> None:
    result = stage.send("mark", "t", 1, countdown=1)
    stage.app.control.revoke(result.id)
    stage.worker.wait_for_log(result.id, 10)
    stage.send("mark", "t", 2)
    stage.done(1)
    stage.settled()
    assert [task["i"] for task in recorded(stage.server)] == [2]


def test_terminate(stage: Stage) -> None:
    if stage.pool != "prefork":
        pytest.skip("only prefork can")
    result = stage.send("sleepy", "t", 1, 60)
    wait_for(lambda: recorded(stage.server, "started"), 10, "the start")
    stage.app.control.terminate(result.id, signal="SIGKILL")
    stage.send("mark", "t", 2)
    stage.done(1)


def test_events(stage: Stage) -> None:
    stage.ask("enable_events")
    heard: list[str] = []
    with stage.app.connection_for_read() as connection:

        def note(event: dict[str, Any]) -> None:
            heard.append(event["type"])
            receiver.should_stop = "task-succeeded" in heard

        receiver = stage.app.events.Receiver(connection, handlers={"*": note})
        threading.Timer(0.5, stage.send, ("mark", "t", 1)).start()
        with contextlib.suppress(TimeoutError):
            receiver.capture(limit=100, timeout=15, wakeup=False)
    stage.ask("disable_events")
    assert {"task-received", "task-started", "task-succeeded"} <= set(heard)


def test_the_pool_grows_and_shrinks(stage: Stage) -> None:
    if stage.pool in ("solo", "threads"):
        pytest.skip("this pool has a fixed size")
    assert "ok" in stage.ask("pool_grow", 2)
    for i in range(10):
        stage.send("mark", "t", i)
    stage.done(10)
    for _ in range(3):  # one at a time: with fewer idle ones than asked for it takes some and fails
        wait_for(lambda: "ok" in stage.ask("pool_shrink", 1), 10, "an idle process to take away")
    for i in range(10):
        stage.send("mark", "t", i)
    stage.done(20)
    assert "ok" in stage.ask("pool_grow", 1)


def test_pool_restart(stage: Stage) -> None:
    if stage.pool != "prefork":
        pytest.skip("the other pools have nothing to restart")
    stage.app.control.pool_restart(destination=[NAME])
    for i in range(10):
        stage.send("mark", "t", i)
    stage.done(10)


def test_the_remote_shutdown_comes_last(stage: Stage) -> None:
    stage.send("mark", "t", 1)
    stage.done(1)
    stage.app.control.shutdown(destination=[NAME])
    assert stage.worker.wait(30) == 0
    assert "Unrecoverable" not in stage.worker.text()


# ------------------------------------------------------------------- workers of their own


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent", "eventlet"])
@pytest.mark.parametrize("task", ["late", "sleepy"])
def test_prefetch_disabled(pool: str, task: str) -> None:
    """No more is claimed than runs, and the pool is never idle for want of a claim."""
    if pool == "gevent" and CELERY_VERSION < (5, 7):
        pytest.skip("Celery 5.6 takes the greenlets that run for the size of the pool, and never starts")
    conf = {"worker_disable_prefetch": True}
    with on_stage(pool, concurrency=2, prefetch=4, conf=conf) as stage:
        client = stage.server.client()
        started = time.monotonic()
        for i in range(20):
            stage.send(task, "t", i, 0.1, tenant=f"t{i % 2}")
        most = 0
        while len(recorded(stage.server)) < 20:
            most = max(most, len(dump(client, "celery").leases))
            assert time.monotonic() - started < 30
            time.sleep(0.02)
        took = time.monotonic() - started
        stage.settled()
        assert most <= 3  # two run, and the next may just have been claimed
        assert took < 5, f"20 tasks of 0.1 s on 2 slots took {took:.1f} s"


def test_autoscale() -> None:
    with on_stage("prefork", "--autoscale", "4,1", concurrency=1) as stage:
        for i in range(16):
            stage.send("sleepy", "t", i, 0.4, tenant=f"t{i % 2}")
        assert sorted(task["i"] for task in stage.done(16, 60)) == list(range(16))
        assert len({task["pid"] for task in recorded(stage.server)}) > 1
        stage.settled()


def test_children_are_replaced() -> None:
    with on_stage("prefork", "--max-tasks-per-child", "2", concurrency=2) as stage:
        for i in range(20):
            stage.send("late" if i % 2 else "mark", "t", i, tenant=f"t{i % 3}")
        assert sorted(task["i"] for task in stage.done(20, 60)) == list(range(20))
        assert len({task["pid"] for task in recorded(stage.server)}) >= 10
        stage.settled()


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_warm_shutdown_hands_back_the_prefetched(pool: str) -> None:
    """What has not started is back in its place at once, and what runs is finished."""
    with on_stage(pool, concurrency=1, prefetch=4) as stage:
        for i in range(8):
            stage.send("late", "t", i, 6.0, tenant="t")
        client = stage.server.client()
        wait_for(lambda: len(dump(client, "celery").leases) == 4, 10, "a full prefetch")
        stage.worker.send(15)
        wait_for(lambda: len(dump(client, "celery").ready.get("t", {})) == 7, 5, "the seven that did not start")
        assert not recorded(stage.server)
        assert stage.worker.wait(30) == 0
        state = check(client, "celery")
        assert len(state.ready["t"]) == 7
        assert {record.failures for record in state.message.values()} == {0}
        assert [task["i"] for task in recorded(stage.server)] == [0]


def test_warm_shutdown_hands_back_in_one_call() -> None:
    """Six that are prefetched, of several tenants, are one release."""
    with on_stage("prefork", concurrency=1, prefetch=7) as stage:
        for i in range(7):
            stage.send("late", "t", i, 2.0, tenant=f"t{i % 3}")
        client = stage.server.client()
        wait_for(lambda: len(dump(client, "celery").leases) == 7, 10, "a full prefetch")
        wait_done(stage.server, 1, 10, "started")
        with contextlib.closing(Monitor(stage.server)) as monitor:
            monitor.start()
            assert stage.worker.stop() == 0
            assert monitor.calls("release") == 1
        state = check(client, "celery")
        assert sum(map(len, state.ready.values())) == len(state.message) == 6
        assert {record.failures for record in state.message.values()} == {0}


@pytest.mark.parametrize("ahead", [3600, -3600])
def test_a_worker_whose_clock_is_wrong(tmp_path: Path, ahead: int) -> None:
    """The server's clock decides: a countdown is as long as it was meant, and ends once."""
    (tmp_path / "sitecustomize.py").write_text(WRONG_CLOCK.format(ahead=ahead))
    env = {"PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT)))}
    with on_stage("prefork", concurrency=1, env=env, transport={"lease_seconds": 1.0}) as stage:
        sent = time.time()
        stage.send("faults.late", 1, 1.5, countdown=2, tenant="t")
        stage.done(1)
        stage.settled()
        assert stage.worker.poll() is None
        (task,) = recorded(stage.server, "started")
        assert 2 - GRAIN <= task["t"] - ahead - sent < 2.5
        assert (task["attempt"], task["redelivered"]) == (1, False)


def test_an_idle_worker_holds_few_connections() -> None:
    transport = {"client_name": "the-worker"}
    with on_stage("prefork", concurrency=2, transport=transport) as stage:
        stage.send("add", 1, 2, tenant="t")
        stage.done(1)
        time.sleep(3)
        names = [client["name"] for client in stage.server.client().client_list()]
        assert names.count("the-worker") <= 5


def test_an_idle_worker_sends_next_to_nothing() -> None:
    flags = ("--without-gossip", "--without-mingle", "--without-heartbeat")
    with on_stage("prefork", *flags, concurrency=1) as stage:
        stage.send("mark", "t", 1)
        stage.done(1)
        stage.settled()
        client = stage.server.client()
        time.sleep(1)

        def calls() -> int:
            stats = client.info("commandstats")
            own = ("cmdstat_info", "cmdstat_llen", "cmdstat_lrange", "cmdstat_ping", "cmdstat_select")
            return sum(stat["calls"] for name, stat in stats.items() if name not in own)

        before = calls()
        time.sleep(10)
        assert calls() - before <= 1


def test_eight_producing_threads_hold_few_connections() -> None:
    with Server(KIND) as server, Sender(server, broker_transport_options={"client_name": "producers"}) as sender:
        most = 0
        client = server.client()

        def produce() -> None:
            for i in range(100):
                sender.send("mark", "t", i, tenant="t")

        threads = [threading.Thread(target=produce) for _ in range(8)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            names = [entry["name"] for entry in client.client_list()]
            most = max(most, names.count("producers"))
        for thread in threads:
            thread.join()
        assert len(check(client, "celery").message) == 800
        assert 1 <= most <= 9


def celery(stage: Stage, *args: str) -> str:
    """Run a `celery` command on the stage's broker and return what it prints."""
    env = {**environment(stage.server.url(), stage.server.port, {}), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "celery", "-A", "tests.apps.basic", *args]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_commands(tmp_path: Path) -> None:
    """`celery purge`, `inspect`, `status`, `call` and `list bindings` from the shell."""
    with on_stage("solo", "-Q", "other", concurrency=1) as stage:
        for i in range(7):
            stage.send("mark", "t", i, tenant=f"t{i}")
        assert "7 messages" in celery(stage, "purge", "-f")
        assert NAME in celery(stage, "status")
        assert "pong" in celery(stage, "inspect", "ping")
        assert "celery" in celery(stage, "list", "bindings")
        celery(stage, "call", "basic.add", "-a", "[1, 2]", "--queue", "other")
        stage.done(1)
        assert "fairlanes" in celery(stage, "report")


def test_results_over_the_same_url() -> None:
    with Server(KIND) as server:
        conf = {"result_backend": server.url(db=3), "task_ignore_result": False}
        with Worker(server, conf=conf, pool="threads"), Sender(server, **conf) as sender:
            results = [sender.send("add", i, 1, tenant="t") for i in range(10)]
            assert [result.get(timeout=20) for result in results] == list(range(1, 11))


def test_beat(tmp_path: Path) -> None:
    entry = {"task": "basic.mark", "schedule": 1.0, "args": ["beat", 0], "options": {"headers": {"tenant": "b"}}}
    conf = {"beat_schedule": {"tick": entry}}
    flags = ("-B", "-s", str(tmp_path / "schedule"))
    with on_stage("prefork", *flags, concurrency=1, conf=conf) as stage:
        tasks = stage.done(3, 20)
        assert {task["tenant"] for task in tasks} == {"beat"}
        stage.worker.stop()


def test_solo_and_threads_side_by_side() -> None:
    """Workers of different pools share the queue, and every task runs once."""
    with on_stage("prefork", concurrency=2) as stage:
        others = [
            Worker(stage.server, "-n", f"{pool}@here", pool=pool, concurrency=2)
            for pool in ("threads", "solo", "gevent")
        ]
        with contextlib.ExitStack() as stack:
            for other in others:
                stack.enter_context(other)
            for i in range(300):
                stage.send("mark", "t", i, tenant=f"t{i % 7}")
            assert sorted(task["i"] for task in stage.done(300, 60)) == list(range(300))
            stage.settled()

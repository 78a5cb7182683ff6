"""The doctor: nothing on a sound queue, also under load; each planted corruption found, named and mended."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis
from click.testing import CliRunner, Result
from kombu import Connection

from fairlanes_transport import keys, scripts
from fairlanes_transport.cli import fairlanes
from fairlanes_transport.errors import QueueAbsent
from fairlanes_transport.lanes.api import Lanes
from fairlanes_transport.lanes.checkup import Kind
from fairlanes_transport.lanes.doctor import Doctor
from fairlanes_transport.store import FailurePolicy, Fence, Store
from tests.harness import Server, wait_for
from tests.invariants import check
from tests.unit.rig import Command, Rig, bury


class Patient(Rig):
    """A queue with a bit of everything, and a doctor."""

    def __init__(self, client: redis.Redis) -> None:
        super().__init__(client)
        self.doctor = Doctor(self.lanes, patience=0.05)
        self.tags = {"dead": bury(self, "b", 1)[0], "leased": self.send("leased", "a")}
        self.store.claim("q", 1, 600_000)
        self.tags["ready"] = self.send("ready", "a")
        self.tags["delayed"] = self.send("delayed", "c", due_ms=self.later())
        self.lanes.set("q", "d", weight=3)
        self.tags["slot"] = self.send("slot", "e")
        self.lanes.set("q", "e", limit=1)
        self.lanes.pause("q", "a")
        (claimed,) = self.store.claim("q", 1, 600_000).claimed
        self.lanes.resume("q", "a")
        self.store.ack("q", [claimed.fence], keep_slot=True)
        self.send("held", "e")
        self.send("throttled", "f")
        self.lanes.throttle("q", "f", 600)

    def key(self, part: str, lane: str = "") -> str:
        """The key of a part of the queue."""
        return keys.part(keys.base("q"), part, lane)

    def kinds(self, *, repair: bool = False) -> set[Kind]:
        """The kinds of what is found."""
        return {finding.kind for finding in self.doctor.check("q", repair=repair).findings}


@pytest.fixture
def patient(any_client: redis.Redis) -> Iterator[Patient]:
    """A queue with a bit of everything, and a doctor."""
    patient = Patient(any_client)
    check(any_client, "q")
    yield patient
    patient.close()


def test_a_sound_queue_has_no_finding(patient: Patient) -> None:
    report = patient.doctor.check("q")
    assert (report.findings, report.skipped, report.sound) == ((), (), True)
    assert (report.lanes, report.messages) == (4, 7)  # two of the lanes hold nothing ready or leased
    before = patient.check().flat()
    assert patient.kinds(repair=True) == set()
    assert patient.check().flat() == before


def test_an_empty_and_an_absent_queue(rig: Rig) -> None:
    assert Doctor(rig.lanes).check("q").sound
    with pytest.raises(QueueAbsent):
        Doctor(rig.lanes).check("x")


#: name -> (what somebody does to the queue, what the doctor says at least)
CORRUPTIONS: dict[str, tuple[Callable[[Patient], object], set[Kind]]] = {
    "lane missing from the ring": (
        lambda p: p.client.zrem(p.key("ring"), "a"),
        {Kind.LANE_STRANDED},
    ),
    "empty lane on the ring": (
        lambda p: p.client.zadd(p.key("ring"), {"ghost": 1}),
        {Kind.LANE_MISPLACED},
    ),
    "paused lane on the ring": (
        lambda p: p.client.hset(p.key("settings", "a"), "paused", 1),
        {Kind.LANE_MISPLACED, Kind.LANE_INDEX},
    ),
    "lane at its limit on the ring": (
        lambda p: p.client.zadd(p.key("ring"), {"e": 1}),
        {Kind.LANE_MISPLACED},
    ),
    "throttled lane on the ring": (
        lambda p: (p.client.zrem(p.key("waiting"), "f"), p.client.zadd(p.key("ring"), {"f": 1})),
        {Kind.LANE_MISPLACED},
    ),
    "throttled lane nowhere": (
        lambda p: p.client.zrem(p.key("waiting"), "f"),
        {Kind.LANE_STRANDED},
    ),
    "lane that waits for ever": (
        lambda p: p.client.zadd(p.key("waiting"), {"f": 9e15}),
        {Kind.LANE_MISPLACED},
    ),
    "lane missing from the index": (
        lambda p: p.client.zrem(p.key("lanes"), "a"),
        {Kind.LANE_INDEX},
    ),
    "settings without index": (
        lambda p: p.client.zrem(p.key("configured"), "d"),
        {Kind.LANE_INDEX},
    ),
    "leaked throttle": (
        lambda p: p.client.set(p.key("throttle", "ghost"), 1),
        {Kind.LANE_ENDLESS},
    ),
    "leaked lane key": (
        lambda p: p.client.sadd(p.key("flight", "ghost"), "nobody"),
        {Kind.LANE_INDEX, Kind.NO_RECORD},
    ),
    "token missing": (
        lambda p: p.client.delete(p.key("wake")),
        {Kind.TOKEN_MISSING},
    ),
    "two tokens": (
        lambda p: p.client.rpush(p.key("wake"), "1"),
        {Kind.TOKEN_SUPERFLUOUS},
    ),
    "keeper gone": (
        lambda p: p.client.hset(p.key("queue"), mapping={"keeper": "k", "keeper_until": 1}),
        {Kind.KEEPER_GONE},
    ),
    "orphan record": (
        lambda p: p.client.zrem(p.key("ready", "a"), p.tags["ready"]),
        {Kind.IN_NO_SET, Kind.LANE_MISPLACED},
    ),
    "lease gone": (
        lambda p: p.client.zrem(p.key("leases"), p.tags["leased"]),
        {Kind.IN_NO_SET, Kind.FLIGHT},
    ),
    "slot without lease": (
        lambda p: p.client.zrem(p.key("leases"), p.tags["slot"]),
        {Kind.IN_NO_SET, Kind.FLIGHT},
    ),
    "ready and leased": (
        lambda p: p.client.zadd(p.key("ready", "a"), {p.tags["leased"]: 5}),
        {Kind.IN_TWO_SETS},
    ),
    "ready and delayed": (
        lambda p: p.client.zadd(p.key("delayed"), {p.tags["ready"]: 1e15}),
        {Kind.IN_TWO_SETS},
    ),
    "dead and delayed": (
        lambda p: p.client.zadd(p.key("delayed"), {p.tags["dead"]: 1e15}),
        {Kind.IN_TWO_SETS},
    ),
    "ready in a foreign lane": (
        lambda p: p.client.zadd(p.key("ready", "z"), {p.tags["ready"]: 5}),
        {Kind.WRONG_LANE, Kind.LANE_STRANDED, Kind.LANE_INDEX},
    ),
    "lease not in flight": (
        lambda p: p.client.srem(p.key("flight", "a"), p.tags["leased"]),
        {Kind.FLIGHT},
    ),
    "in flight without lease": (
        lambda p: p.client.sadd(p.key("flight", "a"), p.tags["ready"]),
        {Kind.FLIGHT},
    ),
    "lease without record": (
        lambda p: p.client.hdel(p.key("message"), p.tags["leased"]),
        {Kind.NO_RECORD},
    ),
    "ready without record": (
        lambda p: p.client.hdel(p.key("message"), p.tags["ready"]),
        {Kind.NO_RECORD},
    ),
    "delayed without record": (
        lambda p: p.client.hdel(p.key("message"), p.tags["delayed"]),
        {Kind.NO_RECORD},
    ),
    "dead without record": (
        lambda p: p.client.hdel(p.key("message"), p.tags["dead"]),
        {Kind.NO_RECORD},
    ),
    "a set's member of nothing": (
        lambda p: p.client.zadd(p.key("delayed"), {"nobody": 1e15}),
        {Kind.NO_RECORD},
    ),
    "damaged record": (
        lambda p: p.client.hset(p.key("message"), p.tags["ready"], "what is this"),
        {Kind.BAD_RECORD},
    ),
    "body missing": (
        lambda p: p.client.hdel(p.key("body"), p.tags["ready"]),
        {Kind.PAYLOAD_LOST, Kind.BOOKS},
    ),
    "envelope missing": (
        lambda p: p.client.hdel(p.key("envelope"), p.tags["leased"]),
        {Kind.PAYLOAD_LOST},
    ),
    "body of nobody": (
        lambda p: p.client.hset(p.key("body"), "nobody", "x"),
        {Kind.NO_RECORD, Kind.BOOKS},
    ),
    "message gone without a trace": (
        lambda p: [
            p.client.zrem(p.key("delayed"), p.tags["delayed"]),
            *(p.client.hdel(p.key(part), p.tags["delayed"]) for part in ("message", "envelope", "body")),
        ],
        {Kind.BOOKS},
    ),
}


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_planted_corruptions_are_found_and_mended(patient: Patient, name: str) -> None:
    corrupt, kinds = CORRUPTIONS[name]
    corrupt(patient)
    found = patient.kinds()
    assert found >= kinds
    # What follows from it may be named too, but nothing that has nothing to do with it.
    assert found <= kinds | {Kind.LANE_INDEX, Kind.LANE_MISPLACED, Kind.BOOKS, Kind.IN_NO_SET, Kind.FLIGHT}
    report = patient.doctor.check("q", repair=True)
    assert report.findings
    assert report.sound
    assert patient.doctor.check("q").findings == ()
    patient.check()


@pytest.mark.parametrize("name", ["ready without record", "damaged record", "orphan record", "lease without record"])
def test_what_can_still_run_runs(patient: Patient, name: str) -> None:
    CORRUPTIONS[name][0](patient)
    patient.doctor.check("q", repair=True)
    waiting = {m.task_id for m in patient.lanes.peek("q", "a")}
    assert "ready" in waiting
    assert ("leased" in waiting) == (name == "lease without record")


def test_what_was_deleted_half_way_does_not_run_again(patient: Patient) -> None:
    """Whoever deleted died after the first step, and the queue is used again: the repair removes what is left."""
    for n in range(150):
        patient.send(f"old{n}", f"lane{n}")
    assert scripts.load("delete").run(patient.store.caller, keys.base("q"), 0, 0) == 2
    patient.send("new", "a")
    patient.doctor.check("q", repair=True)
    (claimed,) = patient.store.claim("q", 16, 600_000).claimed
    assert b'"new"' in claimed.envelope
    assert patient.check().earlier == {}


def test_a_key_that_is_not_ours_is_told_but_left(patient: Patient) -> None:
    patient.client.set(keys.base("q") + "notes", "x")
    (finding,) = patient.doctor.check("q", repair=True).findings
    assert (finding.kind, finding.repaired) == (Kind.UNKNOWN_KEY, False)
    assert patient.client.exists(keys.base("q") + "notes")


def test_a_superfluous_token(rig: Rig) -> None:
    rig.client.rpush(keys.part(keys.base("q"), "wake"), "1")
    (finding,) = Doctor(rig.lanes).check("q", repair=True).findings
    assert finding.kind is Kind.TOKEN_SUPERFLUOUS
    rig.check()


def test_the_command(command: Command) -> None:
    command.send("t")
    assert "q: sound (1 lanes, 1 messages)" in command.run("doctor").output
    command.client.zrem(keys.part(keys.base("q"), "ring"), "a")
    output = command.run("doctor", "q", code=1).output
    assert "lane off the ring, lane a: 1 ready" in output
    report = command.json("doctor", code=1)
    assert (report["sound"], report["queues"][0]["findings"][0]["kind"]) == (False, "lane off the ring")
    assert "(repaired)" in command.run("doctor", "--repair").output
    report = command.json("doctor")
    assert (report["sound"], report["skipped"]) == (True, [])
    assert report["queues"] == [{"queue": "q", "findings": [], "lanes": 1, "messages": 1, "skipped": []}]
    command.run("doctor", "absent", code=1)


# the options decide in which lane a message belongs


@pytest.mark.parametrize(
    ("headers", "lane"),
    [
        ({"customer": "acme"}, "acme"),
        ({"customer": 7}, "7"),
        ({"tenant": "acme"}, "shared"),
        ({"customer": True}, "shared"),
        ({"customer": "x" * 300}, "shared"),
        ({}, "shared"),
    ],
)
def test_a_message_without_a_record_goes_where_the_options_say(
    command: Command, headers: dict[str, object], lane: str
) -> None:
    envelope = json.dumps({"headers": {"id": "t", "task": "t.run", **headers}, "properties": {}})
    command.store.enqueue("q", "t", "acme", envelope, b"[]")
    for part in ("message", "ready:acme", "ring", "lanes"):
        command.client.delete(keys.base("q") + part)
    command.run("-o", "tenant_header=customer", "-o", "default_tenant=shared", "doctor", "q", "--repair")
    assert [message.task_id for message in command.lanes.peek("q", lane)] == ["t"]
    command.check()


# what puts messages at risk, though nothing is broken


def risks(server: Server, *queues: str) -> dict[str, str]:
    """Risk -> what is said of it."""
    rig = Rig(server.client())
    around = Doctor(rig.lanes).look_around(queues or ("q",))
    rig.close()
    assert around.skipped == ()
    return {advice.risk.name: advice.what for advice in around.warnings}


def test_a_server_that_keeps_messages_has_no_warning(fresh_server: Callable[..., Server]) -> None:
    master = fresh_server("--appendonly", "yes")
    replica = fresh_server("--replicaof", f"127.0.0.1 {master.port}")
    wait_for(lambda: master.client().info("replication")["connected_slaves"] == 1, 20, "the replica")
    assert risks(master) == {}
    lanes = Lanes(replica.url("fairlanes"))
    assert "IS_REPLICA" in {advice.risk.name for advice in Doctor(lanes).look_around(["q"]).warnings}


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl"])
def test_a_server_that_does_not_is_warned_of(fresh_server: Callable[..., Server], policy: str) -> None:
    found = risks(fresh_server("--maxmemory-policy", policy))
    assert set(found) == {"EVICTION", "NOT_ON_DISK", "NO_REPLICA"}
    assert policy in found["EVICTION"]


def test_messages_that_nobody_here_serves_are_warned_of(server: Server) -> None:
    client = server.client()
    assert not {"OTHER_LAYOUT", "KOMBU_LIST"} & set(risks(server))
    client.sadd(keys.queues(layout=keys.LAYOUT + 1), "celery", "later")
    with Connection(server.url("redis")) as kombu:
        for priority in (0, 6):
            kombu.Producer().publish("x", routing_key="celery", priority=priority)
    found = risks(server)
    assert f"layout {keys.LAYOUT + 1} has 2 queues (celery, later)" in found["OTHER_LAYOUT"]
    assert "list 'celery' holds 2 messages" in found["KOMBU_LIST"]
    client.hset("unacked", "t", "x")
    assert "1 messages are held by workers on redis://" in risks(server)["KOMBU_LIST"]
    # Something else of that name is none of our business.
    client.delete("celery", "unacked", "celery\x06\x166")
    client.set("celery", "x")
    assert "KOMBU_LIST" not in risks(server)


def test_warnings_are_no_findings(fresh_server: Callable[..., Server]) -> None:
    server = fresh_server("--maxmemory-policy", "allkeys-lru")
    Lanes(server.url("fairlanes")).declare("q")

    def run(*args: str) -> Result:
        return CliRunner().invoke(fairlanes, ["-b", server.url("fairlanes"), "doctor", *args])

    done = run()
    assert done.exit_code == 0
    assert "q: sound" in done.output
    assert "warning: the server may evict keys: maxmemory-policy is allkeys-lru: set noeviction" in done.output
    assert run("--strict").exit_code == 1
    report = json.loads(run("--json").output)
    assert (report["sound"], report["warnings"][0]["risk"]) == (True, "the server may evict keys")


def consume(rig: Rig, seed: int, ended: threading.Event) -> None:
    """Claim, and do with each message one of all that a consumer can do."""
    chance, name = random.Random(seed), f"c{seed}"
    store = Store(rig.link, policy=FailurePolicy(backoff_base=0.01, backoff_max=0.05, max_failures=3))
    ways: list[Callable[[Fence], object]] = [
        lambda fence: store.ack("q", [fence], consumer=name),
        lambda fence: store.ack("q", [fence], keep_slot=True, consumer=name),
        lambda fence: store.release("q", [fence]),
        lambda fence: store.reject("q", fence, requeue=True, reason="x"),
        lambda fence: store.reject("q", fence, requeue=False, reason="x"),
        lambda fence: None,
    ]
    while not ended.is_set():
        for message in store.claim("q", chance.randint(1, 8), 50, consumer=name, will_park=True).claimed:
            chance.choice(ways)(message.fence)


def operate(rig: Rig, seed: int, ended: threading.Event) -> None:
    """Send, and change settings."""
    chance = random.Random(seed)
    while not ended.is_set():
        lane = f"l{chance.randint(0, 19)}"
        settings = {"limit": chance.choice([None, 1, 3]), "rate": chance.choice([None, "50/s"])}
        rig.lanes.set("q", lane, weight=chance.choice([None, 1, 5]), **settings)
        rig.lanes.throttle("q", lane, chance.choice([0, 0.05]), shorten=True)
        for _ in range(20):
            due = rig.later(0.05) if chance.random() < 0.2 else 0
            rig.send("t", f"l{chance.randint(0, 19)}", due_ms=due, priority=chance.randint(0, 9))
        rig.lanes.redrive("q")


def test_none_under_load(server: Server) -> None:
    rig, ended, looks = Rig(server.client()), threading.Event(), 0
    with ThreadPoolExecutor(4) as threads:
        busy = [threads.submit(consume, rig, seed, ended) for seed in range(3)]
        busy.append(threads.submit(operate, rig, 99, ended))
        try:
            doctor, until = Doctor(rig.lanes), time.monotonic() + 4
            while time.monotonic() < until:
                assert doctor.check("q").findings == ()
                looks += 1
        finally:
            ended.set()
    for thread in busy:
        thread.result()
    assert looks > 3
    assert rig.lanes.snapshot("q").totals["claimed"] > 100
    rig.check()
    rig.close()

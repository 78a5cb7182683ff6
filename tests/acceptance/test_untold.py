"""Who waits for a task that killed each of its workers is told: on real workers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import chord
from celery.exceptions import ChordError
from celery.result import AsyncResult

from fairlanes_transport import DeadLettered, Lanes, keys
from fairlanes_transport.connections import Address, Link
from fairlanes_transport.lanes.doctor import Doctor
from fairlanes_transport.store import Store
from tests.harness import Sender, Server, Worker, recorded, wait_done, wait_for

pytestmark = pytest.mark.acceptance

#: A message dies with its second failure, and soon.
OPTIONS = {"max_failures": 2, "backoff_base": 0.01, "lease_seconds": 3}
RESULTS = {"results": True, "broker_transport_options": OPTIONS}

Start = Callable[..., Worker]


@pytest.fixture
def start(worker: Start) -> Start:
    """A function that starts a worker of ``tests.apps.faults`` with results."""

    def made(**options: Any) -> Worker:
        conf = {**RESULTS, **options.pop("conf", {})}
        return worker(app="tests.apps.faults", conf=conf, **options)

    return made


@pytest.fixture
def sender(server: Server) -> Iterator[Sender]:
    with Sender(server, results=True) as made:
        yield made


@pytest.fixture
def store(server: Server) -> Iterator[Store]:
    link = Link(Address.from_url(server.url("fairlanes")))
    yield Store(link)
    link.close()


def untold(server: Server) -> int:
    """How many dead letters nobody has told of."""
    return int(server.client().zcard(keys.part(keys.base("celery"), "untold")))


def fails(result: AsyncResult[Any]) -> DeadLettered:
    """Wait until a task has failed because its message is a dead letter; returns the error."""
    with pytest.raises(DeadLettered) as caught:
        result.get(timeout=30)
    return caught.value


def whose(server: Server, label: str) -> list[str]:
    """Lanes of the ``whoami`` tasks with a label that have run."""
    return [each["properties"]["fairlanes"]["lane"] for each in recorded(server) if each.get("label") == label]


@pytest.mark.parametrize("pool", ["prefork"])
def test_a_task_that_kills_its_process(start: Start, sender: Sender, server: Server, pool: str) -> None:
    working = start(pool=pool)
    told = sender.sig("whoami", "errback")
    result = sender.sig("faults.die", 1, tenant="acme").apply_async(link_error=told)
    error = fails(result)
    assert "dead letter" in str(error) or "failures" in str(error)
    assert "'acme'" in str(error) and "'celery'" in str(error)
    wait_for(lambda: whose(server, "errback"), 20, "the errback")
    assert whose(server, "errback") == ["acme"]
    working.wait_for_log(
        f"task faults.die[{result.id}] of tenant 'acme', queue 'celery' is a dead letter after 2 failures"
    )
    assert "ERROR" in next(line for line in working.text().splitlines() if "is a dead letter after" in line)
    wait_for(lambda: untold(server) == 0, 10, "nobody is to be told any more")
    assert [dead.lane for dead in Lanes(server.url("fairlanes")).dead("celery")] == ["acme"]


def test_a_task_that_kills_its_worker(start: Start, sender: Sender, server: Server) -> None:
    result = sender.sig("faults.die", 1, tenant="acme").apply_async()
    for _ in range(2):
        doomed = start(pool="solo")
        wait_for(lambda doomed=doomed: doomed.poll() is not None, 30, "the worker is dead")  # type: ignore[misc]
    start(pool="solo")
    fails(result)
    assert len(recorded(server, "started")) == 2


def test_a_chord_with_a_part_that_dies(start: Start, sender: Sender, server: Server) -> None:
    start()
    body = sender.sig("add", 1, 2, tenant="body")
    body.link_error(sender.sig("whoami", "of the body"))
    parts = [sender.sig("add", 1, 1, tenant="ca"), sender.sig("faults.die", 1, tenant="cb")]
    result = chord(parts, body, app=sender.app).apply_async()
    with pytest.raises((ChordError, DeadLettered), match="'cb', queue 'celery'"):
        result.get(timeout=30)
    wait_for(lambda: whose(server, "of the body"), 20, "the errback of the body")


def test_a_chain_ends(start: Start, sender: Sender, server: Server) -> None:
    start()
    first = sender.sig("faults.die", 1, tenant="acme")
    result = (first | sender.sig("add", 1, 1)).apply_async()
    fails(result)
    fails(result.parent)


def test_results_over_the_broker(worker: Start, server: Server) -> None:
    conf = {"result_backend": "rpc://", "task_ignore_result": False}
    worker(app="tests.apps.faults", conf={**conf, "broker_transport_options": OPTIONS})
    with Sender(server, **conf) as sender:
        fails(sender.sig("faults.die", 1, tenant="acme").apply_async())


def test_without_results_the_errback_is_sent(worker: Start, sender: Sender, server: Server) -> None:
    working = worker(app="tests.apps.faults", conf={"broker_transport_options": OPTIONS})
    sender.sig("faults.die", 1, tenant="acme").apply_async(link_error=sender.sig("whoami", "errback"))
    wait_for(lambda: whose(server, "errback"), 30, "the errback")
    working.wait_for_log("is a dead letter after 2 failures")
    wait_for(lambda: untold(server) == 0, 10, "nobody is to be told any more")


def bury(store: Store, server: Server) -> None:
    """Let the one message of the queue die, while nobody works."""
    for _ in range(2):
        wait_for(lambda: store.claim("celery", 1, 1).claimed, 10, "a claim")
        wait_for(lambda: store.expire("celery")[0], 10, "its lease is over")
    assert untold(server) == 1


@pytest.fixture
def quick(store: Store) -> Store:
    """A store under whose policy messages die soon."""
    store.policy = type(store.policy)(max_failures=2, backoff_base=0.01)
    return store


@pytest.mark.parametrize("pool", ["solo", "threads", "prefork", "gevent"])
def test_who_died_telling_leaves_it_to_another(
    start: Start, sender: Sender, server: Server, quick: Store, pool: str
) -> None:
    result = sender.sig("add", 1, 2, tenant="acme").apply_async()
    bury(quick, server)
    assert quick.untold("celery", 500) is not None
    start(pool=pool)
    # Whatever claims look at it: those for other messages, too.
    wait_for(lambda: sender.send("mark", "b", 1) and result.state == "FAILURE", 30, "the other worker's report")
    fails(result)
    wait_for(lambda: untold(server) == 0, 10, "nobody is to be told any more")


def test_what_died_while_nobody_worked_is_told_by_the_first_worker(
    start: Start, sender: Sender, server: Server, quick: Store
) -> None:
    result = sender.sig("add", 1, 2, tenant="acme").apply_async()
    bury(quick, server)
    start()
    fails(result)


def test_a_success_stays(start: Start, sender: Sender, server: Server, quick: Store) -> None:
    """Its worker died between the result and the ack, as often as a message may."""
    result = sender.sig("add", 1, 2, tenant="acme").apply_async(link_error=sender.sig("whoami", "errback"))
    bury(quick, server)
    sender.app.backend.store_result(result.id, 3, "SUCCESS")
    start().wait_for_log("has succeeded before: its result stays")
    wait_for(lambda: untold(server) == 0, 10, "nobody is to be told any more")
    assert result.get(timeout=5) == 3
    assert whose(server, "errback") == []


def test_a_task_of_which_the_worker_does_not_know(start: Start, sender: Sender, server: Server, quick: Store) -> None:
    result = sender.app.send_task("nobody.knows", headers={"tenant": "acme"})
    bury(quick, server)
    start()
    fails(result)


def test_what_cannot_be_read_is_logged(start: Start, sender: Sender, server: Server, quick: Store) -> None:
    quick.declare("celery")
    quick.enqueue("celery", "t", "acme", json.dumps({"headers": {}, "properties": {}, "content-type": "x"}), b"?")
    bury(quick, server)
    working = start()
    working.wait_for_log("message t of tenant 'acme', queue 'celery' is a dead letter after 2 failures")
    wait_for(lambda: untold(server) == 0, 10, "nobody is to be told any more")
    sender.send("mark", "b", 1)
    wait_done(server, 1, 20)


def test_protocol_1(start: Start, sender: Sender, server: Server, quick: Store) -> None:
    sender.app.conf.task_protocol = 1
    result = sender.sig("add", 1, 2, tenant="acme").apply_async(link_error=sender.sig("whoami", "errback"))
    bury(quick, server)
    start()
    fails(result)
    wait_for(lambda: whose(server, "errback") == ["acme"], 20, "the errback")


def test_the_doctor_finds_who_is_told_of_nothing(sender: Sender, server: Server, quick: Store) -> None:
    sender.send("add", 1, 2, tenant="acme")
    bury(quick, server)
    doctor = Doctor(Lanes(server.url("fairlanes")))
    assert doctor.check("celery").sound
    server.client().zadd(keys.part(keys.base("celery"), "untold"), {"nobody": 1})
    found = doctor.check("celery", repair=True)
    assert [finding.kind.value for finding in found.findings] == ["told of no dead letter"]
    assert doctor.check("celery").sound
    assert untold(server) == 1

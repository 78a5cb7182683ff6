"""What a task can know of its message, and what becomes of messages that fail: backoff, dead letters, redrive."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from kombu import Connection, Producer

from fairlanes_transport.store import FailurePolicy, Store
from tests.faults.conftest import POOLS, Site
from tests.harness import recorded, wait_done, wait_for

pytestmark = pytest.mark.faults


@pytest.mark.parametrize("pool", POOLS)
def test_the_attempt_reaches_the_task(site: Callable[..., Site], pool: str) -> None:
    here = site()
    here.send("late", 1, tenant="acme")
    assert here.store.claim("celery", 1, 1).claimed  # by somebody who does nothing with it
    time.sleep(0.01)
    here.worker(pool=pool, concurrency=1)
    done = wait_done(here.server, 1, 20)
    assert (done[0]["attempt"], done[0]["lane"], done[0]["redelivered"]) == (2, "acme", True)


def test_a_retry_and_a_child_begin_at_one(site: Callable[..., Site]) -> None:
    here = site()
    here.send("again", 1)
    for _ in range(3):
        assert here.store.claim("celery", 1, 1).claimed
        time.sleep(0.01)
        here.store.expire("celery")
        here.store.reschedule("celery", [(tag.decode(), 0) for tag in here.server.client().hkeys(_key("message"))])
    here.worker(concurrency=1)
    wait_done(here.server, 2, 20)  # the child, and the retry
    attempts = {(each["task"], each["retries"]): each["attempt"] for each in recorded(here.server, "started")}
    assert attempts == {("again", 0): 4, ("again", 1): 1, ("early", 0): 1}


def _key(part: str) -> str:
    return f"fairlanes:2:{{celery}}:{part}"


def _dead(here: Site) -> dict[str, str]:
    """Task id -> reason of each dead letter; its body and headers are still there."""
    client = here.server.client()
    found = {}
    for tag, reason in client.hgetall(_key("reasons")).items():
        assert client.hexists(_key("body"), tag)
        envelope = client.hget(_key("envelope"), tag)
        try:
            task = json.loads(envelope)["headers"].get("id", "")
        except ValueError:
            task = ""
        found[task] = reason.decode()
    return found


def _publish(here: Site, body: Any, **options: Any) -> None:
    with Connection(here.server.url("fairlanes")) as connection:
        Producer(connection.channel()).publish(body, routing_key="celery", **options)


def test_what_cannot_be_run_is_a_dead_letter_with_its_reason(site: Callable[..., Site]) -> None:
    here = site()
    worker = here.worker(concurrency=1)
    headers = {"tenant": "a", "lang": "py", "task": "faults.late", "id": "undecodable"}
    _publish(here, b"{not json", headers=headers, content_type="application/json", content_encoding="utf-8")
    pickled = {**headers, "id": "forbidden"}
    _publish(here, b"x", headers=pickled, content_type="application/x-python-serialize", content_encoding="binary")
    _publish(here, {"x": 1}, headers={"tenant": "a", "id": "strange"})
    _publish(here, [[], {}, {}], headers={**headers, "id": "unknown", "task": "no.such.task"})
    _publish(here, [[], {}, {}], headers={**headers, "id": "invalid", "task": "faults.late", "expires": "never"})
    refused = here.send("refuse", 1)
    here.store.enqueue("celery", "torn", "a", "{no envelope", b"body")
    wait_for(lambda: here.sizes()[3] >= 7, 20, "dead letters")
    reasons = _dead(here)
    assert set(reasons) == {"undecodable", "forbidden", "strange", "unknown", "invalid", refused, ""}
    assert reasons["undecodable"].startswith("cannot be decoded: ")
    assert "ContentDisallowed" in reasons["forbidden"]
    assert reasons["strange"] == "not a task"
    assert reasons["unknown"].startswith("unknown task: ")
    assert reasons["invalid"].startswith("invalid task: ")
    assert reasons[""].startswith("the envelope is not JSON")
    assert here.sizes() == (0, 0, 0, 7)
    # The worker is well, and so is what comes next.
    here.send("late", 2)
    wait_for(lambda: here.ends().get(2), 10, "the next")
    assert worker.poll() is None


def test_a_task_that_is_requeued_comes_back_ever_later(site: Callable[..., Site]) -> None:
    """kombu's redis transport redelivers it 147 times a second."""
    here = site(backoff_base=0.4, backoff_factor=2.0, max_failures=4)
    here.worker(concurrency=1)
    here.send("refuse", 1, True)
    wait_for(lambda: here.sizes()[3] == 1, 30, "a dead letter")
    starts = [each["t"] for each in recorded(here.server, "started")]
    pauses = [b - a for a, b in itertools.pairwise(starts)]
    assert len(pauses) == 3
    for n, pause in enumerate(pauses):
        assert 0.4 * 2**n * 0.5 <= pause < 0.4 * 2**n + 1
    assert here.starts() == {1: 4}


def test_expiries_use_up_the_failures_and_a_redrive_gives_them_back(site: Callable[..., Site]) -> None:
    here = site()
    task = here.send("late", 1)
    store = Store(here.link, policy=FailurePolicy(backoff_base=0.01, backoff_max=0.01, max_failures=3))
    for attempt in range(1, 4):
        claimed = wait_for(lambda: store.claim("celery", 1, 1).claimed, 5, "a claim")
        assert (claimed[0].fence.attempt, claimed[0].failures) == (attempt, attempt - 1)
        time.sleep(0.02)
        store.expire("celery")
    assert here.sizes() == (0, 0, 0, 1)
    assert _dead(here) == {task: "lease expired"}
    tag = here.server.client().zrange(_key("dead"), 0, -1)[0].decode()
    assert here.store.redrive("celery", [tag]) == 1
    here.worker(concurrency=1)
    done = wait_done(here.server, 1, 20)
    assert done[0]["attempt"] == 5  # three that expired, the redrive, and this one
    wait_for(lambda: here.sizes() == (0, 0, 0, 0), 5, "an empty queue")


def test_dead_letters_are_bounded_in_number_and_age(site: Callable[..., Site]) -> None:
    here = site()
    store = Store(here.link, policy=FailurePolicy(dead_letter_max=3, dead_letter_ttl=0.5))
    for i in range(6):
        store.enqueue("celery", str(i), "a", "{}", b"")
        claimed = store.claim("celery", 1, 1000).claimed[0]
        store.reject("celery", claimed.fence, requeue=False, reason="x")
    assert here.sizes() == (0, 0, 0, 3)
    assert here.total("trimmed") == 3
    time.sleep(0.6)
    store.expire("celery")
    assert here.sizes() == (0, 0, 0, 0)
    assert here.total("trimmed") == 6

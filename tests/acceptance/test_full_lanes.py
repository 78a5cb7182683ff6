"""A lane that is full refuses its senders, and never what a running task sends: on real workers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import chain, signature

from fairlanes_transport import LaneFull, Lanes
from tests.acceptance.test_tenancy import SPEAKING, Stage, on_stage
from tests.apps import canvas
from tests.harness import Sender, Server, Worker, wait_done

pytestmark = pytest.mark.acceptance

#: So many messages wait in the lane behind what is tested; those come first, by their priority.
FILLERS = 25

_numbers = itertools.count()


@pytest.fixture(scope="module")
def _stage() -> Iterator[Stage]:
    with on_stage("prefork") as made:
        yield made


@pytest.fixture
def stage(_stage: Stage) -> Stage:
    return _stage.current()


def fill(stage: Stage, label: str, send: Callable[[], Any]) -> None:
    """Let what `send` sends begin in a lane that is full, and stays so until it has ended."""
    lanes = Lanes(stage.server.url("fairlanes"))
    lanes.pause("celery", label)
    send()
    for _ in range(FILLERS):
        canvas.send(stage.app, "filler", headers={"tenant": label}, priority=9)
    lanes.set("celery", label, max_size=1, limit=1)
    with pytest.raises(LaneFull):
        canvas.send(stage.app, "refused", headers={"tenant": label})
    lanes.resume("celery", label)


@pytest.mark.parametrize("form", canvas.FORMS)
def test_what_a_task_sends_is_let_in(stage: Stage, form: str) -> None:
    label = f"{form}, full {next(_numbers)}"
    root = signature("canvas.root", (form, label))
    fill(stage, label, lambda: root.apply_async(headers={"tenant": label}, priority=0))
    stage.expect(label, label, canvas.FORMS[form].notes)


@pytest.mark.parametrize("case", ["hard time limit", "dead child", "chord with a dead part"])
def test_what_the_main_process_sends_for_a_task_is_let_in(stage: Stage, case: str) -> None:
    label = f"{case}, full {next(_numbers)}"
    made = SPEAKING[case].build(stage.app, label)
    fill(stage, label, lambda: made.apply_async(headers={"tenant": label}, priority=0))
    stage.expect(label, label, SPEAKING[case].notes, exact=False)


def test_a_chain_into_a_full_lane_succeeds(stage: Stage) -> None:
    label = f"chain, full {next(_numbers)}"
    results = []
    made = chain(signature("canvas.mark", (label,), immutable=True), signature("canvas.mark", (label,), immutable=True))
    fill(stage, label, lambda: results.append(made.apply_async(headers={"tenant": label}, priority=0)))
    stage.expect(label, label, 2)
    assert results[0].parent.get(timeout=20) is None
    assert results[0].parent.successful()


def test_a_full_lane_names_itself(stage: Stage) -> None:
    label = f"named {next(_numbers)}"
    lanes = Lanes(stage.server.url("fairlanes"))
    lanes.pause("celery", label)
    lanes.set("celery", label, max_size=1)
    canvas.send(stage.app, label, headers={"tenant": label})
    with pytest.raises(LaneFull) as caught:
        canvas.send(stage.app, label, headers={"tenant": label})
    told = caught.value
    assert (told.lane, told.queue, told.size, told.max_size) == (label, "celery", 1, 1)
    assert label in str(told)
    assert "celery" in str(told)
    lanes.purge("celery", label)
    lanes.resume("celery", label)


@pytest.mark.parametrize("pool", ["solo", "prefork"])
def test_tenants_defaults_do_not_rule_reply_queues(
    server: Server, worker: Callable[..., Worker], sender: Sender, pool: str
) -> None:
    options = {"lane_max_size": 2, "lane_limit": 1, "lane_rate": "1/h", "lane_burst": 3}
    conf = {"broker_transport_options": options, "result_backend": "rpc://", "task_ignore_result": False}
    working = worker(pool=pool, conf=conf)
    with Sender(server, **conf) as asking:
        others = [worker(conf=conf, pool="solo") for _ in range(2)]
        results = [asking.send("add", 1, i, tenant=f"t{i}") for i in range(9)]
        wait_done(server, 9, 30)
        assert [result.get(timeout=20) for result in results] == [1 + i for i in range(9)]
        for _ in range(3):
            assert len(asking.app.control.ping(timeout=3)) == 3
    assert working.poll() is None
    assert all(other.poll() is None for other in others)

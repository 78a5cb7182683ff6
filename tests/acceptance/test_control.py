"""Celery remote control of lanes, on real workers: by `app.control` and by the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from fairlanes_transport import Lanes
from tests.apps.settings import environment
from tests.harness import ROOT, Sender, Server, Worker, wait_done, wait_for

pytestmark = pytest.mark.acceptance


class Control:
    """A server with a worker that answers."""

    def __init__(self, server: Server, sender: Sender) -> None:
        self.server, self.app = server, sender.app
        self.lanes = Lanes(server.url("fairlanes"))

    def __call__(self, command: str, **arguments: Any) -> Any:
        """Send a command to all workers; the answer of the one there is."""
        replies = self.app.control.broadcast(command, arguments=arguments, reply=True, timeout=10, limit=1)
        (reply,) = replies
        (answer,) = reply.values()
        return answer

    def shell(self, *args: str) -> subprocess.CompletedProcess[str]:
        """``celery -A tests.apps.basic …``"""
        return subprocess.run(
            [sys.executable, "-m", "celery", "-A", "tests.apps.basic", *args],
            env=environment(self.server.url("fairlanes"), self.server.port, {}),
            cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip


@pytest.fixture
def control(server: Server, sender: Sender, worker: Callable[..., Worker]) -> Control:
    worker(pool="threads", concurrency=2)
    return Control(server, sender)


def test_a_lane_is_paused_and_resumed(control: Control, sender: Sender) -> None:
    assert control("lane_pause", queue="celery", tenant="acme") == {"ok": "lane acme of queue celery paused"}
    sender.send("mark", "acme", 1, tenant="acme")
    sender.send("mark", "other", 2, tenant="other")
    assert [note["tenant"] for note in wait_done(control.server, 1, 10)] == ["other"]
    assert control.lanes.lane("celery", "acme").paused
    assert control("lane_resume", queue="celery", tenant="acme") == {"ok": "lane acme of queue celery resumed"}
    assert len(wait_done(control.server, 2, 10)) == 2


def test_a_queue_is_paused_and_resumed(control: Control, sender: Sender) -> None:
    assert control("queue_pause", queue="celery") == {"ok": "queue celery paused"}
    sender.send("mark", "a", 1, tenant="a")
    assert control.lanes.snapshot("celery").paused
    assert control("queue_pause", queue="celery") == {"ok": "queue celery paused"}, "twice is as once"
    assert control("queue_resume", queue="celery") == {"ok": "queue celery resumed"}
    wait_done(control.server, 1, 10)


def test_settings(control: Control) -> None:
    answer = control("lane_set", queue="celery", tenant="acme", weight=3, limit=10, rate="100/m")
    assert answer["ok"].startswith("lane acme of queue celery set: weight=3, limit=10, rate=100/m")
    assert control.lanes.lane("celery", "acme").own.limit == 10
    answer = control("lane_unset", queue="celery", tenant="acme", names=["limit", "rate"])
    assert answer == {"ok": "lane acme of queue celery set: weight=3"}
    assert control("lane_unset", queue="celery", tenant="acme") == {"ok": "lane acme of queue celery set: nothing"}
    # A tenant that is a number is one, as in a message.
    assert control("lane_set", queue="celery", tenant=7, weight=2)["ok"].startswith("lane 7 ")
    assert control.lanes.lane("celery", "7").weight == 2


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("lane_set", {"queue": "celery", "tenant": "a", "weight": -1}, "weight"),
    ("lane_set", {"queue": "celery", "tenant": "a", "wieght": 1}, "wieght"),
    ("lane_set", {"queue": "celery", "tenant": "a"}, "weight=3"),
    ("lane_set", {"queue": "celery", "tenant": "a", "settings": ["weight"]}, "name=value"),
    ("lane_set", {"queue": "celery", "tenant": "a", "settings": ["paused=perhaps"]}, "paused"),
    ("lane_unset", {"queue": "celery", "tenant": "a", "names": ["speed"]}, "speed"),
    ("lane_pause", {"queue": "celery"}, "tenant"),
    ("lane_pause", {"queue": "celery", "tenant": None}, "tenant"),
    ("lane_pause", {"queue": "celery", "tenant": ""}, "empty"),
    ("lane_pause", {"queue": "absent", "tenant": "a"}, "absent"),
    ("queue_pause", {"queue": "absent"}, "absent"),
    ("queue_pause", {"queue": "celery", "tenant": "a"}, "tenant"),
    ("lanes", {"queue": "celery", "top": "many"}, "top"),
]


def test_what_is_wrong_is_an_error_and_changes_nothing(control: Control) -> None:
    for command, arguments, error in WRONG:
        answer = control(command, **arguments)
        assert list(answer) == ["error"], (command, arguments)
        assert error in answer["error"], (command, arguments)
    stats = control.lanes.snapshot("celery")
    assert (stats.paused, stats.lanes_configured) == (False, 0)


def test_lanes_are_shown(control: Control, sender: Sender) -> None:
    control("queue_pause", queue="celery")
    for tenant, n in {"acme": 3, "other": 1}.items():
        for i in range(n):
            sender.send("mark", tenant, i, tenant=tenant)
    seen = control("lanes")["ok"]["celery"]
    assert (seen["ready"], seen["paused"]) == (4, True)
    assert [(lane["lane"], lane["ready"], lane["share"]) for lane in seen["lanes"]] == [
        ("acme", 3, 0.5),
        ("other", 1, 0.5),
    ]
    assert [lane["lane"] for lane in control("lanes", queue="celery", top=1)["ok"]["celery"]["lanes"]] == ["acme"]


def test_the_command_line(control: Control) -> None:
    ran = control.shell("control", "lane_set", "celery", "acme", "weight=3", "limit=none", "paused=true")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "lane acme of queue celery set: weight=3" in ran.stdout
    own = control.lanes.lane("celery", "acme").own
    assert (own.weight, own.limit, own.paused) == (3, 0, True)
    ran = control.shell("inspect", "--json", "lanes", "celery")
    (answer,) = json.loads(ran.stdout).values()
    assert answer["ok"]["celery"]["ready"] == 0
    assert "lane_pause <queue> <tenant>" in control.shell("control", "--list").stdout


def test_one_worker_as_destination_acts_for_all(
    control: Control, sender: Sender, worker: Callable[..., Worker]
) -> None:
    worker("-n", "second@%h", pool="solo", concurrency=1)
    names = wait_for(lambda: len(found := control.app.control.ping(timeout=1)) == 2 and found, 20, "two workers")
    (name,) = names[0]
    replies = control.app.control.broadcast(
        "queue_pause", arguments={"queue": "celery"}, destination=[name], reply=True, timeout=10, limit=1
    )
    assert replies == [{name: {"ok": "queue celery paused"}}]
    sender.send("mark", "a", 1, tenant="a")
    assert control.lanes.snapshot("celery").ready == 1

"""The documented access rights: each role does its work with them, and nothing else."""

from __future__ import annotations

import re
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery
from kombu import Connection, Exchange, Queue
from kombu.exceptions import OperationalError
from redis.exceptions import NoPermissionError

from fairlanes_transport import scripts
from fairlanes_transport.connections import Address, Link
from fairlanes_transport.errors import FairlanesError, connection_errors
from fairlanes_transport.guard import GuardedProcess
from fairlanes_transport.lanes.api import Lanes
from fairlanes_transport.lanes.doctor import Doctor
from fairlanes_transport.lanes.watch import Watch
from fairlanes_transport.store import Store
from tests.harness import ROOT, Server, wait_for
from tests.unit.test_docs import environment, marked

pytestmark = pytest.mark.acceptance

PREFIX = "app:"
OPTIONS = {"global_keyprefix": PREFIX}
REFUSED = (*connection_errors, FairlanesError, OperationalError)
#: The scripts that a producer's calls run.
OF_PRODUCERS = ("declare", "enqueue", "size")
#: Those that change nothing.
READING = tuple(name for name in scripts.names() if "begin_writes()" not in scripts.load(name).source)
CODE = """
from celery import Celery
app = Celery("rights", broker={url!r})
app.conf.broker_transport_options = {options!r}
app.conf.task_ignore_result = True
@app.task(name="rights.work", bind=True, max_retries=1)
def work(self, again):
    if again and not self.request.retries:
        raise self.retry(countdown=0.2)
"""


def rights(role: str) -> list[str]:
    """The words of a role's block on the page."""
    (text,) = marked("docs/how-to/run-in-production.md", f"acl {role}")
    return text.split()


def commands(role: str) -> set[str]:
    """The commands that a role may use."""
    return {word[1:].upper() for word in rights(role) if word.startswith("+")}


def called(names: tuple[str, ...]) -> set[str]:
    """The commands in the code of scripts, with what they include."""
    source = "".join(scripts.load(name).source for name in names)
    return set(re.findall(r"(?:redis\.call\(|\{ )'([A-Z]+)'", source))


class Site:
    """A server with the three users of the page."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.admin: redis.Redis = server.client()
        for role in ("producer", "worker", "monitor"):
            self.admin.execute_command(*rights(role))
        self.link = Link(Address.from_url(server.url("fairlanes")))
        self.lanes = Lanes(self.link, **OPTIONS)

    def url(self, role: str) -> str:
        """The broker's URL for a role."""
        return self.server.url("fairlanes").replace("://", f"://{role}:secret@")

    def app(self, role: str) -> Celery:
        """A Celery app that connects in a role."""
        app = Celery("rights", broker=self.url(role), set_as_current=False)
        app.conf.update(broker_transport_options=OPTIONS, task_ignore_result=True)
        return app

    def users(self, *commands: str) -> set[str]:
        """Whose connections had one of these commands last."""
        return {client["user"] for client in self.admin.client_list() if client["cmd"] in commands}

    def denied(self) -> set[tuple[Any, Any]]:
        """What was denied since the last call: (reason, command, key or channel)."""
        entries = {(entry["reason"], entry["object"]) for entry in self.admin.acl_log()}
        self.admin.acl_log_reset()
        return entries

    def may_not(self, act: Callable[[], object]) -> None:
        """Something that a role cannot do: it is refused, and the server has said why."""
        with pytest.raises(REFUSED):
            act()
        assert self.denied()


@pytest.fixture
def site(fresh_server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """A server with the three users of the page."""
    monkeypatch.delenv("CELERY_BROKER_URL", raising=False)  # Celery would prefer it
    made = Site(fresh_server())
    yield made
    made.link.close()


# the lists


def test_the_lists_cover_the_scripts_of_each_role() -> None:
    writers = tuple(name for name in scripts.names() if name not in READING)
    assert called(OF_PRODUCERS) <= commands("producer")
    assert called(writers) <= commands("worker") | commands("monitor")
    assert commands("producer") < commands("worker")


def test_no_command_of_the_monitor_writes(site: Site) -> None:
    writing = {name.decode().upper() for name in site.admin.execute_command("ACL", "CAT", "write")}
    assert not commands("monitor") & writing


def test_the_producer_lacks_what_others_do_with_messages() -> None:
    assert not commands("producer") & {"BLPOP", "ZPOPMIN", "DEL", "UNLINK", "PUBLISH", "PSUBSCRIBE", "HGETALL", "SCAN"}
    assert not [word for word in rights("producer") if word.startswith("&")]


# a producer


def test_a_producer_sends(site: Site) -> None:
    app = site.app("producer")
    app.conf.task_queues = [Queue("celery"), Queue("by-name", Exchange("jobs"), routing_key="jobs")]
    for options in (
        {}, {"headers": {"tenant": "acme"}}, {"countdown": 60}, {"priority": 3}, {"queue": "by-name"}, {"queue": "new"},
    ):  # fmt: skip
        app.send_task("rights.work", (False,), **options)
    with app.connection_for_write() as connection:
        assert connection.default_channel.queue_declare("celery", passive=True).message_count == 3
    app.close()
    found = {name: site.lanes.snapshot(name) for name in site.lanes.queues()}
    assert {name: (queue.ready, queue.delayed) for name, queue in found.items()} == {
        "celery": (3, 1), "by-name": (1, 0), "new": (1, 0),
    }  # fmt: skip
    assert site.denied() == set()


def test_a_producer_does_nothing_else(site: Site) -> None:
    app = site.app("producer")
    app.send_task("rights.work", (False,), headers={"tenant": "acme"})
    assert site.denied() == set()
    store = Store(Link(Address.from_url(site.url("producer"))), PREFIX)
    site.may_not(lambda: store.claim("celery", 1, 60_000))
    site.may_not(lambda: store.purge("celery"))
    site.may_not(lambda: store.delete("celery"))
    site.may_not(lambda: store.caller.call("DEL", f"{PREFIX}fairlanes:2:{{celery}}:message"))
    site.may_not(lambda: store.caller.call("FLUSHALL"))
    site.may_not(lambda: store.caller.call("SHUTDOWN", "NOSAVE"))
    site.may_not(lambda: store.caller.call("GET", "of-somebody-else"))
    for command in ("shutdown", "ping"):
        site.may_not(lambda command=command: app.control.broadcast(command))
    with app.connection_for_write() as connection:
        site.may_not(lambda: connection.default_channel.basic_get("celery"))
    app.close()
    # It is refused before anything is in force.
    lanes = Lanes(site.url("producer"), **OPTIONS)
    site.may_not(lambda: lanes.set("celery", "acme", weight=5))
    assert site.lanes.lane("celery", "acme").own.weight is None
    assert site.lanes.snapshot("celery").ready == 1
    assert Doctor(site.lanes).check("celery").sound


# a worker


def test_a_worker_works(site: Site, tmp_path: Path) -> None:
    code = CODE.format(url=site.url("worker"), options=OPTIONS)
    (tmp_path / "rights.py").write_text(code, "utf-8")
    command = [sys.executable, "-m", "celery", "-A", "rights", "worker", "-c", "1", "-E", "-P", "threads"]
    producer, worker = site.app("producer"), site.app("worker")
    env = {**environment(site.server), "CELERY_BROKER_URL": site.url("worker")}
    with (
        (tmp_path / "log").open("wb") as log,
        GuardedProcess(command, env=env, cwd=str(tmp_path), stdout=log) as process,
    ):
        wait_for(lambda: worker.control.ping(timeout=0.5), 30, "a worker that answers")
        assert site.users("blpop", "psubscribe") == {"worker"}
        for again in (False, True):
            producer.send_task("rights.work", (again,), headers={"tenant": "acme"})
        wait_for(lambda: site.lanes.snapshot("celery").totals.get("acked") == 3, 20, "three acks")
        worker.control.shutdown()
        assert process.wait(20) == 0
    with Connection(site.url("worker"), transport_options=OPTIONS) as connection:
        queue = connection.SimpleQueue("plain")
        queue.put("x", headers={"tenant": "acme"})
        queue.get(timeout=5).reject()
        queue.close()
        ending = Queue("ending", Exchange("jobs"), routing_key="ending", expires=60)
        ending(connection.default_channel).declare()
        ending(connection.default_channel).delete()
        connection.default_channel.queue_purge("plain")
    for app in (producer, worker):
        app.close()
    assert site.denied() == set()


def test_set_with_the_rights_of_a_worker_is_refused_before_it_is_in_force(site: Site) -> None:
    site.lanes.declare("celery")
    done = fairlanes(site, "worker", "set", "celery", "acme", "--weight", "5")
    assert done.returncode != 0
    assert site.denied() == {("command", "hgetall")}
    assert site.lanes.lane("celery", "acme").own.weight is None


# a monitor


def fairlanes(site: Site, role: str, *args: str) -> subprocess.CompletedProcess[str]:
    """The command line in a role."""
    command = [
        sys.executable,
        "-m",
        "fairlanes_transport.cli",
        "-b",
        site.url(role),
        "-o",
        f"global_keyprefix={PREFIX}",
    ]
    return subprocess.run([*command, *args], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


def test_a_monitor_reads(site: Site) -> None:
    fill(site)
    for args in (
        ("lanes",), ("lanes", "celery"), ("lanes", "celery", "--top", "3"), ("lanes", "celery", "acme"),
        ("peek", "celery", "acme", "--body"), ("leases", "celery"), ("delayed", "celery"), ("dead", "celery"),
    ):  # fmt: skip
        done = fairlanes(site, "monitor", *args)
        assert (done.returncode, done.stderr) == (0, ""), args
    top = Watch(Lanes(site.url("monitor"), **OPTIONS), "celery")
    assert [len(top.look().rows), len(top.look().rows)] == [1, 1]
    assert site.denied() == set()
    assert "sound" in fairlanes(site, "monitor", "doctor").stdout
    assert site.denied() <= {("command", "scan")}
    site.admin.execute_command("ACL", "SETUSER", "monitor", "+scan")
    assert "sound" in fairlanes(site, "monitor", "doctor").stdout
    assert site.denied() == set()


def test_a_monitor_exports(site: Site) -> None:
    fill(site)
    command = [
        sys.executable,
        "-m",
        "fairlanes_transport.cli",
        "-b",
        site.url("monitor"),
        "-o",
        f"global_keyprefix={PREFIX}",
    ]
    with GuardedProcess([*command, "exporter", "--port", "0"], cwd=str(ROOT), stdout=subprocess.PIPE) as process:
        assert process.output is not None
        address = re.search(rb"http://\S+", process.output.readline())
        assert address is not None
        with urllib.request.urlopen(address[0].decode(), timeout=20) as answer:
            text = answer.read().decode()
    assert "fairlanes_up 1.0" in text
    assert 'fairlanes_lane_ready{lane="acme",queue="celery"} 1.0' in text
    assert site.denied() == set()


def test_a_monitor_changes_nothing(site: Site) -> None:
    fill(site)
    before = site.lanes.snapshot("celery")
    lanes = Lanes(site.url("monitor"), **OPTIONS)
    for act in (
        lambda: lanes.pause("celery"), lambda: lanes.set("celery", "acme", weight=2), lambda: lanes.purge("celery"),
        lambda: lanes.redrive("celery"), lambda: lanes.drop("celery"), lambda: lanes.throttle("celery", "acme", 1),
        lambda: lanes.declare("other"), lambda: lanes.store.claim("celery", 1, 60_000),
        lambda: lanes.store.delete("celery"), lambda: lanes.store.caller.call("PUBLISH", "app:/0.celery.pidbox", "x"),
    ):  # fmt: skip
        site.may_not(act)
    assert site.lanes.snapshot("celery") == before
    assert site.lanes.queues() == ["celery"]


def fill(site: Site) -> None:
    """A queue with a message in each state."""
    lanes, store = site.lanes, site.lanes.store
    lanes.declare("celery")
    lanes.set("celery", "acme", weight=2, rate="100/m")
    for tag in ("dead", "leased", "ready"):
        store.enqueue("celery", tag, "acme", b"{}", b"[]")
    store.enqueue("celery", "later", "acme", b"{}", b"[]", due_ms=int(store.pulse("celery")[0]) + 60_000)
    (claimed,) = store.claim("celery", 1, 60_000).claimed
    store.reject("celery", claimed.fence, requeue=False, reason="x")
    lanes.unset("celery", "acme", "rate")
    assert store.claim("celery", 1, 60_000).claimed


# an operator


def test_an_operator_has_the_rights_of_worker_and_monitor(site: Site) -> None:
    fill(site)
    of_monitor = [word for word in rights("monitor") if word.startswith("+")]
    site.admin.execute_command("ACL", "SETUSER", "worker", *of_monitor)
    lanes = Lanes(site.url("worker"), **OPTIONS)
    lanes.declare("other")
    lanes.set("celery", "acme", weight=2, rate="100/m")
    for queue in lanes.queues():
        lanes.pause(queue)
        lanes.resume(queue)
        lanes.top(queue, 3)
        lanes.leases(queue)
        lanes.delayed(queue)
        lanes.dead(queue)
        lanes.cancel(queue, "nobody")
        Doctor(lanes).check(queue, repair=True)
    assert lanes.redrive("celery") == 1
    lanes.peek("celery", "acme")
    lanes.move("celery", "acme", "other")
    lanes.throttle("celery", "acme", 1)
    lanes.unset("celery", "acme")
    lanes.purge("other")
    lanes.drop("other")
    assert site.denied() <= {("command", "scan")}


def test_another_kind_of_error_is_no_missing_right(site: Site) -> None:
    """What the tests above rely on: the log of the server, which no other error fills."""
    with pytest.raises(redis.ResponseError) as caught:
        site.admin.execute_command("HGET", "x")
    assert not isinstance(caught.value, NoPermissionError)
    assert site.denied() == set()

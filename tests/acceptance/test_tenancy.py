"""Every form of canvas x pool x way of tagging: all that follows from a tagged task stays in its lane.

Each case has a tenant of its own. What is asserted, for each task that the case led to: the lane that its
message was claimed from, the header that it saw, and what `current_tenant` said in it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from celery import Celery, chord, signature
from celery.canvas import Signature
from kombu.utils.uuid import uuid

from fairlanes_transport import TenantError, scripts, tenant
from tests.apps import canvas
from tests.apps.settings import RECORD_DB, environment
from tests.harness import ROOT, SCHEME, Sender, Server, Worker, wait_for

pytestmark = [
    pytest.mark.acceptance,
    pytest.mark.skipif(SCHEME == "redis", reason="kombu's transport has no lanes"),
]

POOLS = ("prefork", "threads", "solo", "gevent", "eventlet")


def customer_of(headers: dict[str, Any], properties: dict[str, Any]) -> str | None:
    """Derive the tenant from a header of the user's own; the sender's option ``tenant_of``."""
    return headers.get("customer")


class Stage(NamedTuple):
    """A server, a worker on it, and an app that sends to it."""

    server: Server
    worker: Worker
    app: Celery

    def current(self) -> Stage:
        """Make the app the one that signatures are of."""
        self.app.set_current()
        return self

    def notes(self, label: str) -> list[dict[str, Any]]:
        """Return what the tasks with a label have noted."""
        noted = map(json.loads, self.server.client(RECORD_DB).lrange("done", 0, -1))
        return [note for note in noted if note["label"] == label]

    def expect(self, label: str, tenant: Any, notes: int, timeout: float = 20, exact: bool = True) -> None:
        """Wait for the notes of a label and assert whose they are; None: in the default lane by intent."""
        noted = wait_for(
            lambda: found if len(found := self.notes(label)) >= notes else None,
            timeout, f"{notes} notes of {label!r}",
        )  # fmt: skip
        header = "absent" if tenant == "absent" else tenant
        name = None if tenant == "absent" else tenant
        wanted = {"header": header, "lane": name or "default", "current": name}
        strays = [note for note in noted if {key: note[key] for key in wanted} != wanted]
        assert not strays, f"not in lane {wanted}"
        assert not exact or len(noted) == notes, [note["task"] for note in noted]


@contextlib.contextmanager
def on_stage(pool: str, *flags: str, **options: Any) -> Iterator[Stage]:
    """A server with a worker on it."""
    conf = {"results": True, "result_expires": 60, **options.pop("conf", {})}
    with Server("redis") as server:
        worker = Worker(server, "-Ofair", *flags, app="tests.apps.canvas", pool=pool, conf=conf, **options)
        transport_options = {"tenant_of": f"{__name__}:customer_of"}
        sender = Sender(server, broker_transport_options=transport_options, **conf)
        with worker, sender:
            canvas.tasks(sender.app)
            # Nobody waits for results. When they are collected, the server they would unsubscribe from is gone.
            sender.app.backend.remove_pending_result = lambda result: result
            yield Stage(server, worker, sender.app)


@pytest.fixture(scope="module", params=POOLS)
def _stage(request: pytest.FixtureRequest) -> Iterator[Stage]:
    with on_stage(request.param, concurrency=1 if request.param == "solo" else 4) as made:
        yield made


@pytest.fixture
def stage(_stage: Stage) -> Stage:
    """A worker of each pool, for all cases: they do not meet, each has a tenant of its own."""
    return _stage.current()


# -------------------------------------------------------------------------------- the ways of tagging


def by_header(form: str, label: str) -> None:
    canvas.FORMS[form].build(label).apply_async(headers={"tenant": label})


def by_block(form: str, label: str) -> None:
    with tenant(label):
        canvas.FORMS[form].build(label).apply_async()


def by_stamp(form: str, label: str) -> None:
    made = canvas.FORMS[form].build(label)
    made.stamp(tenant=label)
    made.apply_async()


def by_inheritance(form: str, label: str) -> None:
    signature("canvas.root", (form, label)).apply_async(headers={"tenant": label})


def by_default(form: str, label: str) -> None:
    signature("canvas.owned_root", (form, label)).apply_async()


def by_option(form: str, label: str) -> None:
    canvas.FORMS[form].build(label).apply_async(headers={"customer": label})


WAYS: dict[str, Callable[[str, str], None]] = {
    "header": by_header,
    "block": by_block,
    "stamp": by_stamp,
    "running task": by_inheritance,
    "default of a task": by_default,
    "tenant_of": by_option,
}

_numbers = itertools.count()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("form", canvas.FORMS)
def test_everything_stays_in_the_lane(stage: Stage, form: str, way: str) -> None:
    if way == "stamp" and not canvas.FORMS[form].stamps:
        pytest.skip("Celery does not carry stamps through it")
    label = f"{form}, by {way} {next(_numbers)}"
    WAYS[way](form, label)
    stage.expect(label, "owner" if way == "default of a task" else label, canvas.FORMS[form].notes)


# ---------------------------------------------------------------------------------- without a running task


def _of_a_chord(*header: Signature[Any], label: str) -> Signature[Any]:
    """A chord that will fail, and sends a task then."""
    body = signature("canvas.mark", (label,), immutable=True)
    body.link_error(signature("canvas.mark", (label,), immutable=True))
    return chord(header, body)


def _failing(name: str, label: str) -> Signature[Any]:
    made = signature(name, (label,), immutable=True)
    made.link_error(signature("canvas.mark", (label,), immutable=True))
    return made


def _revoked(app: Celery) -> str:
    """The id of a task that is revoked before it is sent."""
    task_id = uuid()
    replies = app.control.revoke(task_id, reply=True, timeout=5)
    assert replies
    return task_id


class Speaking(NamedTuple):
    """A case in which the worker's main process sends for a task.

    Attributes:
        build: makes the signature from the app and a label.
        notes: how many notes with this label it leaves.
    """

    build: Callable[[Celery, str], Signature[Any]]
    notes: int


SPEAKING = {
    # the task itself, its errback, and what its on_failure sends
    "hard time limit": Speaking(lambda app, label: _failing("canvas.overdue", label), 3),
    "dead child": Speaking(lambda app, label: _failing("canvas.dying", label), 2),
    "chord with a dead part": Speaking(
        lambda app, label: _of_a_chord(signature("canvas.dying", (label,)), label=label), 2
    ),
    "chord with a late part": Speaking(
        lambda app, label: _of_a_chord(signature("canvas.overdue", (label,)), label=label), 3
    ),
    "chord with a revoked part": Speaking(
        lambda app, label: _of_a_chord(signature("canvas.mark", (label,), task_id=_revoked(app)), label=label),
        1,
    ),
    "chord with an expired part": Speaking(
        lambda app, label: _of_a_chord(signature("canvas.mark", (label,), expires=1e-6), label=label), 1
    ),
}


@pytest.fixture(scope="module")
def _prefork() -> Iterator[Stage]:
    with on_stage("prefork", "-E") as made:
        yield made


@pytest.fixture
def prefork(_prefork: Stage) -> Stage:
    """A prefork worker for what does not concern the other pools."""
    return _prefork.current()


@pytest.mark.parametrize("case", SPEAKING)
def test_what_the_main_process_sends_stays_in_the_lane(prefork: Stage, case: str) -> None:
    label = f"{case} {next(_numbers)}"
    SPEAKING[case].build(prefork.app, label).apply_async(headers={"tenant": label})
    # On a busy machine Celery may report a time limit and the death of the child that it killed for it.
    prefork.expect(label, label, SPEAKING[case].notes, exact=False)


@pytest.mark.parametrize("form", ["chord", "chord of a group", "chord in a chain", "nested"])
@pytest.mark.parametrize("way", ["header", "block", "running task"])
def test_a_chord_that_is_unlocked_by_a_task(unlocking: Stage, form: str, way: str) -> None:
    label = f"{form}, by {way}, unlocked {next(_numbers)}"
    WAYS[way](form, label)
    unlocking.expect(label, label, canvas.FORMS[form].notes)


@pytest.fixture(scope="module")
def _unlocking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    results = tmp_path_factory.mktemp("results")
    conf = {"result_backend": f"file://{results}", "result_chord_retry_interval": 0.1}
    with on_stage("prefork", conf=conf) as made:
        yield made


@pytest.fixture
def unlocking(_unlocking: Stage) -> Stage:
    """A worker whose result backend cannot count: ``celery.chord_unlock`` polls, and sends the body."""
    return _unlocking.current()


# ---------------------------------------------------------------------------------------- leaving the lane


@pytest.mark.parametrize("form", ["task", "spawning", "retry", "chain", "chord"])
def test_who_leaves_the_lane_stays_out(prefork: Stage, form: str) -> None:
    label = f"{form}, left {next(_numbers)}"
    with tenant("acme"):
        canvas.FORMS[form].build(label).apply_async(headers={"tenant": None})
    prefork.expect(label, None, canvas.FORMS[form].notes)
    label = f"{form}, left by a block {next(_numbers)}"
    with tenant(None):
        canvas.FORMS[form].build(label).apply_async()
    prefork.expect(label, None, canvas.FORMS[form].notes)


@pytest.mark.parametrize("form", ["task", "spawning", "retry", "chain", "chord"])
def test_what_is_untagged_stays_so(prefork: Stage, form: str) -> None:
    label = f"{form}, untagged {next(_numbers)}"
    canvas.FORMS[form].build(label).apply_async()
    prefork.expect(label, "absent", canvas.FORMS[form].notes)


def test_a_bad_tenant_stores_nothing(prefork: Stage) -> None:
    label = f"bad {next(_numbers)}"
    with pytest.raises(TenantError):
        signature("canvas.mark", (label,)).apply_async(headers={"tenant": ""})
    signature("canvas.mark", (label,)).apply_async(headers={"tenant": label})
    prefork.expect(label, label, 1)


# ------------------------------------------------------------------------------------------ other producers


def test_protocol_1(prefork: Stage) -> None:
    with Sender(prefork.server, task_protocol=1, task_ignore_result=True) as sender:
        for way in ("header", "block"):
            label = f"protocol 1, by {way} {next(_numbers)}"
            options = {"headers": {"tenant": label}} if way == "header" else {}
            with tenant(label) if way == "block" else contextlib.nullcontext():
                sender.app.send_task("canvas.spawn", (label,), **options)
            prefork.expect(label, label, canvas.FORMS["spawning"].notes)


def test_a_producer_that_is_not_python(prefork: Stage) -> None:
    """As docs/reference/messages.md says: a plain header in the envelope, and the lane as an argument."""
    label, task_id = f"plain {next(_numbers)}", uuid()
    envelope = {
        "content-type": "application/json",
        "content-encoding": "utf-8",
        "headers": {"lang": "go", "task": "canvas.spawn", "id": task_id, "tenant": label},
        "properties": {"correlation_id": task_id, "delivery_tag": task_id, "delivery_info": {}},
    }
    body = [[label], {}, {"callbacks": None, "errbacks": None, "chain": None, "chord": None}]
    client = prefork.server.client()
    digest = client.script_load(scripts.load("enqueue").source)
    arguments = ["", task_id, label, 0, 0, 1, 0, 0, json.dumps(envelope), json.dumps(body)]
    assert client.evalsha(digest, 1, "fairlanes:2:{celery}:", *arguments) == 1
    prefork.expect(label, label, canvas.FORMS["spawning"].notes)


def test_celery_call_has_no_tenant(prefork: Stage) -> None:
    """It has no option for headers, and has not made the app's tasks, whose defaults it would find."""

    def call(task: str, *args: str) -> None:
        program = [sys.executable, "-m", "celery", "-A", "tests.apps.canvas"]
        command = [*program, "call", task, "-a", json.dumps(args)]
        url = prefork.server.url("fairlanes")
        env = {**environment(url, prefork.server.port, {}), "PYTHONPATH": str(ROOT)}
        subprocess.run(command, env=env, cwd=ROOT, check=True, timeout=60, stdout=subprocess.DEVNULL)

    label = f"celery call {next(_numbers)}"
    call("canvas.owned_root", "task", label)
    prefork.expect(label, "absent", 1)
    label = f"celery call {next(_numbers)}"
    call("canvas.mark", label)
    prefork.expect(label, "absent", 1)


def test_beat(tmp_path: Path) -> None:
    mark = {"task": "canvas.mark", "schedule": 0.5}
    entries = {
        "tagged": {**mark, "args": ["b"], "options": {"headers": {"tenant": "b"}}},
        "untagged": {**mark, "args": ["u"]},
    }
    flags = ("-B", "-s", str(tmp_path / "schedule"))
    with on_stage("prefork", *flags, conf={"beat_schedule": entries}) as stage:
        for label, wanted in (("b", ("b", "b")), ("u", ("absent", "default"))):
            notes = wait_for(lambda label=label: stage.notes(label), 20, label)  # type: ignore[misc]
            assert {(note["header"], note["lane"]) for note in notes} == {wanted}


def test_results_over_the_same_broker_come_back() -> None:
    conf = {"results": True, "result_backend": "rpc://"}
    with (
        Server("redis") as server,
        Worker(server, app="tests.apps.canvas", conf=conf),
        Sender(server, **conf) as sender,
        tenant("acme"),
    ):
        sent = [sender.app.send_task("canvas.echo", (i,)) for i in range(5)]
        assert [result.get(timeout=20) for result in sent] == list(range(5))


def test_another_broker_is_left_alone(prefork: Stage) -> None:
    queue = f"q{next(_numbers)}"
    with Sender(prefork.server, "redis", task_ignore_result=True) as sender, tenant("acme"):
        sender.app.send_task("canvas.mark", ("x",), queue=queue)
    (message,) = prefork.server.client().lrange(queue, 0, -1)
    assert "tenant" not in json.loads(message)["headers"]


def test_the_callers_headers_are_not_written_into(prefork: Stage) -> None:
    headers = {"mine": 1}
    with prefork.app.connection_for_write() as connection, tenant("acme"):
        producer = connection.Producer()
        producer.publish({}, routing_key="nobody-reads-this", headers=headers)
        message = connection.default_channel.basic_get("nobody-reads-this")
        message.ack()
    assert headers == {"mine": 1}
    assert message.headers == {"mine": 1, "tenant": "acme"}


# ------------------------------------------------------------------------------------------ events and logs


def test_events_name_the_tenant(prefork: Stage) -> None:
    seen: list[dict[str, Any]] = []
    label, untagged = f"events {next(_numbers)}", f"events {next(_numbers)}"

    def listen() -> None:
        with prefork.app.connection_for_read() as connection:
            receiver = prefork.app.events.Receiver(connection, handlers={"*": seen.append})
            for _ in receiver.itercapture(limit=None, timeout=None, wakeup=True):
                if stop.is_set():
                    return

    stop = threading.Event()
    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    wait_for(lambda: seen, 20, "a heartbeat")  # the receiver listens
    tagged_id = signature("canvas.mark", (label,)).apply_async(headers={"tenant": label}).id
    plain_id = signature("canvas.mark", (untagged,)).apply_async().id

    def of(task_id: str) -> dict[str, Any]:
        return {event["type"]: event.get("tenant") for event in seen if event.get("uuid") == task_id}

    wait_for(lambda: "task-succeeded" in of(tagged_id) and "task-succeeded" in of(plain_id), 20, "the events")
    stop.set()
    names = ("task-received", "task-started", "task-succeeded")
    assert of(tagged_id) == dict.fromkeys(names, label)
    assert of(plain_id) == dict.fromkeys(names)
    listener.join(20)


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_log_lines_name_the_tenant(pool: str) -> None:
    conf = {
        "worker_log_format": "[%(tenant)s] %(message)s",
        "worker_task_log_format": "[%(tenant)s] %(task_name)s: %(message)s",
    }
    with on_stage(pool, conf=conf) as made:
        stage = made.current()
        signature("canvas.log", ("acme's",)).apply_async(headers={"tenant": "acme"})
        signature("canvas.log", ("nobody's",)).apply_async()
        stage.expect("acme's", "acme", 1)
        stage.expect("nobody's", "absent", 1)
        stage.worker.wait_for_log("[acme] canvas.log: acme's")
        stage.worker.wait_for_log("[-] canvas.log: nobody's")
        stage.worker.wait_for_log("[acme] Task canvas.log[")
        assert "Logging error" not in stage.worker.text()

"""The tenant of a message, of a task, and of a block of code; no broker but kombu's memory."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import celery
import pytest
from celery import Celery, chain, chord, group
from celery.app.task import Context
from celery.app.trace import build_tracer
from celery.canvas import Signature
from kombu.transport import TRANSPORT_ALIASES, memory

import fairlanes_transport
from fairlanes_transport import (
    TenantError,
    TenantFilter,
    current_tenant,
    reset_tenant,
    set_tenant,
    tenancy,
    tenancy_worker,
    tenant,
)
from fairlanes_transport.options import Options

OPTIONS = Options()
TASK = {"task": "plain", "id": "1"}


class TaggingChannel(memory.Channel):
    """kombu's memory channel, asking for the tenant where ours does."""

    options = OPTIONS

    def prepare_message(self, body: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        message: dict[str, Any] = super().prepare_message(body, *args, **kwargs)
        message["headers"] = dict(message["headers"])
        tenancy.resolve(message["headers"], message["properties"], self.options)
        return message


class TaggingTransport(memory.Transport):
    Channel = TaggingChannel


def nothing(*args: Any) -> None:
    """Be a task."""


def call(self: Any, function: Callable[[Any], Any]) -> Any:
    """Be a task that does what the test wants."""
    return function(self)


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> Iterator[Celery]:
    """An app with the tasks ``plain``, ``owned`` (by the tenant ``owner``), ``call`` (calls its argument)."""
    monkeypatch.setitem(TRANSPORT_ALIASES, "tagging", f"{__name__}:TaggingTransport")
    made = Celery(f"tenancy-{uuid.uuid4()}", broker="tagging://", set_as_current=False)
    made.conf.task_default_queue = f"q-{uuid.uuid4()}"
    made.task(name="plain", shared=False)(nothing)
    made.task(name="owned", tenant="owner", shared=False)(nothing)
    made.task(name="call", bind=True, shared=False)(call)
    made.finalize()
    # The apps of other tests may live on, and have the same tasks.
    monkeypatch.setattr(celery._state, "default_app", made)
    monkeypatch.setattr(celery._state._tls, "current_app", None)
    yield made
    made.close()


def sent(app: Celery) -> list[dict[str, Any]]:
    """Take the messages that were published, and return their headers."""
    found = []
    with (
        app.connection_for_read() as connection,
        connection.SimpleQueue(app.conf.task_default_queue) as queue,
    ):
        while queue.qsize():
            message = queue.get_nowait()
            message.ack()
            found.append(message.headers)
    return found


def tenants_sent(app: Celery) -> list[Any]:
    """Take the messages that were published, and return their tenants; "absent" without the header."""
    return [headers.get("tenant", "absent") for headers in sent(app)]


def run_task(app: Celery, function: Callable[[Any], Any], name: str = "call", **request: Any) -> Any:
    """Run ``function(task)`` in a task as a worker's pool does, with the headers of a received message."""
    task = app.tasks[name]
    facts = {"id": str(uuid.uuid4()), "delivery_info": {}, "is_eager": False, **request}
    result = build_tracer(name, task, app=app)(facts["id"], (function,), {}, facts)
    assert result.info is None, result.info.retval
    return result.retval


def resolved(headers: dict[str, Any], properties: dict[str, Any] | None = None, **options: Any) -> Any:
    """Resolve and return what the header says then, "absent" if there is none."""
    name = tenancy.resolve(headers, properties or {}, Options(**options))
    header = options.get("tenant_header", "tenant")
    assert headers.get(header) == name
    return headers.get(header, "absent")


# --------------------------------------------------------------------------------------------- what decides


def test_nothing_decided_leaves_the_message_without_a_header() -> None:
    headers = dict(TASK)
    assert tenancy.resolve(headers, {}, OPTIONS) is None
    assert headers == TASK


WAYS = ["explicit", "block", "stamp", "default", "running", "tenant_of"]


@pytest.mark.parametrize("highest", range(len(WAYS)), ids=WAYS)
def test_the_order_of_the_ways(app: Celery, highest: int) -> None:
    """With a way and all those below it in use, that way decides."""
    used = set(WAYS[highest:])
    options = Options(tenant_of=lambda headers, properties: "tenant_of" if "tenant_of" in used else None)

    def send(task: Any) -> Any:
        headers: dict[str, Any] = {"task": "owned" if "default" in used else "plain", "id": "1"}
        if "explicit" in used:
            headers["tenant"] = "explicit"
        if "stamp" in used:
            headers["stamps"] = {"tenant": ["stamp"]}
        with tenant("block") if "block" in used else contextlib.nullcontext():
            return tenancy.resolve(headers, {}, options)

    app.tasks["owned"].__class__.tenant = "default"
    name = run_task(app, send, **({"tenant": "running"} if "running" in used else {}))
    assert name == WAYS[highest]


def test_a_tenant_is_written_as_text() -> None:
    number = uuid.UUID(int=7)
    assert resolved({"tenant": 42}) == "42"
    assert resolved({"tenant": number}) == str(number)
    with tenant(42):
        assert resolved({}) == "42"
    assert resolved({}, tenant_of=lambda headers, properties: 42) == "42"


@pytest.mark.parametrize("bad", ["", "x" * 257, 1.5, True, b"acme", ["acme"], "\ud800"])
def test_a_bad_tenant_is_refused_at_publish(app: Celery, bad: Any) -> None:
    with pytest.raises(TenantError):
        app.tasks["plain"].apply_async(headers={"tenant": bad})
    assert sent(app) == []
    with pytest.raises(TenantError), tenant(bad):
        pytest.fail("entered")
    with pytest.raises(TenantError):
        set_tenant(bad)
    assert current_tenant() is None


def test_another_header() -> None:
    assert resolved({"tenant": "no", "org": "yes"}, tenant_header="org") == "yes"
    assert resolved({"stamps": {"org": "yes"}}, tenant_header="org") == "yes"
    with tenant("acme"):
        assert resolved({}, tenant_header="org") == "acme"


def test_the_header_of_the_app_names_the_tenant_of_a_running_task(app: Celery) -> None:
    app.conf.broker_transport_options = {"tenant_header": "org"}
    assert run_task(app, lambda task: current_tenant(), org="acme", tenant="no") == "acme"


@pytest.mark.parametrize(
    ("stamps", "name"),
    [
        ({"tenant": "acme"}, "acme"),
        ({"tenant": ["acme", "acme"]}, "acme"),
        ({"tenant": []}, "absent"),
        ({"tenant": None}, "absent"),
        ({"other": "x"}, "absent"),
        (None, "absent"),
        ([], "absent"),
    ],
)
def test_stamps(stamps: Any, name: str) -> None:
    assert resolved({**TASK, "stamps": stamps}) == name


def test_two_different_stamps_are_refused() -> None:
    with pytest.raises(TenantError, match="several tenants: 'a', 'b'"):
        resolved({**TASK, "stamps": {"tenant": ["a", "b"]}})


def test_a_stamp_on_a_canvas(app: Celery) -> None:
    signature: Signature[Any] = group(app.signature("plain"), app.signature("plain"), app=app)
    signature.stamp(tenant="acme")
    signature.apply_async()
    assert tenants_sent(app) == ["acme", "acme"]


def test_the_default_of_a_task_that_is_sent_by_name(app: Celery) -> None:
    app.send_task("owned")
    app.send_task("unknown")
    assert tenants_sent(app) == ["owner", "absent"]


def test_a_property_called_tenant_is_no_default(app: Celery) -> None:
    class Base(app.Task):  # type: ignore[misc,name-defined]
        @property
        def tenant(self) -> str:
            raise AssertionError

    app.task(name="with-property", base=Base, lazy=False, shared=False)(nothing).delay()
    assert tenants_sent(app) == ["absent"]


def test_the_default_is_found_in_a_thread_without_a_current_app(app: Celery) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(app.tasks["owned"].delay).result()
    assert tenants_sent(app) == ["owner"]


# ------------------------------------------------------------------------------------------------ tenant_of


def by_customer(headers: dict[str, Any], properties: dict[str, Any]) -> str | None:
    """Derive the tenant; found by its dotted name."""
    return headers.get("customer") or properties.get("reply_to")


def test_tenant_of_by_name_sees_headers_and_properties() -> None:
    option = f"{__name__}:by_customer"
    assert resolved({"customer": "acme"}, tenant_of=option) == "acme"
    assert resolved({}, {"reply_to": "me"}, tenant_of=option) == "me"
    assert resolved({}, tenant_of=option) == "absent"


def test_a_failing_tenant_of_is_a_tenant_error() -> None:
    with pytest.raises(TenantError, match="KeyError") as caught:
        resolved({}, tenant_of=lambda headers, properties: headers["customer"])
    assert isinstance(caught.value.__cause__, KeyError)


def test_an_unknown_tenant_of_names_the_option() -> None:
    with pytest.raises(fairlanes_transport.OptionError, match="tenant_of"):
        resolved({}, tenant_of="no.such.module:function")


@pytest.mark.parametrize("headers", [{"hostname": "w@h"}, {"clock": 1, "expires": None}, {"clock": 1, "ticket": "t"}])
def test_events_and_remote_control_are_nobodys(headers: dict[str, Any]) -> None:
    with tenant("acme"):
        assert resolved(headers, tenant_of=lambda headers, properties: "acme") == "absent"


# ----------------------------------------------------------------------------------------- leaving the lane


def test_a_null_header_leaves_the_lane_and_says_so(app: Celery) -> None:
    with tenant("acme"):
        app.tasks["owned"].apply_async(headers={"tenant": None})
    assert tenants_sent(app) == [None]


def test_a_block_without_tenant_leaves_the_lane(app: Celery) -> None:
    with tenant("acme"), tenant(None) as name:
        assert name is None
        assert current_tenant() is None
        app.tasks["owned"].delay()
    assert tenants_sent(app) == [None]


def test_who_left_the_lane_on_purpose_stays_out(app: Celery) -> None:
    """Children and retries do not ask ``tenant_of`` again."""

    def send(task: Any) -> Any:
        return tenancy.resolve(dict(TASK), {}, Options(tenant_of=lambda headers, properties: "derived"))

    assert run_task(app, send, tenant=None) is None
    assert run_task(app, send) == "derived"


# ---------------------------------------------------------------------------------------------- inheritance


def test_a_task_passes_its_tenant_on(app: Celery) -> None:
    run_task(app, lambda task: app.tasks["plain"].delay(), tenant="acme")
    run_task(app, lambda task: app.send_task("elsewhere"), tenant="acme")
    run_task(app, lambda task: app.send_task("elsewhere"), headers={"tenant": "acme"})  # as in protocol 1
    run_task(app, lambda task: app.tasks["plain"].delay())
    assert tenants_sent(app) == ["acme", "acme", "acme", "absent"]


def test_callbacks_and_the_rest_of_the_chain(app: Celery) -> None:
    plain = app.tasks["plain"]
    last: Signature[Any] = plain.si()
    run_task(app, lambda task: None, tenant="acme", callbacks=[plain.si(), plain.si()], chain=[last])
    assert tenants_sent(app) == ["acme", "acme", "acme"]


def test_a_task_called_as_a_function_is_part_of_its_caller(app: Celery) -> None:
    call = app.tasks["call"]
    send = app.tasks["plain"].delay
    run_task(app, lambda task: call(lambda inner: send()), tenant="acme")
    run_task(app, lambda task: call(lambda inner: call(lambda innermost: send())), tenant="acme")
    assert tenants_sent(app) == ["acme", "acme"]


def test_a_retry_keeps_the_tenant_of_its_message(app: Celery) -> None:
    app.conf.task_publish_retry = False
    task = app.tasks["plain"]
    request = Context({"id": "1", "args": (), "kwargs": {}, "delivery_info": {}, "tenant": "acme"})
    task.signature_from_request(request, retries=1).apply_async()
    assert tenants_sent(app) == ["acme"]


def test_a_block_in_a_task_beats_the_task_and_ends_with_it(installed: Celery) -> None:
    app, plain = installed, installed.tasks["plain"]

    def forgets(task: Any) -> None:
        set_tenant("beta")
        assert current_tenant() == "beta"
        plain.delay()

    run_task(app, forgets, tenant="acme")
    run_task(app, lambda task: plain.delay(), tenant="acme")
    run_task(app, lambda task: plain.delay())
    assert tenants_sent(app) == ["beta", "acme", "absent"]
    assert current_tenant() is None


def test_a_block_around_the_worker_does_not_reach_its_tasks(app: Celery) -> None:
    with tenant("import-time"):
        assert run_task(app, lambda task: current_tenant()) is None
        assert run_task(app, lambda task: current_tenant(), tenant="acme") == "acme"


def test_parents_that_have_left_the_stack_are_remembered() -> None:
    tenancy.recent.put("parent", "acme")
    try:
        assert resolved({**TASK, "parent_id": "parent"}) == "acme"
        assert resolved({}, {"correlation_id": "parent"}) == "acme"  # its result
        assert resolved({**TASK, "parent_id": "other"}) == "absent"
    finally:
        tenancy.recent.clear()


def test_only_the_last_tasks_are_remembered() -> None:
    recent = tenancy._Recent(2)
    for i in range(3):
        recent.put(str(i), "acme")
    assert [recent.get(str(i)) for i in range(3)] == [None, "acme", "acme"]
    recent.put("1", "beta")
    recent.put("3", "acme")
    assert [recent.get(str(i)) for i in range(4)] == [None, "beta", None, "acme"]


# ---------------------------------------------------------------------------------------------------- eager


@pytest.fixture
def eager(app: Celery) -> Celery:
    app.conf.update(task_always_eager=True, task_eager_propagates=True)
    app.tasks["call"].__class__.serializer = "pickle"
    return app


def eagerly(app: Celery, function: Callable[[Any], Any], name: str = "call", **options: Any) -> Any:
    """Apply ``function(task)`` as an eager task."""
    return app.tasks[name].apply((function,), throw=True, **options).get()


def nested(app: Celery, **options: Any) -> Callable[[Any], Any]:
    """A body of a task that applies another eager task and returns what that sees."""
    return lambda task: eagerly(app, lambda child: current_tenant(), **options)


def test_an_eager_task_belongs_to_whom_its_message_would_have(eager: Celery) -> None:
    app = eager
    assert eagerly(app, lambda task: current_tenant()) is None
    assert eagerly(app, lambda task: current_tenant(), headers={"tenant": "acme"}) == "acme"
    with tenant("acme"):
        assert eagerly(app, lambda task: current_tenant()) == "acme"
        assert eagerly(app, lambda task: current_tenant(), headers={"tenant": "beta"}) == "beta"
        assert eagerly(app, lambda task: current_tenant(), headers={"tenant": None}) is None
        assert eagerly(app, nested(app)) == "acme"
        assert eagerly(app, nested(app), headers={"tenant": "beta"}) == "beta"
    assert eagerly(app, nested(app), headers={"tenant": "acme"}) == "acme"
    stamped = {"stamped_headers": ["tenant"], "tenant": "acme"}
    assert eagerly(app, lambda task: current_tenant(), **stamped) == "acme"
    assert eagerly(app, nested(app), **stamped) == "acme"


def test_the_default_of_an_eager_task(eager: Celery) -> None:
    eager.tasks["call"].__class__.tenant = "owner"
    assert eagerly(eager, lambda task: current_tenant()) == "owner"
    with tenant("acme"):
        assert eagerly(eager, lambda task: current_tenant()) == "acme"


def test_blocks_in_eager_tasks(eager: Celery) -> None:
    app = eager

    def parent(task: Any) -> list[Any]:
        with tenant("beta"):
            seen = [current_tenant(), nested(app)(task), nested(app, headers={"tenant": "gamma"})(task)]
            seen.append(eagerly(app, within))
        return [*seen, current_tenant(), nested(app)(task)]

    def within(task: Any) -> list[Any]:
        with tenant("delta"):
            seen = [current_tenant(), nested(app)(task)]
        return [*seen, current_tenant(), nested(app)(task)]

    with tenant("outside"):
        seen = eagerly(app, parent, headers={"tenant": "acme"})
        assert seen == ["beta", "beta", "gamma", ["delta", "delta", "beta", "beta"], "acme", "acme"]
        assert current_tenant() == "outside"


def test_always_eager_delay_agrees(eager: Celery) -> None:
    seen: list[Any] = []

    @eager.task(name="see", lazy=False, shared=False)
    def see(*args: Any) -> None:
        seen.append(current_tenant())

    @eager.task(name="parent", lazy=False, shared=False)
    def parent() -> None:
        see.delay()

    with tenant("acme"):
        see.delay()
        chain(see.si(), see.si(), app=eager).apply_async()
        group(see.si(), see.si(), app=eager).apply_async()
        chord([see.si()], see.si(), app=eager).apply_async()
        see.apply_async(link=see.si())
    parent.apply_async(headers={"tenant": "beta"})
    see.apply_async(headers={"tenant": "beta"}, link=see.si())
    assert seen == ["acme"] * 9 + ["beta"] * 3


# ------------------------------------------------------------------------------------------- blocks of code


def test_blocks_nest_and_are_restored_on_error() -> None:
    with tenant("a"):
        with pytest.raises(RuntimeError), tenant("b") as name:
            assert (name, current_tenant()) == ("b", "b")
            raise RuntimeError
        assert current_tenant() == "a"
    assert current_tenant() is None


def test_tokens() -> None:
    outer = set_tenant("a")
    inner = set_tenant("b")
    reset_tenant(inner)
    assert current_tenant() == "a"
    reset_tenant(inner)  # twice is once
    assert current_tenant() == "a"
    reset_tenant(outer)
    assert current_tenant() is None


def test_tokens_out_of_order() -> None:
    outer, inner = set_tenant("a"), set_tenant("b")
    reset_tenant(outer)
    assert current_tenant() == "b"
    reset_tenant(inner)
    assert current_tenant() is None


def test_a_forgotten_block_does_not_pile_up() -> None:
    def forget() -> int:
        for _ in range(100):
            set_tenant("a")
        scope, depth = tenancy._scope.get(), 0
        while scope is not None:
            scope, depth = scope.outer, depth + 1
        return depth

    assert contextvars.copy_context().run(forget) == 1


def test_threads_have_their_own_and_a_copied_context_carries_it() -> None:
    with tenant("acme"), ThreadPoolExecutor(1) as pool:
        assert pool.submit(current_tenant).result() is None
        assert pool.submit(contextvars.copy_context().run, current_tenant).result() == "acme"

    def other() -> None:
        with tenant("other"):
            entered.set()
            leave.wait(5)

    entered, leave = threading.Event(), threading.Event()
    thread = threading.Thread(target=other)
    thread.start()
    assert entered.wait(5)
    assert current_tenant() is None
    leave.set()
    thread.join()


def test_asyncio_tasks_keep_what_they_were_started_with() -> None:
    async def job(started: asyncio.Event, go: asyncio.Event) -> list[str | None]:
        seen = [current_tenant()]
        started.set()
        await go.wait()
        return [*seen, current_tenant(), await asyncio.to_thread(current_tenant)]

    async def main() -> None:
        go = asyncio.Event()
        jobs = []
        for name in ("a", "b"):
            started = asyncio.Event()
            with tenant(name):
                jobs.append(asyncio.create_task(job(started, go)))
                await started.wait()
        assert current_tenant() is None
        go.set()
        assert await asyncio.gather(*jobs) == [["a"] * 3, ["b"] * 3]

    asyncio.run(main())


def test_generators() -> None:
    def steps() -> Iterator[str | None]:
        yield current_tenant()
        yield current_tenant()

    generator = steps()
    with tenant("a"):
        assert next(generator) == "a"
    with tenant("b"):
        assert next(generator) == "b"

    @contextlib.contextmanager
    def customer() -> Iterator[None]:
        with tenant("acme"):
            yield

    with customer():
        assert current_tenant() == "acme"
    assert current_tenant() is None


def test_generators_that_are_left_in_any_order() -> None:
    def entered(name: str) -> Iterator[None]:
        with tenant(name):
            yield

    first, second = entered("a"), entered("b")
    next(first)
    next(second)
    first.close()
    assert current_tenant() == "b"
    second.close()
    assert current_tenant() is None


GREENLETS = """
import contextvars
{patch}
from fairlanes_transport import current_tenant, tenant

def job():
    with tenant("inner"):
        pause()
        return current_tenant()

with tenant("acme"):
    bare, cured = spawn(current_tenant), spawn(contextvars.copy_context().run, current_tenant)
    inner = spawn(job)
    pause()
    assert current_tenant() == "acme"
    print(wait(bare), wait(cured), wait(inner), current_tenant())
"""
PATCHES = {
    "gevent": "from gevent import monkey; monkey.patch_all(); import gevent; spawn = gevent.spawn\n"
    "pause = lambda: gevent.sleep(0); wait = lambda g: g.get()",
    "eventlet": "import eventlet; eventlet.monkey_patch(); spawn = eventlet.spawn\n"
    "pause = lambda: eventlet.sleep(0); wait = lambda g: g.wait()",
}


@pytest.mark.parametrize("kind", PATCHES)
def test_greenlets(kind: str) -> None:
    pytest.importorskip(kind)
    code = GREENLETS.format(patch=PATCHES[kind])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.split() == ["None", "acme", "inner", "acme"], done.stderr


def test_the_module_needs_no_celery() -> None:
    code = (
        "import sys; sys.modules['celery'] = None\n"
        "from fairlanes_transport import tenant, current_tenant\n"
        "from fairlanes_transport.tenancy import resolve; from fairlanes_transport.options import Options\n"
        "with tenant('acme'): assert resolve({}, {}, Options()) == 'acme' == current_tenant()\n"
        "assert resolve({'task': 'x'}, {}, Options()) is None\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# ---------------------------------------------------------------------------------------------- in a worker


@pytest.fixture
def installed(app: Celery) -> Iterator[Celery]:
    tenancy.install_worker(app)
    yield app
    tenancy.recent.clear()


def test_installing_twice_changes_nothing(installed: Celery) -> None:
    from celery.worker.request import Request

    before = installed.events.dispatcher_cls, Request.on_timeout
    tenancy.install_worker(installed)
    assert (installed.events.dispatcher_cls, Request.on_timeout) == before


def received(app: Celery, **headers: Any) -> Any:
    """A request as the worker's main process holds it."""
    from celery.worker.request import Request
    from kombu.message import Message

    facts = {"id": str(uuid.uuid4()), "task": "plain", "root_id": None, "parent_id": None, **headers}
    message = Message(
        '[[], {}, {"callbacks": null, "errbacks": null, "chain": null, "chord": null}]',
        channel=None, headers=facts, content_type="application/json", content_encoding="utf-8",
    )  # fmt: skip
    return Request(message, app=app)


@pytest.mark.parametrize("method", tenancy_worker._SPEAKING)
def test_the_main_process_speaks_for_a_request_in_its_lane(
    app: Celery, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    from celery.worker.request import Request

    plain = app.tasks["plain"]
    monkeypatch.setattr(Request, method, lambda self: (plain.delay(), app.tasks["owned"].delay(), current_tenant())[2])
    tenancy_worker._wrap_requests()
    assert getattr(received(app, tenant="acme"), method)() == "acme"
    assert getattr(received(app, tenant=None), method)() is None
    assert getattr(received(app), method)() is None
    assert tenants_sent(app) == ["acme", "owner", None, "owner", "absent", "owner"]
    assert current_tenant() is None


def test_received_and_begun_tasks_are_remembered(installed: Celery) -> None:
    from celery import signals

    request = received(installed, tenant="acme")
    signals.task_received.send(sender=None, request=request)
    assert tenancy.recent.get(request.id) == "acme"
    untagged = received(installed)
    signals.task_received.send(sender=None, request=untagged)
    assert tenancy.recent.get(untagged.id) is None
    run_task(installed, lambda task: None, id="begun", tenant="beta")
    assert tenancy.recent.get("begun") == "beta"


def test_a_thread_with_a_copy_of_the_tasks_context_sends_for_the_task(installed: Celery) -> None:
    send = installed.tasks["plain"].delay

    async def main() -> None:
        await asyncio.to_thread(send)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(contextvars.copy_context().run, send).result()
            pool.submit(send).result()

    run_task(installed, lambda task: asyncio.run(main()), tenant="acme")
    assert tenants_sent(installed) == ["acme", "acme", "absent"]
    assert tenancy.carried.get() is tenancy.UNSET


def test_an_eager_task_in_a_task_gives_back_what_is_carried(installed: Celery) -> None:
    def body(task: Any) -> list[Any]:
        eagerly(installed, lambda child: None, headers={"tenant": "beta"})
        return [tenancy.carried.get()]

    assert run_task(installed, body, tenant="acme") == ["acme"]


def test_events_name_the_tenant(installed: Celery) -> None:
    published: list[tuple[str, dict[str, Any]]] = []

    class Producer:
        def publish(self, event: dict[str, Any], **kwargs: Any) -> None:
            published.append((event["type"], event))

    dispatcher = installed.events.Dispatcher(enabled=False)
    dispatcher.enabled, dispatcher.producer, dispatcher._closed = True, Producer(), False
    tenancy.recent.put("1", "acme")
    dispatcher.send("task-received", uuid="1", name="plain")
    dispatcher.send("task-received", uuid="2", name="plain")
    dispatcher.send("task-custom", uuid="1", tenant="mine")
    dispatcher.send("worker-heartbeat", uuid="1")
    assert [event.get("tenant") for _, event in published] == ["acme", None, "mine", None]


# ----------------------------------------------------------------------------------------------------- logs


def record(**attributes: Any) -> logging.LogRecord:
    made = logging.makeLogRecord({"msg": "hello", **attributes})
    assert TenantFilter().filter(made)
    return made


def test_log_records_name_the_tenant(app: Celery) -> None:
    assert record().tenant == "-"
    with tenant("acme"):
        assert record().tenant == "acme"
        assert record(tenant="mine").tenant == "mine"
    assert run_task(app, lambda task: record().tenant, tenant="acme") == "acme"
    tenancy.recent.put("1", "acme")
    try:
        assert record(data={"id": "1"}).tenant == "acme"
        assert record(data="text").tenant == "-"
    finally:
        tenancy.recent.clear()


def test_celerys_handlers_get_the_filter_if_the_broker_is_ours(app: Celery) -> None:
    from celery import signals

    from fairlanes_transport.logs import add_filter_at_setup

    add_filter_at_setup()

    def filters(broker: str) -> int:
        app.conf.update(broker_url=broker, broker_read_url=broker, broker_write_url=broker)
        logger = logging.Logger("made for this")
        handler = logging.StreamHandler()
        logger.addHandler(handler)
        for _ in range(2):
            signals.after_setup_logger.send(
                sender=None, logger=logger, loglevel=0, logfile=None, format="", colorize=False
            )
        return len(handler.filters)

    assert filters("memory://") == 0
    assert filters("fairlanes://127.0.0.1:1/0") == 1

"""Every form in which Celery sends a task, built from tasks that note whose they are.

Plain Celery: nothing here names a tenant, but `current_tenant`, which is asked for it. :data:`FORMS` are used
by the test, which sends them, and by the task ``canvas.root``, which sends them from a worker.
"""

from __future__ import annotations

import contextvars
import functools
import json
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import redis
from celery import VERSION, Celery, Task, chain, chord, group, signature
from celery.canvas import Signature
from celery.utils.log import get_task_logger

from fairlanes_transport import current_tenant
from tests.apps.settings import BROKER, PORT, RECORD_DB, from_environment


@functools.cache
def _client(pid: int) -> redis.Redis:
    """Return the client of this process: a prefork child must not share its parent's connection."""
    return redis.Redis(port=int(os.environ[PORT]), db=RECORD_DB)


def note(task: Task[Any, Any], label: str, **facts: Any) -> None:
    """Note whose task this is: by its header, by the lane its message came from, and by its own idea."""
    running = task.app.current_worker_task  # a task that was called as a function has no message
    request = (running or task).request
    seen = {
        "label": label,
        "header": (request.headers or {}).get("tenant", "absent"),
        "lane": ((request.properties or {}).get("fairlanes") or {}).get("lane"),
        "current": current_tenant(),
        "task": running.name if running else None,
        **facts,
    }
    _client(os.getpid()).rpush("done", json.dumps(seen))


def send(app: Celery, label: str, name: str = "canvas.mark", **options: Any) -> None:
    """Send a task by name, as a program does that does not have its code."""
    app.send_task(name, (label,), **options)


# ------------------------------------------------------------------------------------------------ the forms


def _mark(label: str) -> Signature[Any]:
    return signature("canvas.mark", args=(label,), immutable=True)


def _one(name: str, *more: Any) -> Callable[[str], Signature[Any]]:
    return lambda label: signature(name, args=(label, *more), immutable=True)


def _marks(label: str, n: int) -> list[Signature[Any]]:
    return [_mark(label) for _ in range(n)]


def _linked(label: str) -> Signature[Any]:
    made = _mark(label)
    made.link(_mark(label))
    # Celery drops a second link that is equal to the first.
    made.link(signature("canvas.mark", kwargs={"label": label}, immutable=True))
    return made


def _failing(name: str) -> Callable[[str], Signature[Any]]:
    def build(label: str) -> Signature[Any]:
        made = signature(name, args=(label,), immutable=True)
        made.link_error(_mark(label))
        return made

    return build


def _nested(label: str) -> Signature[Any]:
    inner = chord([_mark(label), chain(*_marks(label, 2))], _mark(label))
    return chain(_mark(label), group(inner, _mark(label)), _mark(label))


def _mapped(label: str, kind: str) -> Signature[Any]:
    from celery.canvas import xmap, xstarmap

    one = signature("canvas.mark")
    return xmap(one, [label, label]) if kind == "map" else xstarmap(one, [(label,), (label,)])


def _chunked(label: str) -> Signature[Any]:
    from celery.canvas import chunks

    return chunks(signature("canvas.mark"), [(label,)] * 4, 2)


class Form(NamedTuple):
    """A form of canvas.

    Attributes:
        build: makes the signature from a label.
        notes: how many notes with this label it leaves.
        stamps: Celery carries stamps through it.
    """

    build: Callable[[str], Signature[Any]]
    notes: int
    stamps: bool = True


#: Before Celery 5.7 map and starmap lose the options of their signature.
MAPS_KEEP_STAMPS = VERSION >= (5, 7)

FORMS = {
    "task": Form(_mark, 1),
    "spawning": Form(_one("canvas.spawn"), 4),
    "copied context": Form(_one("canvas.threaded"), 2),
    "retry": Form(_one("canvas.again"), 3),
    "autoretry": Form(_one("canvas.flaky"), 3),
    "replace": Form(_one("canvas.replaced"), 2),
    "replace by a group": Form(_one("canvas.replaced", "group"), 3),
    "link": Form(_linked, 3),
    "link_error": Form(_failing("canvas.fail"), 2),
    "chain": Form(lambda label: chain(*_marks(label, 3)), 3),
    "group": Form(lambda label: group(*_marks(label, 3)), 3),
    "chord": Form(lambda label: chord(_marks(label, 2), _mark(label)), 3),
    "chord of a group": Form(lambda label: chord(_marks(label, 2), group(*_marks(label, 2))), 4),
    "chord in a chain": Form(lambda label: chain(_mark(label), group(*_marks(label, 2)), _mark(label)), 4),
    "add_to_chord": Form(lambda label: chord([_one("canvas.adding")(label)], _mark(label)), 3),
    "nested": Form(_nested, 7),
    "map": Form(lambda label: _mapped(label, "map"), 2, stamps=MAPS_KEEP_STAMPS),
    "starmap": Form(lambda label: _mapped(label, "starmap"), 2, stamps=MAPS_KEEP_STAMPS),
    # chunks makes its group when it is applied, from what was given to it, without its options.
    "chunks": Form(_chunked, 4, stamps=False),
}  # fmt: skip


def tasks(app: Celery) -> None:  # noqa: C901 - a list
    """Define the tasks on an app."""
    # Else Celery gives them to every app of the process, and warns.
    task = functools.partial(app.task, shared=False)

    @task(bind=True, name="canvas.mark")
    def mark(self: Task[Any, Any], label: str) -> None:
        """Note whose it is."""
        note(self, label)

    @task(name="canvas.echo")
    def echo(value: Any) -> Any:
        """Return the argument."""
        return value

    @task(bind=True, name="canvas.spawn")
    def spawn(self: Task[Any, Any], label: str) -> None:
        """Send a task in each plain way, and call one as a function that sends another."""
        note(self, label)
        mark.delay(label)
        mark.apply_async((label,), countdown=0.1)
        inner(label)

    @task(name="canvas.inner")
    def inner(label: str) -> None:
        """Send a task by name."""
        send(app, label)

    @task(bind=True, name="canvas.threaded")
    def threaded(self: Task[Any, Any], label: str) -> None:
        """Send a task from a thread, with the cure that the manual gives."""
        note(self, label)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(contextvars.copy_context().run, send, app, label).result()

    @task(bind=True, name="canvas.again", max_retries=5)
    def again(self: Task[Any, Any], label: str) -> None:
        """Retry twice."""
        note(self, label)
        if self.request.retries < 2:
            raise self.retry(countdown=0)

    @task(bind=True, name="canvas.flaky", autoretry_for=(ValueError,), retry_backoff=0, default_retry_delay=0)
    def flaky(self: Task[Any, Any], label: str) -> None:
        """Fail twice with what is retried by itself."""
        note(self, label)
        if self.request.retries < 2:
            raise ValueError("on purpose")

    @task(bind=True, name="canvas.replaced")
    def replaced(self: Task[Any, Any], label: str, by: str = "task") -> None:
        """Let others take its place."""
        note(self, label)
        raise self.replace(group(*_marks(label, 2)) if by == "group" else _mark(label))

    @task(bind=True, name="canvas.fail")
    def fail(self: Task[Any, Any], label: str) -> None:
        """Fail."""
        note(self, label)
        raise ValueError("on purpose")

    @task(bind=True, name="canvas.adding")
    def adding(self: Task[Any, Any], label: str) -> None:
        """Add a task to the chord that it is part of."""
        note(self, label)
        self.add_to_chord(_mark(label))

    @task(name="canvas.root")
    def root(form: str, label: str) -> None:
        """Send a form from a task."""
        FORMS[form].build(label).apply_async()

    task(name="canvas.owned_root", tenant="owner")(root.run)

    class Caring(app.Task):  # type: ignore[misc,name-defined]
        """Sends a task when one has failed."""

        def on_failure(self, exc: BaseException, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
            send(app, args[0])

    @task(bind=True, name="canvas.overdue", time_limit=1, base=Caring)
    def overdue(self: Task[Any, Any], label: str) -> None:
        """Take longer than the hard time limit."""
        note(self, label)
        time.sleep(60)

    @task(bind=True, name="canvas.log")
    def log(self: Task[Any, Any], label: str) -> None:
        """Write a line into the log."""
        note(self, label)
        get_task_logger(__name__).warning("%s", label)

    @task(bind=True, name="canvas.dying")
    def dying(self: Task[Any, Any], label: str) -> None:
        """End the pool's child."""
        note(self, label)
        os.kill(os.getpid(), signal.SIGKILL)


if BROKER in os.environ:
    app = from_environment("canvas")
    app.set_default()
    tasks(app)

"""Every form of canvas x pool x way of tagging: all that follows from a tagged task stays in its lane.

Each case has a tenant of its own. What is asserted, for each task that the case led to: the lane that its message
was claimed from, the header that it saw, and what `current_tenant` said in it.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
from celery import Celery, signature

from fairlanes_transport import tenant
from tests.apps import canvas
from tests.apps.settings import RECORD_DB
from tests.harness import SCHEME, Sender, Server, Worker, wait_for

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

    def notes(self, label: str) -> list[dict[str, Any]]:
        """Return what the tasks with a label have noted."""
        noted = map(json.loads, self.server.client(RECORD_DB).lrange("done", 0, -1))
        return [note for note in noted if note["label"] == label]

    def expect(self, label: str, tenant: Any, notes: int, timeout: float = 20) -> None:
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
        assert len(noted) == notes


@contextlib.contextmanager
def on_stage(pool: str, *flags: str, **options: Any) -> Iterator[Stage]:
    """A server with a worker on it."""
    conf = {"results": True, "result_expires": 60, **options.pop("conf", {})}
    with Server("redis") as server:
        worker = Worker(server, "-Ofair", *flags, app="tests.apps.canvas", pool=pool, conf=conf, **options)
        transport_options = {"tenant_of": f"{__name__}:customer_of"}
        sender = Sender(server, broker_transport_options=transport_options, **conf)
        with worker, sender:
            sender.app.set_current()
            canvas.tasks(sender.app)
            yield Stage(server, worker, sender.app)
            gc.collect()  # results unsubscribe when they are collected; here they still can


@pytest.fixture(scope="module", params=POOLS)
def stage(request: pytest.FixtureRequest) -> Iterator[Stage]:
    """A worker of each pool, for all cases: they do not meet, each has a tenant of its own."""
    with on_stage(request.param, concurrency=1 if request.param == "solo" else 4) as made:
        yield made


# ------------------------------------------------------------------------------------------ the ways of tagging


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

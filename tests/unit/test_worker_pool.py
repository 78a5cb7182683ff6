"""What becomes of prefork jobs that no child has accepted when the pool is flushed (at a connection loss)."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
from billiard.einfo import ExceptionWithTraceback
from billiard.pool import RUN
from celery.exceptions import Reject

from fairlanes_transport.worker import _failure, _keeping_written


class Job:
    """A job of the pool, with as much as a flush looks at."""

    def __init__(self, pool: SimpleNamespace, tag: str, child: Any, *, accepted: bool = False) -> None:
        self.pool, self.tag = pool, tag
        self._accepted, self._write_to = accepted, child
        message = SimpleNamespace(delivery_tag=tag, channel=SimpleNamespace(qos=SimpleNamespace(release=pool.release)))
        self.lanes_run = SimpleNamespace(accepted=accepted, request=SimpleNamespace(message=message))
        pool._cache[tag] = self

    def discard(self) -> None:
        """The pool forgets it."""
        self.pool._cache.pop(self.tag, None)


@pytest.fixture
def processes() -> SimpleNamespace:
    released: list[str] = []
    return SimpleNamespace(
        _cache={}, _state=RUN, _put_back=lambda job: None, _active_writers=set(), outbound_buffer=deque(),
        released=released, release=released.extend,
    )  # fmt: skip


def flush(processes: SimpleNamespace) -> None:
    """Flush as Celery's pool does: forget what is not accepted, and what waits to be written."""

    def celerys() -> None:
        for job in tuple(processes._cache.values()):
            if not job._accepted:
                job.discard()
        processes.outbound_buffer.clear()
        for job in tuple(processes._cache.values()):  # what it does when it finds a child dead
            if not job._accepted and not job._write_to._is_alive():
                processes._put_back(job)

    _keeping_written(SimpleNamespace(_pool=processes), celerys)()


def child(*, alive: bool) -> SimpleNamespace:
    return SimpleNamespace(_is_alive=lambda: alive)


def test_what_a_living_child_has_got_is_kept(processes: SimpleNamespace) -> None:
    Job(processes, "written", child(alive=True))
    Job(processes, "running", child(alive=True), accepted=True)
    flush(processes)
    assert set(processes._cache) == {"written", "running"}
    assert processes.released == []


def test_what_no_child_has_got_is_handed_back(processes: SimpleNamespace) -> None:
    Job(processes, "waiting", None)
    flush(processes)
    assert set(processes._cache) == set()
    assert processes.released == ["waiting"]


def test_what_a_dead_child_had_got_is_handed_back(processes: SimpleNamespace) -> None:
    """A chaos run found it: the job of a child that was killed just before a restart of the broker was kept, and its
    lease renewed for ever, but the flush had cleared the buffer from which another child would have had it.
    """
    Job(processes, "killed", child(alive=False))
    put_back = Job(processes, "put back", child(alive=True))
    processes.outbound_buffer.append(put_back)
    flush(processes)
    assert set(processes._cache) == set()
    assert sorted(processes.released) == ["killed", "put back"]


def test_a_pool_that_is_gone_has_nothing_to_flush() -> None:
    """After an error that ends the worker, Celery flushes what it has terminated."""
    _keeping_written(SimpleNamespace(_pool=None), pytest.fail)()


class Silent(Exception):
    """One that cannot be shown."""

    def __repr__(self) -> str:
        raise ValueError("no words")


def info(exc: BaseException) -> SimpleNamespace:
    """As the pool hands a failure to its callbacks."""
    return SimpleNamespace(exception=exc)


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        ((), None),
        ((None,), None),
        (((0, "a result", 0.1),), None),
        ((info(ValueError("bad")),), "ValueError('bad')"),
        (((1, info(ValueError("bad")), 0.1),), "ValueError('bad')"),
        ((info(ExceptionWithTraceback(ValueError("bad"), "")),), "ValueError('bad')"),
        ((info(Reject("not now", requeue=False)),), "rejected: not now"),
        ((info(Reject()),), None),
    ],
)
def test_the_reason_of_a_failure(reply: tuple[Any, ...], reason: str | None) -> None:
    assert _failure(*reply) == reason


def test_a_failure_that_cannot_be_shown_has_a_reason_all_the_same() -> None:
    assert "Silent" in (_failure(info(Silent())) or "")
    assert _failure(info(Reject(Silent(), requeue=False)))

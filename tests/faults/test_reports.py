"""What was reported of other transports, and is not shown by a test of its own elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from kombu import Connection
from redis import exceptions as driver

from fairlanes_transport.errors import FairlanesError, translate
from fairlanes_transport.transport import Transport
from tests.faults.conftest import Site
from tests.harness import wait_for

pytestmark = pytest.mark.faults


def test_a_deadline_is_that_of_the_claimer(site: Callable[..., Site]) -> None:
    """celery#2599: the shortest visibility of any client won."""
    here = site()
    here.store.enqueue("celery", "1", "a", "{}", b"")
    claimed = here.store.claim("celery", 1, 60_000).claimed[0]
    until = time.monotonic() + 1.5
    while time.monotonic() < until:
        assert here.store.claim("celery", 1, 100).claimed == ()
        time.sleep(0.05)
    assert here.store.extend("celery", [claimed.fence], 60_000) == (1,)


def test_the_lease_shows_in_stats(site: Callable[..., Site]) -> None:
    """celery#9339: set in one of several places, without effect."""
    here = site(lease_seconds=7)
    here.worker(concurrency=1)
    stats = wait_for(lambda: here.sender.app.control.inspect(timeout=1).stats(), 10, "stats")
    assert stats["w0@here"]["broker"]["transport_options"]["lease_seconds"] == 7


def test_twenty_thousand_through_a_simple_queue(site: Callable[..., Site]) -> None:
    """kombu#593: some were missing, and the order was odd."""
    here = site()
    n = 20_000
    with Connection(here.server.url("fairlanes")) as connection, connection.SimpleQueue("simple") as queue:
        for i in range(n):
            queue.put(i, headers={"tenant": f"t{i % 3}"})
        got: dict[int, list[int]] = {0: [], 1: [], 2: []}
        for _ in range(n):
            message = queue.get(timeout=5)
            got[message.payload % 3].append(message.payload)
            message.ack()
        with pytest.raises(queue.Empty):
            queue.get(block=False)
    assert got == {lane: list(range(lane, n, 3)) for lane in range(3)}


@pytest.mark.parametrize(
    "error",
    [each for each in vars(driver).values() if isinstance(each, type) and issubclass(each, Exception)],
    ids=lambda each: each.__name__,
)
def test_no_error_of_the_driver_ends_a_worker(error: type[Exception]) -> None:
    """celery#3046: a TimeoutError was "unrecoverable"."""
    assert issubclass(error, Transport.connection_errors)


def test_what_a_server_may_say_ends_no_worker() -> None:
    """kombu#449, celery#10096: UNBLOCKED, READONLY and the like were fatal."""
    for word in ("UNBLOCKED", "READONLY", "LOADING", "MASTERDOWN", "CLUSTERDOWN", "MISCONF", "BUSY", "NOREPLICAS"):
        assert isinstance(translate(driver.ResponseError(f"{word} text")), Transport.connection_errors)
    # And what concerns one message only is no lost connection.
    full = translate(driver.ResponseError("OOM command not allowed"))
    assert isinstance(full, FairlanesError)
    assert not isinstance(full, Transport.connection_errors)


def test_a_wait_longer_than_the_socket_timeout_is_no_loss(site: Callable[..., Site]) -> None:
    """redis-py#583, rq#2120: a socket timeout below the blocking one made false errors."""
    here = site(lease_seconds=20, socket_timeout=1, park_seconds=8)
    worker = here.worker("--without-mingle", concurrency=1)
    time.sleep(1)
    before = {each["id"] for each in here.clients() if each["cmd"] == "blpop" or int(each["psub"])}
    assert len(before) == 2
    time.sleep(20)
    assert before <= {each["id"] for each in here.clients()}
    assert "re-establish" not in worker.text()

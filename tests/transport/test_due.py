"""Much that falls due in one moment: it is taken up in steps, and nobody else waits for it."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from fairlanes_transport.connections import Address, Link
from fairlanes_transport.store import Store
from tests.harness import Server, wait_for
from tests.invariants import check
from tests.transport.conftest import ours

pytestmark = ours

MANY = 10_000
BATCH = 16
ENVELOPE = '{"headers": {}, "properties": {}}'


@pytest.fixture
def store(server: Server) -> Iterator[Store]:
    """The store on ``server``."""
    link = Link(Address.from_url(server.url("fairlanes")))
    yield Store(link)
    link.close()


def test_many_that_are_due_in_one_moment_stall_nobody(store: Store, server: Server) -> None:
    """Each claim takes up some of them and is short, and what others send meanwhile is delivered in its turn."""
    due = int(store.pulse("q")[0]) + 3_600_000
    for n in range(MANY):
        store.enqueue("q", f"flood{n}", "flood", ENVELOPE, b"", due_ms=due)
    due = int(store.pulse("q")[0]) + 1000
    for n in range(0, MANY, 500):
        store.reschedule("q", [(f"flood{i}", due) for i in range(n, n + 500)])
    assert store.size("q").delayed == MANY
    wait_for(lambda: int(store.pulse("q")[0]) >= due, 5, "the moment")

    took: list[float] = []
    delivered: list[str] = []
    sent: dict[str, int] = {}
    turns = 0
    while True:
        if turns % 50 == 0 and len(sent) < 10:
            tag = f"quiet{len(sent)}"
            sent[tag] = len(delivered)
            store.enqueue("q", tag, "quiet", ENVELOPE, b"")
        started = time.monotonic()
        turn = store.claim("q", BATCH, 60_000, consumer="c")
        took.append(time.monotonic() - started)
        if not turn.claimed:
            break
        if not turns:
            assert MANY - 200 <= store.size("q").delayed < MANY, "one step takes up some of them"
        fences = [claimed.fence for claimed in turn.claimed]
        delivered += [fence.tag for fence in fences]
        store.ack("q", fences, consumer="c")
        turns += 1

    assert len(delivered) == len(set(delivered)) == MANY + 10
    assert all(delivered.index(tag) - at < 2 for tag, at in sent.items())
    assert max(took) < 0.25
    assert check(server.client(), "q").message == {}

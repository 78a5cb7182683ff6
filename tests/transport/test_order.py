"""Who comes first: priorities, lanes, and the queues of one consumer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from kombu import Connection, Consumer, Queue

from tests.harness import Server
from tests.transport.conftest import Drainer, Inbox, ours, send, take


def test_priorities_zero_first(connection: Connection) -> None:
    for priority in (9, 3, 0, 6):
        send(connection, "q", f"{priority}a", f"{priority}b", priority=priority)
    inbox = Inbox(connection.default_channel, "q", prefetch=1)
    take(connection, 8)
    assert inbox.bodies == ["0a", "0b", "3a", "3b", "6a", "6b", "9a", "9b"]


@ours
def test_ten_priorities_are_kept_apart(connection: Connection) -> None:
    for priority in (5, 1, 9, 4, 0, 8, 2, 7, 3, 6):
        send(connection, "q", priority, priority=priority)
    inbox = Inbox(connection.default_channel, "q")
    take(connection, 10)
    assert inbox.bodies == list(range(10))


@ours
@pytest.mark.parametrize(("given", "meant"), [(None, 0), (-3, 0), (12, 9), ("4", 4), ("x", 0)])
def test_odd_priorities(connection: Connection, given: Any, meant: int) -> None:
    send(connection, "q", "given", priority=given)
    send(connection, "q", "before", priority=max(meant - 1, 0))
    send(connection, "q", "after", priority=min(meant + 1, 9))
    inbox = Inbox(connection.default_channel, "q")
    take(connection, 3)
    expected = {0: ["given", "before", "after"], 9: ["before", "given", "after"]}
    assert inbox.bodies == expected.get(meant, ["before", "given", "after"])


@ours
def test_a_priority_counts_inside_its_lane_only(connection: Connection) -> None:
    send(connection, "q", *[f"a{i}" for i in range(6)], headers={"tenant": "a"}, priority=0)
    send(connection, "q", *[f"b{i}" for i in range(3)], headers={"tenant": "b"}, priority=9)
    inbox = Inbox(connection.default_channel, "q", prefetch=1)
    take(connection, 9)
    assert [body[0] for body in inbox.bodies[:6]].count("b") == 3
    for lane in "ab":
        own = [body for body in inbox.bodies if body[0] == lane]
        assert own == sorted(own)


@ours
def test_a_quiet_tenant_does_not_wait_for_a_flood(connection: Connection) -> None:
    send(connection, "q", *[f"flood{i}" for i in range(200)], headers={"tenant": "flood"})
    inbox = Inbox(connection.default_channel, "q", prefetch=1)
    take(connection, 5)
    send(connection, "q", "quiet", headers={"tenant": "quiet"})
    take(connection, 3)
    assert "quiet" in inbox.bodies


@ours
@pytest.mark.parametrize("prefetch", [1, 4, 16, 0])
def test_lanes_take_turns_whatever_the_prefetch(connection: Connection, prefetch: int) -> None:
    for tenant in "abc":
        send(connection, "q", *[tenant] * 20, headers={"tenant": tenant})
    inbox = Inbox(connection.default_channel, "q", prefetch=prefetch)
    take(connection, 60)
    for n in range(1, 61):
        counts = Counter(inbox.bodies[:n])
        assert max(counts.values()) - min(counts[tenant] for tenant in "abc") <= 1


# ------------------------------------------------------------------- several queues


def fill(connection: Connection, queues: str, n: int) -> None:
    for queue in queues:
        Queue(queue, channel=connection.default_channel).declare()
        send(connection, queue, *[queue] * n)


@pytest.mark.parametrize("prefetch", [1, 8])
def test_round_robin(connect: Callable[..., Connection], prefetch: int) -> None:
    connection = connect(queue_order_strategy="round_robin")
    fill(connection, "abc", 30)
    inbox = Inbox(connection.default_channel, "a", "b", "c", prefetch=prefetch)
    take(connection, 45)
    counts = Counter(inbox.bodies[:45])
    assert min(counts.values()) >= 15 - 2 * prefetch
    assert set(inbox.bodies[: 3 * prefetch]) == {"a", "b", "c"}


def test_sorted(connect: Callable[..., Connection]) -> None:
    connection = connect(queue_order_strategy="sorted")
    fill(connection, "cab", 5)
    inbox = Inbox(connection.default_channel, "c", "a", "b", prefetch=1)
    take(connection, 15)
    assert "".join(inbox.bodies) == "aaaaabbbbbccccc"


def test_priority(connect: Callable[..., Connection]) -> None:
    """In the order in which they were consumed."""
    connection = connect(queue_order_strategy="priority")
    fill(connection, "cab", 5)
    inbox = Inbox(connection.default_channel, "c", "a", "b", prefetch=1)
    take(connection, 15)
    assert "".join(inbox.bodies) == "cccccaaaaabbbbb"


class Backwards:
    """An order of one's own."""

    def __init__(self, items: list[str] | None = None) -> None:
        self.items = items or []

    def update(self, items: list[str]) -> None:
        self.items = sorted(items, reverse=True)

    def consume(self, n: int) -> list[str]:
        return self.items[:n]

    def rotate(self, last_used: str) -> None:
        pass


@ours
def test_an_order_of_ones_own(connect: Callable[..., Connection]) -> None:
    connection = connect(queue_order_strategy=Backwards)
    fill(connection, "abc", 5)
    inbox = Inbox(connection.default_channel, "a", "b", "c", prefetch=1)
    take(connection, 15)
    assert "".join(inbox.bodies) == "cccccbbbbbaaaaa"


@pytest.mark.parametrize("prefetch", [1, 16])
def test_a_busy_queue_does_not_starve_another(connection: Connection, prefetch: int) -> None:
    """Also if the other one gets its first message while there is a backlog in the busy one."""
    fill(connection, "a", 300)
    Queue("b", channel=connection.default_channel).declare()
    inbox = Inbox(connection.default_channel, "a", "b", prefetch=prefetch)
    take(connection, 40)
    assert set(inbox.bodies) == {"a"}
    send(connection, "b", "b")
    take(connection, 3 * prefetch + 2)
    assert "b" in inbox.bodies


def test_the_first_queue_comes_first_also_under_load(connect: Callable[..., Connection]) -> None:
    connection = connect(queue_order_strategy="priority")
    fill(connection, "zb", 30)
    inbox = Inbox(connection.default_channel, "z", "b", prefetch=1)
    take(connection, 35)
    assert inbox.bodies.count("b") == 5
    send(connection, "z", "z!", "z!")
    take(connection, 4)
    assert inbox.bodies[-4:].count("z!") == 2


def test_queues_of_several_channels(connection: Connection) -> None:
    """Each with its own prefetch; a channel that is full does not hold up the other."""
    fill(connection, "ab", 20)
    full = Inbox(connection.channel(), "a", prefetch=3, ack=False)
    free = Inbox(connection.channel(), "b", prefetch=2)
    take(connection, 23)
    assert (len(full), len(free)) == (3, 20)
    full.ack_all()
    take(connection, 3)
    assert len(full) == 6
    full.ack_all()


def test_parked_on_two_queues(connect: Callable[..., Connection], server: Server) -> None:
    """A parked consumer hears of each of its queues, again and again."""
    sender = connect()
    with Drainer(connect(), "a", "b") as drainer:
        for i in range(10):
            for queue in "ab":
                send(sender, queue, f"{queue}{i}")
                assert wait(drainer, f"{queue}{i}")


def wait(drainer: Drainer, body: str) -> bool:
    from tests.harness import wait_for

    return wait_for(lambda: body in drainer.inbox.bodies, 5, body)


def test_one_consumer_with_many_queues(connection: Connection) -> None:
    names = [f"queue{i}" for i in range(40)]
    queues = [Queue(name, channel=connection.default_channel) for name in names]
    seen: list[str] = []

    def note(body: str, message: Any) -> None:
        seen.append(body)
        message.ack()

    with Consumer(connection.default_channel, queues, callbacks=[note]):
        for name in names:
            send(connection, name, name, name)
        take(connection, 80)
    assert Counter(seen) == dict.fromkeys(names, 2)

"""A queue on a bench: seed it, run one operation at a time that the test names, compare the whole state."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import redis

from fairlanes_transport import errors, keys
from fairlanes_transport.store import Answer, Claimed, FailurePolicy, Fence, Store, Turn
from tests.harness import FakeLink
from tests.invariants import UNIT, Record, State, check, dump

__all__ = ["DONE", "GONE", "STALE", "T0", "TURN", "Answer", "Bench", "ClientLink", "Fence", "Record", "State", "Turn"]

#: Where a bench's clock starts: ms since the epoch.
T0 = 1_700_000_000_000
#: Ticks of a turn of cost 1 at weight 1.
TURN = UNIT
#: Short, so that tests reach its cap and its end.
POLICY = FailurePolicy(backoff_base=1.0, backoff_factor=2.0, backoff_max=8.0, max_failures=4)

# Somebody used the queue a moment ago; a server that is full lets it pass.
_SEEN = """
redis.call('HDEL', KEYS[1], '')
if redis.call('HEXISTS', KEYS[1], 'seen') == 1 then redis.call('HSET', KEYS[1], 'seen', ARGV[1]) end
"""

DONE, STALE, GONE = Answer.DONE, Answer.STALE, Answer.GONE


class ClientLink(FakeLink):
    """A store's link over a redis-py client, real or fake, with the errors that `connections.Link` raises."""

    def call(self, *args: Any) -> Any:
        """Run one command; error replies are translated."""
        try:
            return super().call(*args)
        except redis.exceptions.ResponseError as exc:
            raise errors.translate(exc) from exc


class Bench:
    """One queue and its store, with a clock that only the test moves.

    Args:
        client: on an empty database.
        queue, prefix: names.
        policy: what happens to failures.
    """

    def __init__(
        self,
        client: redis.Redis,
        queue: str = "q",
        prefix: str = "",
        policy: FailurePolicy = POLICY,
    ) -> None:
        self.client, self.queue, self.prefix = client, queue, prefix
        self.store = Store(ClientLink(client), prefix, policy, now=T0)
        self.before: dict[str, Any] = {}

    # the clock

    @property
    def now(self) -> int:
        """The time that scripts are given."""
        assert self.store.now is not None
        return self.store.now

    def tick(self, ms: int, *, away: bool = False) -> int:
        """Let time pass; returns the new time.

        Args:
            away: the server was, and nobody could use the queue.
        """
        self.store.now = self.now + ms
        if not away:
            self.client.eval(_SEEN, 1, self.key("queue"), self.now)
        return self.now

    # seeding and operations

    def key(self, part: str, lane: str = "") -> str:
        """The key of a part of the queue."""
        base = keys.base(self.queue, self.prefix)
        life = (self.client.hget(keys.part(base, "queue"), "life") or b"").decode() if lane else ""
        return keys.part(base, part, lane, life)

    def put(self, tag: str, lane: str = "a", *, delay: int = 0, **options: Any) -> bool:
        """Enqueue a message whose envelope and body are made of its tag."""
        due = {"due_ms": self.now + delay} if delay else {}
        return self.store.enqueue(self.queue, tag, lane, f'{{"{tag}"}}', tag.encode(), **due, **options)

    def fill(self, lane: str, n: int, **options: Any) -> list[str]:
        """Enqueue messages ``<lane>0`` to ``<lane>n-1``; returns their tags."""
        tags = [f"{lane}{i}" for i in range(n)]
        for tag in tags:
            self.put(tag, lane, **options)
        return tags

    def claim(self, n: int = 1, lease: int = 10_000, **options: Any) -> list[Claimed]:
        """Claim and return the messages."""
        return list(self.turn(n, lease, **options).claimed)

    def turn(self, n: int = 1, lease: int = 10_000, **options: Any) -> Turn:
        """Claim and return all that the consumer learns."""
        return self.store.claim(self.queue, n, lease, **options)

    def tags(self, n: int = 1, **options: Any) -> list[str]:
        """Claim and return the tags."""
        return [message.fence.tag for message in self.claim(n, **options)]

    def lanes(self, n: int = 1, **options: Any) -> list[str]:
        """Claim and return whose turn it was."""
        return [message.lane for message in self.claim(n, **options)]

    def fence(self, n: int = 1, **options: Any) -> Fence:
        """Claim `n` and return the last one's fence."""
        return self.claim(n, **options)[-1].fence

    def ack(self, fences: Fence | Iterable[Fence], **options: Any) -> tuple[Answer, ...]:
        """Ack one or several; returns the answers."""
        return self.ack_turn(fences, **options).answers

    def ack_turn(self, fences: Fence | Iterable[Fence], **options: Any) -> Turn:
        """Ack one or several and return all that the consumer learns."""
        fences = [fences] if isinstance(fences, Fence) else list(fences)
        return self.store.ack(self.queue, fences, **options)

    def configure(self, lane: str, **settings: Any) -> None:
        """Give a lane settings of its own; one that holds messages is placed anew."""
        self.store.configure(self.queue, lane, **settings)

    def replace(self) -> None:
        """Have every lane placed anew."""
        self.store.repair_lanes(self.queue, self.client.zrange(self.key("lanes"), 0, -1))

    # looking

    def state(self) -> State:
        """The whole state."""
        return dump(self.client, self.queue, self.prefix)

    def check(self, **options: Any) -> State:
        """Assert the invariants; returns the state."""
        return check(self.client, self.queue, self.prefix, now=self.now, **options)

    def mark(self) -> Bench:
        """Remember the state, for `changes`."""
        self.before = self.check().flat()
        return self

    def changes(self) -> dict[str, Any]:
        """All that has changed since `mark`: ``part[:lane]/member`` -> new value, None where it is gone."""
        after = self.check().flat()
        return {
            name: after.get(name) for name in sorted({*self.before, *after}) if self.before.get(name) != after.get(name)
        }

    def drop_token(self) -> bool:
        """Pop the token, as a parked consumer does; whether there was one."""
        return self.client.lpop(self.key("wake")) is not None

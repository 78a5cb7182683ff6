"""A broker as an operator has it before him: a queue, its store and lanes, and the command line."""

from __future__ import annotations

import json
import uuid
from typing import Any

import fakeredis
import redis
from click.testing import CliRunner, Result

from fairlanes_transport import Lanes
from fairlanes_transport.cli import fairlanes
from fairlanes_transport.connections import Address, Link
from fairlanes_transport.store import Store
from tests.harness import Server
from tests.invariants import State, check
from tests.scripts.bench import ClientLink

__all__ = ["Command", "Rig", "bury"]


class Rig:
    """A broker with the queue ``q``, its store and its lanes."""

    def __init__(self, client: redis.Redis) -> None:
        self.client = client
        at = client.connection_pool.connection_kwargs
        fake = isinstance(client, fakeredis.FakeRedis)
        self.link: Any = ClientLink(client) if fake else Link(Address("tcp", ((at["host"], at["port"]),)))
        self.lanes = Lanes(self.link)
        self.store = Store(self.link)
        self.lanes.declare("q")

    def send(self, task: str, lane: str = "a", queue: str = "q", **options: Any) -> str:
        """Enqueue a task's message; returns its tag."""
        tag = str(uuid.uuid4())
        envelope = {"headers": {"id": task, "task": "t.run"}, "properties": {"correlation_id": task}}
        self.store.enqueue(queue, tag, lane, json.dumps(envelope), b"[]", **options)
        return tag

    def later(self, seconds: float = 3600) -> int:
        """A due time."""
        return int(self.store.pulse("q")[0]) + int(seconds * 1000)

    def check(self, queue: str = "q") -> State:
        """Assert the invariants."""
        return check(self.client, queue)

    def close(self) -> None:
        """Close the connections."""
        if isinstance(self.link, Link):
            self.link.close()


def bury(rig: Rig, lane: str, n: int) -> list[str]:
    """Dead letters of one lane; returns their tags."""
    tags = [rig.send(f"{lane}{i}", lane) for i in range(n)]
    while claimed := rig.store.claim("q", 100, 60_000).claimed:
        for message in claimed:
            rig.store.reject("q", message.fence, requeue=False, reason="broken")
    return tags


class Command(Rig):
    """The command line on a broker with the queue ``q``."""

    def __init__(self, server: Server) -> None:
        super().__init__(server.client())
        self.url = server.url("fairlanes")

    def run(self, *args: str, code: int = 0, **options: Any) -> Result:
        """Run a command and assert its exit code."""
        result = CliRunner().invoke(fairlanes, ["-b", self.url, *args], **options)
        assert result.exit_code == code, (args, result.output, result.exception)
        return result

    def json(self, *args: str, code: int = 0) -> Any:
        """What a command answers with ``--json``."""
        return json.loads(self.run(*args, "--json", code=code).stdout)

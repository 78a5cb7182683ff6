"""What a connection has declared and bound: to be declared again when the broker has forgotten it.

A broker forgets when it is flushed, or restarted without its data.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

#: routing key, pattern, queue
Binding = tuple[str, str, str]


@dataclass(frozen=True)
class Declaration:
    """How a queue was declared."""

    expires_ms: int
    durable: bool
    defaults: dict[str, Any]


class Declared:
    """The queues and bindings of one connection.

    Attributes:
        queues: queue -> how it was declared last.
    """

    def __init__(self) -> None:
        self.queues: dict[str, Declaration] = {}
        self._bindings: dict[str, set[Binding]] = {}

    def bind(self, exchange: str, routing_key: str | None, pattern: str | None, queue: str) -> None:
        """Note a binding."""
        self._bindings.setdefault(exchange, set()).add((routing_key or "", pattern or "", queue))

    def unbind(self, exchange: str, routing_key: str | None, pattern: str | None, queue: str) -> None:
        """Undo `bind`."""
        self._bindings.get(exchange, set()).discard((routing_key or "", pattern or "", queue))

    def forget(self, queue: str) -> None:
        """Drop a queue that was deleted, and its bindings."""
        self.queues.pop(queue, None)
        for exchange, routing_key, pattern in self.bindings_of(queue):
            self.unbind(exchange, routing_key, pattern, queue)

    def bindings_of(self, queue: str) -> list[tuple[str, str, str]]:
        """Return (exchange, routing key, pattern) of each binding of a queue."""
        return [
            (exchange, routing_key, pattern)
            for exchange, bindings in list(self._bindings.items())
            for routing_key, pattern, bound in list(bindings)
            if bound == queue
        ]

    def missing(self, exchange: str, table: Iterable[Binding]) -> set[Binding]:
        """Return the bindings to an exchange that its table lacks."""
        ours = self._bindings.get(exchange)
        return ours - set(table) if ours else set()

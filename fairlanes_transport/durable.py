"""Publishing that returns when the message is safe, and not when the server has it in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from redis.exceptions import ResponseError

from .connections import Link
from .errors import NotConfirmed, OptionError


class Confirming:
    """Runs each command together with a wait until the server says that it is durable.

    Where the server has an append-only file, and WAITAOF (Redis and Valkey 7.2), that is: synced to its disk, and
    to those of `replicas` replicas.  Elsewhere it is WAIT: in the memory of `replicas` replicas.

    Args:
        link: the broker.
        replicas: how many replicas must confirm.
        timeout: seconds that it may take.
    """

    def __init__(self, link: Link, replicas: int, timeout: float) -> None:
        self.link = link
        self.replicas = replicas
        self.timeout_ms = max(1, int(timeout * 1000))
        self._aof: bool | None = None

    def call(self, *args: Any) -> Any:
        """Run a command, confirmed.

        Raises:
            NotConfirmed: it was carried out, but not confirmed in time.
            OptionError: the server can confirm nothing as it is set up; nothing was sent.
            as `Link.call`.
        """
        # Both on one connection: the wait is for what was written on its own.
        reply, confirmed = self.link.pipeline([args, self._wait()])
        if isinstance(reply, Exception):
            raise reply
        if isinstance(confirmed, Exception):
            # The set-up of the server has changed, perhaps; the next call looks again.
            self._aof = None
            raise NotConfirmed(f"the message was stored, but not confirmed: {confirmed}") from confirmed
        local, replicas = confirmed if self._aof else (1, confirmed)
        if local < 1 or replicas < self.replicas:
            missing = [] if local else ["the server's disk"]
            if replicas < self.replicas:
                missing.append(f"{self.replicas - replicas} of {self.replicas} replicas")
            raise NotConfirmed(
                f"the message was stored, but within {self.timeout_ms} ms not confirmed by {' and '.join(missing)}"
            )
        return reply

    def pipeline(self, commands: Sequence[Sequence[Any]], *, raise_on_error: bool = False) -> list[Any]:
        """Run commands without a confirmation."""
        return self.link.pipeline(commands, raise_on_error=raise_on_error)

    def _wait(self) -> tuple[Any, ...]:
        if self._has_aof():
            return ("WAITAOF", 1, self.replicas, self.timeout_ms)
        return ("WAIT", self.replicas, self.timeout_ms)

    def _has_aof(self) -> bool:
        """Whether the server can wait for its disk; asked once."""
        if self._aof is None:
            try:
                self.link.call("WAITAOF", 1, 0, 1)
            except ResponseError as exc:
                if not self.replicas:
                    raise OptionError(
                        f"durable_publish: {self.link.address} cannot confirm that a message is safe ({exc}); it "
                        "needs an append-only file and Redis or Valkey 7.2, or durable_replicas above 0"
                    ) from exc
                self._aof = False
            else:
                self._aof = True
        return self._aof

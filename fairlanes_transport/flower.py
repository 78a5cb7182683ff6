"""Queue lengths on Flower's broker page, and at its ``/api/queues/length``.

Flower asks brokers of five URL schemes that are fixed in its code, and answers for any other that it is not
supported.  Flower runs the file ``flowerconfig.py`` of its directory, or the one that ``--conf`` names; with this
in it, it asks ours too::

    from fairlanes_transport.flower import install
    from proj.celery import app

    install(app)

Everything else of Flower works without.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any
from urllib.parse import urlsplit

from ._register import TRANSPORTS
from .errors import QueueAbsent
from .lanes.api import Lanes


class LanesBroker:
    """What Flower calls a broker: it tells the lengths of queues.

    Args:
        app: the Celery app.
    """

    def __init__(self, app: Any) -> None:
        self.app = app

    async def queues(self, names: Iterable[str]) -> list[dict[str, Any]]:
        """Per queue what Flower shows; the broker is asked in a thread, so that Flower does not stop."""
        return await asyncio.get_running_loop().run_in_executor(None, self._read, list(names))

    def _read(self, names: list[str]) -> list[dict[str, Any]]:
        lanes, seen = Lanes(self.app), []
        for name in names:
            try:
                queue = lanes.snapshot(name)
            except QueueAbsent:
                continue
            seen.append(
                {
                    "name": name,
                    "messages": queue.backlog,
                    "messages_ready": queue.ready,
                    "messages_unacknowledged": queue.in_flight,
                }
            )
        return seen


def install(app: Any) -> None:
    """Let Flower ask brokers of this transport.

    Args:
        app: the Celery app that Flower is started with.
    """
    from flower.utils import broker

    ask_others = broker.Broker.__new__

    def ask(cls: Any, broker_url: str, *args: Any, **kwargs: Any) -> Any:
        if urlsplit(broker_url).scheme in TRANSPORTS:
            return LanesBroker(app)
        return ask_others(cls, broker_url, *args, **kwargs)

    broker.Broker.__new__ = ask

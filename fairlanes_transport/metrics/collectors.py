"""The collectors: what Prometheus gets to read.

::

    from prometheus_client import REGISTRY
    from fairlanes_transport.metrics import LanesCollector

    REGISTRY.register(LanesCollector("fairlanes://localhost"))     # or LanesCollector(app)

``fairlanes exporter`` serves the same.  A scrape is bounded in work and in time, whatever the queues hold, and so
is the number of series: of each queue the `top` longest lanes are named, all others are summed up under the lane
`families.REST`.  A broker that does not answer is ``fairlanes_up 0``, no error.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from time import monotonic
from typing import Any, Final

from prometheus_client.core import GaugeMetricFamily, Metric

from ..errors import FairlanesError, OptionError, QueueAbsent, connection_errors
from ..lanes.api import Lanes
from ..lanes.meter import Meter
from .families import Families, label

logger = logging.getLogger(__name__)

#: Seconds after which a scrape starts nothing more; Prometheus gives up after 10 by default.
SCRAPE_SECONDS: Final = 5.0
#: Seconds that the collector's own connections wait, if the options do not say otherwise.
_SOCKET_SECONDS: Final = 2.0
_FAILURES: Final[tuple[type[Exception], ...]] = (FairlanesError, *connection_errors)


class LanesCollector:
    """What a broker's queues and their lanes look like, read at each scrape.

    Args:
        broker: a URL, a Celery app, a kombu connection, or what runs commands, as for `Lanes`.
        queues: which; None: all durable ones that there are at the time of the scrape.
        top: lanes to name of each queue.
        timeout: seconds after which a scrape starts nothing more.
        options: as ``broker_transport_options``.

    Raises:
        OptionError: an option, or the URL, cannot be used.
    """

    def __init__(
        self, broker: Any, queues: Sequence[str] | None = None, top: int = 20, *,
        timeout: float = SCRAPE_SECONDS, **options: Any,
    ) -> None:  # fmt: skip
        if not 0 <= top <= 1000:
            raise OptionError(f"top is a number of lanes from 0 to 1000, not {top!r}")
        if isinstance(broker, str):
            options = {"socket_timeout": _SOCKET_SECONDS, "socket_connect_timeout": _SOCKET_SECONDS, **options}
            _check(broker, options)
        self._broker, self._options = broker, options
        self._queues, self._top, self._timeout = queues, top, timeout
        self._lanes: Lanes | None = None
        self._meters: dict[str, Meter] = {}
        self._lock = threading.Lock()
        self._failing = False

    def describe(self) -> Iterator[Metric]:
        """The families, for the registry; asks no broker."""
        yield from Families().all()

    def collect(self) -> Iterator[Metric]:
        """Read everything now; one thread at a time."""
        families = Families()
        with self._lock:
            began = monotonic()
            try:
                families.left_out.add_metric((), self._read(families, began + self._timeout))
            except _FAILURES as exc:
                if isinstance(exc, OptionError):
                    raise
                if not self._failing:
                    logger.warning("the broker cannot be read: %s", exc)
                families, self._failing = Families(), True
            else:
                self._failing = False
            families.up.add_metric((), 0 if self._failing else 1)
            families.seconds.add_metric((), monotonic() - began)
        yield from families.all()

    def _read(self, families: Families, until: float) -> int:
        """Read all queues; returns how many had to be left out."""
        if self._lanes is None:
            self._lanes = Lanes(self._broker, **self._options)
        names = list(self._queues) if self._queues is not None else self._lanes.queues()
        self._meters = {name: self._meters.get(name) or Meter(self._lanes, name, self._top) for name in names}
        for i, (name, meter) in enumerate(self._meters.items()):
            if monotonic() > until:
                return len(self._meters) - i
            try:
                families.add(name, meter.read(until))
            except QueueAbsent:
                continue
        return 0


class WorkerCollector:
    """Whether the workers of this process consume: for a worker's main process.

    ``fairlanes_worker_claim_age_seconds`` is the time since the worker last tried to claim from a queue.  An idle
    worker tries once per ``park_seconds``, a busy one when it has room: old while ``fairlanes_worker_room`` is
    not 0 means that it has stopped.
    """

    def describe(self) -> Iterator[Metric]:
        """The families, for the registry."""
        yield from self._families()

    def collect(self) -> Iterator[Metric]:
        """Read now; asks no broker."""
        from .. import control

        age, room = self._families()
        for name, metronome in control.metronomes():
            for queue, seconds, credit in metronome.attention():
                age.add_metric((name, label(queue)), seconds)
                room.add_metric((name, label(queue)), credit)
        yield age
        yield room

    @staticmethod
    def _families() -> tuple[GaugeMetricFamily, GaugeMetricFamily]:
        labels = ("worker", "queue")
        return (
            GaugeMetricFamily(
                "fairlanes_worker_claim_age_seconds", "Since the worker last tried to claim.", labels=labels
            ),
            GaugeMetricFamily("fairlanes_worker_room", "Messages that the worker would take now.", labels=labels),
        )


def _check(url: str, options: dict[str, Any]) -> None:
    from ..addresses import Address
    from ..options import Options

    Address.all_from_url(url, Options.from_transport_options(options))

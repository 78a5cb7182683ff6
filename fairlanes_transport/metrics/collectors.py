"""The collectors: what Prometheus gets to read.

::

    from prometheus_client import REGISTRY
    from fairlanes_transport.metrics import LanesCollector

    REGISTRY.register(LanesCollector("fairlanes://localhost"))     # or LanesCollector(app)

``fairlanes exporter`` serves the same.  A scrape is bounded in work and in time, whatever the queues hold, and so
is the number of series: of each queue the `top` longest lanes are named, all others are summed up under the lane
`families.REST`; queues and named lanes are capped.  One reading serves all scrapes of a second.  A broker that does
not answer is ``fairlanes_up 0``, no error.
"""

from __future__ import annotations

import logging
import math
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
#: Seconds that one reading serves all scrapes.
FRESH_SECONDS: Final = 1.0
#: Queues that are read, and lanes that are named in all of them together.
MAX_QUEUES: Final = 500
MAX_LANES: Final = 2000
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
        fresh_seconds: how long one reading serves all scrapes.
        max_queues: that are read, where `queues` does not name them: the first ones by name.
        max_lanes: that are named, in all queues together.
        options: as ``broker_transport_options``.

    Raises:
        OptionError: an option, or the URL, cannot be used.
    """

    def __init__(
        self, broker: Any, queues: Sequence[str] | None = None, top: int = 20, *,
        timeout: float = SCRAPE_SECONDS, fresh_seconds: float = FRESH_SECONDS, max_queues: int = MAX_QUEUES,
        max_lanes: int = MAX_LANES, **options: Any,
    ) -> None:  # fmt: skip
        if not 0 <= top <= 1000:
            raise OptionError(f"top is a number of lanes from 0 to 1000, not {top!r}")
        if isinstance(broker, str):
            options = {"socket_timeout": _SOCKET_SECONDS, "socket_connect_timeout": _SOCKET_SECONDS, **options}
            _check(broker, options)
        self._broker, self._options = broker, options
        self._queues, self._top, self._timeout = queues, top, timeout
        self._fresh_seconds, self._max_queues, self._max_lanes = fresh_seconds, max_queues, max_lanes
        self._made: list[Metric] = []
        self._made_at = -math.inf
        self._lanes: Lanes | None = None
        self._meters: dict[str, Meter] = {}
        self._lock = threading.Lock()
        self._failing = self._leaving_out = False

    def describe(self) -> Iterator[Metric]:
        """The families, for the registry; asks no broker."""
        yield from Families().all()

    def collect(self) -> Iterator[Metric]:
        """Read everything, one thread at a time, or give what was read a moment ago."""
        with self._lock:
            if monotonic() - self._made_at >= self._fresh_seconds:
                self._made = list(self._collect().all())
                self._made_at = monotonic()
            made = self._made
        yield from made

    def _collect(self) -> Families:
        families = Families()
        began = monotonic()
        try:
            self._read(families, began + self._timeout)
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
        return families

    def _read(self, families: Families, until: float) -> None:
        """Read all queues, and count what had to be left out."""
        if self._lanes is None:
            self._lanes = Lanes(self._broker, **self._options)
        every = self._lanes.queues() if self._queues is None else list(self._queues)
        names = every[: self._max_queues] if self._queues is None else every
        self._meters = {name: self._meters.get(name) or Meter(self._lanes, name, self._top) for name in names}
        lanes_each = self._max_lanes // max(1, len(names))
        queues, lanes = len(every) - len(names), 0
        for i, (name, meter) in enumerate(self._meters.items()):
            if monotonic() > until:
                queues += len(self._meters) - i
                break
            try:
                reading = meter.read(until)
            except QueueAbsent:
                continue
            lanes += max(0, len(reading.lanes) - lanes_each)
            families.add(name, reading.shortened(lanes_each))
        families.left_out.add_metric((), queues)
        families.lanes_left_out.add_metric((), lanes)
        self._tell(queues, lanes)

    def _tell(self, queues: int, lanes: int) -> None:
        """Log once, until nothing is left out again, that something is."""
        if (queues or lanes) and not self._leaving_out:
            logger.warning(
                "%s queues and %s lanes are left out: at most %s queues are read and %s lanes named, in %s seconds",
                queues, lanes, self._max_queues, self._max_lanes, self._timeout,
            )  # fmt: skip
        self._leaving_out = bool(queues or lanes)


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

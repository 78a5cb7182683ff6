"""Metrics for Prometheus: collectors to mount (extra ``metrics``).

::

    from prometheus_client import REGISTRY
    from fairlanes_transport.metrics import LanesCollector

    REGISTRY.register(LanesCollector("fairlanes://localhost"))     # or LanesCollector(app)

``fairlanes exporter`` serves the same.  A scrape is bounded in work and in time, whatever the queues hold, and so
is the number of series: of each queue the `top` longest lanes are named, all others are summed up under the lane
`REST`.  A broker that does not answer is ``fairlanes_up 0``, no error.
"""

from __future__ import annotations

import logging
import math
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from time import monotonic
from typing import Any, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from .errors import FairlanesError, OptionError, QueueAbsent, connection_errors
from .lanes import Lanes
from .meter import WAIT_BOUNDS, Meter, Reading

logger = logging.getLogger(__name__)

#: Lane label of all lanes that are not named.
REST: Final = "(rest)"
#: Seconds after which a scrape starts nothing more; Prometheus gives up after 10 by default.
SCRAPE_SECONDS: Final = 5.0
#: Seconds that the collector's own connections wait, if the options do not say otherwise.
_SOCKET_SECONDS: Final = 2.0

#: Counter -> field of the queue's totals, and what it counts.
TOTALS: Final = {
    "enqueued": "Messages published.",
    "claimed": "Claims by workers; a message that comes back is claimed again.",
    "acked": "Messages finished.",
    "released": "Messages handed back unstarted.",
    "rejected": "Failures told by workers: reject, with or without requeue.",
    "expired": "Leases that ran out: workers that died, or were cut off.",
    "died": "Messages that became dead letters.",
    "redriven": "Dead letters made ready again.",
    "trimmed": "Dead letters dropped by number or age.",
    "purged": "Messages purged.",
    "cancelled": "Messages cancelled.",
    "freed": "Running slots whose worker died.",
}
#: Gauges of a queue: name -> what it is.
_QUEUE: Final = {
    "queue_ready": "Messages that wait in lanes.",
    "queue_in_flight": "Messages that workers hold, and running slots.",
    "queue_running_slots": "Of those in flight: tasks that still run after an early ack.",
    "queue_delayed": "Messages that are due later, backoff included.",
    "queue_dead": "Dead letters.",
    "queue_work": "Ready and in flight: what an autoscaler follows.",
    "queue_paused": "1: nothing is claimed.",
    "queue_lanes": "Lanes with ready messages or messages in flight.",
    "queue_lanes_servable": "Lanes that can be served now.",
    "queue_oldest_wait_seconds": "Longest wait of the next message of any lane that is not paused.",
    "queue_worst_wait_seconds": "Computed: until a message is claimed that a new lane of default weight gets now.",
}
#: Gauges of a lane.
_LANE: Final = {
    "lane_ready": "Messages that wait in the lane.",
    "lane_in_flight": "Messages of the lane that workers hold, and running slots.",
    "lane_oldest_wait_seconds": "Wait of the lane's next message; of the rest the longest, paused lanes apart.",
    "lane_worst_wait_seconds": "Computed: until a message is claimed that the lane gets now.",
    "lane_weight": "Weight in force.",
    "lane_limit": "Limit in force; absent: none.",
    "lane_paused": "1: nothing of the lane is claimed.",
    "lane_share": "Part of the queue that is due to the lane by its weight, among those that contend now.",
    "lane_delayed": "Delayed messages of the lanes that have most; of the next 5000.",
    "lane_dead": "Dead letters of the lanes that have most; of the newest 5000.",
}
_SERVED: Final = "Messages that have left the lane since it is among those named, at least."


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
        yield from _Families().all()

    def collect(self) -> Iterator[Metric]:
        """Read everything now; one thread at a time."""
        families = _Families()
        with self._lock:
            began = monotonic()
            try:
                families.left_out.add_metric((), self._read(families, began + self._timeout))
            except (FairlanesError, *connection_errors) as exc:
                if isinstance(exc, OptionError):
                    raise
                if not self._failing:
                    logger.warning("the broker cannot be read: %s", exc)
                families, self._failing = _Families(), True
            else:
                self._failing = False
            families.up.add_metric((), 0 if self._failing else 1)
            families.seconds.add_metric((), monotonic() - began)
        yield from families.all()

    def _read(self, families: _Families, until: float) -> int:
        """Read all queues; returns how many had to be left out."""
        if self._lanes is None:
            self._lanes = Lanes(self._broker, **self._options)
        names = list(self._queues) if self._queues is not None else self._lanes.queues()
        self._meters = {
            name: self._meters.get(name) or Meter(self._lanes, name, self._top) for name in names
        }
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
        from . import control

        age, room = self._families()
        for name, metronome in control.metronomes():
            for queue, seconds, credit in metronome.attention():
                age.add_metric((name, _label(queue)), seconds)
                room.add_metric((name, _label(queue)), credit)
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
    from .addresses import Address
    from .options import Options

    Address.all_from_url(url, Options.from_transport_options(options))


def _label(name: str) -> str:
    """A name as a label's value: what is no UTF-8 is escaped."""
    return name.encode("utf-8", "backslashreplace").decode("utf-8")


class _Families:
    """The families of one scrape."""

    def __init__(self) -> None:
        def gauges(kinds: dict[str, str], *labels: str) -> dict[str, GaugeMetricFamily]:
            return {
                name: GaugeMetricFamily(f"fairlanes_{name}", text, labels=labels) for name, text in kinds.items()
            }

        self.up = GaugeMetricFamily("fairlanes_up", "1: the broker was read.", labels=())
        self.seconds = GaugeMetricFamily("fairlanes_scrape_seconds", "Time that this scrape took.", labels=())
        self.left_out = GaugeMetricFamily(
            "fairlanes_scrape_queues_left_out", "Queues for which this scrape had no time.", labels=()
        )
        self.queue = gauges(_QUEUE, "queue")
        self.lane = gauges(_LANE, "queue", "lane")
        self.totals = {
            name: CounterMetricFamily(f"fairlanes_{name}", text, labels=("queue",)) for name, text in TOTALS.items()
        }
        self.served = CounterMetricFamily("fairlanes_lane_served", _SERVED, labels=("queue", "lane"))
        self.waits = HistogramMetricFamily(
            "fairlanes_wait_seconds",
            "Time from a message's publication to its first claim; without those that have an eta.",
            labels=("queue",),
        )

    def all(self) -> Iterable[Metric]:
        """Every family."""
        yield from (self.up, self.seconds, self.left_out)
        yield from (*self.queue.values(), *self.totals.values(), self.waits)
        yield from (*self.lane.values(), self.served)

    def add(self, queue: str, reading: Reading) -> None:
        """Take in a queue."""
        queue = _label(queue)
        self._add_queue(queue, reading)
        for lane in reading.lanes:
            self._add_lane(queue, lane.stats.lane, lane)
'''

"""The metric families: their names, what each is, and how a reading fills them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from ..lanes.meter import WAIT_BOUNDS, LaneReading, Reading
from ..lanes.views import QueueStats

#: Lane label of all lanes that are not named.
REST: Final = "(rest)"

#: Counter -> field of the queue's totals, and what it counts.
TOTALS: Final = {
    "enqueued": "Messages published.",
    "repeated": "Publications of a message that was there already: nothing was done.",
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
    "moved_in": "Messages moved here from another queue.",
    "moved_out": "Messages moved to another queue.",
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


def label(name: str) -> str:
    """A name as a label's value: what is no UTF-8 is escaped."""
    return name.encode("utf-8", "backslashreplace").decode("utf-8")


class Families:
    """The families of one scrape."""

    def __init__(self) -> None:
        def gauges(kinds: dict[str, str], *labels: str) -> dict[str, GaugeMetricFamily]:
            return {name: GaugeMetricFamily(f"fairlanes_{name}", text, labels=labels) for name, text in kinds.items()}

        self.up = GaugeMetricFamily("fairlanes_up", "1: the broker was read.", labels=())
        self.seconds = GaugeMetricFamily("fairlanes_scrape_seconds", "Time that this scrape took.", labels=())
        self.left_out = GaugeMetricFamily(
            "fairlanes_scrape_queues_left_out",
            "Queues beyond the cap, or for which this scrape had no time.",
            labels=(),
        )
        self.lanes_left_out = GaugeMetricFamily(
            "fairlanes_scrape_lanes_left_out",
            "Lanes that are not named, as the cap of all queues is reached.",
            labels=(),
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
        yield from (self.up, self.seconds, self.left_out, self.lanes_left_out)
        yield from (*self.queue.values(), *self.totals.values(), self.waits)
        yield from (*self.lane.values(), self.served)

    def add(self, queue: str, reading: Reading) -> None:
        """Take in a queue."""
        name = label(queue)
        self._add_queue(name, reading)
        # Two odd names may look the same as labels: the second goes to the rest, or the scrape would be refused.
        lanes = {label(lane.stats.lane): lane for lane in reversed(reading.lanes)}
        lanes.pop(REST, None)
        for lane in reversed(lanes):
            self._add_lane((name, lane), lanes[lane])
        self._add_rest((name, REST), reading, list(lanes.values()))
        for family, total, by_lane in (
            ("lane_delayed", reading.queue.delayed, reading.delayed),
            ("lane_dead", reading.queue.dead, reading.dead),
        ):
            self._add_split(family, name, total, by_lane)

    def _add_queue(self, name: str, reading: Reading) -> None:
        queue = reading.queue
        values = {
            "queue_ready": queue.ready,
            "queue_in_flight": queue.in_flight,
            "queue_running_slots": queue.running_slots,
            "queue_delayed": queue.delayed,
            "queue_dead": queue.dead,
            "queue_work": queue.backlog,
            "queue_paused": int(queue.paused),
            "queue_lanes": queue.lanes,
            "queue_lanes_servable": queue.lanes_servable,
            "queue_oldest_wait_seconds": reading.oldest_wait,
            "queue_worst_wait_seconds": reading.worst_wait,
        }
        for family, value in values.items():
            if value is not None:
                self.queue[family].add_metric((name,), value)
        for total, counter in self.totals.items():
            counter.add_metric((name,), queue.totals.get(total, 0))
        self.waits.add_metric((name,), buckets(queue), queue.totals.get("wait_ms", 0) / 1000)

    def _add_lane(self, labels: tuple[str, str], lane: LaneReading) -> None:
        stats = lane.stats
        values = {
            "lane_ready": stats.ready,
            "lane_in_flight": stats.in_flight,
            "lane_oldest_wait_seconds": stats.oldest_wait or 0,
            "lane_worst_wait_seconds": lane.worst_wait,
            "lane_weight": stats.weight,
            "lane_limit": stats.limit,
            "lane_paused": int(stats.paused),
            "lane_share": stats.share or 0,
        }
        for family, value in values.items():
            if value is not None:
                self.lane[family].add_metric(labels, value)
        self.served.add_metric(labels, lane.served)

    def _add_rest(self, labels: tuple[str, str], reading: Reading, named: list[LaneReading]) -> None:
        stats = [lane.stats for lane in named]
        contend = any(lane.share for lane in stats) or reading.rest_oldest_wait
        values = {
            "lane_ready": reading.queue.ready - sum(lane.ready for lane in stats),
            "lane_in_flight": reading.queue.in_flight - sum(lane.in_flight for lane in stats),
            "lane_oldest_wait_seconds": reading.rest_oldest_wait,
            "lane_share": round(1 - sum(lane.share or 0 for lane in stats), 9) if contend else 0,
        }
        for family, value in values.items():
            # The queue and its lanes are not read at one moment.
            self.lane[family].add_metric(labels, max(0, value))

    def _add_split(self, family: str, name: str, total: int, by_lane: Mapping[str, int]) -> None:
        lanes = {label(lane): count for lane, count in reversed(list(by_lane.items()))}
        lanes.pop(REST, None)
        for lane, count in lanes.items():
            self.lane[family].add_metric((name, lane), count)
        self.lane[family].add_metric((name, REST), max(0, total - sum(lanes.values())))


def buckets(queue: QueueStats) -> list[tuple[str, float]]:
    """The histogram of waits as Prometheus has it: (upper bound in seconds, waits up to it)."""
    made: list[tuple[str, float]] = []
    count = 0
    for bound in WAIT_BOUNDS:
        count += queue.totals.get(f"wait_le_{bound}", 0)
        made.append((str(bound / 1000), count))
    return [*made, ("+Inf", count + queue.totals.get("wait_le_inf", 0))]

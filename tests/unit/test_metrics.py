"""The collectors and ``fairlanes exporter``: what is exposed, how much of it, and what a dead broker does."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from fairlanes_transport.cli import fairlanes
from fairlanes_transport.errors import OptionError
from fairlanes_transport.metrics import REST, LanesCollector
from fairlanes_transport.metrics.families import TOTALS
from tests.harness import Server, wait_for
from tests.unit.rig import Rig, bury

CLOSED = "fairlanes://127.0.0.1:1/0"


class Scrape:
    """What one scrape said, parsed by Prometheus' own parser."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.samples: dict[tuple[str, str, str], float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                rest = {k: v for k, v in sample.labels.items() if k not in ("queue", "lane")}
                name = sample.name.removeprefix("fairlanes_") + "".join(f"{{{v}}}" for v in rest.values())
                key = (name, sample.labels.get("queue", ""), sample.labels.get("lane", ""))
                assert key not in self.samples, "one series twice: Prometheus refuses the scrape"
                self.samples[key] = sample.value

    def __call__(self, name: str, queue: str = "q", lane: str = "") -> float | None:
        return self.samples.get((name, queue, lane))

    def lanes(self, name: str, queue: str = "q") -> dict[str, float]:
        """Lane -> value."""
        return {lane: v for (n, q, lane), v in self.samples.items() if (n, q) == (name, queue)}


def scraper(broker: Any, *args: Any, **options: Any) -> Callable[[], Scrape]:
    """A registry with a collector on it; each call scrapes."""
    registry = CollectorRegistry(auto_describe=True)
    registry.register(LanesCollector(broker, *args, **options))
    return lambda: Scrape(generate_latest(registry).decode())


def fill(rig: Rig, **lanes: int) -> None:
    for lane, n in lanes.items():
        for i in range(n):
            rig.send(f"{lane}{i}", lane)


def test_a_queue(rig: Rig) -> None:
    fill(rig, a=3, b=2)
    bury(rig, "c", 1)
    fill(rig, a=3, b=2)
    rig.send("t", "a", due_ms=rig.later())
    (claimed,) = rig.store.claim("q", 1, 60_000).claimed
    rig.store.ack("q", [claimed.fence])
    rig.store.claim("q", 1, 60_000)
    scrape = scraper(rig.link)()
    assert (scrape("up", ""), scrape("scrape_queues_left_out", "")) == (1, 0)
    wanted = {"ready": 3, "in_flight": 1, "delayed": 1, "dead": 6, "work": 4, "paused": 0, "lanes": 2}
    assert {name: scrape(f"queue_{name}") for name in wanted} == wanted
    totals = {"enqueued": 12, "claimed": 8, "acked": 1, "rejected": 6, "died": 6, "expired": 0}
    assert {name: scrape(f"{name}_total") for name in totals} == totals
    assert (scrape("wait_seconds_count"), scrape("wait_seconds_bucket{+Inf}")) == (8, 8)


def test_the_histogram_is_cumulative(rig: Rig) -> None:
    rig.client.hset(
        "fairlanes:2:{q}:totals", mapping={"wait_le_50": 2, "wait_le_1000": 3, "wait_le_inf": 1, "wait_ms": 9_000_000}
    )
    scrape = scraper(rig.link)()
    seen = [scrape(f"wait_seconds_bucket{{{le}}}") for le in ("0.05", "0.5", "1.0", "1800.0", "+Inf")]
    assert seen == [2, 2, 5, 5, 6]
    assert (scrape("wait_seconds_sum"), scrape("wait_seconds_count")) == (9000, 6)


def test_lanes_beyond_the_top_are_summed_up(rig: Rig) -> None:
    fill(rig, a=1, b=5, c=3, d=2)
    rig.lanes.set("q", "b", weight=2, limit=9)
    scrape = scraper(rig.link, top=2)()
    assert scrape.lanes("lane_ready") == {"b": 5, "c": 3, REST: 3}
    assert scrape.lanes("lane_in_flight") == {"b": 0, "c": 0, REST: 0}
    assert scrape.lanes("lane_share") == {"b": 2 / 5, "c": 1 / 5, REST: pytest.approx(2 / 5)}
    assert (scrape.lanes("lane_weight"), scrape.lanes("lane_limit")) == ({"b": 2, "c": 1}, {"b": 9})
    assert scrape.lanes("lane_served_total") == {"b": 0, "c": 0}


def test_the_number_of_series_does_not_grow_with_the_lanes(rig: Rig) -> None:
    scrape = scraper(rig.link, top=3)
    fill(rig, **{f"lane{i}": 1 for i in range(10)})
    bury(rig, "x", 1)
    fill(rig, **{f"lane{i}": 1 for i in range(10)})
    few = len(scrape().samples)
    fill(rig, **{f"lane{i}": 2 for i in range(10, 60)})
    assert len(scrape().samples) == few


def test_only_the_queues_named(rig: Rig) -> None:
    rig.lanes.declare("other")
    queues = {queue for _, queue, _ in scraper(rig.link)().samples if queue}
    assert queues == {"q", "other"}
    # One that does not exist is no error: it may come.
    scrape = scraper(rig.link, ["other", "absent"])
    assert {queue for _, queue, _ in scrape().samples if queue} == {"other"}
    rig.lanes.declare("absent")
    assert {queue for _, queue, _ in scrape().samples if queue} == {"other", "absent"}


@pytest.mark.parametrize("names", [[REST, "a"], ['a"b\\c\nd', "x" * 256], ["a\udcff", "a\\udcff", "é"]])
def test_any_name_makes_a_valid_scrape(rig: Rig, names: list[str]) -> None:
    for i, name in enumerate(names):
        rig.store.enqueue("q", f"t{i}", name.encode("utf-8", "surrogateescape"), "{}", b"")  # type: ignore[arg-type]
    registry = CollectorRegistry()
    registry.register(LanesCollector(rig.link))
    scrape = Scrape(generate_latest(registry).decode())
    assert sum(scrape.lanes("lane_ready").values()) == len(names)
    assert generate_openmetrics(registry).endswith(b"# EOF\n")


def test_a_scrape_that_is_out_of_time_leaves_queues_out(rig: Rig) -> None:
    for i in range(4):
        rig.lanes.declare(f"q{i}")
    assert scraper(rig.link, timeout=0)()("scrape_queues_left_out", "") == 5


def test_every_total_is_exposed() -> None:
    lua = Path(__file__).parents[2] / "fairlanes_transport/lua"
    counted = {name for file in lua.rglob("*.lua") for name in re.findall(r"\bcount\('(\w+)'", file.read_text())}
    assert counted <= set(TOTALS)


# brokers that fail


def test_a_dead_broker_is_not_up_and_no_error(fresh_server: Callable[..., Server]) -> None:
    server = fresh_server()
    scrape = scraper(server.url("fairlanes"))
    Rig(server.client()).close()
    assert scrape()("up", "") == 1
    server.stop(signal.SIGKILL)
    dead = scrape()
    assert {key: v for key, v in dead.samples.items() if key[0] != "scrape_seconds"} == {("up", "", ""): 0}
    server.start()
    assert scrape()("up", "") == 1


def test_a_frozen_broker_costs_a_bounded_time(fresh_server: Callable[..., Server]) -> None:
    server = fresh_server()
    scrape = scraper(server.url("fairlanes"))
    assert scrape()("up", "") == 1
    assert server._process is not None
    os.kill(server._process.pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        assert scrape()("up", "") == 0
        assert time.monotonic() - began < 8
    finally:
        os.kill(server._process.pid, signal.SIGCONT)


def test_registering_asks_no_broker_and_no_secret_is_told(caplog: pytest.LogCaptureFixture) -> None:
    scrape = scraper("fairlanes://user:s3cret@127.0.0.1:1/0")
    assert scrape()("up", "") == 0
    scrape()
    assert len(caplog.records) == 1, "once per outage"
    assert "s3cret" not in scrape().text + caplog.text


def test_wrong_arguments() -> None:
    with pytest.raises(OptionError):
        LanesCollector("fairlanes://localhost", top=-1)
    with pytest.raises(OptionError):
        LanesCollector("amqp://localhost")
    with pytest.raises(OptionError):
        LanesCollector("fairlanes://localhost", lease_secs=3)


# the command


@pytest.fixture
def exporter(server: Server) -> Iterator[Callable[..., str]]:
    """A function that starts ``fairlanes exporter`` and returns its URL."""
    processes: list[subprocess.Popen[str]] = []

    def start(*args: str, url: str | None = None) -> str:
        command = [sys.executable, "-m", "fairlanes_transport.cli", "-b", url or server.url("fairlanes"), "exporter"]
        process = subprocess.Popen(
            [*command, "--port", "0", "--host", "127.0.0.1", *args], stdout=subprocess.PIPE, text=True
        )
        processes.append(process)
        assert process.stdout is not None
        line = process.stdout.readline()
        return line.split()[-1]

    yield start
    for process in processes:
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
        assert process.stdout is not None
        process.stdout.close()


def get(url: str) -> Scrape:
    with urllib.request.urlopen(url, timeout=10) as response:
        return Scrape(response.read().decode())


def test_the_exporter_serves(server: Server, exporter: Callable[..., str]) -> None:
    rig = Rig(server.client())
    fill(rig, a=3, b=2)
    url = exporter("--queue", "q", "--top", "1")
    assert get(url).lanes("lane_ready") == {"a": 3, REST: 2}
    rig.lanes.pause("q")
    wait_for(lambda: get(url)("queue_paused") == 1, 5, "the pause")
    rig.close()


def test_the_exporter_starts_without_a_broker(exporter: Callable[..., str]) -> None:
    assert get(exporter(url=CLOSED))("up", "") == 0


def test_a_port_in_use_is_an_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        args = ["-b", CLOSED, "exporter", "--host", "127.0.0.1", "--port", str(taken.getsockname()[1])]
        result = CliRunner().invoke(fairlanes, args)
    assert result.exit_code == 1
    assert "cannot listen" in result.output


def test_a_wrong_url_is_a_usage_error() -> None:
    assert CliRunner().invoke(fairlanes, ["-b", "amqp://x", "exporter"]).exit_code == 2


def test_without_the_extra_it_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['prometheus_client'] = None\n"
        f"sys.argv = ['fairlanes', '-b', '{CLOSED}', 'exporter']\n"
        "from fairlanes_transport.cli import main; main()"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert "pip install 'fairlanes-transport[metrics]'" in ran.stderr

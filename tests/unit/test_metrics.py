"""The collectors and ``fairlanes exporter``: what is exposed, how much of it, and what a dead broker does."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
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
from fairlanes_transport.metrics.server import MetricsServer, tls_context
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
    registry.register(LanesCollector(broker, *args, **{"fresh_seconds": 0, **options}))
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


class Counting:
    """A broker that counts the commands that it runs."""

    def __init__(self, link: Any) -> None:
        self.link, self.count = link, 0

    def call(self, *args: Any) -> Any:
        self.count += 1
        return self.link.call(*args)

    def pipeline(self, commands: Any, **options: Any) -> Any:
        self.count += 1
        return self.link.pipeline(commands, **options)


def test_one_reading_serves_all_scrapes_of_a_moment(rig: Rig) -> None:
    fill(rig, a=3)
    broker = Counting(rig.link)
    scrape = scraper(broker, fresh_seconds=3600)
    with ThreadPoolExecutor(8) as pool:
        pages = [page.text for page in pool.map(lambda _: scrape(), range(40))]
    assert len(set(pages)) == 1
    once = broker.count
    scrape()
    assert broker.count == once
    fresh = scraper(broker, fresh_seconds=0)
    fresh()
    fresh()
    assert broker.count >= 2 * once


def test_queues_and_lanes_are_capped_and_it_is_said_once(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("q1", "q2", "q3"):
        rig.lanes.declare(name)
    fill(rig, a=4, b=3, c=2)
    rig.send("t", "d", due_ms=rig.later())
    scrape = scraper(rig.link, max_queues=2, max_lanes=4)
    page = scrape()
    assert {queue for _, queue, _ in page.samples if queue} == {"q", "q1"}
    assert (page("scrape_queues_left_out", ""), page("scrape_lanes_left_out", "")) == (2, 1)
    assert page.lanes("lane_ready") == {"a": 4, "b": 3, REST: 2}
    assert page.lanes("lane_oldest_wait_seconds")[REST] > 0
    scrape()
    (record,) = caplog.records
    assert "2 queues and 1 lanes are left out: at most 2 queues are read and 4 lanes named" in record.getMessage()
    # Who names queues has them all.
    assert scraper(rig.link, ["q", "q1", "q2", "q3"], max_queues=2)()("scrape_queues_left_out", "") == 0


def test_three_thousand_queues_are_a_bounded_page(rig: Rig) -> None:
    for i in range(60):
        rig.lanes.declare(f"q{i:02}")
    few = len(scraper(rig.link, max_queues=20)().samples)
    for i in range(60, 120):
        rig.lanes.declare(f"q{i:02}")
    assert len(scraper(rig.link, max_queues=20)().samples) == few


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
        process = subprocess.Popen([*command, "--port", "0", *args], stdout=subprocess.PIPE, text=True)
        processes.append(process)
        start.pid = process.pid  # type: ignore[attr-defined]
        assert process.stdout is not None
        line = process.stdout.readline()
        return line.split()[-1]

    yield start
    for process in processes:
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
        assert process.stdout is not None
        process.stdout.close()


def get(url: str, context: ssl.SSLContext | None = None) -> Scrape:
    with urllib.request.urlopen(url, timeout=10, context=context) as response:
        return Scrape(response.read().decode())


def test_the_exporter_serves(server: Server, exporter: Callable[..., str]) -> None:
    rig = Rig(server.client())
    fill(rig, a=3, b=2)
    url = exporter("--queue", "q", "--top", "1")
    assert get(url).lanes("lane_ready") == {"a": 3, REST: 2}
    rig.lanes.pause("q")
    wait_for(lambda: get(url)("queue_paused") == 1, 5, "the pause")
    rig.close()


def test_the_exporter_is_for_this_machine_unless_told_otherwise(exporter: Callable[..., str]) -> None:
    assert exporter(url=CLOSED).startswith("http://127.0.0.1:")
    everywhere = exporter("--host", "0.0.0.0", url=CLOSED)
    assert everywhere.startswith("http://0.0.0.0:")
    assert get(everywhere)("up", "") == 0


def threads(pid: int) -> int:
    """The number of threads of a process."""
    status = Path(f"/proc/{pid}/status").read_text("utf-8")
    return int(re.findall(r"^Threads:\s+(\d+)", status, re.MULTILINE)[0])


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_slow_clients_are_few_threads_and_go(exporter: Callable[..., str]) -> None:
    url = exporter(url=CLOSED)
    port = int(url.split(":")[2].split("/")[0])
    clients = [socket.create_connection(("127.0.0.1", port), timeout=10) for _ in range(1000)]
    try:
        for client in clients[::100]:
            with contextlib.suppress(OSError):
                client.sendall(b"GET /metr")
        assert threads(exporter.pid) < 80  # type: ignore[attr-defined]

        def answers() -> bool:
            with contextlib.suppress(OSError):
                return get(url)("up", "") == 0
            return False

        wait_for(answers, 30, "a scrape, once the silent ones are hung up on")
        wait_for(lambda: threads(exporter.pid) < 10, 30, "the threads end")  # type: ignore[attr-defined]
    finally:
        for client in clients:
            client.close()


@pytest.mark.parametrize("encrypted", [False, True])
def test_a_visit_ends_however_slowly_it_goes_on(encrypted: bool, certificates: Path) -> None:
    files = (str(certificates / "server.crt"), str(certificates / "server.key"), None)
    context = tls_context(*files) if encrypted else None
    server = MetricsServer("127.0.0.1", 0, CollectorRegistry(), context, visit_seconds=0.5)
    server.start()
    sent = 0
    try:
        with socket.create_connection(("127.0.0.1", server.server_port), timeout=20) as client:
            client.settimeout(0.1)
            with contextlib.suppress(OSError):
                while sent < 150:
                    with contextlib.suppress(TimeoutError):
                        if client.recv(100) == b"":
                            break
                    client.sendall(b"\x16" if encrypted and not sent else b"G")
                    sent += 1
    finally:
        server.close()
    assert sent < 150


def test_the_exporter_speaks_tls(exporter: Callable[..., str], certificates: Path) -> None:
    def file(name: str) -> str:
        return str(certificates / name)

    own = ("--tls-cert", file("server.crt"), "--tls-key", file("server.key"))
    url = exporter(*own, url=CLOSED)
    trusting = ssl.create_default_context(cafile=file("ca.crt"))
    assert url.startswith("https://")
    assert get(url, trusting)("up", "") == 0
    with pytest.raises(OSError, match="CERTIFICATE_VERIFY_FAILED"):
        get(url)
    asking = exporter(*own, "--tls-client-ca", file("ca.crt"), url=CLOSED)
    with pytest.raises(OSError):
        get(asking, trusting)
    trusting.load_cert_chain(file("client.crt"), file("client.key"))
    assert get(asking, trusting)("up", "") == 0


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (("--tls-key", "k"), "need --tls-cert"),
        (("--tls-cert", "/gone.crt"), "the certificate '/gone.crt' cannot be used"),
        (("--tls-cert", "{own}", "--tls-client-ca", "/gone.pem"), "the client CA '/gone.pem' cannot be used"),
    ],
)
def test_wrong_files_of_the_exporter_are_named(certificates: Path, args: tuple[str, ...], told: str) -> None:
    own = certificates / "both.pem"
    own.write_text((certificates / "server.crt").read_text() + (certificates / "server.key").read_text())
    result = CliRunner().invoke(fairlanes, ["-b", CLOSED, "exporter", *(arg.format(own=own) for arg in args)])
    assert result.exit_code == 2
    assert told in result.output


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

"""``fairlanes exporter``: the metrics over HTTP, for Prometheus."""

from __future__ import annotations

import signal
import threading

import click

from ..errors import OptionError
from .base import broker_of, broker_options, complete_queue, fail


@click.command("exporter")
@click.option("--port", type=click.IntRange(0, 65535), default=9808, show_default=True, help="0: any free one.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0: all.")
@click.option(
    "--queue", "queues", multiple=True, metavar="QUEUE", shell_complete=complete_queue,
    help="Only this queue; may be repeated. Otherwise all durable ones.",
)  # fmt: skip
@click.option(
    "--top", type=click.IntRange(0, 1000), default=20, show_default=True, metavar="K",
    help="Name the K longest lanes of each queue; the others are summed up.",
)  # fmt: skip
@click.option(
    "--max-queues", type=click.IntRange(1), default=500, show_default=True, metavar="N",
    help="Read at most so many queues, where --queue does not name them.",
)  # fmt: skip
@click.option(
    "--max-lanes", type=click.IntRange(0), default=2000, show_default=True, metavar="N",
    help="Name at most so many lanes, in all queues together.",
)  # fmt: skip
@click.option("--tls-cert", metavar="FILE", help="Certificate (PEM) to show: the page is served by HTTPS.")
@click.option("--tls-key", metavar="FILE", help="Its key, where it is not in the same file.")
@click.option("--tls-client-ca", metavar="FILE", help="Ask clients for a certificate by this authority (PEM).")
@broker_options
@click.pass_context
def exporter(
    ctx: click.Context, port: int, host: str, queues: tuple[str, ...], top: int, max_queues: int, max_lanes: int,
    tls_cert: str | None, tls_key: str | None, tls_client_ca: str | None,
) -> None:  # fmt: skip
    """Serve metrics of queues and lanes for Prometheus at /metrics, until interrupted.

    A broker that does not answer is fairlanes_up 0, and is asked again at the next scrape.
    """
    try:
        from prometheus_client import CollectorRegistry

        from ..metrics import LanesCollector
        from ..metrics.server import MetricsServer, tls_context
    except ModuleNotFoundError as exc:
        hint = "the exporter needs prometheus-client: pip install 'fairlanes-transport[metrics]'"
        raise click.ClickException(hint) from exc
    if tls_cert is None and (tls_key or tls_client_ca):
        raise click.UsageError("--tls-key and --tls-client-ca need --tls-cert")
    broker, options = broker_of(ctx)
    registry = CollectorRegistry()
    caps = {"max_queues": max_queues, "max_lanes": max_lanes}
    try:
        registry.register(LanesCollector(broker, queues or None, top, **caps, **options))
        context = None if tls_cert is None else tls_context(tls_cert, tls_key, tls_client_ca)
    except OptionError as exc:
        fail(exc)
    try:
        server = MetricsServer(host, port, registry, context)
    except OSError as exc:
        raise click.ClickException(f"cannot listen on {host}:{port}: {exc}") from exc
    done = threading.Event()
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda *_: done.set())
    server.start()
    click.echo(f"metrics at {server.url}")
    done.wait()
    server.close()

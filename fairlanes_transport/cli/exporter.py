"""``fairlanes exporter``: the metrics over HTTP, for Prometheus."""

from __future__ import annotations

import signal
import threading

import click

from ..errors import OptionError
from .base import broker_of, broker_options, complete_queue, fail


@click.command("exporter")
@click.option("--port", type=click.IntRange(0, 65535), default=9808, show_default=True, help="0: any free one.")
@click.option("--host", default="0.0.0.0", show_default=True, help="Address to listen on.")
@click.option(
    "--queue", "queues", multiple=True, metavar="QUEUE", shell_complete=complete_queue,
    help="Only this queue; may be repeated. Otherwise all durable ones.",
)  # fmt: skip
@click.option(
    "--top", type=click.IntRange(0, 1000), default=20, show_default=True, metavar="K",
    help="Name the K longest lanes of each queue; the others are summed up.",
)  # fmt: skip
@broker_options
@click.pass_context
def exporter(ctx: click.Context, port: int, host: str, queues: tuple[str, ...], top: int) -> None:
    """Serve metrics of queues and lanes for Prometheus at /metrics, until interrupted.

    A broker that does not answer is fairlanes_up 0, and is asked again at the next scrape.
    """
    try:
        from prometheus_client import CollectorRegistry, start_http_server

        from ..metrics import LanesCollector
    except ModuleNotFoundError as exc:
        hint = "the exporter needs prometheus-client: pip install 'fairlanes-transport[metrics]'"
        raise click.ClickException(hint) from exc
    broker, options = broker_of(ctx)
    registry = CollectorRegistry()
    try:
        registry.register(LanesCollector(broker, queues or None, top, **options))
    except OptionError as exc:
        fail(exc)
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as exc:
        raise click.ClickException(f"cannot listen on {host}:{port}: {exc}") from exc
    done = threading.Event()
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda *_: done.set())
    click.echo(f"metrics at http://{host}:{server.server_port}/metrics")
    done.wait()
    server.shutdown()
    server.server_close()
    thread.join(5)

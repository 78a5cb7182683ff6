"""``fairlanes drill``: the starvation drill, on your broker or on an embedded server.

One tenant floods a queue of the drill's own, others have a little to do, workers are killed as asked.  What happened
is held against the bounds of `fairlanes_transport.drill.figures`: the exit code says whether they hold.
"""

from __future__ import annotations

import contextlib
import json
import signal
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from fairlanes_transport.addresses import SCHEMES
from fairlanes_transport.drill.figures import judge
from fairlanes_transport.drill.run import FLOOD, Broker, Plan, run_drill
from fairlanes_transport.errors import OptionError
from fairlanes_transport.lanes.api import Lanes

from ..cli import base as cli

__all__ = ["drill"]

_OUR_SCHEME = {
    "tcp": "fairlanes",
    "tls": "fairlaness",
    "sentinel": "fairlanes-sentinel",
    "socket": "fairlanes-socket",
}


@contextlib.contextmanager
def _broker(ctx: click.Context, embedded: bool, control: bool) -> Iterator[Broker]:
    """The user's broker, or an embedded server."""
    given = None if embedded or control else _given(ctx)
    if given is not None:
        url, conf, options = given
        conf["broker_transport_options"] = {**(conf.get("broker_transport_options") or {}), **options}
        lanes = Lanes(url, **conf["broker_transport_options"])
        yield Broker(url, conf, lanes)
        return
    from fairlanes_transport.embedded import EmbeddedServer

    with EmbeddedServer() as server:
        url = server.url("redis" if control else "fairlanes")
        yield Broker(url, {}, None if control else Lanes(url))


def _given(ctx: click.Context) -> tuple[str, dict[str, Any], dict[str, Any]] | None:
    """URL, Celery settings and transport options of the broker that the user names; None: he names none."""
    try:
        broker, options = cli.broker_of(ctx)
    except click.UsageError:
        return None
    if isinstance(broker, str):
        return _our_url(broker), {}, options
    conf = {name: broker.conf[name] for name in ("broker_transport_options", "broker_use_ssl")}
    try:
        json.dumps(conf)
    except TypeError as exc:
        raise OptionError(f"the app's broker settings cannot be handed to the drill's workers: {exc}") from exc
    return _our_url(broker.conf.broker_write_url or broker.conf.broker_url), conf, options


def _our_url(given: str) -> str:
    """`given`, perhaps several by ``;``, with the schemes that lead to this transport."""
    made = []
    for url in given.split(";"):
        scheme, separator, rest = url.partition("://")
        made.append(f"{_OUR_SCHEME.get(SCHEMES.get(scheme, ''), scheme)}{separator}{rest}")
    return ";".join(made)


# ---------------------------------------------------------------- the command


def _pairs(
    convert: Callable[[str], Any], least: float
) -> Callable[[click.Context, click.Parameter, tuple[str, ...]], dict[str, Any]]:
    """Read options of the form ``TENANT=NUMBER``."""

    def read(ctx: click.Context, param: click.Parameter, given: tuple[str, ...]) -> dict[str, Any]:
        pairs = {}
        for text in given:
            tenant, _, number = text.rpartition("=")
            try:
                pairs[tenant] = convert(number)
            except ValueError:
                tenant = ""
            if not tenant or pairs[tenant] < least:
                raise click.BadParameter(f"{text!r} is not TENANT=NUMBER, {least:g} or more", ctx, param)
        return pairs

    return read


@contextlib.contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """Let SIGTERM clean up too."""

    def stop(signum: int, _frame: Any) -> None:
        raise SystemExit(128 + signum)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


_count = click.IntRange(1)
_positive = click.FloatRange(0, min_open=True)


@click.command("drill")
@click.option("--tenant", "tenants", multiple=True, default=Plan.tenants, show_default=True, help="A quiet tenant.")
@click.option("--flood", default=Plan.flood, show_default=True, type=_count, help="Tasks that the flood keeps waiting.")
@click.option(
    "--burst", default=Plan.burst, show_default=True, type=_count,
    help="Tasks of each quiet tenant that wait at the start, times its weight.",
)  # fmt: skip
@click.option("--seconds", default=Plan.seconds, show_default=True, type=_positive, help="How long they go on sending.")
@click.option(
    "--every", default=Plan.every, show_default=True, type=_positive, help="Seconds between two tasks of one."
)
@click.option("--task-ms", default=Plan.task_ms, show_default=True, type=float, help="How long a task takes.")
@click.option(
    "--weight", "weights", multiple=True, metavar="TENANT=W", callback=_pairs(float, 0.001), help="A lane's weight."
)
@click.option("--limit", "limits", multiple=True, metavar="TENANT=N", callback=_pairs(int, 1), help="A lane's limit.")
@click.option("--kill-every", default=0.0, metavar="SECONDS", type=click.FloatRange(0), help="Kill a worker so often.")
@click.option("--workers", default=1, show_default=True, type=_count, help="Workers.")
@click.option("-c", "--concurrency", default=2, show_default=True, type=_count, help="Processes of a worker.")
@click.option("--pool", default="prefork", show_default=True, help="Pool of the workers.")
@click.option("--prefetch-multiplier", "multiplier", default=1, show_default=True, type=_count, help="Of the workers.")
@click.option("--lease", type=_positive, metavar="SECONDS", help="Lease of the workers; 5 with --kill-every.")
@click.option("--queue", help="Name of the drill's queue, which must not exist.")
@click.option("--ahead", type=click.IntRange(0), metavar="N", help="Own bound: most tasks ahead of a quiet tenant's.")
@click.option("--max-wait", type=_positive, metavar="SECONDS", help="Own bound: longest wait of a quiet tenant's task.")
@click.option("--embedded", is_flag=True, help="On an embedded server, also if a broker is named somewhere.")
@click.option("--control", is_flag=True, help="On redis:// of kombu, embedded: shows that the drill can fail.")
@click.option("--plot", "plot", type=click.Path(dir_okay=False, writable=True, path_type=Path), help="Draw this PNG.")
@click.option("--json", "as_json", is_flag=True, help="Answer in JSON.")
@click.pass_context
def drill(
    ctx: click.Context, /, *, queue: str | None, embedded: bool, control: bool, plot: Path | None, as_json: bool,
    **given: Any,
) -> None:  # fmt: skip
    """Starvation drill: flood one lane, let others trickle, and see whether every bound holds.

    It runs on the broker that is given, on a queue and with workers of its own; without one on an embedded server.
    Nothing is left behind.  Exit code 1: a bound was broken, or the drill did not finish.
    """
    from . import show as showing

    plan = Plan(**given)
    _check(plan, control)
    name = queue or f"fairlanes-drill-{uuid.uuid4().hex[:8]}"
    try:
        showing.check(plot)
        with _terminated_like_interrupted(), _broker(ctx, embedded, control) as broker:
            record = run_drill(plan, broker, name, lambda line: click.echo(line, err=True))
            facts = plan.facts(broker.options)
    except Exception as exc:
        cli.fail(exc)
    verdict = judge(facts, record)
    if plot is not None:
        showing.draw(plot, facts, record, verdict)
    data = showing.data(facts, record, verdict)
    cli.answer(as_json, data, lambda: showing.show(facts, record, verdict))
    ctx.exit(cli.FAILED if verdict.broken else 0)


def _check(plan: Plan, control: bool) -> None:
    """Raise click.UsageError for what cannot be."""
    if FLOOD in plan.tenants:
        raise click.UsageError(f"{FLOOD} is the tenant that floods: name the quiet ones otherwise")
    unknown = {*plan.weights, *plan.limits} - {FLOOD, *plan.tenants}
    if unknown:
        raise click.UsageError(f"no tenant {', '.join(sorted(unknown))}: name it with --tenant")
    if control and plan.kill_every:
        raise click.UsageError("--control without --kill-every: redis:// takes an hour to notice")

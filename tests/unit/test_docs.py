"""The documentation: its links lead somewhere, its code runs, and what it repeats from the code is in step.

How a page marks what is tried here, in a comment on the line before the block:

* ``<!-- test: run -->``: a Python program, run on an empty server. ``localhost:6379`` stands for that
  server, and ``CELERY_BROKER_URL`` is set to it;
* ``<!-- test: output -->``: what the program before it prints;
* ``<!-- test: file NAME -->``, ``sh``, ``worker``, ``worker output``: the steps of the tutorial;
* ``<!-- test: acl ROLE -->``: access rights; see ``tests/acceptance/test_rights.py``.

Every block of Python compiles, marked or not.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest

from fairlanes_transport import errors, keys, scripts
from fairlanes_transport.embedded import EmbeddedServer
from fairlanes_transport.guard import GuardedProcess
from fairlanes_transport.options import Options
from tests.harness import ROOT, need_valkey, wait_for

DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted(DOCS.rglob("*.md"))]
PACKAGE = ROOT / "fairlanes_transport"
EXAMPLE_HOST = "localhost:6379"

_BLOCK = re.compile(
    r"^(?:<!-- test: (?P<mark>[^>]*?) -->\n)?"
    r"(?P<indent> *)```(?P<language>\w*)\n(?P<text>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)


class Block(NamedTuple):
    """A fenced block of a page."""

    page: Path
    mark: str
    language: str
    text: str
    line: int

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    content = page.read_text("utf-8")
    return [
        Block(
            page,
            found["mark"] or "",
            found["language"],
            re.sub(rf"^{found['indent']}", "", found["text"], flags=re.MULTILINE),
            content.count("\n", 0, found.start("text")),
        )
        for found in _BLOCK.finditer(content)
    ]


ALL = [block for page in PAGES for block in blocks(page)]


def marked(page: str, mark: str) -> list[str]:
    """The texts of a page's blocks with a mark."""
    return [block.text for block in blocks(ROOT / page) if block.mark == mark]


def anchors(page: Path) -> set[str]:
    """What a link into a page may name: its headings, as GitHub spells them, and its own anchors."""
    content = re.sub(r"^( *)```.*?^\1```$", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", content, re.MULTILINE)
    slugs = (re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings)
    return {*slugs, *re.findall(r'<a id="([^"]+)">', content)}


def links(page: Path) -> Iterator[tuple[str, str]]:
    """(File, anchor) of each relative link."""
    content = re.sub(r"^( *)```.*?^\1```$", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", content):
        if not re.match(r"[a-z]+:", target):
            path, _, anchor = target.partition("#")
            yield path, anchor


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    for path, anchor in links(page):
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{path} does not exist"
        if anchor:
            assert anchor in anchors(target), f"{path}#{anchor}: no such heading"


def test_the_index_leads_to_every_page() -> None:
    linked = {(DOCS / path).resolve() for path, _ in links(DOCS / "index.md")}
    assert {*DOCS.glob("*/*.md"), *DOCS.glob("*.md")} - {DOCS / "index.md"} <= linked


# ---------------------------------------------------------------- programs


@pytest.mark.parametrize("block", [block for block in ALL if block.language == "python"], ids=str)
def test_every_block_of_python_compiles(block: Block) -> None:
    compile(block.text, str(block), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


@pytest.fixture
def server() -> Iterator[EmbeddedServer]:
    """An empty server of its own."""
    with EmbeddedServer(binary=need_valkey()) as server:
        yield server


def environment(server: EmbeddedServer) -> dict[str, str]:
    """As a reader of the tutorial has it."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    kept = {name: value for name, value in os.environ.items() if not name.startswith("CELERY_")}
    return {**kept, "PATH": path, "CELERY_BROKER_URL": server.url("fairlanes"), "PYTHONPATH": str(ROOT)}


def run(server: EmbeddedServer, command: list[str], where: Path) -> str:
    """What a command prints; it must succeed."""
    done = subprocess.run(
        command, cwd=where, env=environment(server), capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def on(server: EmbeddedServer, text: str) -> str:
    """A block's text with the server's address in it."""
    return text.replace(EXAMPLE_HOST, f"127.0.0.1:{server.port}")


RUNNABLE = [
    (block, following.text if following is not None and following.mark == "output" else None)
    for block, following in zip(ALL, [*ALL[1:], None], strict=True)
    if block.mark == "run"
]


@pytest.mark.parametrize(("block", "output"), RUNNABLE, ids=[str(block) for block, _ in RUNNABLE])
def test_a_marked_program_runs(block: Block, output: str | None, server: EmbeddedServer, tmp_path: Path) -> None:
    printed = run(server, [sys.executable, "-c", on(server, block.text)], tmp_path)
    assert output is None or printed == output


def test_the_tutorial_works(server: EmbeddedServer, tmp_path: Path) -> None:
    tutorial = blocks(DOCS / "tutorial.md")
    for block in tutorial:
        if block.mark.startswith("file "):
            (tmp_path / block.mark.removeprefix("file ")).write_text(block.text, "utf-8")
    for block in tutorial:
        if block.mark == "sh":
            run(server, ["sh", "-ec", on(server, block.text)], tmp_path)
    (command,) = marked("docs/tutorial.md", "worker")
    (expected,) = marked("docs/tutorial.md", "worker output")
    lines = expected.splitlines()
    log = tmp_path / "log"

    def printed() -> list[str]:
        return re.findall(r"\b(?:loud|quiet|large) \d+$", log.read_text("utf-8"), re.MULTILINE)

    with (
        log.open("wb") as out,
        GuardedProcess(command.split(), env=environment(server), cwd=str(tmp_path), stdout=out),
    ):
        wait_for(lambda: len(printed()) >= len(lines), 40, "the tutorial's worker")
    assert printed()[: len(lines)] == lines


# ---------------------------------------------------------------- in step


def generator() -> ModuleType:
    """``docs/generate.py``, which is in no package."""
    spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: page.name)
def test_what_is_made_from_the_code_is_in_step(page: Path) -> None:
    text = page.read_text("utf-8")
    assert generator().generated(text) == text, "run: python docs/generate.py"


def test_every_block_that_is_made_is_on_one_page() -> None:
    named = re.findall(r"<!-- begin ([\w-]+) -->", "".join(page.read_text("utf-8") for page in PAGES))
    assert sorted(named) == sorted(generator().BLOCKS)


def test_what_is_made_leaves_nothing_out() -> None:
    made = generator()
    settings, errors_, scripts_ = made.settings(), made.error_classes(), made.script_pages()
    assert all(f'id="{row.name}"' in settings for row in Options.table())
    assert all(f".{error.__name__}`" in errors_ for error in _error_classes())
    assert all(f"## {name}\n" in scripts_ for name in scripts.names())
    parts = {part for part, _, _ in made.key_rows()}
    assert parts == set(keys.PARTS)
    for name in scripts.names():
        section = made.script_page(name)
        assert all(f"`{argument}`" in section for argument in scripts.load(name).arguments)
        assert all(f"**{fact}**" in section for fact in ("Returns", "Errors", "Cost"))


def _error_classes() -> list[type[Exception]]:
    return [
        value
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, Exception) and value.__module__ == errors.__name__
        and not value.__name__.startswith("_")
    ]  # fmt: skip


def test_the_commands_of_the_readme() -> None:
    commands = [
        line for block in blocks(ROOT / "README.md") if block.language == "sh" for line in block.text.splitlines()
    ]
    last = (ROOT / ".ci/run").read_text("utf-8").strip().splitlines()[-1]
    assert re.sub(r"timeout \d+ ", "", last) in commands
    demo = "python3 -m venv .venv && .venv/bin/pip install -q '.[demo]' && .venv/bin/fairlanes demo"
    assert demo in commands


def test_the_lines_of_the_log_that_are_explained_exist() -> None:
    page = (DOCS / "how-to/on-call.md").read_text("utf-8")
    table = page[page.index("## Lines in the log") :]
    # Adjacent string literals of the source are one line of the log.
    source = "".join(path.read_text("utf-8") for path in sorted(PACKAGE.glob("*.py")))
    source = re.sub(r'"\s*\n\s*f?"', "", source)
    for line in re.findall(r"^\| `([^`]+)`", table, re.MULTILINE):
        for part in line.split("…"):
            assert part.strip() in source, line

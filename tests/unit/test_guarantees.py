"""The page of guarantees: each row names tests, and they exist."""

from __future__ import annotations

import ast
import re

import pytest

from tests.harness import ROOT

PAGE = ROOT / "docs" / "reference" / "guarantees.md"
ROWS = [
    (number, *(cell.strip() for cell in line.strip().strip("|").split("|", 1)))
    for number, line in enumerate(PAGE.read_text("utf-8").splitlines(), 1)
    if line.startswith("|") and not line.startswith(("| ---", "| Guarantee"))
]


def functions_in(path: str) -> set[str]:
    """Return the names of the test functions in a file of ``tests/``."""
    tree = ast.parse((ROOT / "tests" / path).read_text("utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


@pytest.mark.parametrize(("line", "promise", "shown_by"), ROWS, ids=[f"line {row[0]}" for row in ROWS])
def test_each_row_names_tests_that_exist(line: int, promise: str, shown_by: str) -> None:
    assert promise.endswith("."), "a promise is a sentence"
    named = re.findall(r"`([^`]+)`", shown_by)
    assert named, "a promise without a test is none"
    for name in named:
        path, _, function = name.partition("::")
        assert (ROOT / "tests" / path).is_file(), name
        assert not function or function.partition("[")[0] in functions_in(path), name

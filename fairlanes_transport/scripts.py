"""Compose the Lua scripts, run them by digest, and say where one failed.

A script is one file in ``lua/``.  Its header states what it does and, per line, ``KEYS``, ``ARGV``, ``RETURNS``,
``ERRORS`` and ``COST``; the line ``--@include a b`` names what it shares (``lua/include/``), once and in that
order.  The keys are spelled by `fairlanes_transport.keys`: ``K.ring`` in Lua is the ring of the queue whose base
is ``KEYS[1]``, ``K.ready .. lane`` the ready set of a lane.  The tables of `fairlanes_transport.bounds` go to each
script that uses them, under the same names.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Protocol

from redis.exceptions import NoScriptError, ResponseError

from . import bounds, keys
from .errors import ScriptError

_INCLUDE = re.compile(r"^--@include (.+)$", re.MULTILINE)
_KEY = re.compile(r"\bK\.([a-z]+)\b")
_ARGUMENT = re.compile(r"^-- ARGV\[(\d+)\]  (\S+)", re.MULTILINE)
_COMMENT = re.compile(r"^\s*--.*$")
_AT_LINE = re.compile(r"(?:user_script|\[string \"[^\"]*\"\]):(\d+)")


class Caller(Protocol):
    """What runs commands: `connections.Link`, or an adapter in tests."""

    def call(self, *args: Any) -> Any:
        """Run one command and return its reply, or raise."""

    def pipeline(self, commands: Sequence[Sequence[Any]], *, raise_on_error: bool = False) -> list[Any]:
        """Run commands in one round trip and return their replies."""


@dataclass(frozen=True)
class Script:
    """One composed script."""

    name: str
    source: str
    digest: str
    #: names of the arguments, in order, as the header states them
    arguments: tuple[str, ...]
    #: origin ``(file, line)`` of every line of `source`, for error messages
    origin: tuple[tuple[str, int], ...]

    def run(self, caller: Caller, base: str, *args: Any) -> Any:
        """Run on the queue with key base `base`; loads the script where the server does not know it.

        Raises:
            ScriptError: the script itself failed (a bug, or damaged data); names file and line.
        """
        try:
            try:
                return caller.call("EVALSHA", self.digest, 1, base, *args)
            except NoScriptError:
                return caller.call("EVAL", self.source, 1, base, *args)
        except ResponseError as exc:
            raise self.located(exc) from exc

    def located(self, exc: ResponseError) -> Exception:
        """The same error with the place in our files, if the server named a line."""
        at = _AT_LINE.search(str(exc))
        if not at:
            return exc
        line = int(at.group(1))
        file, number = self.origin[line - 1] if line <= len(self.origin) else (f"{self.name}.lua", 0)
        return ScriptError(f"{file}:{number}: {exc}")


def _read(path: str) -> str:
    return resources.files(__package__).joinpath(f"lua/{path}").read_text("utf-8")


def _code(path: str) -> list[tuple[str, tuple[str, int]]]:
    """The lines of a file that are code, each with its origin."""
    lines = enumerate(_read(path).splitlines(), 1)
    return [(text, (path, n)) for n, text in lines if text.strip() and not _COMMENT.match(text)]


def _prelude(code: str) -> str:
    """Spell the keys that `code` uses, as the table ``K``."""
    used = sorted(set(_KEY.findall(code)) - {"base"})
    unknown = [name for name in used if name not in keys.PARTS]
    if unknown:
        raise ScriptError(f"unknown key part K.{unknown[0]}; keys.py lists the parts")
    parts = ["base = KEYS[1]", *(f"{name} = KEYS[1] .. '{keys.PARTS[name]}'" for name in used)]
    spelled = f"local K = {{ {', '.join(parts)} }}"
    # One line, so that the lines of an error are counted alike in every script.
    return " ".join([spelled, *(table for name, table in _tables().items() if re.search(rf"\b{name}\b", code))])


@cache
def _tables() -> dict[str, str]:
    """The tables of `bounds`, by name, as Lua spells them."""

    def names(among: Iterable[str]) -> dict[str, str]:
        return dict.fromkeys(among, "true")

    def spelled(entries: dict[str, str]) -> str:
        return "{ " + ", ".join(f"{name} = {value}" for name, value in entries.items()) + " }"

    numbers = {
        name: f"{{ {low:.17g}, {high:.17g}, {str(whole).lower()} }}"
        for name, (low, high, whole) in bounds.NUMBERS.items()
    }
    tables = {
        "BOUNDS": numbers,
        "CHOICES": {name: spelled(names(among)) for name, among in bounds.CHOICES.items()},
        "MAY_BE_NONE": names(bounds.MAY_BE_NONE),
        "OF_A_LANE": names(bounds.OF_A_LANE),
        "OF_A_QUEUE": names(bounds.OF_A_QUEUE),
    }
    return {name: f"local {name} = {spelled(entries)}" for name, entries in tables.items()}


@cache
def load(name: str) -> Script:
    """The script ``lua/<name>.lua`` with what it includes.

    Raises:
        ScriptError: it, or something it includes, does not exist or names an unknown key.
    """
    path = f"{name}.lua"
    text = _read(path)
    included = [i for line in _INCLUDE.findall(text) for i in line.split()]
    if len(set(included)) != len(included):
        raise ScriptError(f"{path} includes something twice: {' '.join(included)}")
    lines = [line for include in included for line in _code(f"include/{include}.lua")] + _code(path)
    code = "\n".join(line for line, _ in lines)
    source = f"{_prelude(code)}\n{code}\n"
    return Script(
        name=name,
        source=source,
        digest=hashlib.sha1(source.encode()).hexdigest(),
        arguments=tuple(argument for _, argument in _ARGUMENT.findall(text)),
        origin=((path, 0), *(origin for _, origin in lines)),
    )


def names() -> list[str]:
    """All scripts, sorted."""
    files = resources.files(__package__).joinpath("lua").iterdir()
    return sorted(f.name.removesuffix(".lua") for f in files if f.name.endswith(".lua"))

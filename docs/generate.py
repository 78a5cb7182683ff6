"""Write the parts of the reference pages that repeat what the code says.

    python docs/generate.py            write them
    python docs/generate.py --check    say which are stale; exit code 1 if one is

A page is written by hand but for its blocks ``<!-- begin NAME -->`` … ``<!-- end NAME -->``, whose text comes
from the functions below. ``tests/unit/test_docs.py`` fails when a block is stale.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from fairlanes_transport import channel, errors, keys, options, scripts

DOCS = Path(__file__).resolve().parent
PACKAGE = Path(inspect.getfile(keys)).parent
_BLOCK = re.compile(r"(<!-- begin (?P<name>[\w-]+) -->\n).*?(<!-- end (?P=name) -->)", re.DOTALL)


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    def line(cells: tuple[str, ...]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    return "\n".join([line(head), line(("---",) * len(head)), *map(line, rows)])


def _code(text: object) -> str:
    return f"`{text}`" if str(text) else ""


def _sentence(text: str) -> str:
    """A docstring's first paragraph in one line, with plain Markdown code."""
    first = inspect.cleandoc(text).split("\n\n")[0].replace("\n", " ")
    return re.sub(r":\w+:`~?([^`]+)`", r"`\1`", first).replace("``", "`")


# ---------------------------------------------------------------- settings


def option_groups() -> dict[str, str]:
    """Option -> heading, which is the comment above its group in the class."""
    groups, heading = {}, ""
    for line in inspect.getsource(options.Options).splitlines():
        if comment := re.match(r"    # (.+)$", line):
            heading = comment[1]
        elif name := re.match(r"    (\w+): ", line):
            groups[name[1]] = heading
    return groups


def without_use() -> set[str]:
    """Options that no module reads yet: the page must not promise what they say."""
    source = "\n".join(path.read_text("utf-8") for path in PACKAGE.rglob("*.py") if path.name != "options.py")
    return {
        row.name
        for row in options.Options.table()
        if not re.search(rf'\boptions\.{row.name}\b|"{row.name}"(?!: 0\b)', source)
    }


def _default(value: object) -> str:
    return _code(int(value) if isinstance(value, float) and value.is_integer() else repr(value))


def settings() -> str:
    groups, unused = option_groups(), without_use()
    made: list[str] = []
    for heading in dict.fromkeys(groups.values()):
        rows = [
            (
                f'<a id="{row.name}"></a>`{row.name}`',
                _code(row.type),
                _default(row.default),
                row.unit,
                ("**Has no effect yet.** " if row.name in unused else "") + row.doc,
            )
            for row in options.Options.table()
            if groups[row.name] == heading
        ]
        made += [
            f"### {heading[0].upper()}{heading[1:]}",
            _table(("name", "type", "default", "unit", "meaning"), rows),
        ]
    return "\n\n".join(made)


def without_effect() -> str:
    rows = [(_code(name), hint or "nothing to replace") for name, hint in sorted(options._WITHOUT_EFFECT.items())]
    return _table(("option of kombu's Redis transport", "here"), rows)


#: Queue argument -> what its value is.
_ARGUMENT_VALUES = {
    "x-lane-weight": "number above 0",
    "x-lane-limit": "whole number above 0",
    "x-lane-rate": "`'100/s'`, `'100/m'`, `'100/h'`",
    "x-lane-burst": "number above 0",
    "x-lane-max-size": "whole number above 0",
    "x-fairness": "`'count'`, `'time'`",
}


def queue_arguments() -> str:
    def option(setting: str) -> str:
        name = setting if setting == "fairness" else f"lane_{setting}"
        return f"[`{name}`](#{name})"

    rows = [
        (_code(argument), _ARGUMENT_VALUES[argument], option(setting))
        for argument, setting in channel.LANE_ARGUMENTS.items()
    ]
    return _table(("queue argument", "value", "stands before the option"), rows)


def ignored_arguments() -> str:
    return ", ".join(map(_code, channel.IGNORED_ARGUMENTS)) + "."


# ---------------------------------------------------------------- errors

#: What whoever meets the error can do.
_ADVICE = {
    "FairlanesError": "The base of those below; catch it to catch them all.",
    "OptionError": "Correct the setting that the message names.",
    "TenantError": "Correct the tenant: a string, an int or a UUID, 1 to 256 bytes as text.",
    "QueueAbsent": "Declare the queue, or start a worker that does.",
    "NotConfirmed": "The message is stored. Publish again only if running it twice is harmless.",
    "ServerFull": "Give the server memory, or let workers drain it: "
    "[on call](../how-to/on-call.md#the-server-is-full).",
    "ClusterRefused": "Connect to a server that is no cluster node.",
    "ScriptError": "`FLARG`: correct the call. `FLSTATE`, or a file and line: report it.",
    "DeadLettered": "Raised by `get()` of a result. See what killed the workers, then redrive or drop the message: "
    "[dead letters](../how-to/on-call.md#dead-letters-grow).",
    "LaneFull": "Slow the tenant down, or raise its `max_size`. Publishing again is safe.",
    "BrokerUnavailable": "Nothing, if it passes: Celery reconnects. Else read the server's words in it.",
    "AccessDenied": "Give the user the right that the message names: "
    "[access rights](../how-to/run-in-production.md#access-rights).",
    "NoFreeConnection": "Raise `max_connections`, or use fewer threads that publish.",
}


def _classes() -> Iterator[type[Exception]]:
    for value in vars(errors).values():
        own = isinstance(value, type) and issubclass(value, Exception) and value.__module__ == errors.__name__
        if own and not value.__name__.startswith("_"):
            yield value


def error_classes() -> str:
    import fairlanes_transport

    rows = []
    for error in _classes():
        name = error.__name__
        public = name in fairlanes_transport.__all__
        family = "connection error" if issubclass(error, errors.connection_errors) else "told to the caller"
        rows.append(
            (
                f"`{'fairlanes_transport' if public else 'fairlanes_transport.errors'}.{name}`",
                family,
                _sentence(error.__doc__ or ""),
                _ADVICE[name],
            )
        )
    return _table(("error", "family", "meaning", "what to do"), rows)


def error_codes() -> str:
    """The codes with the docstrings that follow them in the source."""
    source = inspect.getsource(errors.Code)
    meanings = dict(re.findall(r'= "(FL\w+)"\n\s+"""(.*?)"""', source, re.DOTALL))
    rows = [(_code(code.value), _sentence(meanings[code.value])) for code in errors.Code]
    return _table(("first word of the reply", "meaning"), rows)


def unavailable_words() -> str:
    return ", ".join(_code(word) for word in sorted(errors._UNAVAILABLE_WORDS)) + "."


# ---------------------------------------------------------------- keys


def key_rows() -> Iterator[tuple[str, str, str]]:
    """(Part, type, meaning), from the table in the module's docstring."""
    row: tuple[str, str, str] | None = None
    for line in (keys.__doc__ or "").splitlines():
        if found := re.match(r"(\w+):?\s+(hash|zset|set|list|string)\s+(.+)$", line):
            if row:
                yield row
            row = (found[1], found[2], found[3])
        elif row and re.match(r"\s{10,}\S", line):
            row = (row[0], row[1], f"{row[2]} {line.strip()}")
        elif row:
            yield row
            row = None
    if row:
        yield row


def _key_table(parts: tuple[str, ...], lane: str) -> str:
    base = keys.base("celery")
    rows = [
        (_code(keys.part(base, part, lane)), kind, meaning.replace("``", "`"))
        for part, kind, meaning in key_rows()
        if part in parts
    ]
    return _table(("key", "type", "meaning"), rows)


def queue_keys() -> str:
    return _key_table(keys.QUEUE_PARTS, "")


def lane_keys() -> str:
    return _key_table(keys.LANE_PARTS, "acme")


# ---------------------------------------------------------------- scripts

_TAG = re.compile(r"(KEYS|ARGV)\[(\d+)\]\s+(\S+)(?:\s+(.*))?$|(RETURNS|ERRORS|COST)\s+(.*)$")


def script_page(name: str) -> str:
    """One script's section, from the header of its file."""
    about: list[str] = []
    arguments: list[list[str]] = []
    facts: dict[str, str] = {}
    last: Callable[[str], None] = about.append
    for line in (PACKAGE / "lua" / f"{name}.lua").read_text("utf-8").splitlines():
        if not line.startswith("--") or line.startswith("--@"):
            break
        text = line[2:].strip()
        tag = _TAG.match(text)
        if tag and tag[1] == "ARGV":
            row = [tag[2], tag[3], tag[4] or ""]
            arguments.append(row)
            last = _appending(row, 2)
        elif tag and tag[5]:
            facts[tag[5]] = tag[6]
            last = _appending(facts, tag[5])
        elif not tag:
            last(text)
    prose = "\n".join(about).strip()
    made = [f"## {name}", prose]
    if arguments:
        rows = [(number, _code(argument), meaning) for number, argument, meaning in arguments]
        made.append(_table(("ARGV", "name", "meaning"), rows))
    made.append("\n".join(f"- **{tag.capitalize()}**: {text}" for tag, text in facts.items()))
    return "\n\n".join(made)


def _appending(where: list[str] | dict[str, str], at: int | str) -> Callable[[str], None]:
    def append(text: str) -> None:
        where[at] = f"{where[at]} {text}".strip()  # type: ignore[index,call-overload]

    return append


def script_pages() -> str:
    return "\n\n".join(script_page(name) for name in scripts.names())


# ---------------------------------------------------------------- pages

BLOCKS: dict[str, Callable[[], str]] = {
    "settings": settings,
    "without-effect": without_effect,
    "queue-arguments": queue_arguments,
    "ignored-arguments": ignored_arguments,
    "error-classes": error_classes,
    "error-codes": error_codes,
    "unavailable-words": unavailable_words,
    "queue-keys": queue_keys,
    "lane-keys": lane_keys,
    "scripts": script_pages,
}


def generated(page: str) -> str:
    """The page with every block made anew."""
    return _BLOCK.sub(lambda found: f"{found[1]}\n{BLOCKS[found['name']]()}\n\n{found[3]}", page)


def main() -> int:
    """Write or check the pages; returns the exit code."""
    stale = [path for path in sorted(DOCS.rglob("*.md")) if generated(text := path.read_text("utf-8")) != text]
    for path in stale:
        if "--check" not in sys.argv:
            path.write_text(generated(path.read_text("utf-8")), "utf-8")
        print(f"{'stale' if '--check' in sys.argv else 'written'}: docs/{path.relative_to(DOCS)}")
    return 1 if stale and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())

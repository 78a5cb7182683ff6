"""Headers: what a script states is what it does, as the loader, the reference page and the reader rely on it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources

import pytest

from fairlanes_transport import errors, scripts
from fairlanes_transport.errors import ScriptError
from tests.scripts.bench import Bench

LUA = resources.files("fairlanes_transport").joinpath("lua")
INCLUDES = sorted(f.name for f in LUA.joinpath("include").iterdir())
NUMBERS = {"two": 2, "three": 3, "four": 4, "five": 5}
FUNCTION = re.compile(r"^local function ([a-z_]+)\(", re.MULTILINE)


@dataclass(frozen=True)
class Text:
    """One script as it is written."""

    name: str
    header: list[str]
    code: str

    def field(self, name: str) -> str:
        """A field of the header, with the lines that go on with it."""
        lines, taking = [], False
        for line in self.header:
            if re.match(r"-- \S", line):
                taking = line.startswith(f"-- {name} ")
            if taking:
                lines.append(line[2:].strip().removeprefix(name).strip())
        return " ".join(lines)

    def arguments(self) -> dict[int, str]:
        """Number -> what the header says of the argument."""
        found = [re.match(r"-- ARGV\[(\d+)\]  (\S.*)", line) for line in self.header]
        return {int(match[1]): match[2] for match in found if match}


def read(name: str) -> Text:
    """The script of that name."""
    lines = LUA.joinpath(f"{name}.lua").read_text("utf-8").splitlines()
    end = next(n for n, line in enumerate(lines) if not line.startswith("--"))
    code = "\n".join(line for line in lines[end:] if not line.strip().startswith("--"))
    return Text(name, lines[:end], code)


@pytest.fixture(params=scripts.names())
def script(request: pytest.FixtureRequest) -> Text:
    """Each script."""
    return read(request.param)


def test_it_is_complete_and_in_order(script: Text) -> None:
    assert re.fullmatch(r"-- [A-Z].*[.:;,]?", script.header[0]), "it begins with what the script does"
    fields = [m[1] for line in script.header if (m := re.match(r"-- (KEYS\[1\]|ARGV|RETURNS|ERRORS|COST)", line))]
    assert [f for f in fields if f != "ARGV"] == ["KEYS[1]", "RETURNS", "ERRORS", "COST"]
    assert fields[0] == "KEYS[1]"
    assert fields[1 : 1 + fields.count("ARGV")] == ["ARGV"] * fields.count("ARGV")
    for name in ("RETURNS", "ERRORS", "COST"):
        assert script.field(name), f"{name} says nothing"
    assert script.field("KEYS[1]") == "base of the queue's keys"
    includes = [n for n, line in enumerate(script.header) if line.startswith("--@include")]
    assert includes in ([], [len(script.header) - 1]), "one line of includes, after the rest"


def test_its_arguments_have_no_gap(script: Text) -> None:
    numbers = list(script.arguments())
    assert numbers == list(range(1, len(numbers) + 1))
    assert len(scripts.load(script.name).arguments) == len(numbers)


def test_its_arguments_are_those_that_the_code_uses(script: Text) -> None:
    stated = script.arguments()
    used = {int(n) for n in re.findall(r"ARGV\[(\d+)\]", script.code)}
    # What repeats is read in a loop: for i = first, #ARGV, step do ... ARGV[i + n].
    loops = re.findall(r"for i = (\d+), #ARGV(?:, (\d+))? do", script.code)
    if "ipairs(ARGV)" in script.code:
        loops.append(("1", ""))
    repeated = {(int(first), int(step or 1)) for first, step in loops}
    assert len(repeated) <= 1, f"loops differ in what repeats: {repeated}"
    for first, step in repeated:
        offsets = {int(n or 0) for n in re.findall(r"ARGV\[i(?: \+ (\d+))?\]", script.code)}
        assert offsets <= set(range(step)), f"reads beyond {step} arguments each: {offsets}"
        used |= {first + n for n in range(step)}
        words = [word for text in stated.values() for word, n in NUMBERS.items() if f"{word} in all" in text]
        assert [NUMBERS[word] for word in words] == [step] * (step > 1), f"the header should say how many: {step}"
        said = f"{stated[first]} {script.header}"
        assert "and then, per" in said or "and more" in said, "the header should say what repeats"
        assert max(used) == first + step - 1, "what repeats comes last"
    assert set(stated) == used


def test_its_errors_are_those_that_the_code_returns(script: Text) -> None:
    code = scripts.load(script.name).source
    returned = set(re.findall(r"error_reply\((?:string\.format\()?'(FL[A-Z]+)", code))
    stated = set(re.findall(r"\bFL[A-Z]+\b", script.field("ERRORS")))
    assert stated == returned
    assert (script.field("ERRORS") == "none") == (not stated)
    assert stated <= {code.value for code in errors.Code}
    assert code.count("error_reply") == len(re.findall(r"error_reply\((?:string\.format\()?'FL[A-Z]+ ", code))


def test_its_keys_are_spelled_by_the_prelude(script: Text) -> None:
    assert re.findall(r"KEYS\[\d+\]", script.code) == [], "the keys are K.<part>"
    assert not re.search(r"redis\.call\('(KEYS|SCAN)", scripts.load(script.name).source)


def functions(code: str) -> dict[str, str]:
    """Name -> body of every function at the top level."""
    found = {}
    for match in FUNCTION.finditer(code):
        found[match[1]] = code[match.end() : code.index("\nend", match.end())]
    return found


def calls(code: str) -> set[str]:
    return set(re.findall(r"\b([a-z_]+)\(", code))


def test_it_includes_what_it_needs_and_no_more(script: Text) -> None:
    shared = {name: functions(LUA.joinpath(f"include/{name}").read_text("utf-8")) for name in INCLUDES}
    home = {function: name for name, found in shared.items() for function in found}
    own = functions(script.code)
    needed, todo = set(), calls(script.code) & set(home) - set(own)
    while todo:
        function = todo.pop()
        needed.add(function)
        todo |= (calls(shared[home[function]][function]) & set(home)) - needed
    line = script.header[-1]
    included = [f"{name}.lua" for name in line.removeprefix("--@include ").split()] if "@include" in line else []
    missing = {function: home[function] for function in needed if home[function] not in included}
    assert not missing, f"calls functions that it does not include: {missing}"
    # `wake` calls into `ring` where a script gives up a role, and every script that writes has the rest.
    unused = set(included) - {home[function] for function in needed} - {"ring.lua", "settings.lua", "record.lua"}
    assert not unused, f"includes {unused} for nothing"


@pytest.mark.parametrize("include", INCLUDES)
def test_an_include_says_what_each_function_does(include: str) -> None:
    text = LUA.joinpath(f"include/{include}").read_text("utf-8")
    assert text.startswith("-- ")
    assert "KEYS" not in text
    assert "ARGV" not in text, "helpers take arguments"


def test_an_include_that_does_not_exist_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    read = scripts._read
    monkeypatch.setattr(scripts, "_read", lambda path: "--@include no_such\n" if path == "x.lua" else read(path))
    with pytest.raises(FileNotFoundError, match=r"no_such\.lua"):
        scripts.load.__wrapped__("x")


def test_an_include_twice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scripts, "_read", lambda _: "--@include clock clock\n")
    with pytest.raises(ScriptError, match=r"x\.lua includes something twice"):
        scripts.load.__wrapped__("x")


def test_an_unknown_key_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scripts, "_read", lambda _: "return redis.call('GET', K.rnig)\n")
    with pytest.raises(ScriptError, match=r"K\.rnig"):
        scripts.load.__wrapped__("x")


# errors


@pytest.fixture
def break_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str, str], int]:
    """A function that puts a broken line into a file, after the first one that holds a text; returns its number."""
    monkeypatch.setattr(scripts, "load", scripts.load.__wrapped__)
    read = scripts._read

    def put(path: str, after: str, broken: str) -> int:
        lines = read(path).splitlines()
        at = next(n for n, line in enumerate(lines) if after in line) + 1
        lines.insert(at, broken)
        monkeypatch.setattr(scripts, "_read", lambda name: "\n".join(lines) if name == path else read(name))
        return at + 1

    return put


@pytest.mark.parametrize(
    ("path", "after"),
    [("claim.lua", "local taken, dearer ="), ("include/ring.lua", "local ready = redis.call('ZCARD'")],
)
@pytest.mark.parametrize("broken", ["local x = nil + 1", "  error('broken')", "no_such_function()"])
def test_a_failure_names_file_and_line(
    bench: Bench, break_at: Callable[[str, str, str], int], path: str, after: str, broken: str
) -> None:
    line = break_at(path, after, broken)
    bench.put("t") if "include" not in path else None
    with pytest.raises(ScriptError, match=f"^{re.escape(path)}:{line}: ") as failed:
        bench.put("t") if "include" in path else bench.claim()
    assert failed.value.__cause__ is not None


def test_a_command_that_fails_names_file_and_line(bench: Bench) -> None:
    if "fake" in type(bench.client).__module__:
        pytest.skip("fakeredis says no line where a command fails")
    bench.put("t")
    bench.client.delete(bench.key("totals"))
    bench.client.set(bench.key("totals"), "x")
    with pytest.raises(ScriptError, match=r"^include/record\.lua:\d+: .*wrong kind of value"):
        bench.claim()


def test_a_script_that_does_not_compile_names_the_line(bench: Bench, break_at: Callable[[str, str, str], int]) -> None:
    line = break_at("claim.lua", "local taken, dearer =", "local = 2")
    bench.put("t")
    with pytest.raises(ScriptError, match=f"^claim\\.lua:{line}: "):
        bench.claim()


def test_the_server_forgot_the_scripts(bench: Bench) -> None:
    bench.put("t")
    bench.client.script_flush()
    assert bench.tags() == ["t"]

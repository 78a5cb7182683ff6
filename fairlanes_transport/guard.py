"""Child processes that never outlive this one, however it ends.

Cleanup code runs after an exception and on Ctrl-C, but not after SIGTERM's default action and never after
SIGKILL. So each child is started by a small *guard* process that holds one end of a socket pair, the
lifeline. The kernel closes our end when we die, whatever the cause; the guard reads the end of file and kills
the child's process group.

Why not ``PR_SET_PDEATHSIG``: it is Linux only, it fires when the *thread* that forked ends, and it needs a
``preexec_fn``, which is unsafe in a process with threads. A guard works the same on Linux and macOS.

This file is both sides: imported, it is :class:`GuardedProcess`; run as a script by it, the guard. It imports
the standard library only, so that a guard is up in some 20 ms.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

__all__ = ["GuardedProcess"]

_SCRIPT = str(Path(__file__).resolve())
_SIGNALLED = 128
"""A guard exits with 128 + n when signal n ended its child, as shells do."""


class GuardedProcess:
    """A command in a session and process group of its own, that ends when this object is closed or this
    process dies.

    A terminal's Ctrl-C does not reach it: its owner decides how it ends.

    Args:
        command: program and arguments.
        env: its whole environment; ours when None.
        cwd: its working directory; ours when None.
        stdout: where standard output and standard error go together, as for :class:`subprocess.Popen`.
        remove: a directory to delete once the command has ended, also when nobody of us is left to do it.

    Raises:
        OSError: the command cannot be started.

    A process that is forked from this one without exec (multiprocessing's ``fork``) holds the lifeline too:
    the command then lives until that process has ended as well.
    """

    pid: int
    """Process id of the command itself, which is also its process group."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        stdout: int | IO[Any] | None = None,
        remove: str | None = None,
    ) -> None:
        self.pid = 0
        self._lifeline, theirs = socket.socketpair()
        try:
            with theirs:
                self._guard: subprocess.Popen[bytes] = subprocess.Popen(
                    # -I -S: no site-packages, no PYTHON* variables; the command still inherits the variables.
                    [sys.executable, "-I", "-S", _SCRIPT, remove or "", *command],
                    env=env,
                    cwd=cwd,
                    stdin=theirs.fileno(),
                    stdout=stdout,
                    stderr=subprocess.STDOUT if stdout is not None else None,
                    start_new_session=True,
                )
            try:
                self.pid = self._read_pid(command[0])
            except BaseException:
                self.kill()
                raise
        except BaseException:
            self._lifeline.close()
            raise
        self.output: IO[bytes] | None = self._guard.stdout
        """The command's output when ``stdout`` is ``subprocess.PIPE``; at its end when the whole group is
        gone.
        """

    def _read_pid(self, program: str) -> int:
        with self._lifeline.makefile("r") as lines:
            answer = lines.readline().strip()
        if not answer.isdigit():
            raise OSError(f"{program} did not start: {answer or 'its guard process died'}")
        return int(answer)

    def poll(self) -> int | None:
        """Return None while the command runs, afterwards its exit code (128 + n if signal n ended it)."""
        return self._guard.poll()

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the command has ended and its group is gone; return the exit code as :meth:`poll` does.

        Raises:
            subprocess.TimeoutExpired: it still runs after ``timeout`` seconds.
        """
        return self._guard.wait(timeout)

    def send_signal(self, signum: int) -> None:
        """Send a signal to the command alone; nothing happens if it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signum)

    def kill(self) -> None:
        """Kill the whole process group with SIGKILL and wait until it is gone."""
        with contextlib.suppress(OSError):
            self._lifeline.shutdown(socket.SHUT_WR)
        if self._guard.wait() < 0 and self.pid:  # somebody killed the guard itself
            _kill_group(self.pid)

    def close(self) -> None:
        """Kill what still runs and release everything. May be called twice."""
        self.kill()
        self._lifeline.close()
        if self.output is not None:
            self.output.close()

    def __enter__(self) -> GuardedProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _guard(remove: str, command: list[str]) -> int:
    """Run ``command`` until it ends or the lifeline (our standard input) does; return its exit code, shell
    style.
    """
    lifeline = socket.socket(fileno=0)
    try:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    except OSError as error:
        lifeline.sendall(f"{error}\n".encode())
        _remove(remove)
        return 1
    # From here on the group must end with us, also if somebody signals the guard instead of its command.
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, lambda *_: _kill_group(child.pid))
    threading.Thread(target=_watch, args=(lifeline, child.pid), daemon=True).start()
    with contextlib.suppress(OSError):  # a parent that is dead already: the watch kills the group
        lifeline.sendall(b"%d\n" % child.pid)
    code = child.wait()
    _kill_group(child.pid)  # what the command left behind, such as a killed worker's pool
    _remove(remove)
    return _SIGNALLED - code if code < 0 else code


def _watch(lifeline: socket.socket, group: int) -> None:
    with contextlib.suppress(OSError):
        while lifeline.recv(1):
            pass
    _kill_group(group)


def _kill_group(group: int) -> None:
    # macOS answers EPERM for a group of which only zombies are left.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def _remove(directory: str) -> None:
    if directory:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(_guard(sys.argv[1], sys.argv[2:]))

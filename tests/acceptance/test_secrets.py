"""What a worker shows of itself has no password in it: its log, what it answers, and what it says in an outage."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from celery import Celery

from fairlanes_transport.guard import GuardedProcess
from tests.harness import Server, wait_for
from tests.unit.test_docs import environment

pytestmark = pytest.mark.acceptance

SECRETS = ("hunter2", "hunter3", "hunter4")


def test_no_password_is_shown(
    fresh_server: Callable[..., Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = fresh_server("--requirepass", "hunter2")
    url = f"fairlanes://:hunter2@127.0.0.1:{server.port}/0;fairlanes://:hunter3@127.0.0.1:1/0"
    options = {"sentinel_kwargs": {"username": "watch", "password": "hunter4"}, "master_name": "mymaster"}
    (tmp_path / "secrets_app.py").write_text(
        f"from celery import Celery\napp = Celery('x', broker={url!r})\n"
        f"app.conf.broker_transport_options = {options!r}\n",
        "utf-8",
    )
    log = tmp_path / "log"
    command = [sys.executable, "-m", "celery", "-A", "secrets_app", "worker", "-l", "DEBUG", "-c", "1", "-P", "threads"]
    monkeypatch.setenv("CELERY_BROKER_URL", url)  # Celery prefers it
    app = Celery("x", set_as_current=False)
    app.conf.broker_transport_options = options
    with (
        log.open("wb") as file,
        GuardedProcess(command, env={**environment(server), "CELERY_BROKER_URL": url}, cwd=str(tmp_path), stdout=file),
    ):
        inspect = app.control.inspect(timeout=1)
        answers = [
            wait_for(ask, 30, "an answer") for ask in (inspect.ping, inspect.stats, inspect.conf, inspect.report)
        ]
        shown = repr(answers)
        assert "127.0.0.1:1" in shown
        assert "sentinel_kwargs" in shown
        server.kill()
        wait_for(lambda: "Connection to broker lost" in log.read_text("utf-8", "replace"), 30, "the loss in the log")
        wait_for(lambda: log.read_text("utf-8", "replace").count("Cannot connect to") > 1, 30, "two tries in the log")
    app.close()
    shown += log.read_text("utf-8", "replace")
    assert not [secret for secret in SECRETS if secret in shown]

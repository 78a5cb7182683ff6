"""Celery's own ``celery migrate`` moves tasks to this transport and back, and workers run them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.apps.settings import environment
from tests.harness import ROOT, Sender, Server, Worker, wait_done

pytestmark = pytest.mark.acceptance


@pytest.mark.parametrize(("source", "target"), [("redis", "fairlanes"), ("fairlanes", "redis")])
def test_migrated_tasks_run(server: Server, source: str, target: str) -> None:
    with Sender(server, source) as sender:
        for i in range(3):
            sender.send("mark", "acme", i, tenant="acme")
    # Another database: migrate must find the tasks at the source alone.
    urls = [server.url(source), server.url(target, 1)]
    ran = subprocess.run(
        [sys.executable, "-m", "celery", "-A", "tests.apps.basic", "migrate", *urls, "-t", "3"],
        env={**environment(urls[0], server.port, {}), "PYTHONPATH": str(ROOT)},
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert ran.stdout.count("Migrating task") == 3, ran.stdout + ran.stderr
    with Worker(server, scheme=target, db=1, pool="solo") as worker:
        assert sorted(done["i"] for done in wait_done(server, 3, 30)) == [0, 1, 2]
        assert worker.poll() is None

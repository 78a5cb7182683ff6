"""What a worker's own process can say: whether it still claims."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from celery import Celery
from celery.contrib.testing.worker import start_worker
from prometheus_client import CollectorRegistry

from fairlanes_transport.metrics import WorkerCollector
from tests.apps.settings import configured
from tests.harness import Server, wait_for

pytestmark = pytest.mark.acceptance


@pytest.fixture
def app(server: Server) -> Iterator[Celery]:
    app = configured("metrics", server.url("fairlanes"), server.port, {})

    @app.task(name="sleep", shared=False)
    def sleep(seconds: float) -> None:
        time.sleep(seconds)

    yield app
    app.pool.force_close_all()
    app.close()


def test_the_age_of_the_last_claim(app: Celery) -> None:
    registry = CollectorRegistry()
    registry.register(WorkerCollector())

    def value(name: str) -> float | None:
        labels = {"worker": worker.hostname, "queue": "celery"}
        return registry.get_sample_value(f"fairlanes_worker_{name}", labels)

    with start_worker(app, pool="threads", concurrency=2, perform_ping_check=False) as worker:
        wait_for(lambda: value("claim_age_seconds") is not None, 10, "the first claim")
        age = value("claim_age_seconds")
        wait_for(lambda: (value("claim_age_seconds") or 0) >= age + 0.3, 10, "an idle worker grows older")
        assert value("room") == 8
        for _ in range(16):
            app.send_task("sleep", (0.4,))
        wait_for(lambda: value("room") == 0, 10, "a full worker")
        wait_for(lambda: value("room") == 8, 20, "an empty worker")
        assert value("claim_age_seconds") < 2
    assert value("room") is None

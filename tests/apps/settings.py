"""How a test's Celery app learns its broker and settings: from the environment, in the worker as in the
test.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from celery import Celery

RECORD_DB = 9
"""Database of the broker's server in which tasks note what they did (lists ``started`` and ``done``,
JSON).
"""

RESULT_DB = 8
"""Database for results, where a test sets ``result_backend``."""

BROKER = "FAIRLANES_TEST_BROKER"
PORT = "FAIRLANES_TEST_PORT"
CONF = "FAIRLANES_TEST_CONF"


def environment(broker: str, port: int, conf: Mapping[str, Any]) -> dict[str, str]:
    """Return the environment for a process that runs a test app.

    Celery's own variables are left out: those of the developer's shell would win over the app's broker.
    """
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("CELERY_") and name not in ("BROKER_URL", "RESULT_BACKEND")
    }
    return {**env, BROKER: broker, PORT: str(port), CONF: json.dumps(conf)}


def configured(name: str, broker: str, port: int, conf: Mapping[str, Any]) -> Celery:
    """Return an app with the broker, without results unless ``conf`` says ``"results": true``."""
    settings = dict(conf)
    results = settings.pop("results", False)
    app = Celery(name, broker=broker, set_as_current=False)
    app.conf.update(task_ignore_result=not results, broker_connection_retry_on_startup=True)
    if results:
        app.conf.update(result_backend=f"redis://127.0.0.1:{port}/{RESULT_DB}")
    app.conf.update(settings)
    return app


def from_environment(name: str) -> Celery:
    """Return the app of this process: a worker's."""
    return configured(name, os.environ[BROKER], int(os.environ[PORT]), json.loads(os.environ[CONF]))

"""What Django sends after a commit goes into the lane of the block in which it was asked for."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.harness import ROOT, SCHEME, Server

pytestmark = [
    pytest.mark.acceptance,
    pytest.mark.skipif(SCHEME == "redis", reason="kombu's transport has no lanes"),
]

#: The block begins before Django has loaded its database; each form is sent after the block has ended.
PROGRAM = """
import json, sys
from functools import partial
from celery import Celery
from celery.contrib.django.task import DjangoTask
from django.conf import settings
settings.configure(DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}})
import django; django.setup()
from django.db import connection, transaction
from fairlanes_transport import Lanes, tenant

app = Celery("shop", broker=sys.argv[1], task_cls=DjangoTask)
@app.task(name="t")
def task():
    pass
forms = {
    "delay_on_commit": task.delay_on_commit,
    "apply_async_on_commit": task.apply_async_on_commit,
    "partial": lambda: transaction.on_commit(partial(task.delay)),
    "lambda": lambda: transaction.on_commit(lambda: task.delay()),
    "robust": lambda: transaction.on_commit(task.delay, robust=True),
}
for name, form in forms.items():
    with tenant(name):
        outer = transaction.atomic()
        outer.__enter__()
        form()
    with tenant("other"):
        outer.__exit__(None, None, None)
with transaction.atomic():
    task.delay_on_commit()
with tenant("header"), transaction.atomic():
    task.apply_async_on_commit(headers={"tenant": "explicit"})
lanes = Lanes(sys.argv[1])
print(json.dumps({lane.lane: lane.ready for lane in lanes.lanes("celery").lanes}))
"""


def test_the_lane_is_that_of_the_block_that_asked(server: Server) -> None:
    pytest.importorskip("django")
    command = [sys.executable, "-c", PROGRAM, server.url("fairlanes")]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr
    forms = ("delay_on_commit", "apply_async_on_commit", "partial", "lambda", "robust")
    assert json.loads(ran.stdout) == {**dict.fromkeys(forms, 1), "default": 1, "explicit": 1}

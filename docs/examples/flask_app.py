"""Flask: hooks that send everything that a request starts into its customer's lane.

BROKER_URL=fairlanes://localhost:6379/0 flask --app flask_app run
BROKER_URL=fairlanes://localhost:6379/0 celery -A flask_app:celery worker
curl -X POST -H 'X-Customer: acme' localhost:5000/reports
"""

from __future__ import annotations

import os

from celery import Celery
from flask import Flask, g, request

from fairlanes_transport import current_tenant, reset_tenant, set_tenant

celery = Celery("flask_app", broker=os.environ.get("BROKER_URL", "fairlanes://localhost:6379/0"))
app = Flask(__name__)


@celery.task(name="reports.build")
def build_report() -> str | None:
    """Build the report of the customer whose request, or whose task, asked for it."""
    return current_tenant()


@app.before_request
def enter_lane() -> None:
    """Send what the request starts into its customer's lane."""
    g.lane = set_tenant(request.headers.get("X-Customer"))


@app.teardown_request
def leave_lane(error: BaseException | None) -> None:
    """Leave it, also after an error; a request that was refused early has not entered it."""
    if "lane" in g:
        reset_tenant(g.pop("lane"))


@app.post("/reports")
def order() -> dict[str, str | None]:
    """Order a report."""
    return {"task": build_report.delay().id, "tenant": current_tenant()}


@app.post("/fail")
def fail() -> None:
    """Order a report and fail."""
    build_report.delay()
    raise RuntimeError("on purpose")

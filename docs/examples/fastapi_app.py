"""FastAPI: a dependency that sends everything that a request starts into its customer's lane.

BROKER_URL=fairlanes://localhost:6379/0 fastapi dev fastapi_app.py
BROKER_URL=fairlanes://localhost:6379/0 celery -A fastapi_app worker
curl -X POST -H 'X-Customer: acme' localhost:8000/reports
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from typing import Annotated

from celery import Celery
from fastapi import BackgroundTasks, Depends, FastAPI, Header

from fairlanes_transport import current_tenant, tenant

celery = Celery("fastapi_app", broker=os.environ.get("BROKER_URL", "fairlanes://localhost:6379/0"))


@celery.task(name="reports.build")
def build_report() -> str | None:
    """Build the report of the customer whose request, or whose task, asked for it."""
    return current_tenant()


async def customers_lane(x_customer: Annotated[str | None, Header()] = None) -> AsyncIterator[str | None]:
    """Send what the request starts into its customer's lane.

    It must be an ``async def``: FastAPI runs other dependencies in a thread, with a context of their own.
    """
    with tenant(x_customer) as name:
        yield name


app = FastAPI(dependencies=[Depends(customers_lane)])


@app.post("/reports")
def order() -> dict[str, str | None]:
    """Order a report; FastAPI runs this in a thread, with a copy of the request's context."""
    return {"task": build_report.delay().id, "tenant": current_tenant()}


@app.post("/async-reports")
async def order_async() -> dict[str, str | None]:
    """Order a report, on the event loop."""
    return {"task": build_report.delay().id, "tenant": current_tenant()}


@app.post("/background-reports")
def order_later(background: BackgroundTasks, name: Annotated[str | None, Depends(customers_lane)]) -> None:
    """Order a report when the response is on its way: the dependency may have ended by then."""
    background.add_task(order_for, name)


def order_for(name: str | None) -> None:
    """Order a report for a customer."""
    with tenant(name):
        build_report.delay()


@app.post("/fail")
def fail() -> None:
    """Order a report and fail."""
    build_report.delay()
    raise RuntimeError("on purpose")

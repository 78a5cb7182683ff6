"""Django: a middleware that sends everything that a request starts into its customer's lane.

A whole site in one file, to be read and run:

    BROKER_URL=fairlanes://localhost:6379/0 python django_app.py runserver
    BROKER_URL=fairlanes://localhost:6379/0 celery -A django_app worker
    curl -X POST -H 'Host: acme.localhost' localhost:8000/reports
"""

from __future__ import annotations

import os
import sys
from collections.abc import Awaitable, Callable

from asgiref.sync import iscoroutinefunction, markcoroutinefunction
from celery import Celery
from django.conf import settings
from django.core.management import execute_from_command_line
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.urls import path

from fairlanes_transport import current_tenant, tenant

celery = Celery("django_app", broker=os.environ.get("BROKER_URL", "fairlanes://localhost:6379/0"))


@celery.task(name="reports.build")
def build_report() -> str | None:
    """Build the report of the customer whose request, or whose task, asked for it."""
    return current_tenant()


def customer_of(request: HttpRequest) -> str | None:
    """The customer of a request: acme.example.com belongs to acme. None: nobody's, the default lane."""
    name, dot, _ = request.get_host().partition(".")
    return name if dot else None


class TenantMiddleware:
    """Send what a request starts into its customer's lane. For WSGI and ASGI."""

    sync_capable = async_capable = True

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponse | Awaitable[HttpResponse]]) -> None:
        self.get_response = get_response
        if iscoroutinefunction(get_response):
            markcoroutinefunction(self)

    def __call__(self, request: HttpRequest) -> HttpResponse | Awaitable[HttpResponse]:
        if iscoroutinefunction(self):
            return self.respond(request)
        with tenant(customer_of(request)):
            return self.get_response(request)

    async def respond(self, request: HttpRequest) -> HttpResponse:
        with tenant(customer_of(request)):
            return await self.get_response(request)


def order(request: HttpRequest) -> JsonResponse:
    """Order a report."""
    return JsonResponse({"task": build_report.delay().id, "tenant": current_tenant()})


async def order_async(request: HttpRequest) -> JsonResponse:
    """Order a report, from an asynchronous view."""
    return JsonResponse({"task": build_report.delay().id, "tenant": current_tenant()})


def fail(request: HttpRequest) -> JsonResponse:
    """Order a report and fail."""
    build_report.delay()
    raise RuntimeError("on purpose")


urlpatterns = [path("reports", order), path("async-reports", order_async), path("fail", fail)]

if not settings.configured:
    settings.configure(
        ALLOWED_HOSTS=[".localhost", ".example.com"],
        MIDDLEWARE=[f"{__name__}.TenantMiddleware"],
        ROOT_URLCONF=__name__,
        SECRET_KEY="an example",
    )

if __name__ == "__main__":
    execute_from_command_line(sys.argv)

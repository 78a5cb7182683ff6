"""The tenant in log records.

Imports nothing but logging: a ``celery`` command loads this before it sets up its log.
"""

from __future__ import annotations

import logging
from typing import Any

#: What stands for "no tenant" in a log line.
NO_TENANT = "-"


class TenantFilter(logging.Filter):
    """Adds ``record.tenant`` for formats such as ``%(tenant)s``; lets every record pass.

    It is the tenant of the running task or of the block of code; in the worker's main process, of the task
    that the line is about; ``-`` where there is none. A record that has a ``tenant`` already keeps it.

    The handlers of Celery's worker get it by themselves. Elsewhere add it to a handler, not to a logger: a
    logger's filter does not see the records of the loggers below it.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Add the attribute."""
        if not hasattr(record, "tenant"):
            record.tenant = _tenant_of(record)
        return True


def _tenant_of(record: logging.LogRecord) -> str:
    # Imported here for the sake of commands that log nothing about tasks.
    from .tenancy import current_tenant, recent

    name = current_tenant()
    if name is None:
        about: Any = getattr(record, "data", None)  # Celery: what its lines about a task are made of
        name = recent.get(about.get("id")) if isinstance(about, dict) else None
    return NO_TENANT if name is None else name


def add_filter(logger: logging.Logger) -> None:
    """Add the filter to the handlers of a logger that have none yet."""
    for handler in logger.handlers:
        if not any(isinstance(known, TenantFilter) for known in handler.filters):
            handler.addFilter(TenantFilter())


def add_filter_now() -> None:
    """Add the filter to the handlers that Celery's loggers have."""
    for name in ("", "celery", "celery.task", "celery.redirected"):
        add_filter(logging.getLogger(name))


def add_filter_at_setup() -> None:
    """Add the filter when Celery sets its log up, if the app's broker is ours.

    A format with ``%(tenant)s`` needs it from the first line on, which comes before the worker connects.
    """
    from celery import signals

    for signal in (signals.after_setup_logger, signals.after_setup_task_logger):
        signal.connect(_on_setup, weak=False, dispatch_uid="fairlanes_tenant")


def _on_setup(logger: logging.Logger, **kwargs: Any) -> None:
    from celery import current_app

    from ._register import TRANSPORTS

    if current_app.connection_for_write().transport_cls in TRANSPORTS:
        add_filter(logger)

"""Metrics for Prometheus (extra ``metrics``): collectors to mount.  ``fairlanes exporter`` serves the same."""

from __future__ import annotations

from .collectors import LanesCollector, WorkerCollector
from .families import REST

__all__ = ["REST", "LanesCollector", "WorkerCollector"]

"""Read and steer lanes: the public API is `Lanes`, what it returns is in `fairlanes_transport.lanes.views`."""

from __future__ import annotations

from .api import Lanes
from .doctor import Doctor, Report

__all__ = ["Doctor", "Lanes", "Report"]

"""A remote control command that keeps a worker's main loop from turning."""

from __future__ import annotations

import time
from typing import Any

from celery.worker.control import control_command


@control_command(args=[("seconds", float)])
def hang(state: Any, seconds: float) -> None:
    """Spin, as a callback that does not come back."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass

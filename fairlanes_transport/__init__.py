"""Fair multi-tenant queues for Celery on Redis and Valkey.

Importing the package makes the ``fairlanes://`` broker URLs known to kombu. Everything else is loaded when it
is first used, because this module is imported by every program that has kombu and this package installed.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import _register as _register

if TYPE_CHECKING:
    from .errors import BrokerUnavailable as BrokerUnavailable
    from .errors import DeadLettered as DeadLettered
    from .errors import FairlanesError as FairlanesError
    from .errors import LaneFull as LaneFull
    from .errors import NotConfirmed as NotConfirmed
    from .errors import OptionError as OptionError
    from .errors import QueueAbsent as QueueAbsent
    from .errors import ServerFull as ServerFull
    from .errors import TenantError as TenantError
    from .lanes import Lanes as Lanes
    from .logs import TenantFilter as TenantFilter
    from .tasks import attempt as attempt
    from .tasks import delivery as delivery
    from .tasks import throttle as throttle
    from .tenancy import current_tenant as current_tenant
    from .tenancy import reset_tenant as reset_tenant
    from .tenancy import set_tenant as set_tenant
    from .tenancy import tenant as tenant

__version__ = "0.1.0"

#: Public names, and the module of each.
_EXPORTS = {
    "BrokerUnavailable": "errors",
    "DeadLettered": "errors",
    "FairlanesError": "errors",
    "LaneFull": "errors",
    "NotConfirmed": "errors",
    "OptionError": "errors",
    "QueueAbsent": "errors",
    "ServerFull": "errors",
    "TenantError": "errors",
    "TenantFilter": "logs",
    "Lanes": "lanes",
    "attempt": "tasks",
    "delivery": "tasks",
    "current_tenant": "tenancy",
    "reset_tenant": "tenancy",
    "set_tenant": "tenancy",
    "tenant": "tenancy",
    "throttle": "tasks",
}

__all__ = ["__version__", *_EXPORTS]  # noqa: PLE0604


if not TYPE_CHECKING:  # a type checker that sees it takes any name for one of ours

    def __getattr__(name: str) -> Any:
        if name not in _EXPORTS:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(f".{_EXPORTS[name]}", __name__), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

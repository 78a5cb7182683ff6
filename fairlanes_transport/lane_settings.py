"""What can be set of a lane, checked before it is sent to the server."""

from __future__ import annotations

from typing import Any, Final

from .errors import OptionError
from .options import parse_rate

#: Least and most that a message may cost its lane, in turns; as ``enqueue.lua`` has them.
COSTS: Final = (0.01, 1000)
#: What can be set of a lane.
SETTINGS: Final = ("weight", "limit", "rate", "burst", "max_size", "paused")
#: Setting -> least, most, whether it is whole.
_NUMBERS: Final = {
    "weight": (0.001, 1000, False),
    "limit": (1, 10**9, True),
    "burst": (1, 10**9, False),
    "max_size": (1, 10**9, True),
}


def unknown_setting(name: str) -> OptionError:
    """The error to raise for a setting that no lane has."""
    return OptionError(f"unknown setting {name!r}: a lane has {', '.join(SETTINGS)}")


def checked_settings(given: dict[str, Any]) -> dict[str, Any]:
    """Settings as the store takes them.

    Raises:
        OptionError: one is unknown, or out of range.
    """
    return {name: _checked(name, value) for name, value in given.items()}


def _checked(name: str, value: Any) -> Any:
    if name not in SETTINGS:
        raise unknown_setting(name)
    if value is None or (value == "none" and name in ("limit", "rate", "max_size")):
        return value
    if name == "paused":
        return bool(value)
    if name == "rate":
        rate = parse_rate(value)
        return f"{rate.count:.17g}/{rate.per_ms}"
    return _number(name, value)


def _number(name: str, value: Any) -> str:
    low, high, whole = _NUMBERS[name]
    number = value if isinstance(value, (int, float)) and not isinstance(value, bool) else float("nan")
    if not low <= number <= high or (whole and number != int(number)):
        kind = "a whole number" if whole else "a number"
        raise OptionError(f"{name} is {kind} from {low:g} to {high:g}, not {value!r}")
    return f"{number:.17g}"

"""What can be set of a lane, checked before it is sent to the server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from .bounds import CHOICES, MAY_BE_NONE, NUMBERS, OF_A_LANE, OF_A_QUEUE
from .errors import OptionError
from .options import parse_rate

#: Least and most that a message may cost its lane, in turns; as ``enqueue.lua`` has them.
COSTS: Final = (0.01, 1000)
#: What can be set of a lane.
SETTINGS: Final = OF_A_LANE


def unknown_setting(name: str) -> OptionError:
    """The error to raise for a setting that no lane has."""
    return OptionError(f"unknown setting {name!r}: a lane has {', '.join(SETTINGS)}")


def checked_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a lane as the store takes them.

    Raises:
        OptionError: one is unknown, or out of range.
    """
    return {name: _checked(name, value, OF_A_LANE) for name, value in given.items()}


def checked_defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    """What a queue says of all its lanes, as the store takes it.

    Raises:
        OptionError: a default is unknown, or out of range.
    """
    return {name: _checked(name, value, OF_A_QUEUE) for name, value in given.items()}


def _checked(name: str, value: Any, known: tuple[str, ...]) -> Any:
    if name not in known:
        raise unknown_setting(name)
    if value is None or (value == "none" and name in MAY_BE_NONE):
        return value
    if name in CHOICES:
        if value not in CHOICES[name]:
            raise OptionError(f"{name} is {' or '.join(map(repr, CHOICES[name]))}, not {value!r}")
        return value
    if name == "paused":
        return bool(value)
    if name == "rate":
        rate = parse_rate(value)
        return f"{rate.count:.17g}/{rate.per_ms}"
    if not NUMBERS[name].hold(value):
        raise OptionError(f"{name} is {NUMBERS[name]}, not {value!r}")
    return f"{value:.17g}"

"""How the scripts' replies and the stored records are read into `views`."""

from __future__ import annotations

from typing import Any

from ..envelope import EnvelopeError, eta_ms, load
from .views import LaneStats, QueueStats, Settings

_UNITS = {1_000: "s", 60_000: "m", 3_600_000: "h"}


def text(raw: bytes) -> str:
    """A name from the server; one that is no UTF-8 survives a round trip."""
    return raw.decode("utf-8", "surrogateescape")


def raw(name: str) -> bytes:
    """A name as the server has it."""
    return name.encode("utf-8", "surrogateescape")


def pairs(flat: list[bytes]) -> dict[str, str]:
    """A hash from its flat list."""
    names = iter(flat)
    return {text(name): text(value) for name, value in zip(names, names, strict=True)}


def rate_text(stored: str) -> str | None:
    """``"100/60000"`` as ``"100/m"``; ``"none"`` stays, '' is None."""
    count, slash, period = stored.partition("/")
    if not slash:
        return stored or None
    ms = float(period)
    unit = _UNITS.get(int(ms))
    return f"{float(count):g}/{unit}" if unit else f"{float(count) * 1000 / ms:g}/s"


def _bound(value: str | None) -> int | None:
    """A limit or size; ``none`` is 0: a bound that is switched off."""
    if not value:
        return None
    return 0 if value == "none" else int(float(value))


def settings(stored: dict[str, str]) -> Settings:
    """Settings from a lane's hash, or from the queue's."""
    return Settings(
        weight=float(stored["weight"]) if stored.get("weight") else None,
        limit=_bound(stored.get("limit")),
        rate=rate_text(stored.get("rate", "")),
        burst=float(stored["burst"]) if stored.get("burst") else None,
        max_size=_bound(stored.get("max_size")),
        paused=True if stored.get("paused") == "1" else None,
    )


def queue_stats(queue: str, pulse: list[Any]) -> QueueStats:
    """A queue from the reply of ``pulse.lua``."""
    _, ring, waiting, lanes, configured, records, _, bodies, leased, delayed, dead, _, tokens = pulse[:13]
    own, totals = pulse[13:]
    state = pairs(own)
    return QueueStats(
        queue=queue,
        ready=records - leased - delayed - dead,
        in_flight=leased,
        running_slots=max(0, records - bodies),
        delayed=delayed,
        dead=dead,
        paused=state.get("paused") == "1",
        lanes=lanes,
        lanes_servable=ring,
        lanes_waiting=waiting,
        lanes_configured=configured,
        fairness=state.get("fairness") or "count",
        # The queue's own `paused` is no default of its lanes.
        defaults=settings({k: v for k, v in state.items() if k != "paused"}),
        virtual_time=(float(state.get("lap") or 0) * 2**52 + float(state.get("vt") or 0)) / 2**28,
        token=tokens > 0,
        expires=float(state["expires"]) / 1000 if state.get("expires", "0") != "0" else None,
        totals={name: int(value) for name, value in sorted(pairs(totals).items())},
    )


def lane_stats(lane: str, now: int, seen: list[Any]) -> LaneStats:
    """A lane from its part of the reply of ``lanes.lua``."""
    weight, limit, rate, burst, max_size = map(text, seen[7:12])
    blocked, born, eta = text(seen[13]), text(seen[15]), text(seen[16])
    since = max(int(born), eta_ms({"eta": eta})) if born else None
    return LaneStats(
        lane=lane,
        ready=seen[0],
        in_flight=seen[1],
        weight=float(weight),
        limit=_bound(limit),
        rate=rate_text(rate),
        burst=float(burst or 1),
        max_size=_bound(max_size),
        paused=seen[12] == 1,
        blocked_until=int(blocked) / 1000 if blocked else None,
        on_ring=seen[2] != b"",
        oldest_wait=max(0, now - since) / 1000 if since is not None else None,
        own=settings(pairs(seen[6])),
        last_tag=text(seen[17]),
    )


def headers_of(envelope: bytes | None) -> tuple[dict[str, Any], str]:
    """(Headers, task id) of an envelope; the id is Celery's header, or the correlation id.

    Empty if there is no envelope, or it cannot be read.
    """
    try:
        message = load(envelope or b"", b"")
    except (EnvelopeError, UnicodeDecodeError):
        return {}, ""
    headers, properties = message["headers"], message["properties"]
    return headers, str(headers.get("id") or properties.get("correlation_id") or "")


def common(tag: str, record: bytes, headers: dict[str, Any], task_id: str) -> dict[str, Any]:
    """The fields of `views.Message`.

    Raises:
        ValueError: the record is damaged.
    """
    attempt, failures, priority, _, _, born, _, _, lane = record.split(b" ", 8)
    return {
        "tag": tag,
        "lane": text(lane),
        "task_id": task_id,
        "task": str(headers.get("task") or ""),
        "attempt": int(attempt),
        "failures": int(failures),
        "priority": int(priority),
        "published": int(born) / 1000,
    }

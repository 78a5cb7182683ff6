"""When a message is due, and what a failure costs: how both get from what the program says to the store."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone

import pytest

from fairlanes_transport.envelope import eta_ms
from fairlanes_transport.options import Options
from fairlanes_transport.store import FailurePolicy
from fairlanes_transport.transport import _policy

TOKYO = timezone(timedelta(hours=9))
#: 2999-05-06T07:08:09.250 UTC
DUE_MS = 32_482_969_689_250


@pytest.fixture(params=["Asia/Tokyo", "America/New_York", "UTC"])
def _somewhere(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine whose local time is another one."""
    with monkeypatch.context() as patch:
        patch.setenv("TZ", request.param)
        time.tzset()
        assert time.tzname[0] == {"Asia/Tokyo": "JST", "America/New_York": "EST"}.get(request.param, "UTC")
        yield
    time.tzset()


@pytest.mark.usefixtures("_somewhere")
@pytest.mark.parametrize(
    "eta",
    [
        "2999-05-06T07:08:09.250",
        "2999-05-06T07:08:09.250000",
        "2999-05-06T07:08:09.250Z",
        "2999-05-06T07:08:09.250+00:00",
        "2999-05-06T16:08:09.250+09:00",
        "2999-05-06T02:08:09.250-05:00",
        datetime(2999, 5, 6, 7, 8, 9, 250_000),
        datetime(2999, 5, 6, 16, 8, 9, 250_000, TOKYO),
    ],
)
def test_a_naive_eta_is_utc_wherever_the_machine_stands(eta: object) -> None:
    assert eta_ms({"eta": eta}) == DUE_MS


@pytest.mark.parametrize(
    "eta",
    [
        "tomorrow", "2999-99-99", "2999-05-06T25:00:00", "Z", "2999-05-06T07:08:09ZZ", 17, 1.5, True, b"2999-05-06",
        ["2999-05-06"], {"eta": 1}, datetime.min.replace(tzinfo=TOKYO).date(),
    ],
)  # fmt: skip
def test_an_eta_that_is_no_time_is_now(eta: object) -> None:
    assert eta_ms({"eta": eta}) == 0


def test_without_an_eta_it_is_now() -> None:
    assert [eta_ms({}), eta_ms({"eta": None}), eta_ms({"eta": ""})] == [0, 0, 0]


# failures


POLICY: dict[str, float] = {
    "backoff_base": 2.0,
    "backoff_factor": 3.0,
    "backoff_max": 41.0,
    "max_failures": 5,
    "dead_letter_max": 67,
    "dead_letter_ttl": 89.0,
}


def test_each_option_of_the_policy_is_its_field_of_that_name() -> None:
    assert dataclasses.asdict(_policy(Options.from_transport_options(POLICY))) == POLICY


@pytest.mark.parametrize("name", POLICY)
def test_one_option_changes_one_field(name: str) -> None:
    policy = _policy(Options.from_transport_options({name: POLICY[name]}))
    assert policy == dataclasses.replace(FailurePolicy(), **{name: POLICY[name]})


def test_the_defaults_of_options_and_store_are_the_same() -> None:
    assert _policy(Options()) == FailurePolicy()


def test_the_scripts_get_the_policy_in_ms_and_in_their_order() -> None:
    *numbers, jitter = FailurePolicy(**POLICY).argument().split()  # type: ignore[arg-type]
    assert numbers == ["2000", "3.0", "41000", "5", "67", "89000"]
    assert 0 <= float(jitter) < 1

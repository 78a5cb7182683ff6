"""Settings: defaults, checks, what to do about names that are not ours, and the table of the manual."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from fairlanes_transport import options as options_module
from fairlanes_transport.addresses import Address
from fairlanes_transport.connections import Link
from fairlanes_transport.errors import OptionError
from fairlanes_transport.fanout import Fanout
from fairlanes_transport.options import Options, Rate, parse_rate


@pytest.fixture
def nothing_mentioned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a process that has built no options yet."""
    monkeypatch.setattr(options_module, "_mentioned", set())
    return


def options(**given: Any) -> Options:
    return Options.from_transport_options(given)


def test_the_defaults_are_valid() -> None:
    assert options() == Options() == Options.from_transport_options(None)


def test_no_password_is_shown() -> None:
    sentinels = {"username": "u", "password": "s3cret"}
    made = options(sentinel_kwargs=sentinels, credential_provider=lambda: "s3cret", master_name="m")
    assert "s3cret" not in repr(made) + str(made)
    assert "master_name='m'" in repr(made)
    with pytest.raises(OptionError) as caught:
        options(sentinel_kwargs='{"password": "s3cret"')
    assert "s3cret" not in repr(caught.value)
    assert caught.value.__suppress_context__


def test_options_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Options().lease_seconds = 3.0  # type: ignore[misc]


def test_none_means_the_default() -> None:
    assert options(socket_timeout=None, max_connections=None) == Options()


def test_whole_numbers_are_taken_for_seconds() -> None:
    lease = options(lease_seconds=30).lease_seconds
    assert (lease, type(lease)) == (30.0, float)


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("lease_seconds", 0.5, "a number from 1 to 86400"),
        ("lease_seconds", "60", "a number from 1"),
        ("lease_seconds", float("nan"), "a number from 1"),
        ("lease_seconds", True, "a number from 1"),
        ("park_seconds", 3601, "from 1 to 3600"),
        ("claim_batch", 1.5, "a whole number from 1 to 1000"),
        ("claim_batch", 0, "a whole number"),
        ("max_failures", -1, "from 0 to"),
        ("tenant_header", "", "not empty"),
        ("tenant_of", "no spaces.in:names", "dotted name"),
        ("tenant_of", 3, "a callable"),
        ("eta_in_broker", 1, "True or False"),
        ("lane_rate", "100/d", "'100/m'"),
        ("lane_rate", "0/s", "above zero"),
        ("lane_limit", 0, "or None"),
        ("lane_limit", 2_000_000_000, "a whole number from 1 to 1000000000"),
        ("lane_max_size", 2_000_000_000, "a whole number from 1 to 1000000000"),
        ("lane_burst", 2_000_000, "a number from 1 to 1000000"),
        ("lane_weight", 1001, "a number from 0.001 to 1000"),
        ("lane_rate", "0.0001/h", "one start in a year"),
        ("lane_rate", "2000000/s", "a million in a second"),
        ("backoff_max", float("inf"), "a number from 0 to"),
        ("dead_letter_ttl", float("inf"), "a number from 1 to"),
        ("fairness", "luck", "'count', 'time'"),
        ("global_keyprefix", "{app}", "without braces"),
        ("queue_order_strategy", "random", "'round_robin'"),
        ("fanout_prefix", 1.5, "a string"),
        ("fanout_prefix", "a{b}.", "no braces in it but those of {db}"),
        ("fanout_prefix", "a{}.", "no braces in it but those of {db}"),
        ("fanout_prefix", "{{db}}", "no braces in it but those of {db}"),
        ("sentinel_kwargs", "x", "a mapping"),
        ("socket_timeout", 0, "a number from 0.05"),
    ],
)
def test_a_bad_value_is_refused_with_what_it_must_be(name: str, value: object, told: str) -> None:
    with pytest.raises(OptionError) as caught:
        options(**{name: value})
    shown = name if name == "sentinel_kwargs" else f"{name}={value!r}"
    assert f"option {shown}: " in str(caught.value)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    "given",
    [
        {"backoff_base": 10, "backoff_max": 5},
        {"lane_burst": 5},
        {"durable_publish": True, "durable_timeout": 5.0, "socket_timeout": 5.0},
    ],
)
def test_values_that_contradict_each_other_are_refused(given: dict[str, object]) -> None:
    with pytest.raises(OptionError, match=next(iter(given)).split("_")[0]):
        options(**given)


@pytest.mark.parametrize(
    ("name", "nearest"), [("leese_seconds", "lease_seconds"), ("visibility_timeot", "visibility_timeout")]
)
def test_an_unknown_option_is_refused_with_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(OptionError, match=f"unknown option '{name}': did you mean '{nearest}'"):
        options(**{name: 1})


def test_an_unknown_option_like_no_other_points_to_the_manual() -> None:
    with pytest.raises(OptionError, match="unknown option 'zzz': see"):
        options(zzz=1)


@pytest.mark.usefixtures("nothing_mentioned")
def test_options_without_effect_are_named_once_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    for _ in range(2):
        assert options(visibility_timeout=7200, unacked_key="u", priority_steps=[0, 5]) == Options()
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    for told in ("visibility_timeout", "lease_seconds is ours", "unacked_key", "priority_steps"):
        assert told in record.getMessage()


@pytest.mark.usefixtures("nothing_mentioned")
def test_what_kombu_writes_on_each_publish_is_ignored_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    policy = {"max_retries": 3, "interval_start": 0, "interval_step": 0.2, "interval_max": 0.2}
    assert options(**policy, errback=print, callback=print, retry_errors=None) == Options()
    assert caplog.records == []


def test_every_option_of_kombus_redis_transport_is_known() -> None:
    from kombu.transport import redis as kombu_redis

    names = {*kombu_redis.Channel.from_transport_options, *kombu_redis.SentinelChannel.from_transport_options}
    Options.from_transport_options(dict.fromkeys(names))


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("100/m", Rate(100, 60_000)),
        ("10/s", Rate(10, 1000)),
        ("1.5/h", Rate(1.5, 3_600_000)),
        (" 7 / s ", Rate(7, 1000)),
        (5, Rate(5, 1000)),
        ("2", Rate(2, 1000)),
    ],
)
def test_rates_are_written_as_in_celery(text: str | int, rate: Rate) -> None:
    assert parse_rate(text) == rate
    assert options(lane_rate=text).rate == rate


def test_no_rate_by_default() -> None:
    assert Options().rate is None


def test_a_park_ends_within_half_a_lease() -> None:
    assert options(lease_seconds=10).park_time == 5
    assert options(lease_seconds=600, park_seconds=7).park_time == 7


@pytest.mark.parametrize(("given", "prefix"), [(True, "/3."), (False, ""), ("/app{db}.", "/app3."), ("/app.", "/app.")])
def test_fanout_topics_are_spelled_as_in_kombu(given: bool | str, prefix: str) -> None:
    made = options(fanout_prefix=given, global_keyprefix="p:")
    assert made.fanout_keyprefix(3) == prefix
    # What is in use: the fanout makes its topics of it.
    assert Fanout(Link(Address.from_url("fairlanes://")), made, 3).topic("news", None) == f"p:{prefix}news"


@pytest.mark.parametrize("name", ["os.path:basename", "os.path.basename"])
def test_a_tenant_function_is_found_by_its_name(name: str) -> None:
    found = options(tenant_of=name).tenant_function()
    assert found is not None
    assert found("a/b") == "b"


def test_a_tenant_function_may_be_given_itself() -> None:
    assert options(tenant_of=str.upper).tenant_function() is str.upper
    assert options().tenant_function() is None


@pytest.mark.parametrize("name", ["no_such_module:function", "os:no_such_name", "os:sep"])
def test_a_tenant_function_that_cannot_be_used_is_an_option_error(name: str) -> None:
    with pytest.raises(OptionError, match="tenant_of"):
        options(tenant_of=name).tenant_function()


def test_the_table_has_a_full_row_for_each_option() -> None:
    rows = Options.table()
    assert [row.name for row in rows] == [option.name for option in dataclasses.fields(Options)]
    for row in rows:
        assert row.doc.endswith("."), row
        assert row.default == getattr(Options(), row.name), row

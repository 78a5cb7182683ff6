"""What an error reply of the server becomes, and on which side of kombu's border each error stands."""

from __future__ import annotations

import pickle
import socket

import pytest
from redis import exceptions as driver

from fairlanes_transport import errors
from fairlanes_transport.errors import (
    AccessDenied,
    BrokerUnavailable,
    ClusterRefused,
    FairlanesError,
    LaneFull,
    NoFreeConnection,
    OptionError,
    QueueAbsent,
    ScriptError,
    ServerFull,
    TenantError,
    connection_errors,
    translate,
)

OURS = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, FairlanesError) and value is not FairlanesError
]
DRIVERS = [value for value in vars(driver).values() if isinstance(value, type) and issubclass(value, Exception)]


@pytest.mark.parametrize("error", OURS)
def test_typed_errors_are_no_connection_errors(error: type[Exception]) -> None:
    assert not issubclass(error, (*connection_errors, KeyError))


@pytest.mark.parametrize("error", [*DRIVERS, BrokerUnavailable, NoFreeConnection, socket.timeout, BrokenPipeError])
def test_every_error_of_driver_and_socket_is_a_connection_error(error: type[Exception]) -> None:
    assert issubclass(error, connection_errors)


@pytest.mark.parametrize("error", [*OURS, BrokerUnavailable, NoFreeConnection])
def test_the_docstring_is_the_default_message(error: type[Exception]) -> None:
    assert str(error()).strip()
    assert str(error("what went wrong")) == "what went wrong"


@pytest.mark.parametrize("error", [OptionError, TenantError])
def test_bad_values_are_value_errors(error: type[Exception]) -> None:
    assert issubclass(error, ValueError)


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("UNBLOCKED force unblock from blocking operation, master -> replica?", BrokerUnavailable),
        ("MISCONF Redis is configured to save RDB snapshots", BrokerUnavailable),
        ("NOREPLICAS Not enough good replicas to write.", BrokerUnavailable),
        ("BUSY Redis is busy running a script.", BrokerUnavailable),
        ("READONLY You can't write against a read only replica.", BrokerUnavailable),
        ("OOM command not allowed when used memory > 'maxmemory'.", ServerFull),
        ("FLABSENT no such queue", QueueAbsent),
        ("FLARG weight must be above zero", ScriptError),
        ("FLSTATE lane on the ring without messages", ScriptError),
        ("FLFULL 100 100", LaneFull),
        ("FLFULL", LaneFull),
        (
            (
                "Error running script (call to f_0123456789abcdef): @user_script:7: @user_script: 7: "
                "-OOM command not allowed when used memory > 'maxmemory'."
            ),
            ServerFull,
        ),
        (
            (
                "ERR Error running script (call to f_0123456789abcdef): @user_script:7: @user_script: 7: "
                "-READONLY You can't write against a read only replica."
            ),
            BrokerUnavailable,
        ),
    ],
)
def test_a_reply_is_classified_by_its_first_word(reply: str, expected: type[Exception]) -> None:
    assert type(translate(driver.ResponseError(reply))) is expected


@pytest.mark.parametrize(
    ("exc", "expected"),
    [
        (driver.ReadOnlyError("You can't write"), BrokerUnavailable),
        (driver.BusyLoadingError("Redis is loading"), BrokerUnavailable),
        (driver.MasterDownError("Link with MASTER is down"), BrokerUnavailable),
        (driver.ClusterDownError("The cluster is down"), BrokerUnavailable),
        (driver.TryAgainError("Multiple keys request during rehashing"), BrokerUnavailable),
        (driver.OutOfMemoryError("command not allowed"), ServerFull),
        (driver.NoPermissionError("this user has no permissions to run the 'psubscribe' command"), AccessDenied),
        (driver.MovedError("3999 127.0.0.1:6381"), ClusterRefused),
    ],
)
def test_a_reply_that_the_driver_knows_is_classified_by_its_class(exc: Exception, expected: type[Exception]) -> None:
    assert type(translate(exc)) is expected


@pytest.mark.parametrize(
    "exc",
    [
        driver.ResponseError("WRONGTYPE Operation against a key"),
        driver.NoScriptError("No matching script"),
        driver.ConnectionError("Connection closed by server."),
        ValueError("not the server's"),
    ],
)
def test_other_errors_stay_as_they_are(exc: Exception) -> None:
    assert translate(exc) is exc


def test_what_celery_logs_says_what_happened() -> None:
    """redis-py 8 shows its own errors by category and class alone."""
    denied = translate(driver.NoPermissionError("this user has no permissions to run the 'psubscribe' command"))
    assert repr(denied) == "AccessDenied(\"this user has no permissions to run the 'psubscribe' command\")"
    assert "READONLY" in repr(translate(driver.ResponseError("READONLY You can't write")))


def test_a_full_lane_is_named_with_its_size() -> None:
    error = translate(driver.ResponseError("FLFULL 10 9"), lane="acme", queue="mail")
    assert isinstance(error, LaneFull)
    assert (error.lane, error.queue, error.size, error.max_size) == ("acme", "mail", 10, 9)
    assert "lane 'acme' of queue 'mail' is full (10 messages, limit 9)" in str(error)


def test_an_absent_queue_is_named() -> None:
    assert str(translate(driver.ResponseError("FLABSENT"), queue="mail")) == "queue 'mail' does not exist"


def test_a_full_lane_survives_pickling() -> None:
    error = LaneFull(lane="acme", queue="mail", size=10, max_size=9)
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), vars(copy)) == (str(error), vars(error))

"""What is sent is what arrives, byte for byte."""

from __future__ import annotations

import json
import uuid
from typing import Any

import pytest
from kombu import Connection
from kombu.compression import encoders

from tests.harness import Server
from tests.invariants import check, dump
from tests.transport.conftest import Inbox, ours, send, take

BINARY = bytes(range(256)) * 3


@pytest.mark.parametrize("body", [b"", b"\x00", BINARY, "gr\u00fc\u00dfe \u2603 \U0001f600".encode()])
def test_binary_bodies(connection: Connection, body: bytes) -> None:
    send(connection, "q", body, content_type="application/octet-stream", content_encoding="binary")
    message = connection.default_channel.basic_get("q", no_ack=True)
    assert bytes(message.body) == body
    assert message.content_type == "application/octet-stream"


def test_text_bodies(connection: Connection) -> None:
    text = "gr\u00fc\u00dfe \u2603 \U0001f600 \x00 end"
    send(connection, "q", text, serializer="raw")
    assert connection.default_channel.basic_get("q", no_ack=True).payload == text


def test_a_large_body(connection: Connection) -> None:
    body = "x" * 5_000_000
    send(connection, "q", body)
    assert connection.default_channel.basic_get("q", no_ack=True).payload == body


@pytest.mark.parametrize("serializer", ["json", "pickle", "yaml", "msgpack"])
def test_serializers(connection: Connection, serializer: str) -> None:
    pytest.importorskip(serializer)
    inbox = Inbox(connection.default_channel, "q", accept=[serializer])
    body = {"n": 1, "nested": [1, {"deep": None}], "text": "\u2603"}
    send(connection, "q", body, serializer=serializer)
    take(connection, 1)
    assert inbox.bodies == [body]


@pytest.mark.parametrize("compression", sorted(set(encoders())))
def test_compression(connection: Connection, compression: str) -> None:
    send(connection, "q", {"text": "abc" * 1000}, compression=compression)
    assert connection.default_channel.basic_get("q", no_ack=True).payload == {"text": "abc" * 1000}


def test_headers_and_properties_arrive(connection: Connection) -> None:
    headers = {"a": 1, "b": None, "c": {"d": [True]}, "e": "\u2603"}
    send(
        connection, "q", 1, headers=headers, priority=3,
        reply_to="answers", correlation_id="c-1", expiration=60, message_id="m-1", app_id="tests",
    )  # fmt: skip
    message = connection.default_channel.basic_get("q", no_ack=True)
    assert headers.items() <= message.headers.items()
    for name, value in {
        "reply_to": "answers", "correlation_id": "c-1", "message_id": "m-1", "app_id": "tests", "priority": 3,
        "expiration": "60000", "delivery_mode": 2,
    }.items():  # fmt: skip
        assert message.properties[name] == value
    assert message.delivery_info["routing_key"] == "q"
    assert message.delivery_info["exchange"] == ""


@ours
def test_a_body_is_stored_as_its_bytes(connection: Connection, server: Server) -> None:
    """Not base64 inside of JSON: a third less memory, and readable from any language."""
    send(connection, "q", {"n": 1})
    send(connection, "q", BINARY, content_type="application/octet-stream", content_encoding="binary")
    state = check(server.client(), "q")
    assert sorted(state.body.values()) == sorted([json.dumps({"n": 1}).encode(), BINARY])


@ours
def test_redelivered_is_told(connection: Connection) -> None:
    channel = connection.default_channel
    send(connection, "q", 1)
    message = channel.basic_get("q")
    assert message.delivery_info["redelivered"] is False
    channel.basic_recover(requeue=True)
    message = channel.basic_get("q")
    assert message.delivery_info["redelivered"] is True
    assert message.properties["fairlanes"]["attempt"] == 2
    message.ack()


@ours
@pytest.mark.parametrize(
    "envelope",
    [b"no json", b"[]", b"{}", b'{"properties": {}}', b'{"properties": [], "headers": {}}', b"\xff\xfe"],
)
def test_an_unreadable_envelope_becomes_a_dead_letter(connection: Connection, server: Server, envelope: bytes) -> None:
    """It must not stop what comes behind it, and somebody must be able to look at it."""
    send(connection, "q", "broken", "sound")
    client = server.client()
    state = dump(client, "q")
    tag = min(state.ready["default"], key=state.ready["default"].__getitem__)
    client.hset("fairlanes:2:{q}:envelope", tag, envelope)

    inbox = Inbox(connection.default_channel, "q")
    take(connection, 1)
    assert inbox.bodies == ["sound"]
    state = check(client, "q")
    assert list(state.dead) == [tag]
    assert "envelope" in state.reasons[tag]
    assert state.envelope[tag] == envelope


@ours
def test_get_goes_past_an_unreadable_envelope(connection: Connection, server: Server) -> None:
    send(connection, "q", "broken", "sound")
    state = dump(server.client(), "q")
    tag = min(state.ready["default"], key=state.ready["default"].__getitem__)
    server.client().hset("fairlanes:2:{q}:envelope", tag, b"no json")
    assert connection.default_channel.basic_get("q", no_ack=True).payload == "sound"


@pytest.mark.parametrize("value", [7, uuid.uuid4(), "acme", "\u00fcbung {x} %41 \n"])
@ours
def test_tenants(connection: Connection, server: Server, value: Any) -> None:
    send(connection, "q", 1, headers={"tenant": value})
    assert list(check(server.client(), "q").ready) == [str(value)]
    message = connection.default_channel.basic_get("q", no_ack=True)
    assert message.properties["fairlanes"]["lane"] == str(value)


@pytest.mark.parametrize("value", ["", "x" * 257, 1.5, True, b"bytes", [], {}])
@ours
def test_a_bad_tenant_stores_nothing(connection: Connection, server: Server, value: Any) -> None:
    with pytest.raises(ValueError, match="tenant"):
        send(connection, "q", 1, headers={"tenant": value})
    assert server.client().keys("*{q}*") == []

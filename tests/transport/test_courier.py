"""The event loop's own connection: requests go out without waiting, replies find their callbacks."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from redis.exceptions import ConnectionError as DriverConnectionError

from fairlanes_transport.addresses import Address
from fairlanes_transport.connections import Link
from fairlanes_transport.courier import Courier
from fairlanes_transport.errors import BrokerUnavailable
from fairlanes_transport.store import Request, Store
from tests.harness import Server, wait_for


@pytest.fixture
def link(server: Server) -> Iterator[Link]:
    link = Link(Address.from_url(server.url()))
    Store(link).declare("q")
    claim(link).run(link)  # the server knows the script now
    yield link
    link.close()


@pytest.fixture
def courier(link: Link) -> Iterator[Courier]:
    courier = Courier(link)
    yield courier
    courier.close()


def claim(link: Link) -> Request:
    return Store(link).claim_request("q", 1, 60_000, consumer="c", will_park=False)


def put(courier: Courier, request: Request) -> list[Any]:
    """Put a request; what becomes of it is added to the list."""
    fate: list[Any] = []
    courier.put(request, fate.append, lambda: fate.append("lost"))
    return fate


#: What a claim of an empty queue is answered.
NOTHING = b"*2\r\n:0\r\n:-1\r\n"


def test_replies_of_two_packets_that_came_together_are_both_read(courier: Courier, link: Link) -> None:
    """They sit in one read of the socket: the loop would not hear of the second again."""
    first = put(courier, claim(link))
    courier.post()
    second = put(courier, claim(link))
    courier.post()
    wait_for(
        lambda: courier.sock.recv(100, socket.MSG_PEEK | socket.MSG_DONTWAIT) == 2 * NOTHING,
        5,
        "both replies",
    )
    courier.receive()
    assert not courier.waiting
    assert [len(fate) for fate in (first, second)] == [1, 1]
    assert "lost" not in first + second


def test_a_callback_that_fails_keeps_no_other_from_its_reply(courier: Courier, link: Link) -> None:
    def fail(_turn: object) -> None:
        raise RuntimeError("planted")

    courier.put(claim(link), fail, lambda: None)
    other = put(courier, claim(link))
    courier.post()
    with pytest.raises(RuntimeError, match="planted"):
        courier.settle()
    assert len(other) == 1


def test_a_server_that_forgot_its_scripts_is_told_again(courier: Courier, link: Link) -> None:
    link.call("SCRIPT", "FLUSH")
    fate = put(courier, claim(link))
    courier.post()
    courier.settle()
    assert fate[0].claimed == ()


def test_a_lost_connection_tells_every_letter(courier: Courier, link: Link, server: Server) -> None:
    courier.post()
    sent = put(courier, claim(link))
    courier.post()
    unsent = put(courier, claim(link))
    courier.close()
    assert sent == unsent == ["lost"]
    assert not courier.waiting


def test_a_killed_connection_is_an_error_and_loses_its_letters(courier: Courier, link: Link, server: Server) -> None:
    put(courier, claim(link))
    courier.post()
    courier.settle()
    server.client().client_kill_filter(_type="normal", skipme=True)
    fate = put(courier, claim(link))
    with pytest.raises((DriverConnectionError, OSError)):
        courier.post()
        courier.settle()
    assert fate == ["lost"]


def test_an_end_after_a_reply_loses_what_else_was_sent(courier: Courier, link: Link, server: Server) -> None:
    """The reply is read, and then the end of the connection: the second letter is lost, once, and nothing hangs."""
    first = put(courier, claim(link))
    courier.post()
    wait_for(lambda: courier.sock.recv(100, socket.MSG_PEEK | socket.MSG_DONTWAIT) == NOTHING, 5, "the reply")
    pid = server.client().info()["process_id"]
    os.kill(pid, signal.SIGSTOP)
    try:
        second = put(courier, claim(link))
        courier.post()
        courier.sock.shutdown(socket.SHUT_RD)
        with pytest.raises(DriverConnectionError):
            courier.receive()
        courier.settle()
    finally:
        os.kill(pid, signal.SIGCONT)
    assert (len(first), second) == (1, ["lost"])
    assert first != ["lost"]


def test_a_server_that_cannot_serve_is_left(courier: Courier, link: Link, server: Server) -> None:
    """After a failover the address may lead to another one; and what the script's line says is no bug of ours."""
    client, generation = server.client(), link.generation
    client.replicaof("127.0.0.1", "1")
    try:
        refused = put(courier, claim(link))
        courier.post()
        with pytest.raises(BrokerUnavailable, match="READONLY"):
            courier.settle()
    finally:
        client.replicaof("NO", "ONE")
    assert (refused, courier.sock, link.generation > generation) == (["lost"], None, True)


def test_a_connection_from_before_a_failover_is_replaced_when_it_is_idle(courier: Courier, link: Link) -> None:
    ports = []
    for _ in range(2):
        put(courier, claim(link))
        courier.post()
        ports.append(courier.sock.getsockname())
        link.disconnect()  # while a reply is to come
        courier.settle()
    assert ports[0] != ports[1]


def test_what_a_process_had_sent_before_it_forked_is_no_matter_of_its_child(courier: Courier, link: Link) -> None:
    put(courier, claim(link))
    courier.post()
    pid = os.fork()
    if pid == 0:
        try:
            courier.settle()
        except DriverConnectionError:
            os._exit(0)
        except BaseException:
            os._exit(2)
        os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0
    courier.settle()

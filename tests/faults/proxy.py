"""A TCP proxy that fails on purpose: it forwards, delays, stalls, swallows, and cuts."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time

_STEP_SECONDS = 0.02
_RESET = struct.pack("ii", 1, 0)


class _Connection:
    """One client with its connection to the server."""

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self.client, self.server = client, server
        #: what is sent on it is lost from now on, also after the path has come back
        self.lost = False
        #: it ends when the server answers
        self.cutting = False

    def reset(self) -> None:
        """End both sides at once, as a RST does."""
        for sock in (self.client, self.server):
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()


class Proxy:
    """Listens on `port` of loopback and forwards to `target`.

    Attributes:
        delay: seconds that everything takes longer, each way.
    """

    def __init__(self, target: int) -> None:
        self.target = target
        self.delay = 0.0
        self._mode = "forward"
        self._cut_at: bytes | None = None
        self._cuts = 0
        self._connections: set[_Connection] = set()
        self._closed = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, name="proxy", daemon=True).start()

    def forward(self) -> None:
        """The path is there.  Connections that were swallowed stay lost, as after a NAT has forgotten them."""
        self._mode = "forward"

    def stall(self) -> None:
        """Hold everything back, new connections too; `forward` delivers it."""
        self._mode = "stall"

    def swallow(self) -> None:
        """A black hole: connections are made, what is sent on any of them is read and lost, no end is told."""
        self._mode = "swallow"
        for connection in list(self._connections):
            connection.lost = True

    def lose(self, ports: set[int]) -> int:
        """Swallow what is sent on the connections that the server knows by these ports; returns how many."""
        lost = [each for each in list(self._connections) if each.server.getsockname()[1] in ports]
        for connection in lost:
            connection.lost = True
        return len(lost)

    def cut(self) -> int:
        """Reset every connection; returns how many."""
        connections = list(self._connections)
        for connection in connections:
            self._drop(connection)
        return len(connections)

    def refuse(self) -> None:
        """Reset every connection, and each new one."""
        self._mode = "refuse"
        self.cut()

    def cut_reply(self, pattern: bytes) -> None:
        """Forward the next request that holds `pattern`, and reset its connection before the reply."""
        self._cut_at = pattern

    @property
    def cuts(self) -> int:
        """How many replies were cut."""
        return self._cuts

    @property
    def open(self) -> int:
        """Connections that are open now."""
        return len(self._connections)

    def close(self) -> None:
        """Stop."""
        self._closed = True
        self._listener.close()
        self.cut()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        while self._mode == "stall" and not self._closed:
            time.sleep(_STEP_SECONDS)
        try:
            if self._mode == "refuse":
                raise ConnectionRefusedError
            server = socket.create_connection(("127.0.0.1", self.target), 5)
        except OSError:
            _Connection(client, client).reset()
            return
        for sock in (client, server):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = _Connection(client, server)
        connection.lost = self._mode == "swallow"
        self._connections.add(connection)
        if self._closed:
            self._drop(connection)
            return
        for source, sink in ((client, server), (server, client)):
            threading.Thread(target=self._pump, args=(connection, source, sink), daemon=True).start()

    def _pump(self, connection: _Connection, source: socket.socket, sink: socket.socket) -> None:
        try:
            while self._pass_on(connection, source, sink):
                pass
        except (OSError, ValueError):
            self._drop(connection)

    def _pass_on(self, connection: _Connection, source: socket.socket, sink: socket.socket) -> bool:
        if not select.select([source], [], [], _STEP_SECONDS)[0]:
            return not self._closed
        if self._mode == "stall":
            time.sleep(_STEP_SECONDS)
            return True
        data = source.recv(65536)
        if connection.lost:
            return bool(data)  # nobody hears of the end
        if not data:
            self._drop(connection)
            return False
        if self.delay:
            time.sleep(self.delay)
        if connection.cutting and source is connection.server:
            # This is the reply: the server has done it.
            self._cuts += 1
            self._drop(connection)
            return False
        if self._cut_at is not None and source is connection.client and self._cut_at in data:
            self._cut_at = None
            connection.cutting = True
        sink.sendall(data)
        return True

    def _drop(self, connection: _Connection) -> None:
        self._connections.discard(connection)
        connection.reset()

"""A socket that another thread, or a later turn of the loop, makes readable."""

from __future__ import annotations

import contextlib
import socket
import weakref


class Doorbell:
    """Makes an event loop call back soon, from any thread."""

    def __init__(self) -> None:
        self.reader, self.writer = socket.socketpair()
        self.reader.setblocking(False)
        self.writer.setblocking(False)
        self._rung = False
        # Of a connection that is dropped without a close.
        self._finalizer = weakref.finalize(self, _close, self.reader, self.writer)
        self._finalizer.atexit = False

    def ring(self) -> None:
        """Make `reader` readable."""
        if not self._rung:
            self._rung = True
            with contextlib.suppress(OSError):  # full: it is readable anyway; closed: nobody listens
                self.writer.send(b"\0")

    def quiet(self) -> None:
        """The bell was heard; what was the matter has to be looked at after this.

        First the bytes, then the flag: a ring of another thread between the two is one that we look at.  The other
        way round its byte would be gone and its flag would stay, and nobody could ring any more.
        """
        with contextlib.suppress(OSError):
            self.reader.recv(4096)
        self._rung = False

    def close(self) -> None:
        """Close both ends."""
        self._finalizer()


def _close(*sockets: socket.socket) -> None:
    for sock in sockets:
        sock.close()

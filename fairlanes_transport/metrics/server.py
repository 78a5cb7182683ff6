"""A small HTTP server for a page of metrics: it bounds what slow or many clients cost, and speaks TLS."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from socketserver import TCPServer, ThreadingMixIn
from time import monotonic
from typing import Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app

from ..errors import OptionError

#: Seconds that a client may be silent, and that its whole visit may take.
SILENT_SECONDS: Final = 5.0
VISIT_SECONDS: Final = 30.0
#: Clients at a time; who comes then is hung up on.
MOST_CLIENTS: Final = 50


class _Handler(WSGIRequestHandler):
    """Answers one request, and logs nothing."""

    #: on the client's socket
    timeout = SILENT_SECONDS

    def handle(self) -> None:
        # A client that hangs up, or says nothing, is no event.
        with contextlib.suppress(OSError):
            super().handle()

    def finish(self) -> None:
        with contextlib.suppress(OSError):
            super().finish()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        pass


class MetricsServer(ThreadingMixIn, WSGIServer):
    """Serves a registry at every path, a thread per client, until closed.

    Args:
        host, port: where to listen; port 0: any free one.
        registry: what to serve.
        context: makes it HTTPS.
        most_clients: at a time.
        visit_seconds: that a client may take in all.
    """

    daemon_threads = True
    # What is slow waits here, and not in a thread of ours.
    request_queue_size = 128

    def __init__(
        self,
        host: str,
        port: int,
        registry: CollectorRegistry,
        context: ssl.SSLContext | None = None,
        *,
        most_clients: int = MOST_CLIENTS,
        visit_seconds: float = VISIT_SECONDS,
    ) -> None:
        if ":" in host:
            self.address_family = socket.AF_INET6
        self._context, self._most, self._visit_seconds = context, most_clients, visit_seconds
        #: a client's socket as it was accepted -> the one that is read, and when its visit ends
        self._visits: dict[socket.socket, tuple[socket.socket, float]] = {}
        self._lock = threading.Lock()
        super().__init__((host, port), _Handler)
        self.set_app(make_wsgi_app(registry))
        self._thread = threading.Thread(target=self.serve_forever, name="metrics", daemon=True)

    @property
    def url(self) -> str:
        """Where the page is."""
        host = str(self.server_address[0])
        shown = f"[{host}]" if ":" in host else host
        return f"{'http' if self._context is None else 'https'}://{shown}:{self.server_port}/metrics"

    def start(self) -> None:
        """Serve in a thread."""
        self._thread.start()

    def close(self) -> None:
        """Stop listening, and end the thread."""
        self.shutdown()
        self.server_close()
        self._thread.join(5)

    def server_bind(self) -> None:
        # Not HTTPServer's: it asks the DNS for our name.
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            full = len(self._visits) >= self._most
            if not full:
                self._visits[request] = (request, monotonic() + self._visit_seconds)
        if full:
            self.shutdown_request(request)
        else:
            super().process_request(request, client_address)

    def finish_request(self, request: Any, client_address: Any) -> None:
        request.settimeout(SILENT_SECONDS)
        if self._context is None:
            super().finish_request(request, client_address)
            return
        with self._context.wrap_socket(request, server_side=True, do_handshake_on_connect=False) as encrypted:
            with self._lock:
                self._visits[request] = (encrypted, self._visits[request][1])
            # In the client's thread: a slow one holds nobody else up.
            encrypted.do_handshake()
            super().finish_request(encrypted, client_address)

    def shutdown_request(self, request: Any) -> None:
        super().shutdown_request(request)
        with self._lock:
            self._visits.pop(request, None)

    def service_actions(self) -> None:
        """End visits that take too long; called twice a second."""
        now = monotonic()
        with self._lock:
            late = [sock for sock, until in self._visits.values() if until < now]
        for sock in late:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(sock, socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: what goes wrong with one client is its own matter, and a page cannot fail otherwise."""


def tls_context(certificate: str, key: str | None, client_ca: str | None) -> ssl.SSLContext:
    """Return the context of a server that shows *certificate*, and asks for one by *client_ca*.

    Raises:
        OptionError: a file cannot be read or used.
    """
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(certificate, key, password=lambda: "")
    except OSError as exc:
        files = f"{certificate!r}" + (f" with the key {key!r}" if key else "")
        raise OptionError(f"the certificate {files} cannot be used: {exc}") from exc
    if client_ca is not None:
        try:
            context.load_verify_locations(client_ca)
        except OSError as exc:
            raise OptionError(f"the client CA {client_ca!r} cannot be used: {exc}") from exc
        context.verify_mode = ssl.CERT_REQUIRED
    return context

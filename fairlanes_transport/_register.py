"""Make ``fairlanes://`` known to kombu.

kombu has no entry point for transports, and takes none from a dotted name in a URL: its table of aliases must
be written to. This module is imported by whatever comes first:

* ``import fairlanes_transport``;
* any ``celery`` command, through the entry point group ``celery.commands``;
* plain ``from celery import Celery`` in a web process: it loads kombu's serializers, with the entry points of the group
  ``kombu.serializers``, and this is the only hook that runs there.

A program that uses kombu without Celery may connect before it has loaded them (``from kombu import Connection`` does
not): it has to import the package.

So it costs next to nothing, imports neither redis nor celery, and never raises: a fault here would break the
import of kombu for every program in the environment.
"""

from __future__ import annotations

TRANSPORTS = {
    "fairlanes": "fairlanes_transport.transport:Transport",
    "fairlaness": "fairlanes_transport.transport:TLSTransport",
    "fairlanes-sentinel": "fairlanes_transport.transport:SentinelTransport",
    "fairlanes-socket": "fairlanes_transport.transport:SocketTransport",
}


def register() -> None:
    """Add our schemes to kombu's table of transports. Does nothing where kombu cannot be imported."""
    try:
        from kombu.transport import TRANSPORT_ALIASES

        TRANSPORT_ALIASES.update(TRANSPORTS)
    except Exception:
        # The import of kombu must not fail because of us; an unknown scheme is reported well enough by it.
        return


#: What kombu gets as the "serializer" of this name: encoder, decoder, content type, encoding. Without encoder
#: and decoder it notes the name and does nothing with it: nothing can be encoded, no content is accepted.
serializer = (None, None, "application/x-fairlanes-transport", "utf-8")

register()

"""Shell: TLS contexts for clients that remember which certificate they show."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import os

__all__ = ["ClientContext", "client_context"]


class ClientContext(ssl.SSLContext):
    """A context that remembers the certificate it shows, for gRPC, which speaks TLS by itself.

    Attributes:
        shown: The certificate's chain and its key, both as PEM; None if it shows none.
    """

    shown: tuple[bytes, bytes] | None = None

    def load_cert_chain(  # type: ignore[override]  # the key's password is left out: see below
        self, certfile: str | os.PathLike[str], keyfile: str | os.PathLike[str] | None = None
    ) -> None:
        """Show this certificate; its key must not be encrypted, since nothing here could ask for a password."""
        super().load_cert_chain(certfile, keyfile)
        self.shown = Path(certfile).read_bytes(), Path(keyfile or certfile).read_bytes()


def client_context(
    ca: str | os.PathLike[str] | None = None,
    cert: str | os.PathLike[str] | None = None,
    key: str | os.PathLike[str] | None = None,
) -> ClientContext:
    """Return a context for a client, from files in PEM.

    Args:
        ca: The authorities that are trusted; without it, those of the system.
        cert: What to show, if anything.
        key: Its key; without it, it is in the same file.
    """
    context = ClientContext(ssl.PROTOCOL_TLS_CLIENT)
    if ca is not None:
        context.load_verify_locations(ca)
    else:
        context.load_default_certs()
    if cert is not None:
        context.load_cert_chain(cert, key)
    return context

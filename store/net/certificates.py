"""TLS contexts for clients."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import os


class ClientContext(ssl.SSLContext):
    """A TLS context that keeps its certificate chain and key as PEM in `shown`: gRPC needs them as bytes."""

    shown: tuple[bytes, bytes] | None = None

    def load_cert_chain(  # type: ignore[override]  # takes no password
        self, certfile: str | os.PathLike[str], keyfile: str | os.PathLike[str] | None = None
    ) -> None:
        """Load a certificate with an unencrypted key: no password can be asked for."""
        super().load_cert_chain(certfile, keyfile)
        self.shown = Path(certfile).read_bytes(), Path(keyfile or certfile).read_bytes()


def client_context(
    ca: str | os.PathLike[str] | None = None,
    cert: str | os.PathLike[str] | None = None,
    key: str | os.PathLike[str] | None = None,
) -> ClientContext:
    """Return a client's TLS context from PEM files; `ca` defaults to the system's authorities, `key` to `cert`."""
    context = ClientContext(ssl.PROTOCOL_TLS_CLIENT)
    if ca is not None:
        context.load_verify_locations(ca)
    else:
        context.load_default_certs()
    if cert is not None:
        context.load_cert_chain(cert, key)
    return context

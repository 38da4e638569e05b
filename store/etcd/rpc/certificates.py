"""Shell: an `ssl.SSLContext` for gRPC, which needs certificates as text: see `ClientContext`."""

from __future__ import annotations

import contextlib
import ssl
from pathlib import Path
from typing import TYPE_CHECKING, Final

from store.etcd.rpc.grpc_import import grpc
from store.net.certificates import ClientContext

if TYPE_CHECKING:
    from collections.abc import Iterable

SYSTEM_BUNDLES: Final = (
    "/etc/ssl/certs/ca-certificates.crt",  # Debian, Ubuntu, Alpine, Arch
    "/etc/pki/tls/certs/ca-bundle.crt",  # Fedora, Red Hat
    "/etc/ssl/cert.pem",  # macOS
)
"""The systems' files of trusted authorities, for a context that has loaded none: it reads a folder on demand."""


def channel_credentials(context: ssl.SSLContext) -> grpc.ChannelCredentials:
    """Return gRPC's credentials for a client-side context."""
    trusted = [ssl.DER_cert_to_PEM_cert(each) for each in context.get_ca_certs(binary_form=True)]
    roots = "".join(trusted).encode() or _first_of((ssl.get_default_verify_paths().cafile, *SYSTEM_BUNDLES))
    shown = context.shown if isinstance(context, ClientContext) else None
    certificate, key = shown or (None, None)
    return grpc.ssl_channel_credentials(root_certificates=roots, private_key=key, certificate_chain=certificate)


def _first_of(paths: Iterable[str | None]) -> bytes | None:
    for path in paths:
        if path is not None:
            with contextlib.suppress(OSError):
                return Path(path).read_bytes()
    return None

"""Shell: what settings say about who may take part, read from the files that they name: a secret, and certificates.

Secrets are never part of a message; a file that cannot be used is named, with the parameter that names it.
"""

from __future__ import annotations

import ssl
from dataclasses import replace
from typing import TYPE_CHECKING

from rdzv.errors import RendezvousSettingsError
from store.net.certificates import client_context

if TYPE_CHECKING:
    from rdzv.config.settings import Settings

__all__ = ["Credentials", "with_expected_nodes"]


class Credentials:
    """What a run's settings say about who may take part: a token or a password, and certificates."""

    def __init__(self, settings: Settings, token: bytes | None, password: str | None) -> None:
        self._settings = settings
        self.token = token
        self.password = password

    @classmethod
    def of(cls, settings: Settings) -> Credentials:
        """Read the files that the settings name.

        Raises:
            RendezvousSettingsError: One of them cannot be read, or holds nothing.
        """
        token, password = settings.token, None
        if settings.token_file is not None:
            token = _read_secret("token_file", settings.token_file, "the shared secret")
        if settings.password_file is not None:
            password = _read_secret("password_file", settings.password_file, "the password").decode()
        return cls(settings, token.encode() if isinstance(token, str) else token, password)

    def client_tls(self) -> ssl.SSLContext | None:
        """How to reach the store over TLS; None: as the system does, or without."""
        settings = self._settings
        if settings.tls is not None:
            context: ssl.SSLContext = settings.tls
            return context
        if not settings.uses_tls or (settings.ca is None and settings.cert is None):
            return None
        try:
            return client_context(settings.ca, settings.cert, settings.key)
        except OSError as error:
            raise _bad_certificates(settings, error) from error

    def read_password(self) -> str | None:
        """Return the password as it is in its file now: it may have been changed since the start."""
        if self._settings.password_file is not None:
            self.password = _read_secret("password_file", self._settings.password_file, "the password").decode()
        return self.password

    def server_tls(self) -> ssl.SSLContext | None:
        """How to serve the store over TLS; None if there is no certificate to serve it with."""
        settings = self._settings
        if settings.cert is None:
            return None
        try:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(settings.cert, settings.key)
            if settings.ca is not None:
                context.load_verify_locations(settings.ca)
                context.verify_mode = ssl.CERT_REQUIRED
        except OSError as error:
            raise _bad_certificates(settings, error) from error
        return context


def with_expected_nodes(settings: Settings) -> Settings:
    """The settings, with the names that `expected_file` lists.

    Raises:
        RendezvousSettingsError: The file cannot be read, or holds something else.
    """
    path = settings.expected_file
    if path is None:
        return settings
    lines = _read("expected_file", path).decode(errors="replace").splitlines()
    listed = [name for line in lines if (name := line.partition("#")[0].strip())]
    try:
        return replace(settings, expected=(*settings.expected, *listed))
    except RendezvousSettingsError as error:
        raise RendezvousSettingsError(f"expected_file={path!r} does not list names of nodes: {error}") from None


def _read(name: str, path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise RendezvousSettingsError(f"{name}={path!r} cannot be read: {error.strerror or error}") from error


def _read_secret(name: str, path: str, what: str) -> bytes:
    secret = _read(name, path).strip()
    if not secret:
        raise RendezvousSettingsError(f"{name}={path!r} is empty; write {what} into it")
    return secret


def _bad_certificates(settings: Settings, error: OSError) -> RendezvousSettingsError:
    named = {"ca": settings.ca, "cert": settings.cert, "key": settings.key}
    given = ", ".join(f"{name}={path!r}" for name, path in named.items() if path is not None)
    return RendezvousSettingsError(
        f"{given} cannot be used: {error.strerror or error}; "
        f"they must be readable PEM files, and the key the certificate's"
    )

"""A run's secrets and certificates, from files. Messages name files and parameters, never a secret."""

from __future__ import annotations

import functools
import logging
import os
import ssl
import stat
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from rdzv.errors import RendezvousSettingsError
from store.net.address import token_bytes
from store.net.certificates import client_context

if TYPE_CHECKING:
    from collections.abc import Callable

    from rdzv.config.settings import Settings
    from store.protocol.connection import Secret

log: logging.Logger = logging.getLogger(__name__)

PATHS: Final = ("data_dir", "token_file", "password_file", "ca", "cert", "key")
SETTLED_AFTER: Final = 3.0  # seconds without a change until a token's file counts as complete


class Credentials:
    """A run's credentials; unreadable files raise RendezvousSettingsError. No token or TLS file: `renew` is None."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._seen: list[bytes | None] = []
        self._seen = self._read_files()
        self.token: bytes | None = self.read_token()
        self.read_password()  # raises if the password's file is unreadable
        self._client_tls: ssl.SSLContext | None = None
        self._server_tls: ssl.SSLContext | None = None
        named = (settings.token_file, settings.ca, settings.cert, settings.key)
        self.renew: Callable[[], ssl.SSLContext | None] | None = self._renew if any(named) else None

    def read_password(self) -> str | None:
        """Return the present content of the password's file."""
        path = self._settings.password_file
        if path is None:
            return None
        try:
            return _read_secret(f"password_file={path!r}", path, "the password").decode()
        except UnicodeDecodeError:
            raise RendezvousSettingsError(f"password_file={path!r} is not in UTF-8, as passwords of etcd are") from None

    def client_tls(self) -> ssl.SSLContext | None:
        """Return the context for TLS to the store; None for the system's default or no TLS."""
        settings = self._settings
        if settings.tls is None and settings.uses_tls and (settings.ca or settings.cert) and self._client_tls is None:
            self._client_tls = self._load_client_context()
        return settings.tls or self._client_tls

    def _load_client_context(self) -> ssl.SSLContext:
        try:
            return client_context(self._settings.ca, self._settings.cert, self._settings.key)
        except OSError as error:
            raise _tls_error(self._settings, error) from error

    def _renew(self) -> ssl.SSLContext | None:
        """Read token and certificates again; keep the last ones if the new ones are unusable. Return `client_tls`."""
        found = self._read_files()
        if found != self._seen:
            try:
                token = self.read_token() if found[:1] != self._seen[:1] else self.token
                tls = self._load_client_context() if self._client_tls is not None else None
                cert = self._settings.cert if self._server_tls is not None else None
                server_tls = None if cert is None else self._load_server_context(cert)
            except RendezvousSettingsError as error:
                log.warning("%s; new connections use the files as last read", error)
                token, tls, server_tls = self.token, self._client_tls, self._server_tls
            if self._read_files() == found:  # the files did not change during the read
                self.token, self._client_tls, self._server_tls, self._seen = token, tls, server_tls, found
        return self.client_tls()

    def _read_files(self) -> list[bytes | None]:
        """Return the contents of the files, the token's file first; None for each unset or unreadable file."""
        found: list[bytes | None] = []
        for path in (self._settings.token_file, self._settings.ca, self._settings.cert, self._settings.key):
            try:
                fresh = path is not None and abs(time.time() - os.stat(path).st_mtime) < SETTLED_AFTER
                if fresh and self._seen and not found:  # a just changed token may be half written: keep the last
                    found.append(self._seen[0])
                else:
                    found.append(None if path is None else _read_file("", path))
            except (OSError, RendezvousSettingsError):
                found.append(None)
        return found

    def server_token_getter(self, *, renews: bool = False) -> Secret:
        """Return a function that returns the server's token, and rereads it if `renews`; None without a token."""

        def current_token() -> bytes | None:
            if renews and self._settings.token_file is not None:
                self._renew()
            return self.token

        return None if self.token is None else current_token

    def read_token(self) -> bytes | None:
        """Return the token from its file, or the token given by value."""
        path = self._settings.token_file
        return token_bytes(self._settings.token if path is None else _read_secret(f"token_file={path!r}", path))

    def server_tls(self, *, renews: bool = False) -> ssl.SSLContext | None:
        """Return a context to serve TLS; None without a certificate, without TLS, and for etcd.

        New connections use the files as last read. Each call reads the files again; with `renews`, each handshake also
        reads them, in the server's loop.
        """
        settings = self._settings
        if settings.cert is None or not settings.uses_tls or settings.endpoint.scheme_info.family != "tcp":
            return None
        context = self._server_tls = self._load_server_context(settings.cert)

        def renew_connection_tls(connection: Any, *_: object) -> None:
            if renews:
                self._renew()
            connection.context = self._server_tls

        context.sni_callback = renew_connection_tls  # called even if the client names no server
        return context

    def _load_server_context(self, cert: str) -> ssl.SSLContext:
        settings, context = self._settings, ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(cert, settings.key)
            if settings.ca is not None:
                context.load_verify_locations(settings.ca)
                context.verify_mode = ssl.CERT_REQUIRED
        except OSError as error:
            raise _tls_error(settings, error) from error
        return context


class _CredentialPath(str):
    """The full path of a file; its repr, which messages show, is the path as given."""

    __slots__ = ("given",)
    given: str

    @classmethod
    def from_given(cls, path: str) -> _CredentialPath:
        full = cls(os.path.abspath(path))  # `abspath` keeps symbolic links, by which a mounted secret is renewed
        full.given = path
        return full

    def __repr__(self) -> str:
        return repr(self.given)


def with_full_paths(settings: Settings) -> Settings:
    """Return the settings with `expected_file`'s nodes in `expected`, and full paths: the program may `chdir`."""
    given = {name: path for name in PATHS if (path := getattr(settings, name)) is not None}
    full: dict[str, Any] = {name: _CredentialPath.from_given(path) for name, path in given.items()}
    settings = replace(settings, **full)
    path = settings.expected_file
    if path is None:
        return settings
    lines = _read_file(f"expected_file={path!r}", path).decode(errors="replace").splitlines()
    listed = [name for line in lines if (name := line.partition("#")[0].strip())]
    try:
        return replace(settings, expected=(*settings.expected, *listed))
    except RendezvousSettingsError as error:
        raise RendezvousSettingsError(f"expected_file={path!r} does not list names of nodes: {error}") from None


def _read_secret(named: str, path: str, what: str = "the shared secret") -> bytes:
    """Return a file's content without surrounding white space; errors call the file `named`."""
    secret = _read_file(named, path).strip()
    if not secret:
        raise RendezvousSettingsError(f"{named} is empty; write {what} into it")
    if os.stat(path).st_mode & stat.S_IROTH:
        _warn_that_others_can_read(named)
    return secret


@functools.cache  # once per process
def _warn_that_others_can_read(named: str) -> None:
    log.warning("every user of this machine can read %s; chmod o-r takes that away", named)


def _read_file(named: str, path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise RendezvousSettingsError(f"{named} cannot be read: {error.strerror or error}") from error


def _tls_error(settings: Settings, error: OSError) -> RendezvousSettingsError:
    files = {"ca": settings.ca, "cert": settings.cert, "key": settings.key}
    named = ", ".join(f"{name}={path!r}" for name, path in files.items() if path is not None)
    return RendezvousSettingsError(
        f"{named} cannot be used: {error.strerror or error}; "
        f"they must be readable PEM files, and the key the certificate's"
    )

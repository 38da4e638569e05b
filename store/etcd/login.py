"""The login of an etcd client, and its token, which etcd may forget at any time."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import anyio

from store.errors import AuthenticationError, StoreUsageError
from store.etcd.codec import Failure, FailureKind

if TYPE_CHECKING:
    from collections.abc import Callable

    from store.etcd.rpc.connection import Connection

log: logging.Logger = logging.getLogger(__name__)

TOKENS_MOST = 3  # rejected tokens of one request; the next rejection fails the request


class Login:
    """The login of one client; see `Client` for its user and password."""

    def __init__(self, name: str, user: str | None, password: str | Callable[[], str | None] | None) -> None:
        self._name, self._user, self._password = name, user, password
        self._token: str | None = None  # None: a login is needed; empty if etcd has no authentication
        self._logging_in = asyncio.Lock()

    async def token(self, connection: Connection, limit: float) -> str | None:
        """Return the token, after a login within `limit` seconds if necessary; None if no token is needed."""
        if self._user is None or self._token is not None:
            return self._token or None
        with anyio.move_on_after(limit):
            async with self._logging_in:
                if self._token is None:
                    self._token = await self._log_in(connection, limit)
                return self._token or None
        raise Failure("a login is not answered", FailureKind.UNDONE, silent=True)

    async def _log_in(self, connection: Connection, limit: float) -> str:
        password = self._read_password()
        while True:
            fields = {"name": self._user, "password": password or ""}
            try:
                reply = await connection.ask("Auth/Authenticate", fields, token=None, limit=limit)
            except Failure as failure:
                if failure.trouble is not FailureKind.NO_AUTHENTICATION:
                    # The login failed, so the caller's request was not sent.
                    raise Failure(str(failure), FailureKind.UNDONE, silent=failure.silent) from failure
                log.warning("%s has no authentication: user %r is not used", self._name, self._user)
                return ""
            except StoreUsageError as error:
                raise AuthenticationError(str(error)) from None
            except AuthenticationError:
                before, password = password, self._read_password()
                if password == before:  # no new password to try
                    raise
            else:
                return str(reply.token)

    def _read_password(self) -> str | None:
        return self._password() if callable(self._password) else self._password

    def forget_rejected_token(self, failure: Failure, token: str | None, tokens: int) -> None:
        """If a token was rejected, forget it; the next attempt logs in. `tokens` counts the rejected ones."""
        if failure.trouble is not FailureKind.TOKEN:
            return
        if self._user is None:
            raise AuthenticationError(f"{self._name} wants a user ({failure}): pass user= and password=")
        if token == (self._token or None):
            self._token = None
        if tokens > TOKENS_MOST:
            raise AuthenticationError(f"{self._name} does not let user {self._user!r} do that: {failure}")

"""The errors that a store raises, and a base of objects that no other process can use."""

from __future__ import annotations

from typing import NoReturn


class StoreError(Exception):
    """Base of a store's errors; `maybe_applied` is False only if the request certainly did not take effect."""

    maybe_applied: bool = False


class ConnectionLost(StoreError):
    """No answer came, as the connection broke, or no store could be reached."""

    # The default is for pickle, which makes an error from its message alone, and sets `maybe_applied` afterwards.
    def __init__(self, message: str, *, maybe_applied: bool = True) -> None:
        super().__init__(message)
        self.maybe_applied = maybe_applied


class StoreReplaced(ConnectionLost):
    """The store that answers is not the one that this client knew, or is an old copy of it (promise S10)."""


class StoreTimeoutError(StoreError, TimeoutError):
    """The answer did not arrive in time."""

    def __init__(self, message: str, *, maybe_applied: bool = False) -> None:
        super().__init__(message)
        self.maybe_applied = maybe_applied


class ProtocolError(StoreError):
    """The peer sent something that is not the protocol, or another version of it."""


class AuthenticationError(StoreError):
    """The client or the server could not prove that it knows the token, or TLS rejected a certificate."""


class LimitExceeded(StoreError):
    """A request exceeded a limit of the server, or the server's disk accepts no writes."""


class LeaseNotFound(StoreError):
    """The lease has lapsed, was revoked, or never existed."""


class ConditionFailed(StoreError):
    """The conditions of a write (`when=`) did not hold, so nothing was written."""


class Unsupported(StoreError):
    """The server is of an older release, and does not know this request, or a part of it."""


class WaitEndedError(StoreError):
    """The client ended the wait (`BlockingStore.end_waits`); nothing was changed."""


class WatchCompacted(StoreError):
    """The history from the requested revision on is gone, and the watch has no `snapshot`."""


class UsedAfterFork(StoreError):
    """A client made before `fork()` was used in the child: make another there; with etcd, spawn it instead."""


class StoreUsageError(StoreError, ValueError):
    """The arguments of a call contradict each other or are out of range."""


def unsent_error(error: StoreError) -> StoreError:
    """Return a copy of an error, without its traceback, to raise for a request that was never sent."""
    if isinstance(error, ConnectionLost):
        return type(error)(str(error), maybe_applied=False)
    return type(error)(str(error))


class NotPicklable:
    """The base of objects that use this process's connections or threads: they can be neither copied nor pickled."""

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} uses this process's connections, and cannot be copied or pickled: "
            "give other processes the URL, to connect themselves, and values such as the rank"
        )

"""The errors of a rendezvous."""

from __future__ import annotations

import operator
from typing import SupportsIndex, TypeVar

SIGNALLED = 128
STATUS_MAX = 255  # the largest exit status of a process; in a shell, 128 + n means signal n


def make_valid_exit_status(status: SupportsIndex) -> tuple[int, str]:
    """Return a valid exit status, and a remark if it replaces an invalid one. A replacement is never 0."""
    try:
        number = operator.index(status)
    except TypeError:
        number = -STATUS_MAX
    if 0 <= number <= STATUS_MAX:
        return number, ""
    usable = SIGNALLED - number if 0 < -number <= STATUS_MAX - SIGNALLED else 1
    return usable, f" (exit status {usable}: {status!r:.40} is not from 0 to {STATUS_MAX})"


class RendezvousError(Exception):
    """The base of all errors of a rendezvous."""

    of_run: str | None = None  # the id of the run, in an error that reports a round's end


SomeError = TypeVar("SomeError", bound=RendezvousError)


def mark_run(run_id: str | None, error: SomeError) -> SomeError:
    """Return the error, marked with the run."""
    error.of_run = run_id
    return error


class RendezvousNonRetryableError(RendezvousError):
    """The base of errors that a retry cannot mend; launchers of NVIDIA and PyTorch know its name."""


class RendezvousClosedError(RendezvousNonRetryableError):
    """The run has been closed; the message has the given reason.

    Attributes:
        reason: The reason of the closing, perhaps empty.
        given_up: True if the run was given up, False for any other closing.
        status: The exit status if given up, from 0 to 255; 0 for none in particular.
    """

    def __init__(self, message: str, *, reason: str = "", given_up: bool = False, status: int = 0) -> None:
        super().__init__(message)
        self.reason = reason
        self.given_up = given_up
        self.status: int = make_valid_exit_status(status)[0]


class RunGivenUpError(RendezvousClosedError):
    """A member has given the run up; the message has its reason."""


class RendezvousTimeoutError(RendezvousNonRetryableError, TimeoutError):
    """The round did not complete within `join_timeout`; the message says what was missing."""


class RendezvousRefusedError(RendezvousNonRetryableError):
    """This node is banned, or its health check has failed; the message has the reason."""


class RendezvousSettingsError(RendezvousNonRetryableError, ValueError):
    """A setting is missing, malformed, out of range, or differs from the run's."""


class RendezvousGracefulExitError(RendezvousError):
    """This node is drained, or was a spare of a run now closed: its process should exit with success."""


class RendezvousConnectionError(RendezvousError, ConnectionError):
    """The store could not be reached, or is not the one that this node used before."""


class RendezvousStateError(RendezvousError):
    """The store holds data of another program, or a method was called out of order."""


class GiveUp(RendezvousError):
    """Raised in the body of a round: the run ends everywhere, with this reason.

    Attributes:
        reason: Why the run is given up: a text, or the repr of another value.
        status: The exit status of every launcher, from 0 to 255; 0 for none in particular. An invalid status is
            replaced, and the reason says so: -n, of a process killed by signal n, becomes 128 + n; any other becomes 1.
    """

    def __init__(self, reason: object = "", *, status: int = 0) -> None:
        number, remark = make_valid_exit_status(status)
        self.status: int = number
        text = (reason if isinstance(reason, str) else repr(reason)) + remark
        # accept any value: an invalid reason must not prevent giving up
        self.reason: str = text.encode(errors="backslashreplace").decode()
        super().__init__(self.reason)


class RoundChanged(RendezvousError):
    """The round is over for this member, for whatever reason. Leaving the round's block swallows this error."""


class RoundSupersededError(RendezvousError):
    """This node no longer belongs to the round: it left, was dropped, or a later round took its place."""


class MembersLostError(RendezvousError):
    """Members of the round were lost while this node waited in its shared store; meet again with `next_rendezvous`.

    Attributes:
        node_ids: The ids of the lost members, as far as they are known.
    """

    def __init__(self, message: str, *, node_ids: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.node_ids = node_ids


class SharedStoreTimeoutError(RendezvousError, TimeoutError):
    """A wait in the round's shared store timed out; the round itself may continue.

    Attributes:
        keys: The keys still missing.
        timeout: The time limit of the wait, in seconds.
    """

    def __init__(self, message: str, *, keys: tuple[str, ...] = (), timeout: float = 0.0) -> None:
        super().__init__(message)
        self.keys = keys
        self.timeout = timeout


class QueueEmptyError(RendezvousError):
    """The queue was empty, and the caller asked not to wait."""


RendezvousException = RendezvousError
RendezvousClosedException = RendezvousClosedError
RendezvousTimeoutException = RendezvousTimeoutError

"""What can go wrong with a rendezvous.

    RendezvousError
    ├── RendezvousClosedError         the run was closed           (a retry cannot mend it)
    ├── RendezvousTimeoutError        the round did not complete in time  (a retry cannot mend it)
    ├── RendezvousRefusedError        this node is banned, or failed its health check  (a retry cannot mend it)
    ├── RendezvousSettingsError       a setting is wrong or contradicts the run's (a retry cannot mend it)
    ├── RendezvousGracefulExitError   a spare is no longer needed: leave with success
    ├── RendezvousConnectionError     the store cannot be reached
    ├── RendezvousStateError          the store holds something that is not ours, or a call came out of order
    ├── MembersLostError              members of the round were lost, on whom this node waited
    ├── RoundSupersededError          this node is no longer part of the round whose store it used
    ├── SharedStoreTimeoutError       a key of the round's shared store did not come in time
    └── QueueEmptyError               a queue of the round's shared store held nothing, and the caller would not wait

`RendezvousNonRetryableError` is mixed into those that a retry cannot mend, as NVIDIA's and PyTorch's launchers
distinguish them.
"""

from __future__ import annotations

import operator
from typing import SupportsIndex

__all__ = [
    "STATUS_MAX",
    "GiveUp",
    "MembersLostError",
    "QueueEmptyError",
    "RendezvousClosedError",
    "RendezvousClosedException",
    "RendezvousConnectionError",
    "RendezvousError",
    "RendezvousException",
    "RendezvousGracefulExitError",
    "RendezvousNonRetryableError",
    "RendezvousRefusedError",
    "RendezvousSettingsError",
    "RendezvousStateError",
    "RendezvousTimeoutError",
    "RendezvousTimeoutException",
    "RoundChanged",
    "RoundSupersededError",
    "RunGivenUpError",
    "SharedStoreTimeoutError",
    "exit_status",
]


SIGNALLED = 128
STATUS_MAX = 255  # of what a process can end with; a shell says from 128 on by which signal


def exit_status(status: SupportsIndex) -> tuple[int, str]:
    """Return the exit status that a verdict ends with, and a remark for its reason if that is not the one given.

    A verdict stands whatever its status is: one that no process can end with becomes another that is not 0.
    """
    try:
        number = operator.index(status)
    except TypeError:
        number = -STATUS_MAX
    if 0 <= number <= STATUS_MAX:
        return number, ""
    usable = SIGNALLED - number if 0 < -number <= STATUS_MAX - SIGNALLED else 1
    return usable, f" (exit status {usable}: {status!r:.40} is not from 0 to {STATUS_MAX})"


class RendezvousError(Exception):
    """Base of everything a rendezvous raises."""


class RendezvousNonRetryableError(RendezvousError):
    """Mixed into errors that trying again cannot mend."""


class RendezvousClosedError(RendezvousNonRetryableError):
    """The run has been closed; the message carries the reason given.

    Attributes:
        reason: The reason given by whoever closed the run, perhaps empty.
        given_up: Whether it is a verdict not to go on, rather than the end of the work.
        status: The exit status that comes with that verdict, from 0 to 255; 0 for none in particular.
    """

    def __init__(self, message: str, *, reason: str = "", given_up: bool = False, status: int = 0) -> None:
        super().__init__(message)
        self.reason = reason
        self.given_up = given_up
        self.status: int = exit_status(status)[0]


class RunGivenUpError(RendezvousClosedError):
    """A member has given the run up; the message carries its reason."""


class RendezvousTimeoutError(RendezvousNonRetryableError, TimeoutError):
    """The round did not complete within `join_timeout`; the message says what it was waiting for."""


class RendezvousRefusedError(RendezvousNonRetryableError):
    """This node may not join: it is banned, or its health check has failed; the message has the reason."""


class RendezvousSettingsError(RendezvousNonRetryableError, ValueError):
    """A setting is missing, malformed, out of range, or differs from the one the run was started with."""


class RendezvousGracefulExitError(RendezvousError):
    """This node was a spare and the run is closed: it should end with success."""


class RendezvousConnectionError(RendezvousError, ConnectionError):
    """The store could not be reached, or is no longer the one this node knew."""


class RendezvousStateError(RendezvousError):
    """What the store holds is not a rendezvous of ours, or a call came out of order."""


class GiveUp(RendezvousError):
    """Raised in the body of a round: the run is to end everywhere, with this reason.

    Attributes:
        reason: Why it is no use to go on; what is no text, an error perhaps, is shown as Python shows it.
        status: The exit status that every launcher ends with, from 0 to 255; 0 for none in particular. Of another one
            the reason says what became of it: 128 and the signal of a process that was killed by one, else 1.
    """

    def __init__(self, reason: object = "", *, status: int = 0) -> None:
        self.status, remark = exit_status(status)
        text = (reason if isinstance(reason, str) else repr(reason)) + remark
        self.reason: str = text.encode(errors="backslashreplace").decode()  # whatever it is, it is to be carried out
        super().__init__(self.reason)


class RoundChanged(RendezvousError):
    """The round is over for this member: one was lost, or all leave here together. Leaving the block swallows it."""


class RoundSupersededError(RendezvousError):
    """This node no longer belongs to the round: it left, was dropped, or a later round took its place."""


class MembersLostError(RendezvousError):
    """Members of the round were lost while this node waited in its shared store; meet again with `next_rendezvous`.

    Attributes:
        node_ids: Which ones, as far as they are known by name.
    """

    def __init__(self, message: str, *, node_ids: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.node_ids = node_ids


class SharedStoreTimeoutError(RendezvousError, TimeoutError):
    """A wait at the round's shared store ran out; the round itself may well go on.

    Attributes:
        keys: Which of the keys waited for were still missing.
        timeout: How many seconds it waited.
    """

    def __init__(self, message: str, *, keys: tuple[str, ...] = (), timeout: float = 0.0) -> None:
        super().__init__(message)
        self.keys = keys
        self.timeout = timeout


class QueueEmptyError(RendezvousError):
    """There was nothing to pop, and the caller asked not to wait."""


RendezvousException = RendezvousError
RendezvousClosedException = RendezvousClosedError
RendezvousTimeoutException = RendezvousTimeoutError

"""Shell: whether to look for a moment for what is about to come before going to sleep, learned from what came of it.

A call and its answer wake a sleeping thread twice, and to wake one on a core that sleeps takes 25 to 35 us, which is
as long as all that is computed for the call. Who *spins*, asking the system again and again instead of sleeping, is
still awake when what it waits for comes. If that does not come in time, a core was busy for nothing. So each failure
doubles how many waits pass without spinning, and each success makes up for two failures: who waits for a store that is
far away, for a process that needs the very core that it spins on, or for requests that come at random and too seldom,
soon burns next to nothing.
"""

from __future__ import annotations

import socket
import ssl
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["SPIN", "Spin", "receive_soon"]

SPIN = 50e-6  # seconds; twice what a request takes there and back between two cores that are awake
PASSED_MOST = 255  # waits in a row without spinning: at most 0.2 us of each are burnt for what never comes in time


class Spin:
    """Whether the next wait begins with spinning."""

    __slots__ = ("_pass", "_passes")

    def __init__(self) -> None:
        self._pass = 0  # so many waits pass without, now ...
        self._passes = 0  # ... and so many did after the last failure

    def is_due(self) -> bool:
        """Whether to spin now; to be asked once in each wait."""
        if self._pass:
            self._pass -= 1
            return False
        return True

    def paid(self) -> None:
        """What was waited for came while we spun."""
        self._passes >>= 2

    def failed(self) -> None:
        """It did not."""
        self._pass = self._passes = min(2 * self._passes + 1, PASSED_MOST)


def receive_soon(
    sock: socket.socket, buffer: memoryview, spin: Spin, clock: Callable[[], float] = time.monotonic
) -> int:
    """Receive without sleeping: how many bytes came. 0 if nothing came soon, or the other side has closed.

    Raises:
        OSError: The connection is lost.
    """
    if not spin.is_due() or isinstance(sock, ssl.SSLSocket):  # which takes no flags
        return 0
    until = 0.0
    while True:
        try:
            size = sock.recv_into(buffer, 0, socket.MSG_DONTWAIT)
        except BlockingIOError:
            if not until:
                until = clock() + SPIN
            elif clock() >= until:
                spin.failed()
                return 0
        else:
            if not until:
                pass  # it was there already, and nothing was learned
            elif clock() < until:
                spin.paid()
            else:  # another thread, or process, had what we spin on meanwhile
                spin.failed()
            return size

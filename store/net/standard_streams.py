"""Shell: opens the standard streams that a process was started without, as by `2>&-`.

The system gives the lowest free number to each new file. Without this, a socket gets the number of a closed stream: a
line on standard error is then sent to a peer, and libuv aborts the process when it is to close such a socket.
"""

from __future__ import annotations

import contextlib
import os
import sys

__all__ = ["open_before_uvloop", "open_standard_streams"]


def open_standard_streams(*, for_command: bool = False) -> None:
    """Open each of the descriptors 0, 1 and 2 that is closed on `/dev/null`, for child processes, too.

    Args:
        for_command: Replace the stream objects, too, which Python sets to None if their descriptors were closed.
    """
    # The system chooses the number, so a file that another thread opens meanwhile is never replaced.
    with contextlib.suppress(OSError):  # no file can be opened: the caller's next one fails, and says why
        while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
            os.set_inheritable(number, True)
        os.close(number)
    if for_command:
        for number, name in enumerate(("stdin", "stdout", "stderr")):
            if getattr(sys, name) is None:
                setattr(sys, name, os.fdopen(number, "w" if number else "r", errors="replace", closefd=False))


def open_before_uvloop(loop: object) -> None:
    """Open those that are closed if the loop is one of uvloop's; the caller is about to give it a socket."""
    uvloop = sys.modules.get("uvloop")
    if uvloop is not None and isinstance(loop, uvloop.Loop):
        open_standard_streams()

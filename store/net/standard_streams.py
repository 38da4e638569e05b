"""Opens the standard streams that a process was started without, for example by `2>&-`.

If standard error stays closed, a socket gets its number, and a peer gets what the process writes to standard error.
Libuv aborts the process when it closes a socket with the number 0, 1 or 2.
"""

from __future__ import annotations

import contextlib
import os
import sys


def reserve_standard_streams(*, for_command: bool = False) -> None:
    """Open closed descriptors 0, 1, 2 on `/dev/null`; `for_command` also makes missing stream objects."""
    # Let the system choose the number: another thread may take a free number meanwhile.
    with contextlib.suppress(OSError):
        while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
            os.set_inheritable(number, True)
        os.close(number)
    if for_command:
        for number, name in enumerate(("stdin", "stdout", "stderr")):
            if getattr(sys, name) is None:
                setattr(sys, name, os.fdopen(number, "w" if number else "r", errors="replace", closefd=False))


def reserve_streams_if_uvloop(loop: object) -> None:
    """Open closed standard streams before a uvloop gets a socket."""
    uvloop = sys.modules.get("uvloop")
    if uvloop is not None and isinstance(loop, uvloop.Loop):
        reserve_standard_streams()

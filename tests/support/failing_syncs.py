"""`rdzv` in a process whose every fsync fails from SIGUSR1 on, as on a dying disk.

    python -m tests.support.failing_syncs serve --data-dir DIR

The kernel itself answers each fsync with EIO (seccomp; Linux on x86-64 and arm64), so SQLite and the server react as
they do to a real disk. All other calls succeed, and written data is in the files. The filter cannot be removed: kill
the process afterwards.
"""

import ctypes
import errno
import os
import platform
import signal
import struct
import sys
from typing import Any

# The numbers of fsync, fdatasync and seccomp.
_NUMBERS = {"x86_64": (74, 75, 317), "aarch64": (82, 83, 277)}
_PR_SET_NO_NEW_PRIVS = 38
_SECCOMP_SET_MODE_FILTER = 1
_ALL_THREADS = 1  # SECCOMP_FILTER_FLAG_TSYNC
_ALLOW, _FAIL = 0x7FFF0000, 0x00050000  # SECCOMP_RET_ALLOW, SECCOMP_RET_ERRNO
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06  # of the filter's little machine: BPF


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("steps", ctypes.c_void_p))


def fail_syncs() -> None:
    """Have every fsync and fdatasync of this process fail from now on.

    Raises:
        OSError: The system does not let us.
    """
    if sys.platform != "linux" or platform.machine() not in _NUMBERS:
        raise OSError(errno.ENOSYS, "only known of Linux on x86-64 and arm64")
    fsync, fdatasync, seccomp = _NUMBERS[platform.machine()]
    steps = (
        (_LOAD, 0, 0, 0),  # the number of the system call
        (_JUMP_IF_EQUAL, 1, 0, fsync),
        (_JUMP_IF_EQUAL, 0, 1, fdatasync),
        (_RETURN, 0, 0, _FAIL | errno.EIO),
        (_RETURN, 0, 0, _ALLOW),
    )
    code = b"".join(struct.pack("HBBI", *step) for step in steps)
    held = ctypes.create_string_buffer(code, len(code))
    program = _Program(len(steps), ctypes.addressof(held))
    libc = ctypes.CDLL(None, use_errno=True)
    for outcome in (
        libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
        libc.syscall(seccomp, _SECCOMP_SET_MODE_FILTER, _ALL_THREADS, ctypes.byref(program)),
    ):
        if outcome != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _on_signal(*_: Any) -> None:
    try:
        fail_syncs()
    except OSError as error:
        sys.stderr.write(f"syncs cannot be made to fail: {error}\n")
    else:
        sys.stderr.write("syncs fail from now on\n")
    sys.stderr.flush()


if __name__ == "__main__":
    from rdzv.cli import main as cli

    signal.signal(signal.SIGUSR1, _on_signal)
    sys.exit(cli.main(sys.argv[1:]))

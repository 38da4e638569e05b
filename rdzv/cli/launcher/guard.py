"""A guard between `rdzv run` and one process of its command, so that no process outlives the launcher.

    python -I -S guard.py CONTROL FILES[/SIGNALS] COMMAND ...

The guard starts the command in its own process group. CONTROL is the reading end of a pipe from the launcher. Each byte
in the pipe is a signal for the group, plus `IN_PASSING` if the signal is not meant to end the group. The pipe is closed
when the launcher ends, also by SIGKILL: then the guard kills the whole group.

When the command's first process ends, the guard kills the rest of the group, and ends with the same exit status or
signal. But if a signal was meant to end the group, the guard does so only once the group has ended, or the launcher
sends SIGKILL. A process that leaves the group gets no signals.

FILES is the command's soft limit of open files, as a launcher that hosts a store has raised its own limit. SIGNALS are
the signals that the launcher blocks and ignores (`signal_state`), as uvloop resets both in its children.

This file runs as a script, without the rest of rdzv, and imports little, as one guard starts per process.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import sys
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

POLL = 20  # milliseconds between checks
CANNOT_EXECUTE = 126  # the exit status, as in shells, if the start fails
IN_PASSING = 0x80  # marks signals that shall not end the group; larger than any signal number
STARTED: set[int] = set()  # pids of the launcher's children; if the launcher is process 1, others are orphans to reap
# The guard ignores these signals, which Slurm sends to every process of a job: the launcher passes them on.
PASSED_OVER = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def run_guarded(control: int, files: int, command: list[str], signals: str = "") -> NoReturn:
    """Run a command until the command or the launcher ends."""
    close_inherited_files(control)
    if signals:
        block_and_ignore(signals)
    try:
        fork_and_guard_child(control, files)
    except OSError as error:
        os.write(2, f"rdzv run: no process can be started: {error.strerror}; see ulimit -u\n".encode())
        os._exit(CANNOT_EXECUTE)
    try:
        os.execvp(command[0], command)  # noqa: S606  the guard exists to run this command
    except OSError as error:
        import shutil

        is_there = isinstance(error, FileNotFoundError) and shutil.which(command[0])
        why = "the interpreter that it names does not exist" if is_there else error.strerror
        os.write(2, f"rdzv run: {command[0]} cannot be executed: {why}\n".encode())
    finally:
        os._exit(CANNOT_EXECUTE)


def close_inherited_files(keep: int) -> None:
    """Close all files but the standard streams and `keep`, lest a daemon keep pipes open that uvloop has leaked."""
    with contextlib.suppress(OSError):  # the system has no /dev/fd
        for file in map(int, os.listdir("/dev/fd")):
            if file > 2 and file != keep:
                with contextlib.suppress(OSError):  # the listing contains its own file, already closed
                    os.close(file)


def signal_state() -> str:
    """Return the signals that this process blocks and ignores, except SIGPIPE and SIGXFSZ, for `block_and_ignore`."""
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    of_python = {signal.SIGPIPE, signal.SIGXFSZ}
    ignored = {each for each in signal.valid_signals() - of_python if signal.getsignal(each) is signal.SIG_IGN}
    return "/".join(",".join(str(int(each)) for each in sorted(some)) for some in (blocked, ignored))


def block_and_ignore(signals: str) -> None:
    """Block and ignore the signals that `signal_state` has returned in the launcher."""
    blocked, ignored = ([int(number) for number in some.split(",") if number] for some in signals.split("/"))
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def fork_and_guard_child(control: int, files: int, *, report: int | None = None) -> None:
    """Fork, and become the guard of the child; return only in the child, without the guard's files and handlers.

    `files` is the child's soft limit of open files. If the launcher is not the guard's parent, the guard writes two
    numbers of four bytes, in the machine's order, to the file `report`: its pid, and later the child's wait status.
    """
    os.set_inheritable(control, False)
    if report is not None:
        os.write(report, os.getpid().to_bytes(4, sys.byteorder))
    as_inherited = {number: signal.getsignal(number) for number in PASSED_OVER}
    for number in PASSED_OVER:
        if as_inherited[number] is not signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
    child_ended = _open_sigchld_pipe()
    guard = os.getpid()
    # Block signals until the child has replaced the guard's handlers, which would drop the child's signals.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_OVER)
    group = os.fork()
    if group == 0:
        try:
            _prepare_child(guard=guard, files=files, as_inherited=as_inherited, mask=mask)
        except BaseException:  # noqa: BLE001  a half-prepared child must not return to the caller
            os._exit(CANNOT_EXECUTE)
        os.close(control)
        os.close(child_ended)
        if report is not None:
            os.close(report)
        return
    signal.pthread_sigmask(signal.SIG_SETMASK, mask - {signal.SIGCHLD})  # a preloaded module may have blocked SIGCHLD
    with contextlib.suppress(OSError):  # the child may have made its group already
        os.setpgid(group, group)
    status = _supervise_group(group, control, child_ended)
    if report is not None:
        os.write(report, status.to_bytes(4, sys.byteorder))
    _exit_like_child(status)


def _prepare_child(
    *, guard: int, files: int, as_inherited: Mapping[signal.Signals, object], mask: Iterable[int]
) -> None:
    os.setpgid(0, 0)
    _die_with_guard(guard)
    os.close(signal.set_wakeup_fd(-1))  # otherwise the child's signals would wake the guard
    for number, handler in as_inherited.items():
        signal.signal(number, signal.SIG_IGN if handler is signal.SIG_IGN else signal.SIG_DFL)
    for number in (signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores the last two
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def _die_with_guard(guard: int) -> None:
    if sys.platform != "linux":
        return
    import ctypes

    pr_set_pdeathsig = 1  # from <sys/prctl.h>
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, int(signal.SIGKILL))
    if os.getppid() != guard:  # the guard died before the call of prctl
        os._exit(CANNOT_EXECUTE)


def _open_sigchld_pipe() -> int:
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    os.set_blocking(writing, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # without a handler, Python writes nothing to the wakeup file
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    return reading


def _supervise_group(group: int, control: int, child_ended: int) -> int:
    """Pass signals on, and end the group as the module says; return its first process's wait status."""
    poll = select.poll()  # `select.select` accepts no file number above 1023
    poll.register(control, select.POLLIN)
    poll.register(child_ended, select.POLLIN)
    status: int | None = None
    was_told = False
    while True:
        for file, _ in poll.poll(None if status is None else POLL):
            if file == child_ended:
                os.read(child_ended, 4096)
            else:
                numbers = os.read(control, 4096) or bytes([signal.SIGKILL])
                for number in numbers:
                    _signal_group(group, number & ~IN_PASSING)
                    was_told = was_told or not number & IN_PASSING
                if signal.SIGKILL in numbers:
                    return status if status is not None else os.waitpid(group, 0)[1]
        if status is None:
            pid, ended_as = os.waitpid(group, os.WNOHANG)
            status = ended_as if pid else None
        if status is not None and not (was_told and _signal_group(group, 0)):
            _signal_group(group, signal.SIGKILL)
            return status


def _signal_group(group: int, number: int) -> bool:
    with contextlib.suppress(OSError):  # the group has ended; or, on macOS, is not reaped yet
        os.killpg(group, number)
        return True
    return False


def _exit_like_child(status: int) -> NoReturn:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))  # no core dump here
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    _inherited: tuple[str, str, str] = sys.argv[2].partition("/")  # FILES, SIGNALS
    run_guarded(int(sys.argv[1]), int(_inherited[0]), sys.argv[3:], _inherited[2])

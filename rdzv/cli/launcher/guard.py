"""Shell: stands between `rdzv run` and one process of its command, so that nothing outlives the launcher.

    python -I -S guard.py CONTROL FILES[/SIGNALS] COMMAND ...

The launcher starts a guard, and the guard starts the command, in a process group of the command's own. CONTROL is the
reading end of a pipe whose other end only the launcher has. Each byte in it is the number of a signal for the group,
with `IN_PASSING` added if the signal is not meant to end it.
The end of it means that the launcher is gone, by SIGKILL perhaps, and then the group is killed: however far it had
come, whatever it has started, and on any system (Linux's PR_SET_PDEATHSIG alone would reach the first process only).

The guard ends as the command's first process has ended, with its exit status or by its signal. What that leaves behind
in its group is killed at once; only after a signal that is meant to end it is it given the time that the launcher
gives it.
Whoever leaves the group on purpose (a daemon with a session of its own) is not followed.

FILES is the soft limit of open files that the command gets: a launcher that hosts a store has raised its own. SIGNALS
is what the launcher was told to ignore and has blocked (`signals_here`): uvloop resets both in what it starts.

This file runs by itself, and imports nothing but the standard library, and little of that: it starts once per process.
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

__all__ = ["CANNOT_EXECUTE", "STARTED", "close_others", "fork_guarded", "main", "signals_here", "take_signals"]

POLL = 20  # milliseconds between looks whether a group that was told to end has ended; nothing announces that
CANNOT_EXECUTE = 126  # as shells say it
IN_PASSING = 0x80  # beyond the numbers of signals, which end at 64
STARTED: set[int] = set()
"""In a launcher: the processes that it has started itself, and waits for."""

PASSED_OVER = (  # for the launcher to hear, and to pass on: Slurm sends them to every process of a job
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)


def main(control: int, files: int, command: list[str], signals: str = "") -> NoReturn:
    """Run a command until it ends, or until the launcher does."""
    close_others(control)
    if signals:
        take_signals(signals)
    try:
        fork_guarded(control, files)
    except OSError as error:
        os.write(2, f"rdzv run: no process can be started: {error.strerror}; see ulimit -u\n".encode())
        os._exit(CANNOT_EXECUTE)
    try:
        os.execvp(command[0], command)  # noqa: S606  that is what it is for
    except OSError as error:
        os.write(2, f"rdzv run: {command[0]} cannot be executed: {error.strerror}\n".encode())
    finally:
        os._exit(CANNOT_EXECUTE)


def close_others(keep: int) -> None:
    """Close all files but the three streams and this one.

    uvloop leaves copies of the streams open in what it starts, and whatever the launcher itself has inherited. A daemon
    of the command's that closes its streams would hold the ends of the launcher's pipes all the same.
    """
    with contextlib.suppress(OSError):  # a system without this folder
        for file in map(int, os.listdir("/dev/fd")):
            if file > 2 and file != keep:
                with contextlib.suppress(OSError):  # the one that has read the folder is closed by now
                    os.close(file)


def signals_here() -> str:
    """Return which signals this process has blocked, and which it ignores, but for those that Python itself does."""
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    of_python = {signal.SIGPIPE, signal.SIGXFSZ}
    ignored = {each for each in signal.valid_signals() - of_python if signal.getsignal(each) is signal.SIG_IGN}
    return "/".join(",".join(str(int(each)) for each in sorted(some)) for some in (blocked, ignored))


def take_signals(signals: str) -> None:
    """Block and ignore what `signals_here` said in the launcher."""
    blocked, ignored = ([int(number) for number in some.split(",") if number] for some in signals.split("/"))
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def fork_guarded(control: int, files: int, *, report: int | None = None) -> None:
    """Fork, and stand guard over the child: this returns in the child only, without a trace of the guard.

    Args:
        control: Where the launcher sends the numbers of signals; its end means that the launcher is gone.
        files: The child's soft limit of open files.
        report: A file for four bytes in the machine's order, twice: this process, and the child's wait status; if the
            launcher is not the guard's parent and cannot wait for it.
    """
    os.set_inheritable(control, False)
    if report is not None:
        os.write(report, os.getpid().to_bytes(4, sys.byteorder))
    as_inherited = {number: signal.getsignal(number) for number in PASSED_OVER}
    for number in PASSED_OVER:
        if as_inherited[number] is not signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
    child_ended = _tell_of_children()
    guard = os.getpid()
    # What is sent to the child before it is itself must wait until then, or it would be handled in our way: by nobody.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_OVER)
    group = os.fork()
    if group == 0:
        try:
            _become_ordinary(guard=guard, files=files, as_inherited=as_inherited, mask=mask)
        except BaseException:  # noqa: BLE001  nobody above may go on as if this were the guard
            os._exit(CANNOT_EXECUTE)
        os.close(control)
        os.close(child_ended)
        if report is not None:
            os.close(report)
        return
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    with contextlib.suppress(OSError):  # the child does so, too; whoever is first
        os.setpgid(group, group)
    status = _watch(group, control, child_ended)
    if report is not None:
        os.write(report, status.to_bytes(4, sys.byteorder))
    _mirror(status)


def _become_ordinary(
    *, guard: int, files: int, as_inherited: Mapping[signal.Signals, object], mask: Iterable[int]
) -> None:
    """In the child: undo what the guard has changed for itself."""
    os.setpgid(0, 0)
    _die_with(guard)
    os.close(signal.set_wakeup_fd(-1))  # else a signal of the child's would read as one of the guard's
    for number, handler in as_inherited.items():
        signal.signal(number, signal.SIG_IGN if handler is signal.SIG_IGN else signal.SIG_DFL)
    for number in (signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores the last two
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def _die_with(guard: int) -> None:
    """On Linux, have the child die even if it is the guard that is killed."""
    if sys.platform != "linux":
        return
    import ctypes

    pr_set_pdeathsig = 1  # from <sys/prctl.h>
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, int(signal.SIGKILL))
    if os.getppid() != guard:  # it was killed before we could ask
        os._exit(CANNOT_EXECUTE)


def _tell_of_children() -> int:
    """A file that can be read once a child has ended."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    os.set_blocking(writing, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # without a handler, nothing is written
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    return reading


def _watch(group: int, control: int, child_ended: int) -> int:
    """Pass signals on until the group is gone; the wait status of its first process."""
    poll = select.poll()  # not select(), which knows no number above 1023
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
                    _signal(group, number & ~IN_PASSING)
                    was_told = was_told or not number & IN_PASSING
                if signal.SIGKILL in numbers:
                    return status if status is not None else os.waitpid(group, 0)[1]
        if status is None:
            pid, ended_as = os.waitpid(group, os.WNOHANG)
            status = ended_as if pid else None
        if status is not None and not (was_told and _signal(group, 0)):
            _signal(group, signal.SIGKILL)
            return status


def _signal(group: int, number: int) -> bool:
    """Send a signal to a group; whether there is one."""
    try:
        os.killpg(group, number)
    except OSError:  # gone, or, on macOS, dead and not yet reaped
        return False
    return True


def _mirror(status: int) -> NoReturn:
    """End as the command has ended."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))  # one core is enough
        with contextlib.suppress(OSError):  # SIGKILL has no other way to end
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    _files, _, _signals = sys.argv[2].partition("/")
    main(int(sys.argv[1]), int(_files), sys.argv[3:], _signals)

"""The guard process between `rdzv run` and a command: it exits like that, passes signals on, and kills the rest."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rdzv.cli.launcher import guard

PYTHON = sys.executable
# in one write: two processes may write at once
PAUSE = "import os, signal; os.write(1, b'here' + bytes([10])); signal.pause()"


@contextlib.contextmanager
def guarded(
    *command: str,
    already_sent: bytes = b"",
    files: int = 256,
    before: tuple[str, ...] = (),
    left_open: tuple[int, ...] = (),
) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Yield a guard that runs a command, and the write end of the guard's control pipe."""
    control, told = os.pipe()
    with open(told, "wb", buffering=0) as writing:
        writing.write(already_sent)
        process = subprocess.Popen(
            [*before, PYTHON, "-I", "-S", guard.__file__, str(control), str(files), *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            pass_fds=(control, *left_open),
            start_new_session=True,
        )
        os.close(control)
        with process:
            try:
                yield process, writing.fileno()
            finally:
                process.kill()


def ends_with(process: subprocess.Popen[str]) -> int:
    return process.wait(timeout=60)


@pytest.mark.parametrize(
    ("script", "status"),
    [("exit 0", 0), ("exit 7", 7), ("kill -TERM $$", -signal.SIGTERM), ("kill -KILL $$", -signal.SIGKILL)],
)
def test_a_guard_ends_as_its_command_ends(script: str, status: int) -> None:
    with guarded("sh", "-c", script) as (process, _):
        assert ends_with(process) == status


def test_a_command_that_cannot_be_executed_is_named() -> None:
    with guarded("/no/such/command") as (process, _):
        assert ends_with(process) == 126
        assert process.stdout is not None
        assert process.stdout.read() == "rdzv run: /no/such/command cannot be executed: No such file or directory\n"


def test_of_a_script_whose_interpreter_is_missing_the_interpreter_is_named(tmp_path: Path) -> None:
    """Regression: it was said that the script did not exist."""
    script = tmp_path / "train"
    script.write_text("#!/no/such/python\n")
    script.chmod(0o755)
    with guarded(str(script)) as (process, _):
        assert ends_with(process) == 126
        assert process.stdout is not None
        why = "the interpreter that it names does not exist"
        assert process.stdout.read() == f"rdzv run: {script} cannot be executed: {why}\n"


def test_a_signal_sent_before_the_command_has_begun_is_not_lost() -> None:
    with guarded(PYTHON, "-c", PAUSE, already_sent=bytes([signal.SIGTERM])) as (process, _):
        assert ends_with(process) == -signal.SIGTERM


def test_signals_to_the_guard_itself_are_for_the_launcher_to_pass_on() -> None:
    with guarded(PYTHON, "-c", PAUSE) as (process, control):
        assert process.stdout is not None
        process.stdout.readline()
        for number in guard.PASSED_OVER:
            process.send_signal(number)
        os.write(control, bytes([signal.SIGUSR1]))
        assert ends_with(process) == -signal.SIGUSR1


def test_if_the_launcher_dies_the_whole_process_group_is_killed() -> None:
    with guarded("sh", "-c", f'{PYTHON} -c "{PAUSE}" & {PYTHON} -c "{PAUSE}"; wait') as (process, control):
        assert process.stdout is not None
        assert [process.stdout.readline(), process.stdout.readline()] == ["here\n", "here\n"]
        os.dup2(os.open(os.devnull, os.O_WRONLY), control)  # closes the pipe, but keeps its descriptor in use
        assert process.stdout.read() == ""  # end of file: every process that held the pipe is gone
        assert ends_with(process) == -signal.SIGKILL


def test_processes_that_a_command_leaves_behind_are_killed() -> None:
    with guarded("sh", "-c", f'{PYTHON} -c "{PAUSE}" & exit 5') as (process, _):
        assert process.stdout is not None
        process.stdout.read()
        assert ends_with(process) == 5


def test_processes_of_a_stopped_command_get_time_to_end() -> None:
    saves = (
        "import signal, sys\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})\n"
        "print('here', flush=True)\n"
        "signal.sigwait({signal.SIGTERM})\n"
        "signal.sigtimedwait(set(), 0.2)\n"
        "print('saved')\n"
    )
    with guarded("sh", "-c", f'{PYTHON} -c "$1" & wait', "sh", saves) as (process, control):
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        os.write(control, bytes([signal.SIGTERM]))
        assert process.stdout.read() == "saved\n"
        assert ends_with(process) == -signal.SIGTERM


def test_a_command_has_the_signal_dispositions_and_limits_of_the_launcher() -> None:
    with guarded("sh", "-c", "ulimit -n; kill -PIPE $$", files=64) as (process, _):  # Python itself ignores SIGPIPE
        assert process.stdout is not None
        assert process.stdout.read() == "64\n"
        assert ends_with(process) == -signal.SIGPIPE
    with guarded("sh", "-c", "kill -HUP $$; exit 5", before=("nohup",)) as (process, _):
        assert ends_with(process) == 5


def test_a_command_inherits_only_its_standard_streams() -> None:
    """uvloop leaves descriptors open. In a command they would keep the readers of a pipe from seeing its end."""
    with guarded("sh", "-c", "ls /dev/fd | wc -l", left_open=(os.dup(1),)) as (process, _):
        assert process.stdout is not None
        assert process.stdout.read().strip() == "4"  # the listed directory itself is open, too

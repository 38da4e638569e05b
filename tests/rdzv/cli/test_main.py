"""The `rdzv` command: parsing of its arguments, exit statuses, one line per error."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import errno
import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

import rdzv
import store
import store.sync
from rdzv.cli import command, runs
from rdzv.cli import main as cli
from rdzv.errors import RendezvousClosedError, RendezvousError, RendezvousTimeoutError
from tests.support.processes import free_port, require, start_python

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.some_here(3)


# What users of etcdctl, kubectl and torchrun type first.
GUESSES = (
    {"scale": "resize", "cordon": "ban", "uncordon": "unban", "remove": "drain", "get": "status", "ls": "runs"}
    | {"watch": "status --watch", "snapshot": "backup", "stop": "close", "rm": "forget", "logs": "history"}
    | {"launch": "run", "start": "serve", "health": "ping"}
)


async def run(*arguments: str, **env: str) -> tuple[int, list[str]]:
    """Run a real command. Return its exit status and the lines of its output."""
    async with start_python("-m", "rdzv", *arguments, env=env) as child:
        return await child.wait(), child.output


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("statsu", "did you mean stats?"),
        *((word, f"did you mean {ours}?") for word, ours in GUESSES.items()),
        ("snapshots", "did you mean backup?"),
        ("status --token-file f tcp://127.0.0.1:1/job", "put it into the URL (tcp://head:29400/job-7?token_file=...)"),
        ("run tcp://127.0.0.1:1/job python train.py", "the command comes after --"),
    ],
)
def test_an_error_suggests_the_probable_command_or_option(
    line: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status_of(*line.split())
    assert meant in capsys.readouterr().err


async def fails(*arguments: str) -> tuple[int, str]:
    """Return the exit status and the only line of output of a failing command."""
    status, output = await run(*arguments)
    assert len(output) == 1, output
    return status, output[0]


def status_of(*arguments: str) -> object:
    try:
        return cli.main(arguments)
    except SystemExit as leaving:
        return leaving.code


# ------------------------------------------------------------------------------------- exit statuses and errors


@pytest.mark.parametrize(
    "arguments",
    [
        ("status", "tcp://127.0.0.1"),
        ("status", "tcp://127.0.0.1/job?min_node=2"),
        ("status", "nonsense"),
        ("status",),
        ("close", "tcp://127.0.0.1/job?token=secret"),
        ("serve", "--port", "70000"),
        ("chaos", "tcp://127.0.0.1:1/job", "--kill", "1/1s"),
        ("chaos", "tcp://127.0.0.1:1/job", "--kill", "0/1s", "--yes"),
        ("chaos", "tcp://127.0.0.1:1/job", "--kill", f"{10**400}/1s", "--yes"),
        ("forget", "tcp://127.0.0.1:1"),
        ("-v",),
        ("nonsense",),
    ],
)
def test_wrong_usage_is_2_and_one_line(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RDZV_URL", raising=False)
    assert status_of(*arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"rdzv {arguments[0]}: " if len(arguments) > 1 else "rdzv")
    assert "=secret" not in line


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RendezvousError("x"), 1),
        (ValueError("x"), 1),
        (ImportError("x"), 2),
        (rdzv.RendezvousSettingsError("x"), 2),
        (store.StoreUsageError("x"), 2),
        (RendezvousClosedError("x"), 3),
        (RendezvousTimeoutError("x"), 4),
        (store.StoreTimeoutError("x", maybe_applied=False), 4),
        (rdzv.RendezvousConnectionError("x"), 5),
        (store.ConnectionLost("x", maybe_applied=False), 5),
        (store.AuthenticationError("x"), 5),
    ],
)
def test_each_kind_of_error_has_its_status(
    error: Exception, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def fail(_: object) -> int:
        raise error

    monkeypatch.setattr(runs, "_ping_store", dataclasses.replace(cli.command_named("ping"), run=fail))
    assert cli.main(["ping", "tcp://127.0.0.1"]) == status
    assert capsys.readouterr().err == "rdzv ping: x\n"
    assert cli.main(["ping", "tcp://127.0.0.1", "--debug"]) == status
    told = capsys.readouterr().err
    assert told.startswith("Traceback")
    assert told.endswith("rdzv ping: x\n")


async def test_no_connection_is_5_and_one_line() -> None:
    url = f"tcp://127.0.0.1:{free_port()}"
    for looking in ("ping", "status", "close"):
        status, line = await fails(looking, f"{url}/job", "--timeout", "0.3")
        assert status == 5
        assert line.startswith(f"rdzv {looking}: ")
        assert "nobody listens there" in line


@pytest.mark.parametrize("asks", ["status", "stats"])
async def test_an_etcd_that_does_not_listen_is_status_5_too(asks: str) -> None:
    """Regression: the import of gRPC used up the timeout, so the message was that etcd listens, with status 4."""
    require("grpc")
    status, line = await fails(asks, f"etcd://127.0.0.1:{free_port()}/job", "--timeout", "0.3")
    assert status == 5
    assert "nobody listens there" in line


async def test_a_wrong_token_is_reported_and_never_shown(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("hunter2, hunter2, hunter2")
    secret.chmod(0o600)
    async with store.serve(token="another of 16 bytes or more") as server:
        status, line = await fails("status", f"{server.url}/job?token_file={secret}")
    assert status == 5
    assert "token" in line
    assert "hunter2" not in line


@pytest.mark.virtual_time
async def test_a_commands_timeout_limits_it_as_a_whole_or_until_its_first_output() -> None:
    """Regression: each step of `rdzv status` had 10 s of its own, and `rdzv top` waited 30 s for each answer."""

    async def takes_long(_: argparse.Namespace) -> int:
        await asyncio.sleep(60)
        return command.DONE

    options = argparse.Namespace(timeout=10.0, watch=False)
    looks = command.Command(name="status", help="look", run=takes_long, limited=True)
    with pytest.raises(store.StoreTimeoutError):
        await command._run_with_timeout(looks, options)
    assert await command._run_with_timeout(looks, argparse.Namespace(timeout=10.0, watch=True)) == command.DONE
    assert await command._run_with_timeout(dataclasses.replace(looks, limited=False), options) == command.DONE
    with command.limited_by_timeout(10.0) as answered:
        answered()
        await asyncio.sleep(60)


def test_every_command_with_a_timeout_is_limited_by_it_or_limits_itself() -> None:
    asks = [each for each in map(cli.command_named, cli.ROOMS) if each.takes_url and not each.takes_command]
    assert {each.name for each in asks if not each.limited} == {"doctor", "chaos"}


# ------------------------------------------------------------------------------------------ ways to ask


async def test_flags_may_stand_before_the_subcommand_as_well_as_after_it() -> None:
    url = f"tcp://127.0.0.1:{free_port()}"
    for arguments in (("--debug", "ping"), ("ping", "--debug")):
        status, output = await run(*arguments, url, "--timeout", "0.2")
        assert status == 5
        assert any("Traceback" in line for line in output)
        assert output[-1].startswith("rdzv ping: no store at")
    status, output = await run("-v", "run", f"{url}/job?min_nodes=2", "--", "no-such-command", "-v")
    assert (status, len(output)) == (121, 1)


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        *(((), "usage: rdzv"), (("help",), "usage: rdzv"), (("--help",), "usage: rdzv")),
        *((words, "usage: rdzv run [options] URL -- COMMAND ...") for words in (("help", "run"), ("run", "--help"))),
        (("--debug", "help", "run"), "usage: rdzv run [options] URL -- COMMAND ..."),
        (("--version",), f"rdzv {rdzv.__version__}\n"),
    ],
)
def test_help_and_version_are_shown(arguments: tuple[str, ...], shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of(*arguments) == 0
    output = capsys.readouterr().out
    assert output.startswith(shown)
    assert not shown.endswith("rdzv") or all(name in output for name in cli.ROOMS)


def test_the_help_lists_each_command_once_in_its_group(capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of("--help") == 0
    _, *groups = re.split("\n\n(?=(?:" + "|".join(cli.GROUPS) + "):\n)", capsys.readouterr().out)
    listed = {group.partition(":")[0]: re.findall("^    ([a-z]+) ", group, re.MULTILINE) for group in groups}
    assert listed == {title: list(group) for title, group in cli.GROUPS.items()}


def test_top_is_status_watch() -> None:
    assert cli._parse(["top", "tcp://h/job", "--json"]) == cli._parse(["status", "--watch", "tcp://h/job", "--json"])


@pytest.mark.parametrize(("word", "rooms"), [("--version", set()), ("token", {"command", "data"})])
def test_a_subcommand_imports_no_other(word: str, rooms: set[str]) -> None:
    """Regression: every command imported all others, so `--version` took as long as a whole run."""
    code = "import sys; from rdzv.cli.main import main\ntry: main()\nexcept SystemExit: pass\nprint(*sys.modules)"
    said = subprocess.run([sys.executable, "-c", code, word], capture_output=True, text=True, check=True).stdout.split()
    assert {name.removeprefix("rdzv.cli.") for name in said if name.startswith("rdzv.cli.")} == {"main", *rooms}
    assert ("asyncio" in said) == bool(rooms)


@pytest.mark.in_ci
async def test_a_given_url_takes_precedence_over_the_environment() -> None:
    async with store.serve() as server:
        url = f"{server.url}/job"
        async with rdzv.connect(f"{url}?min_nodes=1", is_host=False) as handler:
            await handler.next_rendezvous()
        async with rdzv.connect(f"{server.url}/other") as handler:
            await handler.ban("gpu-0")
        for arguments, says in (
            (("history",), "round 0: 1 node"),
            (("history", f"{server.url}/other"), "run other: no round"),
            (("ban", "--now", "gpu-1", "--reason", "slow"), "node gpu-1 is banned from run job"),
            (("ban", "gpu-2", "--for", "10m"), "node gpu-2 is banned from run job for 10 min"),
            (("ban", "gpu-3", "--reason", "see https://tickets/7"), "node gpu-3 is banned from run job"),
            (("ban", "gpu-4", "--reason=https://tickets/7"), "node gpu-4 is banned from run job"),
            (("ping", "--count", "1"), "answers in"),
        ):
            status, output = await run(*arguments, RDZV_URL=url)
            assert status == 0, output
            assert says in output[0]
        status, output = await run("run", "--", "echo", "done", RDZV_URL=f"{url}?min_nodes=1")
        assert status == 0, output
        assert "[0] done" in output


def test_a_generated_token_is_long_enough_and_new_each_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["token"]) == cli.main(["token"]) == 0
    first, second = capsys.readouterr().out.split()
    assert first != second
    assert re.fullmatch("[A-Za-z0-9_-]{43}", first), "32 random bytes, which pass a shell and a file unharmed"


@pytest.mark.parametrize(("line", "goes_on"), [("rdzv res", ["resize", "restore"]), ("rdzv drain --w", ["--within"])])
def test_a_shell_gets_completions(line: str, goes_on: list[str], tmp_path: Path) -> None:
    require("argcomplete")
    asked = {"COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE_STDOUT_FILENAME": str(tmp_path / "told")}
    environment = {**os.environ, **asked, "_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": "\n"}
    subprocess.run([sys.executable, "-m", "rdzv"], env=environment, check=True)
    assert (tmp_path / "told").read_text().split() == goes_on


def test_an_interrupt_while_a_command_is_imported_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: str) -> object:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_import_cli_module", interrupted)
    assert cli.main(["ping", "tcp://127.0.0.1"]) == 130


@pytest.mark.parametrize("name", ["token", "demo"])
@pytest.mark.parametrize(
    ("reader", "status", "says"), [("nobody", 0, ""), ("full", 1, "standard output: No space left on device\n")]
)
def test_output_that_cannot_be_written_ends_with_an_exit_status_of_rdzv(
    name: str, reader: str, status: int, says: str
) -> None:
    """Regression: Python flushed again at exit, failed with two more lines, and exited with 120."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    reading, writing = os.pipe() if reader == "nobody" else (None, os.open("/dev/full", os.O_WRONLY))
    if reading is not None:
        os.close(reading)
    command = [sys.executable, "-m", "rdzv", name]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, env=environment, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (status, says and f"rdzv {name}: {says}")


def test_a_broken_pipe_that_is_not_the_output_is_no_success(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: `rdzv run` ended with 0 when the process that forks its workers was gone."""

    async def broken(*_: object) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr(store.Client, "ping", broken)
    with store.sync.serve() as server:
        assert cli.main(["ping", server.url]) == 1
    assert capsys.readouterr().err == "rdzv ping: Broken pipe\n"


def test_system_errors_are_printed_without_errno(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "none" / "file"
    assert cli.main(["serve", "--port", "0", "--port-file", str(path)]) == 1
    told = capsys.readouterr().err.splitlines()[-1]
    assert "Errno" not in told
    assert str(path) in told

"""The `rdzv` command as real processes: what it prints, its exit statuses, one line per error."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import jsonschema
import pytest

import rdzv
import store
from rdzv.cli import main as cli
from rdzv.cli import operate, outcome
from rdzv.cli.command import DONE, Command, limited_by_timeout
from rdzv.errors import RendezvousClosedError, RendezvousError, RendezvousTimeoutError
from tests.rdzv.core.test_report import SCHEMA
from tests.support.processes import Child, free_port, require, start, start_python

if TYPE_CHECKING:
    import contextlib
    from pathlib import Path


def command(*arguments: str) -> contextlib.AbstractAsyncContextManager[Child]:
    return start_python("-m", "rdzv", *arguments)


async def run(*arguments: str) -> tuple[int, list[str]]:
    async with command(*arguments) as child:
        return await child.wait(), child.output


async def fails(*arguments: str) -> tuple[int, str]:
    """The exit status, and the one line that says why."""
    status, output = await run(*arguments)
    assert len(output) == 1, output
    return status, output[0]


async def test_history_and_timeline_tell_what_happened_and_join_nothing(tmp_path: Path) -> None:
    async with store.serve() as server:
        url = f"{server.url}/job"
        status, output = await run("history", url)
        assert (status, output) == (0, ["run job: no round has completed, as far as is remembered"])
        async with rdzv.connect(f"{url}?min_nodes=1", node_id="a", is_host=False) as handler:
            await handler.next_rendezvous()
            await handler.next_rendezvous()
        status, output = await run("history", url)
        assert status == 0
        stamp = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\dZ"
        assert re.fullmatch(rf"{stamp}  round 0: 1 node: a \(127\.0\.0\.1\)", output[0])
        assert "s meeting again" in output[1]
        assert re.fullmatch(rf"{stamp}  round 1, \d+\.\d s after the one before: 1 node: a \(127\.0\.0\.1\)", output[2])
        assert re.fullmatch(
            r"job: \d+ s; training .* %, regrouping .* %, waiting for nodes .* %; no losses", output[-1]
        )
        path = tmp_path / "run.json"
        assert await run("timeline", url, "-o", str(path)) == (0, [])
        events = json.loads(path.read_text())["traceEvents"]
        assert {"round 0", "round 1"} <= {event["name"] for event in events}
        status, output = await run("timeline", url, "-o", "-")
        assert output[0] == "<!doctype html>"
        status, output = await run("history", url, "--json")
        assert [each["number"] for each in json.loads(output[0])["rounds"]] == [0, 1]


@pytest.mark.parametrize("ending", ["terminate", "interrupt"])
async def test_serve_writes_its_port_and_leaves_with_success_when_asked_to(tmp_path: Path, ending: str) -> None:
    port_file = tmp_path / "port"
    async with command("serve", "--port", "0", "--port-file", str(port_file)) as child:
        await child._until(lambda: any("listens on" in line for line in child.output), 60, "does not listen")
        port = int(port_file.read_text())
        status, output = await run("ping", f"tcp://127.0.0.1:{port}", "--count", "2")
        assert status == 0
        assert len(output) == 2
        assert f"tcp://127.0.0.1:{port} answers in" in output[0]
        getattr(child, ending)()
        assert await child.wait() == 0
        assert "leaving" in child.output[-1]


async def test_a_second_sigterm_ends_serve_at_once(tmp_path: Path) -> None:
    port_file = tmp_path / "port"
    stubborn = """
import asyncio, sys, store
async def main():
    async with store.connect(sys.argv[1]) as client, client.watch("big/") as watch:
        print("watching", flush=True)
        async for _ in watch:
            pass
asyncio.run(main())
"""
    async with command("serve", "--port", "0", "--port-file", str(port_file)) as child:
        await child._until(lambda: any("listens on" in line for line in child.output), 60, "does not listen")
        url = f"tcp://127.0.0.1:{int(port_file.read_text())}"
        async with start_python("-c", stubborn, url) as reader:
            await reader.line("watching")
            reader.stop()  # it reads nothing any more, so that the last frames cannot get through
            async with store.connect(url) as client:
                for number in range(12):
                    await client.put(f"big/{number}", bytes(1_000_000))
            child.terminate()
            await child._until(lambda: "leaving" in child.output[-1], 60, "does not leave")
            child.terminate()
            assert await child.wait() == 1, "and not 0, after the five seconds that leaving may take"
            reader.kill()


async def test_status_of_a_run_that_is_not_there_names_those_that_are() -> None:
    async with store.serve() as server:
        assert await run("status", f"{server.url}/jbo") == (
            1,
            ["rdzv status: the store has no run jbo; it has none under /rdzv"],
        )
        async with rdzv.connect(f"{server.url}/job?min_nodes=1", node_id="a", is_host=False) as node:
            await node.next_rendezvous()
            assert await run("status", f"{server.url}/jbo", "--json") == (
                1,
                ["rdzv status: the store has no run jbo; it has job"],
            )


async def test_status_close_and_watch_show_a_run() -> None:
    async with store.serve() as server:
        url = f"{server.url}/job"
        async with command("status", url, "--watch") as watching:
            await watching.line("nobody is here")
            async with rdzv.connect(f"{url}?min_nodes=1", node_id="a", is_host=False, payload=[1]) as node:
                info = await node.next_rendezvous()
                await watching.line("run job: complete: round 0 stands with 1 node")
                status, output = await run("status", url, "--json")
                told = json.loads(output[0])
                jsonschema.validate(told, SCHEMA)
                assert told["cost"].items() >= {"rounds": 1, "losses": 0}.items()
                status, output = await run("status", url)
                assert any(re.fullmatch(r"job: \d+ s; training .* %, .*; no losses", line) for line in output)
                assert (told["round"], told["phase"], told["coordinator"]) == (0, "complete", "a")
                assert tuple(told["bootstrap"].values()) == info.bootstrap_address
                (member,) = told["members"]
                assert member.items() >= {"node_id": "a", "rank": 0, "address": "127.0.0.1", "payload": [1]}.items()
                assert (member["attributes"], member["step"]) == ({}, None)
                status, output = await run("close", url, "--reason", "enough")
                assert (status, output[0]) == (0, "run job is closed")
                assert re.fullmatch(r"job: \d+ s; training .* %, .*; no losses", output[1])
                status, output = await run("close", url, "--reason", "more")
                assert (status, output[0]) == (0, "run job is closed, and was before: enough")
                await watching.line("run job: closed: the run is closed by")
                assert await watching.wait() == 0
                assert (await node.status()).closed == "enough"


async def test_output_that_nobody_reads_to_its_end_is_no_error() -> None:
    async with store.serve() as server:
        line = f"'{{}}' -m rdzv status {server.url}/job --watch | head -n 1; echo status ${{{{PIPESTATUS[0]}}}}"
        async with start("bash", "-c", line.format(sys.executable)) as child:
            await child.line("nobody is here")
            async with rdzv.connect(f"{server.url}/job?min_nodes=1", is_host=False) as node:
                await node.next_rendezvous()
                await node.set_closed()
                assert await child.line("status") == "status 0"
            assert child.output == ["run job: gathering: nobody is here", "status 0"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("status", "tcp://127.0.0.1"),
        ("status", "tcp://127.0.0.1/job?min_node=2"),
        ("status", "nonsense"),
        ("close", "tcp://127.0.0.1/job?token=secret"),
        ("serve", "--host", "0.0.0.0", "--port", "0"),
        ("serve", "--token-file", "/no/such/file"),
        ("serve", "--token-file", "/dev/null"),
        ("serve", "--key", "key.pem"),
        ("serve", "--cert", "/no/such/file"),
    ],
)
def test_wrong_usage_is_2_and_one_line(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of(*arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"rdzv {arguments[0]}: ")
    assert "=secret" not in line


@pytest.mark.parametrize("arguments", [("nonsense",), ("-v",), ("serve", "--port", "70000"), ("serve", "--port", "x")])
def test_what_argparse_refuses_is_2_and_one_line_as_well(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert status_of(*arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    prog = f"rdzv {arguments[0]}" if len(arguments) > 1 else "rdzv"
    assert line.startswith(f"{prog}: ")
    assert line.endswith(f"; see {prog} --help")


async def test_ping_takes_parameters_without_a_run_and_measures_below_a_millisecond(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("hunter2, hunter2, hunter2")
    async with store.serve(token="hunter2, hunter2, hunter2") as server:
        status, output = await run("ping", f"{server.url}?token_file={secret}", "--count", "4")
    assert status == 0
    taken = [float(re.fullmatch(rf"{server.url} answers in (\d+\.\d+) ms", line).group(1)) for line in output]  # type: ignore[union-attr]  # it fails either way
    assert len(taken) == 4
    assert all(milliseconds > 0 for milliseconds in taken)
    assert any(milliseconds % 1 for milliseconds in taken), "more than whole milliseconds, which is all uvloop counts"


async def test_no_connection_is_5_and_one_line() -> None:
    port = free_port()
    status, line = await fails("ping", f"tcp://127.0.0.1:{port}", "--timeout", "0.3")
    assert status == 5
    assert line == f"rdzv ping: no store at tcp://127.0.0.1:{port} within 0.3 s: nobody listens there"
    for looking in ("status", "close"):
        status, line = await fails(looking, f"tcp://127.0.0.1:{port}/job", "--timeout", "0.3")
        assert status == 5
        assert "nobody listens there" in line


@pytest.mark.parametrize("asks", ["status", "stats"])
async def test_an_etcd_where_nobody_listens_is_5_too(asks: str) -> None:
    """It was said to take connections, with status 4: the import of gRPC took more than was left for the last word."""
    require("grpc")
    status, line = await fails(asks, f"etcd://127.0.0.1:{free_port()}/job", "--timeout", "0.3")
    assert status == 5
    assert "nobody listens there" in line


async def test_a_port_that_is_taken_is_1_and_one_line_and_debug_shows_the_traceback() -> None:
    async with store.serve() as server:
        status, line = await fails("serve", "--port", str(server.port))
        assert status == 1
        assert "address already in use" in line
        status, output = await run("serve", "--port", str(server.port), "--debug")
        assert status == 1
        assert any("Traceback" in line for line in output)


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

    failing = dataclasses.replace(cli.command_named("ping"), run=fail)
    monkeypatch.setattr(operate, "_ping", failing)
    assert cli.main(["ping", "tcp://127.0.0.1"]) == status
    assert capsys.readouterr().err == "rdzv ping: x\n"
    assert cli.main(["ping", "tcp://127.0.0.1", "--debug"]) == status
    told = capsys.readouterr().err
    assert told.startswith("Traceback")
    assert told.endswith("rdzv ping: x\n")


async def test_a_wrong_token_is_said_and_never_shown(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("hunter2, hunter2, hunter2")
    async with store.serve(token="another of 16 bytes or more") as server:
        status, line = await fails("status", f"{server.url}/job?token_file={secret}")
        assert status == 5
        assert "token" in line
        assert "hunter2, hunter2, hunter2" not in line


# ---------------------------------------------------------------------------------------------- ways to ask


async def test_flags_may_stand_before_the_subcommand_as_well_as_after_it() -> None:
    port = free_port()
    for arguments in (("--debug", "ping"), ("ping", "--debug")):
        status, output = await run(*arguments, f"tcp://127.0.0.1:{port}", "--timeout", "0.2")
        assert status == 5
        assert any("Traceback" in line for line in output)
        assert output[-1].startswith("rdzv ping: no store at")
    status, output = await run("-v", "run", f"tcp://127.0.0.1:{port}/job?min_nodes=2", "--", "no-such-command", "-v")
    assert (status, len(output)) == (121, 1)


@pytest.mark.parametrize("arguments", [(), ("help",), ("--help",)])
def test_without_a_subcommand_the_help_is_shown(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of(*arguments) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("usage: rdzv")
    assert all(name in shown for name in cli.ROOMS)


@pytest.mark.parametrize("arguments", [("help", "run"), ("run", "--help"), ("--debug", "help", "run")])
def test_help_tells_of_a_subcommand(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of(*arguments) == 0
    assert capsys.readouterr().out.startswith("usage: rdzv run [options] URL -- COMMAND ...")


def status_of(*arguments: str) -> object:
    try:
        return cli.main(arguments)
    except SystemExit as leaving:
        return leaving.code


def test_the_version_is_the_packages_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of("--version") == 0
    assert capsys.readouterr().out == f"rdzv {rdzv.__version__}\n"


@pytest.mark.parametrize(("word", "rooms"), [("--version", set()), ("token", {"command", "outcome", "data"})])
def test_a_subcommand_imports_no_other(word: str, rooms: set[str]) -> None:
    """To say the version took as long as a whole run, since every command imported all others."""
    code = "import sys; from rdzv.cli.main import main\ntry: main()\nexcept SystemExit: pass\nprint(*sys.modules)"
    said = subprocess.run([sys.executable, "-c", code, word], capture_output=True, text=True, check=True).stdout.split()
    assert {name.removeprefix("rdzv.cli.") for name in said if name.startswith("rdzv.cli.")} == {"main", *rooms}
    assert ("asyncio" in said) == bool(rooms)


async def test_the_url_may_come_from_the_environment_and_a_given_one_beats_it() -> None:
    async with store.serve() as server:
        environment = {"RDZV_URL": f"{server.url}/job"}
        async with rdzv.connect(f"{server.url}/job?min_nodes=1", is_host=False) as handler:
            await handler.next_rendezvous()
        for arguments, says in (
            (("history",), "round 0: 1 node"),
            (("history", f"{server.url}/other"), "run other: no round"),
            (("ban", "--now", "gpu-1", "--reason", "slow"), "node gpu-1 is banned from run job"),
            (("ban", "gpu-2", "--for", "10m"), "node gpu-2 is banned from run job for 10 min"),
            (("ping", "--count", "1"), "answers in"),
        ):
            async with start_python("-m", "rdzv", *arguments, env=environment) as child:
                assert await child.wait() == 0, child.written()
                assert says in child.output[0]
        environment["RDZV_URL"] += "?min_nodes=1"
        async with start_python("-m", "rdzv", "run", "--", "echo", "done", env=environment) as child:
            assert await child.wait() == 0, child.written()
            assert child.stdout == ["[0] done"]


async def test_without_a_url_anywhere_its_absence_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RDZV_URL", raising=False)
    status, line = await fails("status")
    assert status == 2
    assert "required: URL" in line


@pytest.mark.virtual_time
async def test_the_timeout_of_a_command_limits_all_of_it_but_for_what_is_to_go_on() -> None:
    """Each step of `rdzv status` had 10 s for itself: 30 s through a path that drops large packets."""

    async def takes_long(_: argparse.Namespace) -> int:
        await asyncio.sleep(60)
        return DONE

    options = argparse.Namespace(timeout=10.0, watch=False)
    looks = Command(name="status", help="look", run=takes_long, limited=True)
    with pytest.raises(store.StoreTimeoutError, match="not done within 10 s"):
        await outcome._run(looks, options)
    goes_on = argparse.Namespace(timeout=10.0, watch=True)
    assert await outcome._run(looks, goes_on) == DONE
    assert await outcome._run(dataclasses.replace(looks, limited=False), options) == DONE


@pytest.mark.virtual_time
async def test_what_goes_on_for_long_is_limited_until_its_first_word() -> None:
    """`rdzv top` waited half a minute for each answer that was lost, and showed nothing meanwhile."""
    with limited_by_timeout(10.0) as answered:
        answered()
        await asyncio.sleep(60)
    with pytest.raises(store.StoreTimeoutError, match="not done within 10 s"), limited_by_timeout(10.0):
        await asyncio.sleep(60)


def test_every_command_that_asks_is_limited_by_its_timeout_but_for_those_that_see_to_it_themselves() -> None:
    asks = {each for each in map(cli.command_named, cli.ROOMS) if each.takes_url and not each.takes_command}
    assert {command.name for command in asks if not command.limited} == {"top", "doctor", "chaos"}

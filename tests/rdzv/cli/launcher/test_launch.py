"""`rdzv run`: real launchers over a real store, with commands that are controlled by signals."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
from asyncio.subprocess import PIPE
from pathlib import Path

import pytest

import rdzv
import store
from rdzv.cli.launcher.job import CHECKPOINT_FILE, ERROR_FILE, Job, NodeRanks, environment_of, process_ranks
from rdzv.cli.launcher.job_round import SUCCEEDED
from rdzv.cli.launcher.launch import _join_round
from rdzv.cli.launcher.processes import LINE_BYTES_MAX, label_lines, open_log
from rdzv.cli.main import main
from rdzv.cli.run import resolve_nproc
from rdzv.config.parameters import Source
from rdzv.config.settings import PARAMETERS
from rdzv.core.round import Participant
from rdzv.errors import RendezvousSettingsError, RendezvousStateError
from rdzv.loop.process_files import BEAT_DIR, _lowest_step, read_exception_line
from rdzv.node.handler import Handler
from tests.support.launched import FAIL, SUCCEED, TWO, TWO_OR_THREE, node, places, started, tell
from tests.support.processes import free_port, start_python
from tests.support.runs import VirtualRun

pytestmark = pytest.mark.some_here(5)


async def written(server: str, name: str) -> bytes:
    """Wait until the round has this key, and return its value."""
    async with store.connect(server) as client, client.watch("/rdzv/job/rounds/", snapshot=True) as watch:
        async for event in watch:
            if event.key.endswith(name):
                return event.value or b""
    raise AssertionError("the watch has ended")


# ------------------------------------------------------------------------------------------ rounds and success


async def test_processes_get_their_ranks_and_the_run_is_closed_once_all_have_succeeded(server: str) -> None:
    url = f"{server}/job?{TWO}&rank_order=name"
    async with node(url, "a", "--nproc", "2") as a, node(url, "b") as b, rdzv.connect(f"{server}/job") as observer:
        told = sorted([await started(a), await started(a), await started(b)], key=lambda process: int(process["RANK"]))
        names = (
            "RANK",
            "WORLD_SIZE",
            "LOCAL_RANK",
            "LOCAL_WORLD_SIZE",
            "GROUP_RANK",
            "GROUP_WORLD_SIZE",
            "MASTER_ADDR",
        )
        assert [tuple(process[name] for name in names) for process in told] == [
            ("0", "3", "0", "2", "0", "2", "127.0.0.1"),
            ("1", "3", "1", "2", "0", "2", "127.0.0.1"),
            ("2", "3", "0", "1", "1", "2", "127.0.0.1"),
        ]
        assert {(one["RDZV_RUN_ID"], one["RDZV_ROUND"], one["RDZV_RESTARTS"]) for one in told} == {("job", "0", "0")}
        assert len({process["MASTER_PORT"] for process in told}) == 1
        first, second, third = told
        assert third["RDZV_URL"] == f"{url}&node_id=b"

        tell(first, SUCCEED)
        tell(third, SUCCEED)
        await written(server, "rdzv/done")  # b has counted itself, and waits for the second process of a
        assert not await observer.is_closed()
        tell(second, SUCCEED)
        assert await a.wait() == 0
        assert await b.wait() == 0
        assert (await observer.status()).closed == SUCCEEDED


async def test_a_failure_restarts_the_run_and_one_too_many_ends_the_node_but_not_the_run(server: str) -> None:
    url = f"{server}/job?{TWO}"
    async with node(url, "a", "--max-restarts", "1") as a, node(url, "b", "--max-restarts", "1") as b:
        first, second = await started(a), await started(b)
        tell(second, signal.SIGKILL)
        again_a, again_b = await started(a), await started(b)
        assert (first["RDZV_RESTARTS"], second["RDZV_RESTARTS"]) == ("0", "0")
        assert (again_a["RDZV_ROUND"], again_a["RDZV_RESTARTS"]) == ("1", "1")
        assert (again_b["RDZV_ROUND"], again_b["RDZV_RESTARTS"]) == ("1", "1")
        tell(again_a, FAIL)
        assert await a.wait(timeout=30) == 3, "its own first failure is the second of the run"
        assert "--max-restarts 1 allows no restart; see what it wrote, or allow more" in a.output[-1]
        await b.line(containing="asked to end by SIGTERM")
        async with rdzv.connect(f"{server}/job") as observer:
            assert not await observer.is_closed()
        b.terminate()  # it waits for a replacement
        assert await b.wait() == 128 + signal.SIGTERM


async def test_the_other_nodes_are_told_at_once_how_a_process_has_ended(server: str) -> None:
    """No loss is reported in this case: the node whose process failed is alive, and must tell the others itself."""
    url = f"{server}/job?min_nodes=2&last_call_timeout=0&disconnect_ttl=600&ttl=2000"
    async with node(url, "a", "--max-restarts", "1") as a, node(url, "b") as b:
        first = await started(a)
        await started(b)
        tell(first, signal.SIGKILL)
        assert [(await started(a))["RDZV_RESTARTS"], (await started(b))["RDZV_RESTARTS"]] == ["1", "1"]
        assert any(f"a: rank {first['RANK']} was killed by SIGKILL; meeting again" in line for line in b.output)


async def test_a_node_that_fails_after_another_is_not_blamed(server: str) -> None:
    url = f"{server}/job?{TWO}"
    async with node(url, "a", "--max-restarts", "1") as a, node(url, "b") as b:
        first, second = await started(a), await started(b)
        tell(first, FAIL)
        assert await written(server, "rdzv/ended_by") == f"a\nrank {first['RANK']} exited with status 3".encode()
        with contextlib.suppress(ProcessLookupError):  # under load, its launcher has stopped it already
            tell(second, FAIL)
        assert (await started(a))["RDZV_RESTARTS"] == "1"
        assert (await started(b))["RDZV_RESTARTS"] == "1", "it is the run's count"


@pytest.mark.in_ci
async def test_a_killed_launcher_leaves_no_process_and_the_others_accept_a_replacement(server: str) -> None:
    url = f"{server}/job?{TWO_OR_THREE}&rank_order=name"
    async with (
        node(url, "a") as a,
        node(url, "b") as b,
        node(url, "c", "--no-prefix", "--nproc", "2", does=("with-child",)) as c,
    ):
        while True:  # the first round may have only two nodes
            process = await started(a)
            if process["WORLD_SIZE"] == "4":
                break
        c.kill()
        await c.wait()  # end of file: the workers and all that they have started are gone
        tell(process, FAIL)  # as a failed collective does, before the node has heard of any failure
        after = await started(a)
        assert (after["RANK"], after["WORLD_SIZE"], after["RDZV_RESTARTS"]) == ("0", "2", "0")
        async with node(url, "d") as d:
            final = await started(d)
            assert (final["RANK"], final["WORLD_SIZE"]) == ("2", "3")
            assert int(final["RDZV_ROUND"]) == int(after["RDZV_ROUND"]) + 1
            for one in (a, b):
                while (process := await started(one))["RDZV_ROUND"] != final["RDZV_ROUND"]:
                    pass
                tell(process, SUCCEED)
            tell(final, SUCCEED)
            assert [await one.wait() for one in (a, b, d)] == [0, 0, 0]


async def test_a_node_that_was_paused_and_dropped_stops_its_processes_and_joins_again(server: str) -> None:
    url = f"{server}/job?min_nodes=1&max_nodes=2&last_call_timeout=0.5&ttl=1&rank_order=name"
    async with node(url, "a") as a, node(url, "b") as b:
        while (await started(b))["WORLD_SIZE"] != "2":
            pass
        a.stop()
        while (await started(b))["WORLD_SIZE"] != "1":
            pass
        a.resume()
        await a.line(containing="asked to end by SIGTERM")
        run_together = await started(b)
        assert (run_together["RANK"], run_together["WORLD_SIZE"], run_together["RDZV_RESTARTS"]) == ("1", "2", "0")


@pytest.mark.in_ci
async def test_a_finished_node_meets_again_when_the_others_accept_a_newcomer(server: str) -> None:
    """Regression: the launcher of such a node ignored the announced change, and the others waited until a timeout."""
    url = f"{server}/job?{TWO_OR_THREE}&rank_order=name"
    async with node(url, "a") as a, node(url, "b") as b:
        tell(await started(a), SUCCEED)
        await started(b)
        await written(server, "rdzv/done")
        async with node(url, "c") as c:
            again = [await started(one) for one in (a, b, c)]
            assert [process["WORLD_SIZE"] for process in again] == ["3", "3", "3"]
            for process in again:
                tell(process, SUCCEED)
            assert [await one.wait() for one in (a, b, c)] == [0, 0, 0]


async def test_if_the_last_node_to_succeed_dies_before_closing_another_closes_the_run(server: str) -> None:
    url = f"{server}/job?{TWO}"
    async with node(url, "a") as a:
        async with rdzv.connect(url, node_id="b") as last:  # with the library: it counts as one process
            info = await last.next_rendezvous()
            process = await started(a)
            assert process["WORLD_SIZE"] == "2"
            tell(process, SUCCEED)
            await written(server, "rdzv/done")
            counts = info.store.clone()
            counts.prefix = counts.prefix.replace("/store/", "/rounds/")
            assert await counts.add("rdzv/done", 1) == 2
        assert await a.wait() == 0
        async with rdzv.connect(f"{server}/job") as observer:
            assert await observer.is_closed()


@pytest.mark.in_ci
async def test_an_unneeded_spare_exits_with_0_and_a_node_that_comes_later_with_closed(server: str) -> None:
    url = f"{server}/job?min_nodes=1&max_nodes=1"
    async with node(url, "a") as a:
        process = await started(a)
        async with node(url, "b", "-v") as b, rdzv.connect(f"{server}/job") as observer:
            while not (await observer.status()).waiting:
                async with observer.changes():
                    pass
            tell(process, SUCCEED)
            assert await a.wait() == 0
            assert await b.wait() == 0
    async with node(url, "c") as c:
        assert await c.wait() == 122
    assert c.output[-1] == f"rdzv run: run job is closed by a: {SUCCEEDED}"


async def test_r6_a_closed_run_ends_as_closed_also_if_processes_hang(server: str) -> None:
    url = f"{server}/job?min_nodes=2"
    hangs = node(url, "b", "--grace", "0.2", "--no-prefix", does=("stubborn",))
    async with node(url, "a") as a, hangs as b, rdzv.connect(f"{server}/job", node_id="boss") as observer:
        await started(a)
        await started(b)
        await observer.set_closed("enough")
        assert [await a.wait(), await b.wait()] == [122, 122]
    assert any("asked to end by SIGTERM" in line for line in a.output)
    assert a.output[-2].startswith("rdzv run: job: "), "the cost of the run"
    for each in (a, b):
        assert each.output[-1] == "rdzv run: run job is closed by boss: enough"


# ------------------------------------------------------------------------------------------ exit statuses and messages


@pytest.mark.parametrize(
    ("parameters", "command", "status", "says"),
    [
        ("min_nodes=1", ("sh", "-c", "kill -TERM $$"), 143, "rank 0 was killed by SIGTERM"),
        ("min_nodes=1", ("sh", "-c", "exit 42"), 42, "rank 0 exited with status 42"),
        ("min_nodes=2&join_timeout=0.2", ("true",), 123, "1 of at least 2 nodes"),
        ("min_nodes=1&is_host=no&join_timeout=0.2", ("true",), 124, "nobody listens there"),
    ],
)
async def test_the_exit_status_is_the_commands_or_names_the_error_which_is_one_line(
    parameters: str, command: tuple[str, ...], status: int, says: str
) -> None:
    url = f"tcp://127.0.0.1:{free_port()}/job?{parameters}"
    async with start_python("-W", "error", "-m", "rdzv", "run", url, "--", *command) as launcher:
        assert await launcher.wait() == status
    (line,) = launcher.output
    assert says in line


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("tcp://127.0.0.1:1/job?min_nodes=1",), "there is no command; write it at the end, after --"),
        ((), "required: URL"),
        (
            ("tcp://127.0.0.1:1/job?min_nodes=1", "--", "no-such-command"),
            "'no-such-command' is not an executable file, nor in PATH",
        ),
        (
            ("tcp://127.0.0.1:1/job?min_nodes=1", "--nproc", "0", "--", "true"),
            "'0' is not a whole number from 1 to 1000000",
        ),
        (
            ("tcp://127.0.0.1:1/job?min_nodes=1", "--grace", "nan", "--", "true"),
            "'nan' is not a number of seconds from 0 to",
        ),
        (("tcp://127.0.0.1:1/job?min_nodes=1&attributes=nproc:3", "--", "true"), "nproc:3 contradicts --nproc 1"),
        (("tcp://127.0.0.1:1/job", "--", "true"), "min_nodes is missing"),
    ],
)
def test_wrong_usage_is_reported_before_anything_begins(
    arguments: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status: object = main(["run", *arguments])
    except SystemExit as leaving:
        status = leaving.code
    assert status == 121
    (line,) = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("usage:")]
    assert says in line


@pytest.mark.virtual_time
async def test_only_a_waiting_node_prints_a_line_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    async with VirtualRun(min_nodes=2, max_nodes=2) as run:
        a, b, c = run.handler("a"), run.handler("b"), run.handler("c")
        joining = asyncio.create_task(_join_round(a))
        await asyncio.sleep(10)
        assert capsys.readouterr().err == f"rdzv run: run {a.run_id}, node a: 1 of at least 2 nodes\n", "and once only"
        assert (await _join_round(b)).world_size == (await joining).world_size == 2
        assert capsys.readouterr().err == ""
        joining = asyncio.create_task(_join_round(c))
        await asyncio.sleep(10)
        assert "node c: a spare: all 2 nodes that a round takes are there" in capsys.readouterr().err
        await a.set_closed("done")
        with pytest.raises(rdzv.RendezvousGracefulExitError):
            await joining


# ------------------------------------------------------------------------------------------ output


async def test_each_line_of_output_has_its_rank_and_is_also_in_a_file(server: str, tmp_path: Path) -> None:
    program = (
        "import os, sys\n"
        "sys.stdout.write('x' * 99 + '\\n'); sys.stderr.write('oops\\n')\n"
        "for _ in range(20_000): sys.stdout.write('y' * 99 + '\\n')\n"
        "sys.stdout.write('no end')"
    )
    command = (sys.executable, "-c", program)
    options = ("--nproc", "2", "--log-dir", str(tmp_path))
    async with node(f"{server}/job?min_nodes=1", "a", *options, command=command) as a:
        assert await a.wait(timeout=20) == 0
    for rank in (0, 1):
        written = (tmp_path / "job" / "round-0" / f"rank-{rank}.log").read_text().splitlines()
        assert sorted(written) == sorted(["x" * 99, "oops", *["y" * 99] * 20_000, "no end"])
    for rank in (0, 1):
        assert a.output.count(f"[{rank}] {'x' * 99}") == 1
        assert a.output.count(f"[{rank}] oops") == 1
        assert a.output.count(f"[{rank}] {'y' * 99}") == 20_000
        assert a.output.count(f"[{rank}] no end") == 1
    assert len(a.output) == 2 * 20_003 + 1  # and the closing line


@pytest.mark.parametrize(("run", "folder"), [("..", "%2E%2E"), (".", "%2E"), ("a/b", "a%2Fb"), ("v1.2", "v1.2")])
async def test_the_logs_of_a_run_are_below_the_folder_whatever_its_name(run: str, folder: str, tmp_path: Path) -> None:
    file = await open_log(str(tmp_path / "logs"), {"RDZV_RUN_ID": run, "RDZV_ROUND": "0", "RANK": "1"})
    assert file is not None
    with file:
        assert file.name == str(tmp_path / "logs" / folder / "round-0" / "rank-1.log")
    assert [path.name for path in tmp_path.iterdir()] == ["logs"]  # noqa: ASYNC240  no other task runs here


@pytest.mark.parametrize("is_written", [False, True])
def test_a_pipe_among_the_steps_does_not_hold_up_the_launcher(is_written: bool, tmp_path: Path) -> None:
    """It was opened until a writer came, in the launcher's own loop."""
    os.mkfifo(tmp_path / "0")
    (tmp_path / "1").write_text("17")
    with contextlib.ExitStack() as stack:
        if is_written:
            stack.callback(os.close, os.open(tmp_path / "0", os.O_RDWR))
        assert _lowest_step(tmp_path) == 17


async def test_an_escaped_process_that_holds_the_output_does_not_delay_the_end(server: str, tmp_path: Path) -> None:
    program = (
        "import os, subprocess, sys\n"
        "escaped = subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'], start_new_session=True)\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(escaped.pid))\n"
        "print('done')"
    )
    async with node(f"{server}/job?min_nodes=1", "a", command=(sys.executable, "-c", program)) as a:
        assert await a.wait() == 0
    assert a.stdout == ["[0] done"]
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)


def test_lines_are_labelled_when_they_are_complete() -> None:
    assert label_lines(b"one\ntwo\r\nthr", b"[0] ") == (b"[0] one\n[0] two\r\n", b"thr")
    assert label_lines(b" 10%\r 20%\r", b"[0] ") == (b"[0]  10%\r", b" 20%\r")  # a line feed may follow
    assert label_lines(b"\n", b"[0] ") == (b"[0] \n", b"")
    assert label_lines(b"", b"[0] ") == (b"", b"")


def test_a_very_long_line_is_broken() -> None:
    endless = b"x" * LINE_BYTES_MAX
    assert label_lines(endless, b"[0] ") == (b"[0] " + endless + b"\n", b"")
    assert label_lines(endless[1:], b"[0] ") == (b"", endless[1:])


# ------------------------------------------------------------------------------------------ places


def participant(rank: int, **attributes: str) -> Participant:
    return Participant(node_id=f"n{rank}", rank=rank, address="", payload=None, attributes=attributes)


def test_a_nodes_first_process_comes_after_all_processes_of_the_nodes_before_it() -> None:
    members = [participant(0, nproc="2"), participant(1), participant(2, nproc="8", rack="r1")]
    assert process_ranks(0, members, 2) == NodeRanks(first_rank=0, world_size=11)
    assert process_ranks(2, members, 8) == NodeRanks(first_rank=3, world_size=11)


@pytest.mark.parametrize("nproc", ["many", "0", "-1", ""])
def test_an_invalid_number_of_processes_is_refused_with_the_name_of_its_node(nproc: str) -> None:
    with pytest.raises(RendezvousStateError, match=r"node n1 has the attribute nproc:.*rename that attribute"):
        process_ranks(0, [participant(0, nproc="1"), participant(1, nproc=nproc)], 1)


async def test_payload_and_attributes_are_kept_beside_the_number_of_processes(server: str) -> None:
    url = f"{server}/job?min_nodes=1&attributes=rack:r1&payload=8xH100"
    async with node(url, "a", "--nproc", "2") as a, rdzv.connect(f"{server}/job") as observer:
        await started(a)
        (member,) = (await observer.status()).members
    assert member.attributes == {"rack": "r1", "nproc": "2"}
    assert member.payload == "8xH100"


async def test_no_variable_is_read_back_as_a_parameter(server: str) -> None:
    async with rdzv.connect(f"{server}/job?min_nodes=1") as handler:
        info = await handler.next_rendezvous()
        job = Job(url=server, command=("true",))
        told = environment_of(job, info, NodeRanks(first_rank=0, world_size=1), local_rank=0, restarts=0)
    assert (told["TORCHELASTIC_RESTART_COUNT"], told["TORCHELASTIC_RUN_ID"], told["ROLE_RANK"]) == ("0", "job", "0")
    names = {*told, BEAT_DIR, CHECKPOINT_FILE, ERROR_FILE}
    assert names & {Source.ENVIRONMENT.name_of(name) for name in PARAMETERS} == set()


async def test_preloaded_processes_are_forked_and_otherwise_the_same(server: str) -> None:
    """One round, a restart after a failure, and a success. The worker finds the module already imported."""
    options = ("--preload", "decimal", "--standby", "1", "--max-restarts", "1")
    async with node(f"{server}/job?min_nodes=1", "a", *options) as launcher:
        first = await started(launcher)
        tell(first, signal.SIGKILL)
        again = await started(launcher)
        assert places(first, again) == [("0", "0", "1"), ("1", "0", "1")]
        assert again["RDZV_RESTARTS"] == "1"
        tell(again, SUCCEED)
        assert await launcher.wait() == 0
        assert not any("--preload" in line for line in launcher.output), launcher.written()


@pytest.mark.parametrize("options", [(), ("--preload", "decimal")], ids=["started", "forked"])
async def test_standard_input_goes_to_the_first_process_and_several_share_the_cores(
    server: str, options: tuple[str, ...], tmp_path: Path
) -> None:
    script = tmp_path / "reads.py"
    script.write_text(
        "import os, sys\n"
        "print(os.environ['LOCAL_RANK'], repr(sys.stdin.read()), os.environ.get('OMP_NUM_THREADS'), flush=True)\n"
    )
    command = (sys.executable, "-m", "rdzv", "run", f"{server}/job?min_nodes=1", "--nproc", "2", *options)
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    launcher = await asyncio.create_subprocess_exec(
        *command, "--", sys.executable, str(script), stdin=PIPE, stdout=PIPE, env=environment
    )
    told, _ = await asyncio.wait_for(launcher.communicate(b"as told\n"), 60)
    assert sorted(told.decode().splitlines()) == [r"[0] 0 'as told\n' 1", "[1] 1 '' 1"]
    assert launcher.returncode == 0


async def test_the_error_that_a_process_raised_is_printed_with_its_exit_status(server: str) -> None:
    """PyTorch's `@record` writes such a file, at the path that the launcher sets."""
    report = json.dumps({"message": {"message": "ValueError: no batch 7\nin train.py", "extraInfo": {}}})
    command = ("sh", "-c", f"printf %s '{report}' > \"$TORCHELASTIC_ERROR_FILE\"; exit 7")
    async with node(f"{server}/job?min_nodes=1", "a", command=command) as launcher:
        assert await launcher.wait(timeout=20) == 7
        assert any("rank 0 exited with status 7: ValueError: no batch 7, and" in line for line in launcher.output)


@pytest.mark.parametrize(
    ("written", "raised"),
    [
        ('{"message": "OSError: no disk"}', "OSError: no disk"),
        ('{"message": {"message": "' + "x" * 999 + '"}}', "x" * 200),
        ('{"message": {"message": ""}}', ""),
        ("[]", ""),
        ("half a fi", ""),
        ('{"message": 7}', ""),
        pytest.param("[" * 99_999, "", id="deep"),
        ("a pipe", ""),
    ],
)
def test_an_error_file_is_read_or_ignored(tmp_path: Path, written: str, raised: str) -> None:
    file = tmp_path / "error.json"
    assert read_exception_line(file) == ""
    os.mkfifo(file) if written == "a pipe" else file.write_text(written, encoding="utf-8")
    assert read_exception_line(file) == raised


@pytest.mark.parametrize(
    ("wanted", "visible", "count"),
    [(3, "0", 3), ("gpu", "0,1,2", 3), ("auto", "4,5", 2), ("gpu", "1,-1,2", 1), ("cpu", "0,1", os.cpu_count())],
)
def test_as_many_processes_as_there_are_of_something(
    wanted: int | str, visible: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(os.cpu_count() or 1)), raising=False)
    assert resolve_nproc(wanted) == count


def test_without_gpus_nproc_gpu_is_refused_and_auto_takes_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(RendezvousSettingsError, match="no GPU"):
        resolve_nproc("gpu")
    assert resolve_nproc("auto") == resolve_nproc("cpu") >= 1


async def test_a_node_that_lost_its_store_says_at_once_that_it_was_dropped() -> None:
    """Regression: it asked the store whether all nodes had succeeded, and reported nothing for 30 s."""
    async with contextlib.AsyncExitStack() as serving:
        served = await serving.enter_async_context(store.serve("127.0.0.1", 0))
        async with node(f"{served.url}/job?min_nodes=1&ttl=1", "a") as launcher:
            await started(launcher)
            await serving.aclose()
            await launcher.says("this node was dropped", timeout=15)
            launcher.terminate()
            await launcher.wait()


async def test_a_command_that_cannot_be_preloaded_is_started_as_usual_with_a_warning(server: str) -> None:
    command = ("sh", "-c", "echo ran")
    async with node(f"{server}/job?min_nodes=1", "a", "--preload", "decimal", command=command) as launcher:
        assert await launcher.wait(timeout=20) == 0
        assert any("--preload decimal has no effect" in line and "sh is not" in line for line in launcher.output)
        assert "[0] ran" in launcher.stdout


async def test_a_process_that_gives_up_ends_the_run_on_every_node_with_its_status(server: str) -> None:
    url = f"{server}/job?{TWO}"
    give_up = ("sh", "-c", "exit 93")
    async with node(url, "a", "--max-restarts", "5", command=give_up) as a, node(url, "b", "--max-restarts", "5") as b:
        assert await a.wait(timeout=30) == 93
        assert await b.wait(timeout=30) == 93
        assert any("says not to go on" in line for line in b.output), b.written()


@pytest.mark.some_of(1)
@pytest.mark.parametrize("by_signal", [True, False], ids=["signal", "command"])
async def test_a_drained_node_leaves_and_the_others_meet_again(server: str, by_signal: bool) -> None:
    url = f"{server}/job?min_nodes=1&max_nodes=2&last_call_timeout=30"
    async with node(url, "a") as a, node(url, "b", "--drain-on", "TERM") as b:
        await started(a)
        await started(b)
        if by_signal:
            os.kill(b.pid, signal.SIGTERM)
        else:
            async with start_python("-m", "rdzv", "drain", f"{server}/job", "b", "--reason", "maintenance") as drain:
                assert await drain.wait(timeout=20) == 0, drain.written()
        assert await b.wait(timeout=30) == 0, "it has left, and has not been killed by the signal"
        again = await started(a)
        assert (again["WORLD_SIZE"], again["RDZV_RESTARTS"]) == ("1", "0"), "no restart is counted"
        why = "SIGTERM came" if by_signal else "maintenance"
        assert any(f"b to leave: {why}; meeting again" in line for line in a.output), a.written()
        tell(again, SUCCEED)
        assert await a.wait(timeout=20) == 0


@pytest.mark.parametrize(("writes", "status"), [(False, 93), (True, 1)])
async def test_rounds_that_fail_without_a_checkpoint_are_not_repeated_for_ever(
    server: str, writes: bool, status: int
) -> None:
    command = ("sh", "-c", 'echo $RDZV_ROUND >> "$RDZV_CHECKPOINT_FILE"; exit 1' if writes else "exit 1")
    options = ("--max-restarts", "3", "--no-progress", "2")
    async with node(f"{server}/job?min_nodes=1", "a", *options, command=command) as a:
        assert await a.wait(timeout=60) == status, a.written()
        verdict = "2 rounds have failed, one after the other, without a checkpoint"
        assert any(verdict in line for line in a.output) is not writes


async def test_a_round_with_a_finished_step_counts_as_progress(server: str) -> None:
    options = ("--max-restarts", "1", "--no-progress", "1")
    async with node(f"{server}/job?min_nodes=1&ttl=3", "a", *options) as a, rdzv.connect(f"{server}/job") as observer:
        first = await started(a)
        beat = Path(first["RDZV_BEAT_DIR"]) / "0"
        beat.write_text("7")
        while not any(one.step == 7 for one in (await observer.status()).steps.values()):  # noqa: ASYNC110  it travels with keep-alives
            await asyncio.sleep(0.1)
        beat.write_text("8")
        tell(first, FAIL)
        tell(await started(a), FAIL)
        assert await a.wait(timeout=60) == 3, "it was started again, and no verdict ended it"


async def test_a_launcher_whose_temporary_folder_was_deleted_continues(server: str) -> None:
    """Systems delete files in /tmp that are unused for days. Regression: at the next loss all launchers failed."""
    async with node(f"{server}/job?min_nodes=1", "a", "--max-restarts", "1") as a:
        first = await started(a)
        shutil.rmtree(Path(first["RDZV_BEAT_DIR"]).parent)
        tell(first, FAIL)
        again = await started(a)
        (Path(again["RDZV_BEAT_DIR"]) / "0").write_text("7")  # the folder exists again
        tell(again, SUCCEED)
        assert await a.wait(timeout=60) == 0


@pytest.mark.in_ci
async def test_after_a_resize_the_surplus_nodes_wait_as_spares(server: str) -> None:
    url = f"{server}/job?min_nodes=1&max_nodes=2&last_call_timeout=30"
    async with node(url, "a") as a, node(url, "b") as b:
        first, second = await started(a), await started(b)
        async with (
            start_python("-m", "rdzv", "resize", f"{server}/job", "--max", "1", "--reason", "cost") as resize,
            start_python("-m", "rdzv", "resize", f"{server}/job") as nothing,
        ):
            assert await resize.wait(timeout=30) == 0, resize.written()
            assert await nothing.wait(timeout=30) == 2, nothing.written()
        assert "run job is resized to 1 node, from its next round on" in resize.stdout
        stays, goes = (a, b) if first["RANK"] == "0" else (b, a)
        assert {first["RANK"], second["RANK"]} == {"0", "1"}
        again = await started(stays)
        assert places(again) == [("1", "0", "1")]
        async with rdzv.connect(f"{server}/job") as observer:
            assert isinstance(observer, Handler)
            await observer.drain(node_id="b" if goes is b else "a")
        assert await goes.wait(timeout=30) == 0, "it is a spare, and is to leave"
        tell(again, SUCCEED)
        assert await stays.wait(timeout=30) == 0
        assert "to leave" not in stays.written(), "no process is stopped for a spare"
        assert any("resized to at most 1: cost; meeting again" in line for line in (*a.output, *b.output))

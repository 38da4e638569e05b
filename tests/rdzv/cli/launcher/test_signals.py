"""Signals to `rdzv run`: some end it, some are passed on to the command, some report a checkpoint."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import pytest

import rdzv
from rdzv.cli.command import AGAIN_AFTER
from tests.support.launched import WORKER, node, started
from tests.support.processes import ROOT, free_port, start_python
from tests.support.proxy import Proxy
from tests.support.stores import until

pytestmark = pytest.mark.some_here(3)

# ------------------------------------------------------------------------------------------ signals that end


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_is_passed_on_and_the_node_leaves_without_closing(server: str, number: signal.Signals) -> None:
    url = f"{server}/job?min_nodes=1"
    # The shell ends at once; the process that it started is given its time all the same.
    script = f"{sys.executable} {WORKER} slow & wait"
    async with node(url, "a", "--no-prefix", command=("bash", "-c", script)) as a:
        await started(a)
        os.kill(a.pid, number)
        await a.line(containing=f"asked to end by {number.name}")
        await a.line(containing="saved")
        assert await a.wait() == 128 + number
    async with rdzv.connect(f"{server}/job") as observer:
        status = await observer.status()
    assert (status.closed, status.waiting) == (None, ())
    assert status.reason == "no node is here"


@pytest.mark.parametrize("before", ["", 'touch "$RDZV_STACKS_DIR/a.b"; '], ids=["", "stacks cannot be read"])
async def test_a_process_that_does_not_end_within_the_grace_is_killed(server: str, before: str) -> None:
    command = ("bash", "-c", f"{before}exec {sys.executable} {WORKER} stubborn")
    async with node(f"{server}/job?min_nodes=1", "a", "--grace", "0.2", "--no-prefix", command=command) as a:
        await started(a)
        a.terminate()
        await a.line(containing="asked to end by SIGTERM")
        assert await a.wait() == 128 + signal.SIGTERM


async def test_a_node_that_cannot_announce_its_leave_leaves_in_time_all_the_same(server: str) -> None:
    flags, port = ("--drain-on", "TERM", "--drain-in", "0.3"), int(server.rpartition(":")[2])
    async with Proxy("127.0.0.1", port) as proxy, node(f"tcp://127.0.0.1:{proxy.port}/j?min_nodes=1", "a", *flags) as a:
        await started(a)
        proxy.black_hole()
        a.terminate()
        await a.says("cannot be announced: the store has not answered within 0.3 s")
        await a.line(containing="asked to end by SIGTERM")
        assert await a.wait() == 128 + signal.SIGTERM


async def test_a_second_signal_ends_everything_at_once(server: str) -> None:
    async with node(f"{server}/job?min_nodes=1", "a", "--grace", "100", "--no-prefix", does=("stubborn",)) as a:
        await started(a)
        a.terminate()
        await a.line(containing="asked to end by SIGTERM")
        await asyncio.sleep(1.1)  # within a second, the two count as one signal
        a.terminate()
        assert await a.wait() == 128 + signal.SIGTERM


async def test_a_launcher_that_leaves_hosts_no_next_store_unless_no_other_can() -> None:
    """Regression: within its `--grace` it became the next host, and its store ended with it soon afterwards."""
    at = f"tcp://127.0.0.1:{free_port()},127.0.0.1:{free_port()}/job?min_nodes=1&max_nodes=3&last_call_timeout=2"
    stubborn = ("--grace", "5", "--no-prefix", "-v")
    async with (
        node(at, "a", *stubborn, does=("stubborn",)) as a,
        node(at, "b", *stubborn, does=("stubborn",)) as b,
        node(f"{at}&is_host=0", "c", "--no-prefix") as c,
    ):
        places = [(await started(one))["WORLD_SIZE"] for one in (a, b, c)]
        assert places == ["3", "3", "3"]
        host, leaves = (a, b) if "hosts the store" in a.written() else (b, a)
        leaves.terminate()
        await leaves.says("SIGTERM: leaving")
        killed = time.monotonic()
        host.kill()
        await leaves.says("this node hosts the store")
        assert time.monotonic() - killed > 2, "it waits for another host"
        await c.says("was dropped: the store")


async def test_a_launcher_hosts_the_store_until_other_jobs_have_ended_or_a_second_signal() -> None:
    """As a torchrun agent does; who joins is told whose process serves the store."""
    at = f"tcp://127.0.0.1:{free_port()}"
    async with (
        node(f"{at}/one?min_nodes=1", "a", "--no-prefix") as host,
        node(f"{at}/other?min_nodes=1&is_host=0", "b", "--no-prefix") as other,
    ):
        await started(host)
        await started(other)
        assert f"run other: run one, node a (process {host.pid} on " in other.written()
        host.terminate()
        host.terminate()
        await host.says("1 of run other use it: its process stays")
        assert host.returncode is None
        await asyncio.sleep(AGAIN_AFTER)
        host.terminate()
        assert await host.wait() == 128 + signal.SIGTERM
        await other.says("no process listens")


HANGS = """
import pathlib, socket, sys, time
from rdzv.cli.main import main
inner = {0}
def hang(*given, **named):
    if {1!r} not in str(given) or named.get("flags") == socket.AI_NUMERICHOST:
        return inner(*given, **named)
    print("hangs", flush=True)
    time.sleep(60)
{0} = hang
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("what", "of", "words"),
    [
        ("socket.getaddrinfo", "head.test", ["run", "tcp://head.test:29400/job?min_nodes=1"]),
        ("socket.getaddrinfo", "head.test", ["serve", "--insecure", "--host", "head.test"]),
        ("pathlib.Path.mkdir", "logs", ["run", "--log-dir", "logs", "tcp://127.0.0.1:{}/job?min_nodes=1"]),
        ("print", "no", ["run", "--preload", "hangs", "tcp://127.0.0.1:{}/job?min_nodes=1"]),
    ],
)
async def test_a_signal_ends_a_command_at_once_whatever_it_waits_for(
    what: str, of: str, words: list[str], tmp_path: Path
) -> None:
    (tmp_path / "hangs.py").write_text("import time; print('hangs', flush=True); time.sleep(60)")
    words = [word.format(free_port()) for word in words] + ["--", sys.executable, "-m", "hangs"] * (words[0] == "run")
    environment = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}
    async with start_python("-c", HANGS.format(what, of), *words, env=environment) as child:
        await child.line("hangs")
        child.terminate()
        assert await child.wait(timeout=4) == (143 if words[0] == "run" else 0)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a process die with its parent")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_process_does_not_outlive_its_guard_nor_its_launcher(server: str, number: signal.Signals) -> None:
    async with node(f"{server}/job?min_nodes=1", "a", "--no-prefix") as a:
        process = await started(a)
        os.kill(process["guard"], number)
        if number == signal.SIGSTOP:
            a.terminate()
        assert await a.wait() == 128 + (signal.SIGTERM if number == signal.SIGSTOP else number)
        await until(lambda: not Path(f"/proc/{process['pid']}").exists())


@pytest.mark.parametrize("flags", [(), ("--preload", "json")], ids=["new", "warm"])
async def test_the_end_of_a_process_is_noticed_while_its_guard_is_stopped(server: str, flags: tuple[str, ...]) -> None:
    """Regression: it was noticed at the next signal only."""
    async with node(f"{server}/job?min_nodes=1", "a", "--no-prefix", *flags) as a:
        process = await started(a)
        os.kill(process["guard"], signal.SIGSTOP)
        os.kill(process["pid"], signal.SIGKILL)
        assert await a.wait(timeout=10) == 128 + signal.SIGKILL


# ------------------------------------------------------------------------------------------ signals for the command

LISTENER = """
import os, signal, sys
told = {signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM}
signal.pthread_sigmask(signal.SIG_BLOCK, told)
print("round", os.environ["RDZV_ROUND"], "of", os.environ["WORLD_SIZE"], flush=True)
while True:
    number = signal.sigwait(told)
    print("told", signal.Signals(number).name, flush=True)
    if number == signal.SIGTERM or "save" in sys.argv and number == signal.SIGUSR1:
        sys.exit(9)
    if "checkpoint" in sys.argv and number == signal.SIGUSR2:
        open(os.environ["RDZV_CHECKPOINT_FILE"], "w").close()
"""
DIES = "import signal; print('here', flush=True); signal.pause()"


def listener(*does: str) -> tuple[str, ...]:
    return (sys.executable, "-c", LISTENER, *does)


async def test_signals_for_the_command_are_passed_on_and_end_nothing(server: str) -> None:
    async with node(f"{server}/job?min_nodes=1", "a", command=listener()) as a:
        await a.line("round 0")
        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGQUIT):
            os.kill(a.pid, number)
            await a.line(f"told {number.name}")
            if number in {signal.SIGHUP, signal.SIGQUIT}:
                await asyncio.sleep(AGAIN_AFTER)  # sooner, the next one would count as the same
        a.terminate()
        await a.line("told SIGTERM")
        assert await a.wait() == 128 + signal.SIGTERM


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGHUP])
async def test_a_command_that_ends_by_a_signal_passed_on_is_not_started_again(
    server: str, number: signal.Signals
) -> None:
    command = (sys.executable, "-c", DIES)
    async with node(f"{server}/job?min_nodes=1", "a", "--max-restarts", "3", command=command) as a:
        await a.line("here")
        os.kill(a.pid, number)
        assert await a.wait() == 128 + number
        assert a.stdout == ["[0] here"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
async def test_during_the_wait_for_nodes_an_ending_signal_ends_it_and_others_are_reported(
    server: str, number: signal.Signals
) -> None:
    async with node(f"{server}/job?min_nodes=2", "a") as a, rdzv.connect(f"{server}/job") as observer:
        while not (await observer.status()).waiting:
            async with observer.changes():
                pass
        os.kill(a.pid, signal.SIGUSR1)
        await a.says("SIGUSR1 came while no process was running: nothing was passed on")
        os.kill(a.pid, number)
        assert await a.wait() == 128 + number


ONE_OR_TWO = "min_nodes=1&max_nodes=2&last_call_timeout=0&rank_order=survivors"


async def test_a_newcomer_waits_for_the_jobs_checkpoint(server: str) -> None:
    url = f"{server}/job?{ONE_OR_TWO}"
    options = ("--on-change", "checkpoint", "--grace", "60", "-v")
    async with node(url, "a", *options, command=listener("checkpoint")) as a:
        await a.line("round 0 of 1")
        os.kill(a.pid, signal.SIGUSR2)  # a checkpoint while no node waits: only the next one counts
        await a.line("told SIGUSR2")
        async with node(url, "b", *options, command=listener()) as b:
            await a.says("for a checkpoint of the job")
            assert "[0] told SIGTERM" not in a.output
            os.kill(a.pid, signal.SIGUSR2)
            await a.line("told SIGTERM")
            await a.line("round 1 of 2")
            await b.line("round 1 of 2")


async def test_a_newcomer_waits_for_a_checkpoint_no_longer_than_the_grace(server: str) -> None:
    url = f"{server}/job?{ONE_OR_TWO}"
    options = ("--on-change", "checkpoint", "--grace", "0.2")
    async with node(url, "a", *options, command=listener()) as a:
        await a.line("round 0 of 1")
        async with node(url, "b", *options, command=listener()):
            await a.line("told SIGTERM")
            await a.line("round 1 of 2")


async def test_a_job_that_saves_and_exits_on_usr1_has_neither_failed_nor_finished(server: str) -> None:
    url = f"{server}/job?{ONE_OR_TWO}"
    options = ("--on-change", "usr1", "--grace", "60")
    async with node(url, "a", *options, command=listener("save")) as a:
        await a.line("round 0 of 1")
        async with node(url, "b", *options, command=listener("save")) as b:
            await a.line("told SIGUSR1")
            await a.line("round 1 of 2")  # its exit status of 9 is no failure: no restart is allowed here
            await b.line("round 1 of 2")
        assert "[0] told SIGTERM" not in a.output

"""Signal masks and ignored signals that commands inherit from their parent, and signals that arrive in pairs."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import pytest

import store
from rdzv.cli import command
from tests.support.processes import free_port, start_python
from tests.support.saving import saves

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from tests.support.processes import Child

pytestmark = pytest.mark.some_here(3)

ENDING = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT]
PARENT = """
import os, signal, sys
blocked, ignored = ([signal.Signals[name] for name in words.split(",") if name] for words in sys.argv[1:3])
signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
for number in ignored:
    signal.signal(number, signal.SIG_IGN)
os.execv(sys.executable, [sys.executable, *sys.argv[3:]])
"""


def inheriting(*words: str, blocked: str = "", ignored: str = "") -> AbstractAsyncContextManager[Child]:
    return start_python("-c", PARENT, blocked, ignored, "-m", "rdzv", *words)


def launched(script: str, *flags: str, blocked: str = "", ignored: str = "") -> AbstractAsyncContextManager[Child]:
    url = f"tcp://127.0.0.1:{free_port()}/job?min_nodes=1"
    words = ("run", *flags, url, "--", sys.executable, "-c", script)
    return inheriting(*words, blocked=blocked, ignored=ignored)


@pytest.mark.some_of(2)
@pytest.mark.parametrize(("blocked", "ignored"), [("SIGCHLD", ""), ("", "SIGCHLD"), ("SIGCHLD", "SIGCHLD")])
@pytest.mark.parametrize("flags", [(), ("--preload", "json")], ids=["new", "warm"])
async def test_a_launcher_sees_its_processes_end_also_if_sigchld_is_blocked_or_ignored(
    blocked: str, ignored: str, flags: tuple[str, ...], tmp_path: Path
) -> None:
    script = tmp_path / "job.py"
    script.write_text("raise SystemExit(7)")
    url = f"tcp://127.0.0.1:{free_port()}/job?min_nodes=1"
    words = ("run", *flags, url, "--", sys.executable, str(script))
    async with inheriting(*words, blocked=blocked, ignored=ignored) as child:
        assert await child.wait(timeout=30) == 7


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_that_the_parent_has_blocked_stops_a_server(number: signal.Signals) -> None:
    async with inheriting("serve", "--port", "0", blocked="SIGTERM,SIGINT,SIGHUP") as child:
        await child.says("listens on")
        child.send_signal(number)
        assert await child.wait(timeout=12) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_that_the_parent_has_blocked_stops_a_launcher(number: signal.Signals) -> None:
    async with launched(saves(0.5), blocked="SIGTERM,SIGINT") as child:
        await child.line("ready")
        child.send_signal(number)
        assert await child.wait(timeout=12) == 128 + number
        assert any("saved" in line for line in child.output)


SHOWS = """
import signal, time
print("blocks", *sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, []))), "ignores", end=" ")
print(*[int(number) for number in signal.valid_signals() if signal.getsignal(number) is signal.SIG_IGN], flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("flags", [(), ("--preload", "json")], ids=["new", "warm"])
async def test_signals_ignored_or_blocked_by_the_parent_stay_so(flags: tuple[str, ...], tmp_path: Path) -> None:
    """A shell's `&` and nohup ignore signals, and a job may block some. Both hold in the started processes, too."""
    script = tmp_path / "job.py"
    script.write_text(SHOWS)
    url = f"tcp://127.0.0.1:{free_port()}/job?min_nodes=1"
    words = ("run", *flags, url, "--", sys.executable, str(script))
    async with inheriting(*words, blocked="SIGTERM,SIGALRM", ignored="SIGINT,SIGHUP") as child:
        assert await child.line("blocks") == "[0] blocks 14 ignores 1 2 13 25"
        for number in (signal.SIGINT, signal.SIGHUP):
            child.send_signal(number)
        await asyncio.sleep(0.5)
        child.terminate()
        assert await child.wait() == 128 + signal.SIGTERM
        assert not any("SIGINT: leaving" in line or "SIGHUP: leaving" in line for line in child.output)


@pytest.mark.parametrize("words", ["top", "status --watch"])
async def test_a_signal_that_the_parent_has_blocked_stops_a_command_that_waits(words: str) -> None:
    async with store.serve() as server, inheriting(*words.split(), f"{server.url}/job", blocked="SIGTERM") as child:
        await child.says("waiting for it")
        child.terminate()
        assert await child.wait(timeout=12) == -signal.SIGTERM


WITH_UMASK = "import os, sys; os.umask(int(sys.argv[1], 8)); os.execv(sys.executable, sys.argv[2:])"
WRITES = """
import os, pathlib
pathlib.Path(os.environ["RDZV_BEAT_DIR"], "0").write_text("7")
print(f"umask {os.umask(0):o}")
"""


@pytest.mark.parametrize("flags", [(), ("--preload", "json")], ids=["new", "warm"])
@pytest.mark.parametrize("umask", ["0", "77"])
async def test_a_launcher_and_its_processes_work_under_the_umask_of_the_parent(
    umask: str, flags: tuple[str, ...], tmp_path: Path
) -> None:
    script = tmp_path / "job.py"
    script.write_text(WRITES)
    url = f"tcp://127.0.0.1:{free_port()}/job?min_nodes=1"
    words = ("-m", "rdzv", "run", *flags, url, "--", sys.executable, str(script))
    async with start_python("-c", WITH_UMASK, umask, sys.executable, *words) as child:
        assert await child.wait() == 0
        assert f"[0] umask {umask}" in child.output


async def test_the_library_does_not_change_the_signal_mask() -> None:
    """A program may block the signals that it waits for."""
    script = """
import asyncio, signal, rdzv, store
async def main():
    async with store.serve() as server, rdzv.connect(f"{server.url}/job?min_nodes=1", is_host=False) as node:
        await node.next_rendezvous()
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGUSR1])
asyncio.run(main())
assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == {signal.SIGTERM, signal.SIGUSR1}
"""
    async with start_python("-c", script) as child:
        assert await child.wait() == 0


# ------------------------------------------------------------------------------------------ pairs


@pytest.mark.parametrize(("first", "second"), list(itertools.product(ENDING, ENDING)))
@pytest.mark.parametrize(("pause", "is_new"), [(0.0, False), (0.004, False), (0.3, False), (1.5, True)])
def test_a_signal_repeated_within_a_second_counts_once(
    first: signal.Signals, second: signal.Signals, pause: float, is_new: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr("rdzv.cli.command.time.monotonic", lambda: now)
    wish = command.RepeatedSignalFilter()
    assert wish.accept(first)
    now += pause
    assert wish.accept(second) is is_new
    now = 100.0 + pause + 0.8
    assert wish.accept(second) is (pause == 0.3), "counted from the one that was heeded"


def test_a_warning_and_a_termination_signal_count_separately() -> None:
    wish = command.RepeatedSignalFilter()
    assert wish.accept(signal.SIGUSR1)
    assert not wish.accept(signal.SIGUSR1)
    assert wish.accept(signal.SIGTERM)


PAIRS = list(itertools.product(ENDING, ENDING))
WITH_TERM = [pair for pair in PAIRS if signal.SIGTERM in pair]


@pytest.mark.some_of(4)
@pytest.mark.parametrize(
    ("flags", "first", "second", "pause"),
    [
        *(((), *pair, pause) for pair in PAIRS for pause in (0.004, 0.3)),
        *((("--drain-on", "TERM"), *pair, pause) for pair in WITH_TERM for pause in (0.004, 0.3)),
        *((flags, signal.SIGTERM, number, 0.0) for flags in ((), ("--drain-on", "TERM")) for number in ENDING),
    ],
)
async def test_of_two_signals_within_a_second_a_process_gets_one_and_has_time_to_save(
    flags: tuple[str, ...], first: signal.Signals, second: signal.Signals, pause: float
) -> None:
    """Regression: the second of the two SIGTERMs that `timeout` sends killed the process in the middle of its
    checkpoint, and SIGTERM after a SIGHUP that was passed on reached it, too.
    """
    async with launched(saves(0.5), *flags) as child:
        await child.line("ready")
        child.send_signal(first)
        await asyncio.sleep(pause)
        child.send_signal(second)
        told = (await child.line("saved after")).removeprefix("[0] saved after ")
        # Of two pending signals the system delivers the one with the lower number first.
        assert told in ({first.name} if pause == 0.3 else {first.name, second.name})
        ends = {number for number in (first, second) if number in {signal.SIGTERM, signal.SIGINT}}
        drains = bool(flags) and signal.SIGTERM in ends
        assert await child.wait() in {0 if drains or not ends else None} | {128 + number for number in ends}


@pytest.mark.some_of(2)
@pytest.mark.parametrize("second", ENDING)
async def test_a_signal_a_second_after_one_that_was_passed_on_reaches_the_process(second: signal.Signals) -> None:
    script = saves(2.5)
    async with launched(script) as child:
        await child.line("ready")
        child.send_signal(signal.SIGHUP)
        await asyncio.sleep(1.2)
        child.send_signal(second)
        assert await child.line("saved after") == f"[0] saved after SIGHUP {second.name}"


@pytest.mark.some_of(2)
@pytest.mark.parametrize("drains", [False, True])
@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("second", ENDING)
async def test_a_later_second_signal_ends_a_launcher_at_once(
    first: signal.Signals, second: signal.Signals, drains: bool
) -> None:
    async with launched(saves(60), *(["--drain-on", first.name] if drains else [])) as child:
        await child.line("ready")
        child.send_signal(first)
        leaves = "this node leaves" if drains else "leaving, within --grace 10 s; again after a second: at once"
        await child.says(f"{first.name}: {leaves}")
        await asyncio.sleep(1.2)
        child.send_signal(second)
        assert await child.wait(timeout=5) == 128 + second
        assert "[0] saved" not in child.written()


@pytest.mark.parametrize("second", ENDING)
async def test_a_repeated_signal_ends_a_server_cleanly(second: signal.Signals) -> None:
    async with inheriting("serve", "--port", "0") as child:
        await child.says("listens on")
        child.terminate()
        await child.says("SIGTERM: leaving; again after a second: at once")
        if child.returncode is None:
            child.send_signal(second)
        assert await child.wait() == 0


WITH_A_SIGNAL_AT_EACH_RETURN_TO_THE_DEFAULT = """
import os, signal, sys
sys.modules["uvloop"] = None  # whose calls of `signal.signal` cannot be changed
from rdzv.__main__ import main
set_handler = signal.signal
def set_handler_and_send(number, handler):
    before = set_handler(number, handler)
    if handler is signal.SIG_DFL:
        os.kill(os.getpid(), number)
    return before
signal.signal = set_handler_and_send
sys.exit(main(sys.argv[1:]))
"""


async def test_a_second_signal_while_the_handlers_are_removed_does_not_kill_a_server() -> None:
    async with start_python("-c", WITH_A_SIGNAL_AT_EACH_RETURN_TO_THE_DEFAULT, "serve", "--port", "0") as child:
        await child.says("listens on")
        child.terminate()
        assert await child.wait() == 0, child.written()


async def test_a_repeated_ctrl_c_ends_the_demo_with_its_nodes_and_without_a_traceback() -> None:
    async with inheriting("demo") as child:
        await child.line("starts")
        child.interrupt()
        await asyncio.sleep(0.004)
        if child.returncode is None:
            child.interrupt()
        assert await child.wait(timeout=20) == 130
        assert not any("Traceback" in line for line in child.output)


ENDS_SLOWLY = """
import argparse, asyncio, sys
from rdzv.cli.command import Command, run_command

async def run(_):
    print("begun", flush=True)
    try:
        await asyncio.sleep(60)
    finally:
        print("ending", flush=True)
        await asyncio.sleep(0.3)

slow = Command(name="slow", help="", run=run, ends_in_order="in order" in sys.argv)
sys.exit(run_command(slow, argparse.Namespace(debug=False, verbose=False)))
"""


@pytest.mark.parametrize("again", ENDING)
async def test_a_signal_right_after_ctrl_c_lets_a_command_end_in_good_order(again: signal.Signals) -> None:
    """Regression: SIGTERM right after Ctrl-C killed `rdzv demo`, with status 143."""
    async with start_python("-c", ENDS_SLOWLY) as child:
        await child.line("begun")
        child.interrupt()
        await child.line("ending")
        child.send_signal(again)
        assert await child.wait() == 130


async def test_a_second_ctrl_c_ends_a_command_whose_output_is_not_read() -> None:
    """The write holds up the loop, which does not hear of signals meanwhile."""
    blocks = "import os; writing = os.pipe()[1]\n    while True:\n        os.write(writing, bytes(65_536))\n"
    async with start_python("-c", ENDS_SLOWLY.replace("try:", f"{blocks}    try:")) as child:
        await child.line("begun")
        async with asyncio.timeout(10):
            while child.returncode is None:
                child.interrupt()
                await asyncio.sleep(0.3)
        assert await child.wait() == 130


async def send_at_once(child: Child, *numbers: signal.Signals) -> None:
    """Send signals that a process sees in the same moment: it gets all of them before it handles one."""
    child.send_signal(signal.SIGSTOP)
    await asyncio.to_thread(os.waitid, os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
    for number in (*numbers, signal.SIGCONT):
        child.send_signal(number)


@pytest.mark.parametrize("pair", list(itertools.combinations_with_replacement(ENDING, 2)))
async def test_a_command_that_ends_in_order_does_so_at_any_two_signals_of_one_moment(
    pair: tuple[signal.Signals, signal.Signals],
) -> None:
    """Regression: SIGTERM killed `rdzv demo` before its loop had seen the Ctrl-C."""
    async with start_python("-c", ENDS_SLOWLY, "in order") as child:
        await child.line("begun")
        await send_at_once(child, *pair)
        await child.line("ending")
        assert await child.wait() in {128 + number for number in pair}


@pytest.mark.parametrize("second", ENDING)
@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGQUIT, signal.SIGTERM])
async def test_a_server_ends_cleanly_at_any_two_signals_of_one_moment(
    first: signal.Signals, second: signal.Signals
) -> None:
    """Regression: SIGQUIT killed a server beside the SIGTERM or Ctrl-C that it was about to heed."""
    async with inheriting("serve", "--port", "0") as child:
        await child.says("listens on")
        await send_at_once(child, first, second)
        await child.says("connections are told")
        assert await child.wait() == 0


@pytest.mark.parametrize("others", [True, False])
async def test_a_launcher_that_gets_a_signal_says_that_it_keeps_its_store_for_the_other_nodes(others: bool) -> None:
    """Regression: it stayed for half a minute without a word on the screen."""
    port = free_port()
    url = f"tcp://127.0.0.1:{port}/job?min_nodes=1&close_timeout=4"
    async with inheriting("run", url, "--", sys.executable, "-c", saves(0.5)) as child, AsyncExitStack() as stack:
        await child.line("ready")
        if others:
            await stack.enter_async_context(store.connect(f"tcp://127.0.0.1:{port}"))
        child.interrupt()
        assert await child.wait(timeout=20) == 130
        stays = any("the store is served from here until the other nodes have gone" in line for line in child.output)
        assert stays is others

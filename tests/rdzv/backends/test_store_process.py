"""`host=process`: the embedded store runs in a process of its own, which ends with its node, also if that is killed."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import rdzv
import store
from rdzv.backends import store_process
from rdzv.config.settings import parse
from rdzv.errors import RendezvousConnectionError, RendezvousSettingsError
from store.net.sockets import listen_on
from store.net.threads import Flag
from tests.support.processes import free_port, require, start_python

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from rdzv.config.settings import Settings
    from tests.support.processes import Child

pytestmark = pytest.mark.some_here(3)

LINUX = pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="/proc is Linux's")

# Without a main guard: a start method that runs the script again would host a second store, and never end.
NODE = """
import asyncio, os, sys, time, rdzv
async def main():
    async with rdzv.connect(sys.argv[1], host="process", node_id="host") as handler:
        await handler.next_rendezvous()
        if "fork" in sys.argv and os.fork() == 0:
            os.write(1, b"child %d\\n" % os.getpid())
            time.sleep(600)
        os.write(1, b"met\\n")
        if "hold" in sys.argv:
            sum(range(10**12))  # in C, with the GIL
        await asyncio.sleep(600)
print("started", flush=True)
if "uvloop" in sys.argv:
    from uvloop import run
else:
    from asyncio import run
run(main())
"""


@contextlib.asynccontextmanager
async def hosting(*words: str, query: str = "min_nodes=1") -> AsyncIterator[tuple[str, Child]]:
    url = f"tcp://127.0.0.1:{free_port()}"
    async with start_python("-c", NODE, f"{url}/job?{query}", *words) as child:
        await child.says("met")
        assert len([line for line in child.stdout if line == "started"]) == 1
        yield url, child


def listens(url: str) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", int(url.rpartition(":")[2]))) == 0


def started(settings: Settings) -> store_process.StoreProcess:
    port = free_port()
    return store_process.StoreProcess(settings, "127.0.0.1", port, listen_on("127.0.0.1", port), Flag())


async def is_over(url: str) -> None:
    async with asyncio.timeout(20):
        while listens(url):  # noqa: ASYNC110  there is no event for the end of another process
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("words", [(), ("fork",), ("uvloop",), ("uvloop", "fork")])
async def test_it_ends_with_a_killed_node_also_if_a_fork_of_that_node_lives_on(words: tuple[str, ...]) -> None:
    """A worker of a DataLoader is such a fork: it holds all files that its parent had open."""
    if "uvloop" in words:
        require("uvloop")
    async with hosting(*words) as (url, child):
        child.kill()
        await is_over(url)
        for line in child.stdout:
            if line.startswith("child"):
                os.kill(int(line.split()[1]), signal.SIGKILL)


@pytest.mark.parametrize("held_up_by", ["SIGSTOP", "C code that holds the GIL"])
async def test_it_serves_while_its_node_stands_still(held_up_by: str) -> None:
    """Hosted inside the node's process, the store would stop with the node, and all other nodes would wait."""
    async with hosting("hold" if "GIL" in held_up_by else "") as (url, child):
        if held_up_by == "SIGSTOP":
            child.send_signal(signal.SIGSTOP)
        async with store.connect(url, timeout=5) as client:
            for number in range(100):
                await client.put("key", b"%d" % number, timeout=2)


async def test_signals_to_the_programs_process_group_do_not_reach_the_store() -> None:
    async with hosting() as (url, child), store.connect(url) as client:
        os.killpg(child.pid, signal.SIGSTOP)
        # Else the others, which have lower numbers, may end it first.
        await asyncio.to_thread(os.waitid, os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            os.killpg(child.pid, number)
            await client.ping()
        os.killpg(child.pid, signal.SIGCONT)
        await child.wait()
        await is_over(url)


def told_of_children() -> list[bytes]:
    """Return the arguments and the environment of each child of this process, as `/proc` shows them."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"\nPPid:\t{os.getpid()}\n" in (folder / "status").read_text():
                found.append((folder / "cmdline").read_bytes() + (folder / "environ").read_bytes())
    assert any(b"store_process" in one for one in found)
    return found


@LINUX
async def test_its_secrets_are_in_no_argument_and_no_environment_variable() -> None:
    token = "a secret that nobody else may read"
    url = f"tcp://127.0.0.1:{free_port()}"
    async with rdzv.connect(f"{url}/job?min_nodes=1", host="process", token=token) as handler:
        await handler.next_rendezvous()
        for shown in told_of_children():
            assert token.encode() not in shown
            assert token.encode().hex().encode() not in shown
        with pytest.raises(store.AuthenticationError):
            async with store.connect(url, token="another secret, as long as that"):
                pass
        async with store.connect(url, token=token) as client:
            await client.ping()


@pytest.mark.in_ci
async def test_the_next_process_takes_over_its_data_directory_at_once(tmp_path: Path) -> None:
    async with hosting(query=f"min_nodes=1&data_dir={tmp_path}") as (url, child):
        async with store.connect(url) as client:
            await client.put("kept", b"1")
        child.kill()
        await child.wait()
        async with rdzv.connect(
            f"{url}/job?min_nodes=1&data_dir={tmp_path}", host="process", node_id="next"
        ) as handler:
            await handler.next_rendezvous()
            async with store.connect(url) as client:
                entry = await client.get("kept")
                assert entry is not None
                assert entry.value == b"1"


async def killed_store() -> None:
    """Kill the process that serves the store for this process."""
    listing = await asyncio.create_subprocess_exec(
        "pgrep", "-P", str(os.getpid()), "-f", "store_process", stdout=asyncio.subprocess.PIPE
    )
    (found, _) = await listing.communicate()
    os.kill(int(found), signal.SIGKILL)


async def test_the_next_store_waits_for_the_members_of_the_node_whose_store_process_was_killed() -> None:
    """Only the store's process was lost; had the node served the store itself, its members would be lost, too."""
    hosts = f"tcp://127.0.0.1,127.0.0.2:{free_port()}"
    url = f"{hosts}/job?min_nodes=1&max_nodes=2&last_call_timeout=1.5&close_timeout=0&host=process"
    async with rdzv.connect(url, node_id="a") as a, rdzv.connect(url, node_id="b") as b, asyncio.timeout(60):
        await asyncio.gather(a.next_rendezvous(), b.next_rendezvous())
        parent, other = (a, b) if a.hosts_store else (b, a)
        await killed_store()
        waiting = asyncio.create_task(other.next_rendezvous())
        await asyncio.sleep(5)
        assert not waiting.done(), "the parent may still train"
        infos = await asyncio.gather(parent.next_rendezvous(), waiting)
        assert [(info.round, info.world_size) for info in infos] == [(1, 2)] * 2


@LINUX
def test_a_dead_process_leaves_no_file_open_in_its_node() -> None:
    """Regression: with several hosts, its socket stayed open until the node ended."""
    settings = parse("tcp://127.0.0.1:29400/job?min_nodes=1&host=process", {}, {})
    gc.collect()  # files of earlier tests
    before = set(os.listdir("/proc/self/fd"))
    serving = started(settings)
    os.kill(serving._process.pid, signal.SIGKILL)
    until = time.monotonic() + 20
    while not serving.has_died and time.monotonic() < until:
        time.sleep(0.05)
    assert before.issuperset(os.listdir("/proc/self/fd"))
    serving.close()


async def test_the_death_of_its_process_is_reported_as_the_loss_of_the_store(caplog: pytest.LogCaptureFixture) -> None:
    url = f"tcp://127.0.0.1:{free_port()}/job?min_nodes=1&store_gone_timeout=0.5"
    async with rdzv.connect(url, host="process") as handler:
        await handler.next_rendezvous()
        hosted = handler.node.hosts_store
        assert hosted()
        await killed_store()
        with pytest.raises(RendezvousConnectionError, match="its process is gone"):
            await handler.next_rendezvous()
        assert re.search(r"the process that serves the store \(pid \d+\) has ended with -9", caplog.text)


def test_a_store_that_stands_still_does_not_hold_up_the_end_of_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that left waited for ever for an answer of the stopped process."""
    monkeypatch.setattr(store_process, "ENDS_WITHIN", 0.5)
    settings = parse("tcp://127.0.0.1:29400/job?min_nodes=1&host=process", {}, {})
    serving = started(settings)
    os.kill(serving._process.pid, signal.SIGSTOP)
    asking = threading.Thread(target=serving.wait_until_alone, args=(60.0,), daemon=True)
    asking.start()
    asking.join(30.0)
    assert not asking.is_alive()
    assert serving.connections == 0
    serving.close()
    assert serving._process.returncode == -signal.SIGKILL


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """The processes that the test has started, each stopped as it starts."""
    started: list[subprocess.Popen[bytes]] = []

    def start_and_stop(*words: object, **more: object) -> subprocess.Popen[bytes]:
        started.append(start(*words, **more))  # type: ignore[call-overload]
        started[-1].send_signal(signal.SIGSTOP)
        return started[-1]

    start = subprocess.Popen
    monkeypatch.setattr(store_process, "ENDS_WITHIN", 0.5)
    monkeypatch.setattr(subprocess, "Popen", start_and_stop)
    return started


def test_a_process_that_stands_still_as_it_starts_is_killed_after_join_timeout(
    stopped: list[subprocess.Popen[bytes]],
) -> None:
    """A node waited for ever, and its cancellation, too."""
    settings = parse("tcp://127.0.0.1:29400/job?min_nodes=1&host=process&join_timeout=0.5", {}, {})
    with pytest.raises(OSError, match="has not answered within join_timeout"):
        started(settings)
    assert stopped[0].returncode == -signal.SIGKILL


@pytest.mark.parametrize("hosts", ["127.0.0.1", "127.0.0.1,127.0.0.2"])
async def test_a_node_that_is_cancelled_does_not_wait_for_a_process_that_stands_still_as_it_starts(
    hosts: str, stopped: list[subprocess.Popen[bytes]], caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: Ctrl-C waited for up to `join_timeout`."""
    connecting = asyncio.ensure_future(
        rdzv.connect(f"tcp://{hosts}:{free_port()}/job?min_nodes=1&host=process").__aenter__()
    )
    async with asyncio.timeout(30):
        while not stopped:  # noqa: ASYNC110  there is no event for the start of a process
            await asyncio.sleep(0.01)
    connecting.cancel()
    async with asyncio.timeout(2):
        await asyncio.wait([connecting])
    assert stopped[0].returncode == -signal.SIGKILL
    assert "has ended" not in caplog.text


@pytest.mark.parametrize("entry", ["", "here"])
async def test_a_program_that_found_the_library_by_a_relative_path_may_change_its_directory(
    entry: str, tmp_path: Path
) -> None:
    """Regression: the store's process did not find the library, or found another package of its name."""
    home = Path(rdzv.__file__).parents[1]
    here = tmp_path / "here"
    here.mkdir()
    for package in ("rdzv", "store"):
        (here / package).symlink_to(home / package)
    (tmp_path / "elsewhere" / "store").mkdir(parents=True)
    (tmp_path / "elsewhere" / "store" / "__init__.py").write_text("raise ImportError('another package')")
    program = f"""
import sys
sys.path[:] = [{entry!r}, *(each for each in sys.path if each not in ("", {str(home)!r}))]
import asyncio, os, rdzv
async def main():
    connecting = rdzv.connect(sys.argv[1], host="process")
    async with connecting as handler:
        os.write(1, b"connected\\n")
import rdzv.backends.store_process
os.chdir({str(tmp_path / "elsewhere")!r})
asyncio.run(main())
"""
    url = f"tcp://127.0.0.1:{free_port()}/job?min_nodes=1"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", program, url),
        cwd=here if entry == "" else tmp_path,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await asyncio.wait_for(process.communicate(), 60)
    assert output == b"connected\n"


def test_settings_that_cannot_be_passed_to_a_process_are_refused_before_the_node_joins() -> None:
    with pytest.raises(RendezvousSettingsError, match="host=process cannot hand over"):
        parse("tcps://head/job?min_nodes=1&host=process", {"tls": ssl.create_default_context()}, {})
    with pytest.raises(RendezvousSettingsError, match="one of inside, process"):
        parse("tcp://head/job?min_nodes=1&host=elsewhere", {}, {})


@LINUX
async def test_it_serves_and_ends_also_if_its_standard_error_is_not_read() -> None:
    """It logs that it serves: a write that waits for a reader would hold it up before that."""
    reading, writing = os.pipe()
    os.write(writing, b"x" * 65_536)
    logs = NODE.replace("async def main", "import logging; logging.getLogger('store').setLevel(10)\nasync def main", 1)
    url = f"tcp://127.0.0.1:{free_port()}"
    program = f"import os; os.dup2(os.open('/proc/{os.getpid()}/fd/{writing}', os.O_WRONLY), 2); exec({logs!r})"
    async with start_python("-c", program, f"{url}/job?min_nodes=1") as child:
        await child.says("met")
        child.kill()
        await is_over(url)
    for end in (reading, writing):
        os.close(end)


async def test_the_page_is_served_beside_it() -> None:
    pytest.importorskip("aiohttp")
    port = free_port()
    url = f"tcp://127.0.0.1:{free_port()}/job?min_nodes=1&host=process&http_port={port}"
    async with rdzv.connect(url) as handler:
        await handler.next_rendezvous()
        assert listens(f"tcp://127.0.0.1:{port}")


async def test_a_port_that_is_taken_and_a_store_open_to_strangers_are_refused_as_inside() -> None:
    async with store.serve() as server:
        with pytest.raises(RendezvousConnectionError, match="the port is already in use"):
            async with rdzv.connect(f"{server.url}/job?min_nodes=1", host="process", is_host=True):
                pass
    with pytest.raises(RendezvousSettingsError, match="would accept every client"):
        async with rdzv.connect(f"tcp://0.0.0.0:{free_port()}/job?min_nodes=1", host="process", is_host=True):
            pass

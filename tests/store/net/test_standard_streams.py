"""Processes that were started without some of their standard streams, as by `2>&-`."""

import contextlib
import itertools
import json
import sys
from pathlib import Path

import pytest

import store
from tests.support.processes import PATIENCE, Child, free_port, require, start

SETS = [closed for count in (1, 2, 3) for closed in itertools.combinations(range(3), count)]

STREAMS = "[os.readlink(f'/proc/self/fd/{number}') for number in range(3)]"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the system is asked what a descriptor stands for")


def without(closed: tuple[int, ...], *arguments: str) -> contextlib.AbstractAsyncContextManager[Child]:
    """Start Python without these descriptors."""
    closing = " ".join(f"{number}>&-" for number in closed)
    return start("/bin/sh", "-c", f'exec "$@" {closing}', "sh", sys.executable, "-W", "error", *arguments)


@pytest.mark.some_of(2)
@pytest.mark.parametrize("closed", SETS)
async def test_a_server_without_standard_streams_outlives_its_clients(closed: tuple[int, ...]) -> None:
    """If standard error was closed, the first client to leave ended the process: libuv never closes socket 2."""
    port = free_port()
    async with without(closed, "-m", "rdzv", "serve", "--port", str(port)) as child:
        for _ in range(3):
            async with store.connect(f"tcp://127.0.0.1:{port}", timeout=PATIENCE) as client:
                await client.put("a", b"")
        child.terminate()
        assert await child.wait() == 0, child.written()
        assert any("listens on" in line for line in child.output) is (2 not in closed)


@pytest.mark.some_of(2)
@pytest.mark.parametrize("closed", SETS)
async def test_processes_of_a_launcher_have_all_three(closed: tuple[int, ...], tmp_path: Path) -> None:
    found = tmp_path / "found"
    script = f"import json, os; open({str(found)!r}, 'w').write(json.dumps({STREAMS}))"
    url = f"tcp://127.0.0.1:{free_port()}/job?min_nodes=1&max_nodes=1"
    async with without(closed, "-m", "rdzv", "run", url, "--", sys.executable, "-c", script) as launcher:
        assert await launcher.wait() == 0, launcher.written()
    assert len(json.loads(found.read_text())) == 3


async def test_a_program_on_uvloop_keeps_its_own_open_files() -> None:
    """The loops belong to our threads: a file that the program has opened at 0 stays, and 2 is free for a socket."""
    require("uvloop")
    async with without(
        (0, 2),
        "-c",
        f"""if True:
            import os, sys, store.sync
            file = open(sys.executable)
            with store.sync.serve() as server:
                for _ in range(3):
                    with store.sync.connect(server.url) as client:
                        client.put("a", b"")
                streams = {STREAMS}
            assert file.fileno() == 0 and streams[0] == os.path.realpath(sys.executable), streams
            assert streams[2] == os.devnull, streams
            print("well")""",
    ) as child:
        assert (await child.wait(), child.stdout) == (0, ["well"]), child.written()


@pytest.mark.parametrize("side", ["server", "client"])
@pytest.mark.parametrize(("loop", "opened"), [("uvloop", True), ("asyncio", False)])
async def test_a_loop_of_the_program_is_given_no_socket_of_such_a_number_if_it_is_one_of_uvloops(
    loop: str, opened: bool, side: str
) -> None:
    require("uvloop")
    async with store.serve() as server:
        url = server.url if side == "client" else ""
        async with without(
            (),
            "-c",
            f"""if True:
                import asyncio, os, {loop}, store
                async def main():
                    os.close(0)
                    async with (store.connect({url!r}) if {url!r} else store.serve()):
                        name = os.readlink("/proc/self/fd/0")
                        print(name == os.devnull, {STREAMS})
                asyncio.Runner(loop_factory={loop}.new_event_loop).run(main())""",
        ) as child:
            assert await child.wait() == 0, child.written()
            assert child.stdout[0].startswith(str(opened)), child.written()

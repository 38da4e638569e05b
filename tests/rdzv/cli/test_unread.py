"""Output that is not read, as after Ctrl-S on a terminal: it delays no store, no job and no shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pty
import signal
import subprocess
import sys
import termios
import time
from typing import TYPE_CHECKING

import pytest

import rdzv
import store
from rdzv.cli.command import AGAIN_AFTER
from rdzv.display import standard_error
from tests.support.processes import ROOT, free_port

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


pytestmark = pytest.mark.some_here(2)

PIPE_HOLDS = 65_536


@contextlib.contextmanager
def unread(
    *words: str, streams: tuple[str, ...], blocking: bool = True
) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Yield a command some of whose streams go to a full pipe, and the read end of that pipe."""
    reading, writing = os.pipe()
    os.set_blocking(writing, blocking)
    os.write(writing, b"x" * PIPE_HOLDS)
    into = {name: writing if name in streams else subprocess.DEVNULL for name in ("stdout", "stderr")}
    command = [sys.executable, "-m", "rdzv", *words]
    with subprocess.Popen(command, cwd=ROOT, start_new_session=True, **into) as process:  # type: ignore[call-overload]
        os.close(writing)
        try:
            yield process, reading
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(OSError):
                os.close(reading)


@pytest.mark.in_ci
async def test_a_store_serves_also_if_its_standard_error_is_not_read() -> None:
    port = free_port()
    with unread("--debug", "serve", "--port", str(port), streams=("stderr",)) as (process, reading):
        async with store.connect(f"tcp://127.0.0.1:{port}", timeout=20) as client:
            await client.put("a", b"1")
        for _ in range(300):  # each connection logs a few lines
            async with store.connect(f"tcp://127.0.0.1:{port}", timeout=10) as client:
                assert await client.get("a") is not None
        began = time.monotonic()
        process.terminate()
        assert await asyncio.to_thread(process.wait, 20) == 0
        assert time.monotonic() - began < 6
        os.close(reading)


@contextlib.contextmanager
def on_a_stopped_terminal(*words: str) -> Iterator[subprocess.Popen[bytes]]:
    """Yield a command on a terminal whose output is stopped, as by Ctrl-S."""
    ours, terminal = pty.openpty()
    termios.tcflow(terminal, termios.TCOOFF)
    command = [sys.executable, "-m", "rdzv", *words]
    with subprocess.Popen(command, cwd=ROOT, start_new_session=True, stdout=terminal, stderr=terminal) as process:
        try:
            yield process
        finally:
            process.kill()
            for end in (ours, terminal):
                os.close(end)


async def test_a_server_ends_on_a_stopped_terminal(tmp_path: Path) -> None:
    """Regression: even an empty write to standard output waits while another thread writes to the terminal."""
    file = tmp_path / "port"
    with on_a_stopped_terminal("serve", "--port", "0", "--port-file", str(file)) as process:
        async with asyncio.timeout(20):
            while not file.exists():  # noqa: ASYNC110  another process makes it
                await asyncio.sleep(0.01)
        process.terminate()
        assert await asyncio.to_thread(process.wait, 20) == 0


async def test_a_job_ends_also_if_its_standard_error_is_not_read() -> None:
    url = f"tcp://127.0.0.1:{free_port()}/job?min_nodes=1"
    words = ("--debug", "run", url, "--", sys.executable, "-c", "pass")
    with unread(*words, streams=("stderr",)) as (process, _):
        assert await asyncio.to_thread(process.wait, 30) == 0


async def test_a_node_leaves_also_if_its_output_is_not_read() -> None:
    async with store.serve() as server:
        url = f"{server.url}/job?min_nodes=1"
        script = "import time; print('y' * 100_000, flush=True); time.sleep(60)"
        words = ("run", url, "--grace", "1", "--", sys.executable, "-c", script)
        with unread(*words, streams=("stdout", "stderr")) as (process, reading):
            async with (
                rdzv.connect(f"{server.url}/job") as seen,
                asyncio.timeout(30),
                contextlib.aclosing(seen.statuses()) as statuses,
            ):
                async for status in statuses:
                    if status.round is not None and not status.members:
                        break
                    if status.members and process.poll() is None:
                        process.terminate()
            await asyncio.sleep(1.5)
            assert process.poll() is None, "the output is for a reader that may be slow"
            process.terminate()
            assert abs(await asyncio.to_thread(process.wait, 10)) in {15, 143}
            os.close(reading)


async def test_a_second_signal_ends_a_node_that_has_left_and_whose_output_is_not_read(tmp_path: Path) -> None:
    """Regression: once the node had left, the launcher ignored signals, and waited for a reader for ever."""
    async with store.serve() as server, store.connect(server.url) as client:
        written = tmp_path / "written"
        script = f"import time; print('y' * 100_000, flush=True); open({str(written)!r}, 'w'); time.sleep(60)"
        words = ("run", f"{server.url}/job?min_nodes=1", "--", sys.executable, "-c", script)
        with unread(*words, streams=("stdout",)) as (process, _):
            async with asyncio.timeout(30):
                while not written.exists():  # noqa: ASYNC110  another process makes it
                    await asyncio.sleep(0.01)
                process.terminate()
                while (await client.stats())["connections"] > 1:  # noqa: ASYNC110  there is no event to wait for
                    await asyncio.sleep(0.01)
            await asyncio.sleep(AGAIN_AFTER)
            assert process.poll() is None, "the output is for a reader that may be slow"
            process.terminate()
            assert await asyncio.to_thread(process.wait, 10) == 143


async def test_output_for_a_non_blocking_pipe_waits_for_its_reader() -> None:
    """Regression: a parent may have set O_NONBLOCK, and then the output was cut off without an error."""
    async with store.serve() as server:
        with unread("stats", server.url, streams=("stdout",), blocking=False) as (process, reading):
            await asyncio.sleep(3)
            text = b""
            while chunk := await asyncio.to_thread(os.read, reading, PIPE_HOLDS):
                text += chunk
            assert await asyncio.to_thread(process.wait, 10) == 0
            assert b"connections" in text


def test_the_streams_of_a_command_stay_blocking_for_other_processes() -> None:
    """O_NONBLOCK belongs to the pipe or terminal: the shell, and all that write there, would have it, too."""
    streams = [os.pipe() for _ in range(2)]
    into = dict(zip(("stdout", "stderr"), (writing for _, writing in streams), strict=True))
    url = f"tcp://127.0.0.1:{free_port()}/job?min_nodes=1"
    words = [sys.executable, "-m", "rdzv", "--debug", "run", url, "--", "sleep", "3"]
    with subprocess.Popen(words, cwd=ROOT, start_new_session=True, **into) as process:  # type: ignore[call-overload]
        blocking = True
        while process.poll() is None:
            blocking = blocking and all(os.get_blocking(writing) for _, writing in streams)
            time.sleep(0.01)
    assert (process.returncode, blocking) == (0, True)
    for stream in streams:
        for end in stream:
            os.close(end)


def test_lines_for_a_non_blocking_standard_error_wait_for_its_reader() -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with os.fdopen(reading, "rb") as written, os.fdopen(writing, "w"):
        lines, wanted = standard_error._NonBlockingWriter(), b"".join(b"line %d\n" % number for number in range(20_000))
        for line in wanted.decode().splitlines():
            lines.put(line, writing)
        assert written.read(len(wanted)) == wanted


def test_dropped_lines_are_counted() -> None:
    reading, writing = os.pipe()
    os.write(writing, b"x" * PIPE_HOLDS)
    with os.fdopen(writing, "w"):
        lines = standard_error._NonBlockingWriter()
        lines.put("first", writing)
        while lines._waiting:  # the thread has taken the line, and waits for the reader
            time.sleep(0.001)
        for _ in range(12):
            lines.put("y" * 99_999, writing)
        began = time.monotonic()
        lines.wait_until_written(0.1)
        assert time.monotonic() - began < 2
        text = b""
        while b"lines are lost" not in text:
            text += os.read(reading, 10**6)
        assert b"rdzv: 2 lines are lost here" in text
        lines.put("last", writing)
        lines.wait_until_written(10)
        assert os.read(reading, 10**6).endswith(b"last\n")
    os.close(reading)


def test_a_child_of_a_fork_logs_too(capfd: pytest.CaptureFixture[str]) -> None:
    logger = logging.Logger("forked")
    logger.addHandler(standard_error.NonBlockingStderrHandler())
    logger.error("parent %s", "\ud800")
    standard_error.flush_standard_error()
    child = os.fork()
    if child == 0:
        logger.error("child")
        standard_error.flush_standard_error()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert capfd.readouterr().err == "parent \\ud800\nchild\n"

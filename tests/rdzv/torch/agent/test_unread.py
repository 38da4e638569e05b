"""Agents of torchrun whose standard error is not read any more, as by a log collector that is stuck."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import store
from tests.support.processes import ROOT, free_port, require

WORKER = """
import os, signal, time
agent = os.getppid()
print("blocks", *signal.pthread_sigmask(signal.SIG_BLOCK, []), flush=True)
while os.getppid() == agent:
    time.sleep(0.05)
"""


def block() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])


@pytest.mark.in_ci
async def test_an_agent_serves_its_store_and_ends_also_if_its_standard_error_is_not_read(tmp_path: Path) -> None:
    """And it leaves the signal mask as it is, for its workers, too."""
    require("torch")
    port = free_port()
    script = tmp_path / "train.py"
    script.write_text(WORKER, encoding="utf-8")
    words = ("--rdzv-backend=rdzv", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=job", "--nnodes=1", str(script))
    log = tmp_path / "fifo"
    os.mkfifo(log)
    reading = os.open(log, os.O_RDONLY | os.O_NONBLOCK)
    filling = os.open(log, os.O_WRONLY | os.O_NONBLOCK)
    writing = os.open(log, os.O_WRONLY)
    with subprocess.Popen(  # noqa: ASYNC220  the test itself reads and fills the pipe
        [sys.executable, "-m", "rdzv.torchrun", *words],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "LOGLEVEL": "DEBUG"},
        stdout=subprocess.PIPE,
        stderr=writing,
        preexec_fn=block,  # noqa: PLW1509  this process has no other thread here
        start_new_session=True,
    ) as agent:
        try:
            assert agent.stdout is not None
            begins = asyncio.create_task(asyncio.to_thread(agent.stdout.readline))
            while not begins.done():
                with contextlib.suppress(BlockingIOError):
                    os.read(reading, 65_536)
                await asyncio.sleep(0.01)
            assert begins.result() == b"blocks 10\n"
            with contextlib.suppress(BlockingIOError):
                while True:
                    os.write(filling, b"x" * 4096)
            for _ in range(100):  # each connection logs a few lines
                async with store.connect(f"tcp://127.0.0.1:{port}", timeout=10) as client:
                    await client.put("a", b"1")
            agent.terminate()  # PyTorch logs its lines about that in the main thread
            assert await asyncio.to_thread(agent.wait, 60) == 1
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(agent.pid, signal.SIGKILL)
            for file in (reading, filling, writing):
                os.close(file)

"""An event loop that is closed without cancelling its tasks, in a process that lives on."""

from __future__ import annotations

import subprocess
import sys
import time

import rdzv.sync
import store

PROGRAM = """
import asyncio, sys, rdzv

member = asyncio.Event()

async def train():
    async for round in rdzv.rounds(sys.argv[1], min_nodes=1, node_id="a", ttl=3):
        async with round:
            member.set()
            await asyncio.sleep(3600)

loop = asyncio.new_event_loop()
kept = loop.create_task(train())
loop.run_until_complete(member.wait())
loop.close()
print("closed", flush=True)
sys.stdin.read()
"""


def test_a_member_whose_event_loop_was_closed_leaves_the_round() -> None:
    """Regression: it stayed a member as long as its process lived, so the others did not meet without it."""
    with store.sync.serve() as server:
        url = f"{server.url}/job"
        with (
            subprocess.Popen(
                [sys.executable, "-c", PROGRAM, url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            ) as program,
            rdzv.sync.connect(url, min_nodes=1) as observer,
        ):
            assert program.stdout is not None
            assert program.stdout.readline() == "closed\n"
            assert [one.node_id for one in observer.status().members] == ["a"]
            until = time.monotonic() + 10.0
            while observer.status().members and time.monotonic() < until:
                time.sleep(0.05)
            assert observer.status().members == ()
            assert program.poll() is None
            program.communicate(timeout=20)

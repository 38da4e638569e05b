"""R5: "A crash after completion is pushed to every survivor", also where every survivor's event loop is busy.

A node lives in a thread of its own. Here each member is a real process whose event loop stands still from before the
death until its node has notified it: a node that depended on that loop would never be notified.
"""

import contextlib
from typing import Any

import pytest

import store.sync
from tests.support.processes import start_python

MEMBER = """
import asyncio, sys, time
import rdzv

WITHIN = 60  # seconds; it is told, or it fails

async def main():
    loop = asyncio.get_running_loop()
    async with rdzv.connect(sys.argv[1], node_id=sys.argv[2], is_host=False) as handler:
        await handler.next_rendezvous()
        print("coordinator", (await handler.status()).coordinator, flush=True)
        print("member", flush=True)
        lost = 0
        while True:
            turns = []
            loop.call_soon(turns.append, "the loop went on")
            until = time.monotonic() + WITHIN
            print(f"blocked after {lost}", flush=True)
            while handler.num_nodes_changed() == lost and time.monotonic() < until:
                time.sleep(0.01)  # the loop stands still; other threads of the process do not
            assert not turns
            now = handler.num_nodes_changed()
            print("told of", now, flush=True)
            if now == lost:
                return
            lost = now
            async with handler.changes() as changes:
                print("lost", *sorted((await anext(changes)).node_ids), flush=True)

asyncio.run(main())
"""


@pytest.fixture
def run_url() -> Any:
    with store.sync.serve() as server:
        # If the end of the connection were no sign, a death would only be known after 10 minutes.
        yield f"{server.url}/job?min_nodes=4&last_call_timeout=0&ttl=600&closed_ttl=1200"


async def test_r5_a_killed_member_is_announced_to_all_others_while_their_event_loops_are_blocked(run_url: str) -> None:
    """With every loop busy in steps of half a second, a killed member was never announced.

    The first to be killed coordinates, so that another one has to take over; then one that does not.
    """
    names = ["a", "b", "c", "d"]
    async with contextlib.AsyncExitStack() as stack:
        members = {name: await stack.enter_async_context(start_python("-c", MEMBER, run_url, name)) for name in names}
        (coordinator,) = {await member.line("coordinator", timeout=60) for member in members.values()}
        coordinator = coordinator.removeprefix("coordinator ")
        assert coordinator in names
        for lost in (0, 1):
            for member in members.values():
                await member.line(f"blocked after {lost}", timeout=60)
            victim = coordinator if lost == 0 else min(members)
            members.pop(victim).kill()
            for member in members.values():
                assert await member.line("told of", timeout=90) == f"told of {lost + 1}"
                assert victim in (await member.line("lost", timeout=60)).split()

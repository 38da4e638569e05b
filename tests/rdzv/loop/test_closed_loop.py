"""An event loop that ends while its node is a member."""

import asyncio
import subprocess
import sys
import threading
import time

import pytest

import rdzv.sync
import store
from rdzv.core.state import NodesLeft
from tests.support.processes import free_port

PROGRAM = """
import asyncio, sys, rdzv

url, how = sys.argv[1] + "?min_nodes=1&node_id=a&ttl=3", sys.argv[2]
loop, kept = asyncio.new_event_loop(), []

async def train(member):
    async for round in rdzv.rounds(url):
        async with round:
            member.set_result(None)
            await asyncio.sleep(3600)

async def join(into):
    handler = await rdzv.connect(url)
    into += [handler, await handler.next_rendezvous()]

if how == "rounds":
    kept.append(loop.create_task(train(member := loop.create_future())))
    loop.run_until_complete(member)
else:
    loop.run_until_complete(join(kept))
loop.close()
print("closed", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("how", ["rounds", "handler"])
def test_a_member_whose_event_loop_was_closed_leaves_the_round(how: str) -> None:
    """Regression: it stayed a member as long as its process lived, so the others did not meet without it."""
    with store.sync.serve() as server:
        url = f"{server.url}/job"
        with (
            subprocess.Popen(
                [sys.executable, "-c", PROGRAM, url, how], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
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


def test_a_store_is_served_for_the_others_after_its_hosts_body_has_raised() -> None:
    """Regression: `asyncio.run` broke off the host's leaving, and 3 s later the store ended with the process."""
    url = f"tcp://127.0.0.1:{free_port()}/job?min_nodes=1&max_nodes=2&last_call_timeout=10"

    async def train() -> None:
        async for round in rdzv.rounds(url, node_id="host"):
            async with round:
                await round.store.get("raise")
                raise KeyError("its own error")

    def host() -> None:
        with pytest.raises(KeyError):
            asyncio.run(train())

    hosting = threading.Thread(target=host)
    hosting.start()
    with rdzv.sync.connect(url, node_id="other", is_host=False) as other:
        other.next_rendezvous().store.set("raise", b"")
        with other.changes() as changes:
            assert isinstance(changes.poll(20), NodesLeft)
        hosting.join(1)
        assert hosting.is_alive(), "the other node still uses the store"
        assert other.next_rendezvous().world_size == 1
    hosting.join(20)
    assert not hosting.is_alive()

"""`rdzv ban --where`: all nodes of a run with an attribute, at once."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import rdzv
import store
from rdzv.cli import main as command

if TYPE_CHECKING:
    import pytest

    from store.server.server import Server


async def said(server: Server, *arguments: str) -> int:
    """Run `rdzv ban` against a run of this server."""
    return await asyncio.to_thread(command.main, ["ban", f"{server.url}/job", *arguments])


async def test_all_nodes_with_an_attribute_are_banned(capsys: pytest.CaptureFixture[str]) -> None:
    racks = {"a": "17", "b": "18", "c": "17"}
    async with store.serve() as server:
        url = f"{server.url}/job?min_nodes=3&is_host=false"
        handlers = [await rdzv.connect(url, node_id=name, attributes={"rack": rack}) for name, rack in racks.items()]
        try:
            await asyncio.gather(*(handler.next_rendezvous() for handler in handlers))
            assert await said(server, "--where", "rack=99") == 1
            assert "no node of the run has rack=99; it has 17, 18" in capsys.readouterr().err
            assert await said(server, "a", "--where", "rack=17") == 2
            assert await said(server, "--where", "rack=17", "--reason", "its switch", "--for", "1h") == 0
            assert "node a is banned from run job for 1 h\nnode c is banned" in capsys.readouterr().out
            assert set((await handlers[1].status()).bans) == {"a", "c"}
        finally:
            for handler in handlers:
                await handler.aclose()

"""The shared store has a connection of its own, so its traffic delays neither the node's lease nor its role."""

import asyncio

import pytest

from tests.support.runs import VirtualRun

pytestmark = pytest.mark.virtual_time

LARGE = 25_000_000  # bytes
TTL = 2.0  # seconds


async def test_a_set_of_25_mb_over_a_slow_connection_loses_neither_the_lease_nor_the_role() -> None:
    """Regression: on the connection that renews them, the value delayed the keep-alives, and both leases expired."""
    async with VirtualRun(min_nodes=1, ttl=TTL, disconnect_ttl=1) as run:
        (info,) = await run.meet(run.handler("a"))
        held = [*run.keys_whole("nodes/"), *run.keys_whole("head/coordinator")]
        before = {key: run.engine._keys.entries[key].mod_revision for key in held}
        assert len(before) == 2
        info.store.set_timeout(600)
        connections = set(run.network.links())
        await info.store.set("small", b"")  # makes the connection
        (own,) = set(run.network.links()) - connections
        run.network.partition(own.name)  # the value is on its way for several TTLs
        setting = run.start(info.store.set("large", bytes(LARGE)))
        await asyncio.sleep(5 * TTL)
        run.network.heal(own.name)
        await setting
        assert {key: run.engine._keys.entries[key].mod_revision for key in held} == before, "the same record, and term"
        assert info.superseded() is None
        assert len(await info.store.get("large")) == LARGE

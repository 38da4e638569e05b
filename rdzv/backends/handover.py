"""Sends the nodes of a store that ends to the next of its URL's hosts."""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from rdzv.backends.host_queries import MultiHostDial
from rdzv.core.keys import Keys
from rdzv.node.run.status import read_nodes_of_all_runs
from store import Client, StoreError, StoreReplaced

if TYPE_CHECKING:
    from collections.abc import Callable

    from rdzv.backends.credentials import Credentials
    from rdzv.config.settings import Settings
    from store import Server

ANNOUNCES_WITHIN: Final = 15.0  # seconds for each request below


async def send_nodes_to_next_host(
    open_client: Callable[[], Any], store_id: str, keys: Keys, ttl: float, *, with_parent: bool = False
) -> None:
    """Send the nodes of all runs to the next host. `with_parent`: also report the parent process's nodes dead."""
    async with open_client() as client:
        if client.store_id != store_id:
            raise StoreReplaced(f"{client.store_id} serves at another host")
        await client.put(keys.ending, b"", ttl=ttl)  # first: no run may begin after the listing below
        for run in {keys, *await read_nodes_of_all_runs(client)}:
            for dead in await client.list(run.parents) if with_parent else ():
                value = b"%s %d" % (dead.value, dead.mod_revision)
                await client.put(run.hosted + dead.key.removeprefix(run.parents), value, ttl=ttl)
            await client.put(run.moving, b"", ttl=ttl)


def hand_over_as_parent_died(settings: Settings, credentials: Credentials, server: Server) -> None:
    """In a store's own process: send all nodes to the next host, as the parent's died; wait up to `close_timeout`."""
    if not settings.endpoint.has_successors:
        return
    keys, ttl = Keys(settings.prefix, settings.run_id, has_successors=True), settings.close_timeout
    dial, token = MultiHostDial(settings, credentials), credentials.token
    open_client = partial(Client, dial, name=server.url, token=token, timeout=ANNOUNCES_WITHIN)
    with contextlib.suppress(StoreError):
        asyncio.run(send_nodes_to_next_host(open_client, server.store_id, keys, ttl, with_parent=True))
        server.end_when_alone.reject_new_clients()
        server.end_when_alone.wait_until_alone(ttl)

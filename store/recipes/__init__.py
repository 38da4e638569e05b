"""Locks and elections over a store, with fencing.

    async with store.recipes.lock(client, "reports/today") as held:
        await client.put("reports/today/text", text, when=[held.fence])

The blocking twins in `store.sync.recipes` have the same names and arguments.

A paused or disconnected holder may go on after another has taken the lock. So each holder has a *fence*, a condition
that is true while its place exists: add it to `when=` of each critical write. Other systems can compare `token`, which
is higher than that of each earlier holder.
"""

from store.recipes.awaited import Held, leader, leaders, leadership, lock, read_lock, write_lock

__all__ = ["Held", "leader", "leaders", "leadership", "lock", "read_lock", "write_lock"]

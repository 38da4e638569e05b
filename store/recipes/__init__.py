"""Locks and elections over a store, with fencing.

    async with store.recipes.lock(client, "reports/today") as held:
        await client.put("reports/today/text", text, when=[held.fence])

The blocking twins in `store.sync.recipes` have the same names and arguments.

A paused or disconnected holder may go on after another client has taken the lock. So each holder has a *fence*, a
condition that is true while it holds the lock: add the fence to `when=` of each critical write. Systems other than the
store can compare `token`: each holder's token is higher than those of all earlier holders.
"""

from store.recipes.awaited import Held, leader, leaders, leadership, lock, read_lock, write_lock

__all__ = ["Held", "leader", "leaders", "leadership", "lock", "read_lock", "write_lock"]

"""What many programs do with a store: locks and elections, each step of them fenced by a revision.

    async with store.recipes.lock(client, "reports/today") as held:
        await client.put("reports/today/text", text, when=[held.fence])

The blocking twins have the same names and arguments, in `store.sync.recipes`. Both work on our own store and on etcd.

A holder that is paused, or cut off, may go on for a while after another holds what it held. Nothing can prevent that.
So each holder has a *fence*, a condition that holds for as long as its place in the store exists: put it among the
conditions of each write that must not come late. For other systems there is `token`, a number which each holder has
higher than all before it.
"""

from store.recipes.awaited import (
    Held,
    leader,
    leaders,
    leadership,
    lock,
    read_lock,
    write_lock,
)

__all__ = [
    "Held",
    "leader",
    "leaders",
    "leadership",
    "lock",
    "read_lock",
    "write_lock",
]

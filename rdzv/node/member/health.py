"""Shell: a node's health check before it joins (promise R17); a failure is written beside the run, for `status`."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from rdzv.core.stored import prose
from rdzv.errors import RendezvousRefusedError
from store import Delete, Lease, Put
from store.net.threads import Call

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from rdzv.core.keys import Keys
    from store import Store


UNFIT_MOST = 64  # nodes whose failed checks a run keeps: the latest


async def examine_in(there: asyncio.AbstractEventLoop, check: Callable[[], Any]) -> str | None:
    """Run the user's health check in the loop `there`; cancel it when the caller is cancelled."""
    call = Call(examine(check), there)
    try:
        return await call
    finally:
        call.cancel()


async def examine(check: Callable[[], Any]) -> str | None:
    """Run the user's health check; return why it failed, or None. It must return None or True, and not raise."""
    try:
        verdict = check()
        if inspect.isawaitable(verdict):
            verdict = await verdict
    except (Exception, SystemExit) as error:  # noqa: BLE001  any error is a failed check
        verdict = f"{type(error).__name__}: {error}"
    if verdict is None or verdict is True:
        return None
    return prose(f"failed its health check: {verdict}") if isinstance(verdict, str) else "failed its health check"


async def report_health(store: Store, keys: Keys, lease: Lease, *, node_id: str, failure: str | None) -> None:
    """Write a failed check, and raise RendezvousRefusedError; after a passed check, delete an earlier failure."""
    key = keys.unfits + node_id
    if failure is None:
        await store.delete(key)  # the failure of an earlier check
        return
    # A node that restarts again and again under new names must not fill the store.
    others = [entry for entry in await store.list(keys.unfits, keys_only=True) if entry.key != key]
    others.sort(key=lambda entry: entry.mod_revision, reverse=True)
    forgotten = [Delete(entry.key) for entry in others[UNFIT_MOST - 1 :]]
    await store.transact(then=[Put(key, failure.encode(), lease=lease.id), *forgotten])
    raise RendezvousRefusedError(f"run {keys.run_id}: node {node_id} {failure}")

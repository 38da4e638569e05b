"""A node's health check before it joins (promise R17). Failures are written to the store, for `status`."""

from __future__ import annotations

import asyncio
import inspect
from typing import TYPE_CHECKING, Any

from rdzv.core.stored import fit_bytes
from rdzv.errors import RendezvousRefusedError
from store import Delete, Lease, Put
from store.net.sockets import is_ctrl_c
from store.net.threads import Call

if TYPE_CHECKING:
    from collections.abc import Callable

    from rdzv.core.keys import Keys
    from store import Store

UNFIT_MOST = 64  # failed health checks that a run keeps, at most one of each node


async def run_health_check_in_loop(there: asyncio.AbstractEventLoop, check: Callable[[], Any]) -> str | None:
    """Run the user's health check in the loop `there`; if the caller is cancelled, cancel the check."""
    call = Call(run_health_check(check), there)
    try:
        return await call
    finally:
        call.cancel()


async def run_health_check(check: Callable[[], Any]) -> str | None:
    """Run the user's health check; return why it failed, or None. A check passes if it returns None or True."""
    try:
        verdict = check()
        if inspect.isawaitable(verdict):
            verdict = await verdict
    except BaseException as error:  # a failed check, unless it is a Ctrl-C or this task's own cancellation
        task = asyncio.current_task()
        if is_ctrl_c(error) or (isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling()):
            raise
        verdict = f"{type(error).__name__}: {error}"
    if verdict is None or verdict is True:
        return None
    return fit_bytes(f"failed its health check: {verdict}") if isinstance(verdict, str) else "failed its health check"


async def refuse_if_unhealthy(store: Store, keys: Keys, lease: Lease, *, node_id: str, failure: str | None) -> None:
    """If the health check failed, store why, and raise RendezvousRefusedError; else delete an earlier failure."""
    key = keys.unfits + node_id
    if failure is None:
        await store.delete(key)
        return
    # Delete the oldest failures, or a node that restarts under ever new names would fill the store.
    others = [entry for entry in await store.list(keys.unfits, keys_only=True) if entry.key != key]
    others.sort(key=lambda entry: entry.mod_revision, reverse=True)
    forgotten = [Delete(entry.key) for entry in others[UNFIT_MOST - 1 :]]
    await store.transact(then=[Put(key, failure.encode(), lease=lease.id), *forgotten])
    raise RendezvousRefusedError(f"run {keys.run_id}: node {node_id} {failure}")

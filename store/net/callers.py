"""Rejects blocking calls that would never end, as the caller's own thread runs the store's event loop."""

from __future__ import annotations

import asyncio
import sys

from store.errors import StoreUsageError

LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})

_served: dict[int, tuple[str, asyncio.AbstractEventLoop, str]] = {}
"""The stores that loops of this process serve, by port, with their ids."""


def register_served_store(host: str, port: int, store_id: str) -> None:
    """Note that the running loop serves a store at this address."""
    _served[port] = host, asyncio.get_running_loop(), store_id


def process_serves_store(store_id: str | None) -> bool:
    """Return True if this process serves that store."""
    return any(served == store_id for _, _, served in _served.values())


def unregister_served_store(port: int) -> None:
    """Note that the store on this port is closed."""
    _served.pop(port, None)


def check_not_server_loop(host: str, port: int) -> None:
    """Reject a blocking call in the thread whose loop serves the store."""
    served = _served.get(port)
    if served is None or host not in {*LOOPBACK, served[0]}:
        return
    try:
        running = asyncio.get_running_loop()
    except RuntimeError:
        return
    if running is served[1]:
        raise StoreUsageError(
            f"a blocking client is used in the thread whose event loop serves its store, port {port}, and cannot "
            f"be answered; use store.connect (async) there, store.sync.serve, or call it in another thread"
        )


def reject_green_threads() -> None:
    """Raise `StoreUsageError` if gevent or eventlet has replaced this process's threads."""
    for name, module, function, what in (
        ("gevent", "gevent.monkey", "is_module_patched", "threading"),
        ("eventlet", "eventlet.patcher", "is_monkey_patched", "thread"),
    ):
        patcher = sys.modules.get(module)
        if patcher is not None and getattr(patcher, function)(what):
            raise StoreUsageError(
                f"{name} has replaced the threads and sockets of this process, and asyncio does not run on those: use "
                f"rdzv and store in a process that is not monkey-patched"
            )

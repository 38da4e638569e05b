"""Shell: the event loops of our own threads, uvloop's where it is installed, and a thread with one for who blocks."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar, cast

import anyio
from anyio.from_thread import BlockingPortal

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

__all__ = ["PortalThread", "backend_options", "in_thread", "loop_factory"]

T = TypeVar("T")


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """What makes the event loops of our threads and commands."""
    if importlib.util.find_spec("uvloop") is not None:
        import uvloop

        factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
        return factory
    return asyncio.new_event_loop


def backend_options() -> dict[str, Any]:
    """The same, as anyio's portals take it."""
    return {"loop_factory": loop_factory()}


async def in_thread(work: Callable[[], T]) -> T:
    """Do some work in a thread of its own, which keeps nobody: neither who is cancelled, nor a process from its end.

    A thread of anyio's or asyncio's would: a process that ends waits for those, and may wait for a disk for ever.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def report(result: T | None, error: BaseException | None) -> None:
        if done.done():  # nobody waits any more
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(cast("T", result))

    def run() -> None:
        result: T | None = None
        failure: BaseException | None = None
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is for who waits
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop has gone meanwhile
            loop.call_soon_threadsafe(report, result, failure)

    threading.Thread(target=run, name="store work", daemon=True).start()
    return await done


class PortalThread(contextlib.AbstractContextManager[BlockingPortal]):
    """A thread with an event loop, and the portal to it.

    It is anyio's `start_blocking_portal`, but no generator: those clean up when they are let go of, too, and at the end
    of a process that never left the context, or in a forked child, that is to wait for ever for a thread that does not
    run any more. A forked child leaves the context without a word: thread and loop are its parent's.

    Args:
        name: What the thread is called.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._pid = os.getpid()

    def __enter__(self) -> BlockingPortal:
        started: Future[BlockingPortal] = Future()

        async def serve() -> None:
            async with BlockingPortal() as portal:
                started.set_result(portal)
                await portal.sleep_until_stopped()

        def run() -> None:
            try:
                anyio.run(serve, backend_options=backend_options())
            except BaseException as error:
                if started.done():
                    raise
                started.set_exception(error)

        self._thread = threading.Thread(target=run, name=self._name, daemon=True)
        self._thread.start()
        self._portal = started.result()
        return self._portal

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        if self._pid != os.getpid():
            return
        with contextlib.suppress(RuntimeError):  # it has stopped already
            self._portal.call(self._portal.stop, kind is not None)
        self._thread.join()

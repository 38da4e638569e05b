"""Which event loop our own threads run on."""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import threading
import weakref
from concurrent.futures import Future

import anyio
import pytest

import store
from store.net import threads
from tests.support.processes import require, start_python


def module_of_loop() -> str:
    async def here() -> str:
        return type(asyncio.get_running_loop()).__module__

    with asyncio.Runner(loop_factory=threads.loop_factory()) as runner:
        return runner.run(here())


def test_uvloop_is_used_where_it_is_installed() -> None:
    require("uvloop")
    assert module_of_loop().startswith("uvloop")


def test_asyncio_does_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert module_of_loop().startswith("asyncio")


@pytest.mark.parametrize("fast", [True, False])
def test_portals_take_the_same_loop(monkeypatch: pytest.MonkeyPatch, fast: bool) -> None:
    if fast:
        require("uvloop")
    else:
        monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert threads.backend_options() == {"loop_factory": threads.loop_factory()}
    with store.sync.serve() as server, store.sync.connect(server.url) as client:
        assert client.put("a", b"") == 1


def test_a_portal_thread_runs_what_it_is_given_until_it_is_left() -> None:
    with threads.PortalThread("spare") as portal:
        assert portal.call(threading.current_thread).name == "spare"
    assert "spare" not in [thread.name for thread in threading.enumerate()]


def test_nobody_keeps_a_thread_that_has_ended() -> None:
    """The table of what runs did, by what ends it: each handler that had come and gone left 300 kB of a loop behind."""
    ours = threads.LoopThread("brief")
    ours.stop(within=60)
    gone = weakref.ref(ours)
    del ours
    gc.collect()
    assert gone() is None


async def test_a_call_into_another_loop_gives_what_came_of_it_or_is_cancelled_there() -> None:
    async def fail() -> None:
        raise ValueError("as asked")

    begun, cancelled = asyncio.Event(), asyncio.Event()
    here = asyncio.get_running_loop()

    async def wait() -> None:
        here.call_soon_threadsafe(begun.set)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            here.call_soon_threadsafe(cancelled.set)
            raise

    ours = threads.LoopThread("other")
    name = ours.call(thread_name())
    await name.end()
    assert name.result() == "other"
    failing = ours.call(fail())
    await failing.end()
    with pytest.raises(ValueError, match="as asked"):
        failing.result()

    waiting = ours.call(wait())
    await begun.wait()
    with anyio.move_on_after(0):
        await waiting.end()  # who waits is cancelled, and the work is not
    assert not cancelled.is_set()
    waiting.cancel()
    await cancelled.wait()
    waiting.cancel()  # twice does no harm

    unbegun = ours.call(wait())
    unbegun.cancel()  # before it has come to begin, perhaps
    await unbegun.end()
    with pytest.raises(asyncio.CancelledError):
        unbegun.result()
    ours.stop(within=60)
    with pytest.raises(RuntimeError):
        ours.call(thread_name())


async def thread_name() -> str:
    return threading.current_thread().name


def test_a_thread_that_cannot_be_started_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    loops = []

    def new_loop() -> asyncio.AbstractEventLoop:
        loops.append(asyncio.new_event_loop())
        return loops[-1]

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threads, "loop_factory", lambda: new_loop)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    before = len(threads._running)
    with pytest.raises(RuntimeError, match="the thread 'none' could not start: can't start new thread"):
        threads.LoopThread("none")
    assert [loop.is_closed() for loop in loops] == [True]
    assert len(threads._running) == before


def test_what_keeps_the_loop_from_starting_is_raised_to_who_enters(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_loop() -> asyncio.AbstractEventLoop:
        raise OSError("too many open files")

    monkeypatch.setattr(threads, "loop_factory", lambda: no_loop)
    with pytest.raises(OSError, match="too many open files"), threads.PortalThread("none"):
        raise AssertionError("nothing was started")


FORKING = """
import os, sys
if sys.argv[1] == "asyncio":
    sys.modules["uvloop"] = None
import asyncio, store
from store.net.threads import loop_factory

assert (loop_factory() is asyncio.new_event_loop) == (sys.argv[1] == "asyncio")
with store.sync.serve("localhost") as server:
    child = os.fork()
    if child == 0:
        sys.exit(7)
    print("child ended with", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    with store.sync.connect(server.url) as client:
        print("parent is at revision", client.put("a", b""), flush=True)
serving = store.sync.serve()
serving.__enter__()
"""


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
async def test_a_child_forked_while_its_parent_serves_can_end(loop: str) -> None:
    """It waited for ever, on leaving the context, for a thread that it does not have; with uvloop, it crashed.

    And so can a process that never leaves the context.
    """
    if loop == "uvloop":
        require("uvloop")
    async with start_python("-W", "ignore", "-c", FORKING, loop) as parent:
        assert await parent.line("ended") == "child ended with 7"
        assert await parent.line("parent") == "parent is at revision 1"
        assert await parent.wait() == 0


ENDING = """
import atexit, sys, threading

def look():
    print("left at the end:", sorted(thread.name for thread in threading.enumerate()), flush=True)

atexit.register(look)  # before ours, so that it runs after it: the last thing before Python finalizes
from store.net.threads import LoopThread, PortalThread

loop = LoopThread("a loop")
portal = PortalThread("a portal").__enter__()
portal.start_task_soon(__import__("anyio").sleep_forever)
works_on = threading.Thread(target=lambda: print(portal.call(threading.current_thread).name, flush=True))
if sys.argv[1] == "thread":
    threading.Timer(0.3, lambda: works_on.start()).start()
elif sys.argv[1] == "raise":
    raise SystemExit("over")
"""


@pytest.mark.parametrize("how", ["return", "raise", "thread"])
async def test_no_loop_of_ours_runs_into_finalization(how: str) -> None:
    """A daemon's loop that wanted the interpreter lock while Python finalized was a SIGSEGV; and a program whose main
    thread has ended goes on in others, which may still use the loops."""
    async with start_python("-c", ENDING, how) as child:
        if how == "thread":
            assert await child.line("portal") == "a portal"
        assert await child.line("left at the end") == "left at the end: ['MainThread']"
        assert await child.wait() == (1 if how == "raise" else 0)


def test_a_wait_for_another_thread_gives_its_result_or_its_error_or_says_that_time_is_over() -> None:
    done, failed, event = Future[int](), Future[int](), threading.Event()
    done.set_result(7)
    failed.set_exception(TimeoutError("its own"))
    assert threads.until_result(done) == 7
    with pytest.raises(TimeoutError, match="its own"):
        threads.until_result(failed)
    assert not threads.until_set(event, 0)
    event.set()
    assert threads.until_set(event)
    assert threads.until_set(event, 0)

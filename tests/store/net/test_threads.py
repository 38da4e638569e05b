"""Threads with loops of their own: calls into them, their end, and exceptions out of signal handlers."""

import asyncio
import contextlib
import gc
import threading
import weakref
from collections.abc import AsyncIterator

import anyio
import pytest

import rdzv
import store
from rdzv.node.link.node_loop import wait_for_result
from store.net import threads
from tests.support.interrupts import tears, torn
from tests.support.processes import require, start_python


def test_a_context_is_held_in_the_thread_until_it_is_left() -> None:
    @contextlib.asynccontextmanager
    async def context() -> AsyncIterator[str]:
        with anyio.CancelScope():  # it is left in the task in which it was entered
            yield threading.current_thread().name
            ended.append(threading.current_thread().name)
            raise LookupError("nothing is left")

    ended: list[str] = []
    ours = threads.LoopThread("spare")
    with pytest.raises(LookupError), threads.ContextInThread(ours, context()) as name:
        assert (name, ended) == ("spare", [])
    assert ended == ["spare"]
    ours.stop(within=60)
    assert "spare" not in [thread.name for thread in threading.enumerate()]


def test_an_ended_thread_is_freed() -> None:
    """A table of the running loops kept each one that had ended: each handler left 300 kB behind."""
    ours = threads.LoopThread("brief")
    ours.stop(within=60)
    gone = weakref.ref(ours)
    del ours
    gc.collect()
    assert gone() is None


async def test_a_call_into_another_loop_returns_its_result_or_is_cancelled_there() -> None:
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
    name = ours.start_call(thread_name())
    await name.until_over()
    assert name.result() == "other"
    failing = ours.start_call(fail())
    await failing.until_over()
    with pytest.raises(ValueError, match="as asked"):
        failing.result()

    waiting = ours.start_call(wait())
    await begun.wait()
    with anyio.move_on_after(0):
        await waiting.until_over()  # the waiting task is cancelled, and the work is not
    assert not cancelled.is_set()
    waiting.cancel()
    await cancelled.wait()
    waiting.cancel()  # twice does no harm

    unbegun = ours.start_call(wait())
    unbegun.cancel()  # perhaps before it has begun
    await unbegun.until_over()
    with pytest.raises(asyncio.CancelledError):
        unbegun.result()
    ours.stop(within=60)
    with pytest.raises(RuntimeError):
        ours.start_call(thread_name())


async def thread_name() -> str:
    return threading.current_thread().name


@pytest.mark.parametrize("what_fails", ["the loop", "the thread"])
def test_a_thread_that_cannot_be_started_says_why_and_leaves_nothing_behind(
    what_fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loops = []

    def new_loop() -> asyncio.AbstractEventLoop:
        if what_fails == "the loop":
            raise OSError("there is no more")
        loops.append(asyncio.new_event_loop())
        return loops[-1]

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("there is no more")

    monkeypatch.setattr(threads, "new_loop", new_loop)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    before = len(threads._running)
    with pytest.raises(RuntimeError, match="there is no more"), store.sync.serve():
        raise AssertionError("nothing was started")
    assert all(loop.is_closed() for loop in loops)
    assert len(threads._running) == before


FORKING = """
import contextlib, os, sys
if sys.argv[1] == "asyncio":
    sys.modules["uvloop"] = None
import asyncio, store
from store.net.threads import new_loop

with contextlib.closing(new_loop()) as loop:
    assert isinstance(loop, asyncio.SelectorEventLoop) == (sys.argv[1] == "asyncio")
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
    """On leaving the context it waited for ever for a thread that only its parent has; with uvloop, it crashed.

    A process that never leaves the context can end as well.
    """
    if loop == "uvloop":
        require("uvloop")
    async with start_python("-W", "ignore", "-c", FORKING, loop) as parent:
        assert await parent.line("ended") == "child ended with 7"
        assert (await parent.line("parent")).startswith("parent is at revision ")
        assert await parent.wait() == 0


ENDING = """
import atexit, sys, threading

def look():
    print("left at the end:", sorted(thread.name for thread in threading.enumerate()), flush=True)

atexit.register(look)  # before ours, so that it runs after it: the last thing before Python finalizes
import asyncio
from store.net.threads import LoopThread

async def name():
    return threading.current_thread().name

loop = LoopThread("a loop")
last = LoopThread("the last loop", last=True)
last.start_call(asyncio.sleep(3600))
works_on = threading.Thread(target=lambda: print(last.start_call(name()).wait(), flush=True))
if sys.argv[1] == "thread":
    threading.Timer(0.3, lambda: works_on.start()).start()
elif sys.argv[1] == "raise":
    raise SystemExit("over")
"""


@pytest.mark.parametrize("how", ["return", "raise", "thread"])
async def test_no_loop_of_ours_runs_into_finalization(how: str) -> None:
    """A daemon thread's loop that took the interpreter lock while Python finalized caused a SIGSEGV. If only the main
    thread of a program has ended, its other threads may still use the loops.
    """
    async with start_python("-c", ENDING, how) as child:
        if how == "thread":
            assert await child.line("last") == "the last loop"
        assert await child.line("left at the end") == "left at the end: ['MainThread']"
        assert await child.wait() == (1 if how == "raise" else 0)


def test_a_wait_for_another_thread_gives_its_result_or_its_error_or_says_that_time_is_over() -> None:
    async def fail() -> None:
        raise ConnectionError("its own")

    ours, event = threads.LoopThread("other"), threads.Flag()
    assert ours.start_call(thread_name()).wait() == "other"
    with pytest.raises(ConnectionError, match="its own"):
        ours.start_call(fail()).wait()
    endless = ours.start_call(asyncio.sleep(3600))
    with pytest.raises(TimeoutError):
        endless.wait(0.01)
    assert not event.wait(0)
    threading.Timer(0.01, event.set).start()
    assert event.wait()
    assert event.wait(0)
    ours.stop(within=60)
    with pytest.raises(asyncio.CancelledError):
        endless.wait()


@pytest.mark.parametrize("how", ["wait", "awaited", "of a node"])
def test_a_call_that_comes_as_the_loop_closes_is_cancelled(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller waited for ever for a call that the loop had accepted and did not begin."""
    calls: list[threads.Call[str]] = []

    class ConnectionEnd(asyncio.SelectorEventLoop):
        def close(self) -> None:
            if not calls:
                calls.append(ours.start_call(thread_name()))
            super().close()

    async def wait_for(call: threads.Call[str]) -> str:
        async with asyncio.timeout(10):
            return await call

    monkeypatch.setattr(threads, "new_loop", ConnectionEnd)
    ours = threads.LoopThread("other")
    ours.stop(within=60)
    (call,) = calls
    if how == "of a node":
        with pytest.raises(rdzv.RendezvousStateError, match="has ended"):
            wait_for_result(call)
    else:
        with pytest.raises(asyncio.CancelledError):
            call.wait(10) if how == "wait" else asyncio.run(wait_for(call))


def all_end(name: str) -> bool:
    """Return True if all threads of a name end by themselves."""
    threads_named = [thread for thread in threading.enumerate() if thread.name == name]
    for thread in threads_named:
        with contextlib.suppress(RuntimeError):  # its start was interrupted
            thread.join(10)
    return not any(thread.is_alive() for thread in threads_named)


def answers(ours: threads.LoopThread) -> bool:
    """Return True if a thread's loop still runs."""
    try:
        return ours.start_call(thread_name()).wait(5) == "other"
    except TimeoutError:
        return False


@tears
def test_an_interrupt_anywhere_in_a_call_leaves_the_loop_that_is_called_at_work() -> None:
    """An exception in the lock of a `concurrent.futures.Future` left it locked, and the loop waited for it for ever."""
    ours = threads.LoopThread("other")
    places = []
    for where in torn(lambda: ours.start_call(asyncio.sleep(0.001)).wait()):
        places.append(where)
        assert answers(ours), where
    assert len(places) > 10
    ours.stop(within=60)


@tears
def test_an_interrupt_while_a_thread_starts_is_raised_and_leaves_no_thread() -> None:
    """Regression: the loop was closed under the thread that ran it, and the resulting error was raised instead."""
    made: list[threads.LoopThread] = []
    places = list(torn(lambda: made.append(threads.LoopThread("brief"))))
    assert len(places) > 10
    for one in made:
        one.stop()
    assert all_end("brief")


@tears
def test_an_interrupt_while_a_server_starts_in_a_thread_is_raised_and_leaves_no_server() -> None:
    made: list[store.sync.Serving] = []

    def start() -> None:
        made.append(store.sync.serve())
        made[-1].__enter__()

    assert len(list(torn(start))) > 10
    for one in made[-2:]:  # the last but one may have begun to serve before it was interrupted
        one.__exit__(None, None, None)
    assert all_end("store")

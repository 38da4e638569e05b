"""Shell: where nodes live: an event loop that their callers cannot hold up.

There is one such loop per process, in a thread of its own, for async and blocking callers alike. A caller may be busy
for as long as it likes: its node goes on following the run, keeping its leases, coordinating, and hearing who has died.
Only a caller that keeps the interpreter lock (a C extension that does not release it) holds its node up as well, and
after the TTL it is dropped, and told so.

Nothing in this loop waits for anything but the store. What users bring (a health check, an order of ranks) runs apart
from it: see `NodeLoop.apart`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from typing import TYPE_CHECKING, Any, TypeVar

from rdzv.errors import RendezvousStateError
from store.net.threads import Call, LoopThread, in_thread

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine

__all__ = ["NodeLoop", "NodeThread", "check_process", "result_of"]

T = TypeVar("T")

TURNS = 64  # nodes of one process at the same moment: a step of all of them keeps the loop for some 20 ms
TURN_MOST = 5.0  # seconds that a node, which waits for a store that is away perhaps, may keep others from their turn


def result_of(call: Call[T]) -> T:
    """What came of something in a node's loop, once it is over.

    Raises:
        RendezvousStateError: That loop has ended, and cancelled it.
    """
    try:
        return call.result()
    except asyncio.CancelledError:
        raise RendezvousStateError("the thread in which nodes live has ended, with the process") from None


def check_process(pid: int, run_id: str) -> None:
    """Refuse to go on in a forked child, where the nodes of its parent are not."""
    if pid != os.getpid():
        raise RendezvousStateError(f"this handler of run {run_id} was made before fork(); make a new one in the child")


class NodeLoop:
    """A node's way to the loop that it lives in: here one that is there already, the caller's own or one that is given.

    So it is in tests on virtual time, where threads do not exist.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._loop = loop

    def start(self, work: Coroutine[Any, Any, T]) -> Call[T]:
        """Begin a coroutine there, from any thread.

        Raises:
            RendezvousStateError: The loop has ended.
        """
        self._loop = self._loop or asyncio.get_running_loop()
        return Call(work, self._loop)

    async def apart(self, work: Callable[[], T]) -> T:
        """Run somebody else's code, which may take its time, where it holds up no lease."""
        return work()

    def turn(self) -> contextlib.AbstractAsyncContextManager[None]:
        """Let few of the nodes that live here do the block at the same moment; to be entered in the loop."""
        return contextlib.nullcontext()

    def leave(self) -> None:
        """Make no more use of it; a loop that is somebody else's goes on without us."""


class NodeThread(NodeLoop):
    """The process's node thread: it starts with its first user, and ends with its last."""

    def __init__(self) -> None:
        super().__init__()
        self._thread: LoopThread | None = None
        self._left = False

    def start(self, work: Coroutine[Any, Any, T]) -> Call[T]:
        """Begin a coroutine in the thread."""
        thread = self._thread
        try:
            if thread is None:
                if self._left:
                    raise RuntimeError("it was left")  # noqa: TRY301
                thread = self._thread = _join(self)
            return thread.run(work)
        except RuntimeError as error:
            if thread is not None and not thread.has_ended:
                raise  # a signal's handler has raised it
            work.close()
            raise RendezvousStateError(f"the thread in which nodes live has ended: {error}") from None

    async def apart(self, work: Callable[[], T]) -> T:
        """Run it in a thread of its own."""
        return await in_thread(work)

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """A turn among all nodes of this process, for what costs much: connecting, arriving, reading one's rank.

        A process may carry thousands of nodes, all of which come at once. If all of them did each step together, the
        loop would take seconds for each, and renew no lease meanwhile. A few after the other are as quick all together.
        """
        held = [_turns]
        await held[0].acquire()

        def give_back() -> None:
            if held:
                held.pop().release()

        # Whoever waits for a store that is away holds up the others for a moment only.
        over = asyncio.get_running_loop().call_later(TURN_MOST, give_back)
        try:
            yield
        finally:
            over.cancel()
            give_back()

    def leave(self) -> None:
        """Make no more use of the thread; from any thread, and once."""
        thread, self._thread, self._left = self._thread, None, True
        if thread is not None:
            _leave(self, thread)


_lock = threading.Lock()
_thread: LoopThread | None = None
_turns = asyncio.Semaphore(TURNS)  # of that thread
_users: set[NodeThread] = set()


def _join(user: NodeThread) -> LoopThread:
    """The process's node thread, for one more user; who is interrupted here may come again."""
    global _thread, _turns
    with _lock:
        if _thread is None:
            _thread, _turns = LoopThread("rdzv node"), asyncio.Semaphore(TURNS)
        _users.add(user)
        return _thread


def _leave(user: NodeThread, thread: LoopThread) -> None:
    """One user fewer; the last one ends the thread."""
    global _thread
    with _lock:
        if thread is not _thread:  # that of the process which forked
            return
        _users.discard(user)
        if not _users:
            _thread = None
            thread.stop()


def _forget_in_child() -> None:
    """A forked child has no thread but the one that forked; it starts its own if it needs one."""
    global _thread, _users, _lock, _turns
    _thread, _users, _lock, _turns = None, set(), threading.Lock(), asyncio.Semaphore(TURNS)


os.register_at_fork(after_in_child=_forget_in_child)

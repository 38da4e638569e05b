"""Shell: how a worker of this agent has failed, at the moment it does.

PyTorch's agent looks at its workers ten times a second; once it has seen that one has failed, it first stops those
beside it, for up to 30 s, and only then meets the others again. Nobody else would know meanwhile what has happened, and
their workers may hang in a collective. So the workers' ends are waited for here (Linux's pidfd), in the node's loop,
and how each has ended is read without reaping it, which is the agent's to do.

An agent that stops its workers is not told on: these end because of that. Where there is no pidfd, and where the agent
is none that we know, nothing is told before it meets the others again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from typing import TYPE_CHECKING, Final

import anyio

from rdzv.torch.pytorch import how_ended, stops_workers

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Mapping
    from typing import Any

    from store.net.threads import Call

__all__ = ["WorkerEnds"]

LOOKS_EVERY: Final = 0.02
"""In seconds, until the agent has started all workers of a round: it does so as soon as it has the round."""


class WorkerEnds:
    """Waits for the ends of one agent's workers.

    Args:
        start: Begins a coroutine in the loop where it waits: the node's.
        on_failure: Awaited there once, with how the first worker has failed.
    """

    def __init__(
        self,
        start: Callable[[Coroutine[Any, Any, None]], Call[None]],
        on_failure: Callable[[str], Awaitable[object]],
    ) -> None:
        self._start = start
        self._on_failure = on_failure
        self._waiting: Call[None] | None = None

    def follow(self, workers: Callable[[], Mapping[int, int]], raised_by: Callable[[int], str]) -> None:
        """Wait for the ends of these, and of no others any more; called by the agent's thread.

        Args:
            workers: Gives their process ids, by local rank, once all have been started; before that, none.
            raised_by: Gives what the worker of a local rank has raised.
        """
        self.forget()
        if hasattr(os, "pidfd_open"):
            self._waiting = self._start(self._wait(workers, raised_by, threading.get_ident()))

    def forget(self) -> None:
        """Wait for none any more: the agent is about to stop them, or they are of a round that is over."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting.cancel()

    async def _wait(
        self, workers: Callable[[], Mapping[int, int]], raised_by: Callable[[int], str], agent: int
    ) -> None:
        while not (pids := workers()):  # noqa: ASYNC110  nothing announces it
            await anyio.sleep(LOOKS_EVERY)
        ended: asyncio.Queue[int] = asyncio.Queue()
        loop, files = asyncio.get_running_loop(), dict[int, int]()

        def hear(file: int) -> None:
            loop.remove_reader(file)
            ended.put_nowait(file)

        try:
            for rank, pid in pids.items():
                with contextlib.suppress(OSError):  # it has been reaped: the agent knows
                    file = os.pidfd_open(pid)
                    files[file] = rank
                    loop.add_reader(file, hear, file)
            for _ in tuple(files):
                file = await ended.get()
                status = _status_of(file)
                if status and not stops_workers(agent):
                    await self._on_failure(how_ended(files[file], status, raised_by(files[file])))
                    return
        finally:
            for file in files:
                loop.remove_reader(file)
                os.close(file)


def _status_of(file: int) -> int:
    """How the process behind a pidfd has ended, negative for a signal; 0 if it is not for us to know any more."""
    try:
        ended = os.waitid(os.P_PIDFD, file, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except OSError:  # the agent was quicker, and has reaped it
        return 0
    if ended is None:
        return 0
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

"""Reports a failed worker of an agent at once.

After a worker has failed, PyTorch's agent stops its other workers for up to 30 s before it meets the other agents.
Meanwhile other nodes' workers may hang. So this module waits for the ends of the workers by Linux's pidfd; the agent
reaps them. While an agent stops its workers, or without pidfd, nothing is reported.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import anyio

from rdzv.torch.pytorch import describe_worker_end, is_stopping_workers

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Mapping
    from typing import Any

    from rdzv.loop import Call

LOOKS_EVERY: Final = 0.02  # seconds between checks whether all workers are started


@dataclass
class WorkerEnds:
    """Waits for the ends of one agent's workers; awaits `on_failure` with the first failure."""

    start: Callable[[Coroutine[Any, Any, None]], Call[None]]
    on_failure: Callable[[str], Awaitable[object]]
    _waiting: Call[None] | None = None

    def watch_workers(self, workers: Callable[[], Mapping[int, int]], read_error_of: Callable[[int], str]) -> None:
        """Wait for the ends of these workers only; `workers` returns none before all have been started."""
        self.stop_watching()
        if hasattr(os, "pidfd_open"):
            self._waiting = self.start(self._wait_for_ends(workers, read_error_of, threading.get_ident()))

    def stop_watching(self) -> None:
        """Stop waiting: the agent is about to stop the workers, or their round is over."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting.cancel()

    async def _wait_for_ends(
        self, workers: Callable[[], Mapping[int, int]], read_error_of: Callable[[int], str], agent: int
    ) -> None:
        while not (pids := workers()):  # noqa: ASYNC110  PyTorch does not notify of started workers
            await anyio.sleep(LOOKS_EVERY)
        ended: asyncio.Queue[int] = asyncio.Queue()
        loop, files = asyncio.get_running_loop(), dict[int, int]()

        def handle_worker_end(file: int) -> None:
            loop.remove_reader(file)
            ended.put_nowait(file)

        try:
            for rank, pid in pids.items():
                with contextlib.suppress(OSError):  # the worker has ended, and the agent has reaped it
                    file = os.pidfd_open(pid)
                    files[file] = rank
                    loop.add_reader(file, handle_worker_end, file)
            for _ in tuple(files):
                file = await ended.get()
                status = _exit_status_of_pidfd(file)
                if status and not is_stopping_workers(agent):
                    await self.on_failure(describe_worker_end(files[file], status, read_error_of(files[file])))
                    return
        finally:
            for file in files:
                loop.remove_reader(file)
                os.close(file)


def _exit_status_of_pidfd(file: int) -> int:
    """Return the exit status of a pidfd's process, negative for a signal; 0 if the agent has reaped it."""
    with contextlib.suppress(OSError):
        if (ended := os.waitid(os.P_PIDFD, file, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
    return 0

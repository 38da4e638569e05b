"""Shell: tells the other agents of a round how a worker of this one has failed, at the moment it does.

PyTorch's agent looks at its workers ten times a second; once it has seen that one has failed, it first stops those
beside it, for up to 30 s, and only then meets the others again. Nobody else knows meanwhile what has happened. So a
thread waits for the workers' ends here (Linux's pidfd), and reads how each has ended without reaping it, which is the
agent's to do. The first that fails is written into the round's store, under one key: whoever writes it first is the one
that the others have failed because of. All agents of the round wait for that key.

An agent that stops its workers is not told on: these end because of that, and why it stops them is said elsewhere.
Where there is no pidfd, and where the agent is none that we know, nothing is told sooner than before.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
from functools import partial
from typing import TYPE_CHECKING, Final

from rdzv.errors import RendezvousError
from rdzv.loop.blame import be_first, who_failed_first
from rdzv.node.front.sharing import shared_store
from rdzv.torch.pytorch import how_ended, stops_workers
from store import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rdzv.membership import Membership
    from rdzv.node.node import Node

__all__ = ["WorkerEnds", "hear_of_failure", "tell_of_failure"]

log: logging.Logger = logging.getLogger("rdzv.torch")

LOOKS_EVERY: Final = 20
"""In milliseconds, until the agent has started all workers of a round: it does so as soon as it has the round."""


class WorkerEnds:
    """Waits for the ends of one agent's workers, in a thread of its own.

    Args:
        on_failure: Called once, in that thread, with how the first worker has failed.
    """

    def __init__(self, on_failure: Callable[[str], None]) -> None:
        self._on_failure = on_failure
        self._stop: int | None = None  # the writing end of a pipe: what is written ends the thread

    def follow(self, workers: Callable[[], Mapping[int, int]]) -> None:
        """Wait for the ends of these, and of no others any more; called by the agent's thread.

        Args:
            workers: Gives their process ids, by local rank, once all have been started; before that, none.
        """
        self.forget()
        if hasattr(os, "pidfd_open"):
            stopped, self._stop = os.pipe()
            args = (workers, stopped, threading.get_ident())
            threading.Thread(target=self._wait, args=args, name="rdzv workers", daemon=True).start()

    def forget(self) -> None:
        """Wait for none any more: the agent is about to stop them, or they are of a round that is over."""
        stop, self._stop = self._stop, None
        if stop is not None:
            with contextlib.suppress(OSError):  # the thread has ended by itself
                os.write(stop, b"\0")
            os.close(stop)

    def _wait(self, workers: Callable[[], Mapping[int, int]], stopped: int, agent: int) -> None:
        poll = select.poll()
        poll.register(stopped, select.POLLIN)
        files: dict[int, int] = {}
        try:
            while not (pids := workers()):
                if poll.poll(LOOKS_EVERY):
                    return
            for rank, pid in pids.items():
                with contextlib.suppress(OSError):  # it has been reaped: the agent knows
                    files[os.pidfd_open(pid)] = rank
            for file in files:
                poll.register(file, select.POLLIN)
            while files:
                for file, _ in poll.poll():
                    if file == stopped:
                        return
                    poll.unregister(file)
                    status = _status_of(file)
                    rank = files.pop(file)
                    os.close(file)
                    if status and not stops_workers(agent):
                        self._on_failure(how_ended(rank, status))
                        return
        finally:
            for file in (*files, stopped):
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


async def tell_of_failure(node: Node, membership: Membership, how: str) -> None:
    """Tell all members of a round how a worker of this node has failed, if no other has told of one; in its loop."""
    with contextlib.suppress(RendezvousError, StoreError):  # then the next round's line says it
        link = await node.connect()
        await be_first(shared_store(node, membership, link.store).listening(), node.node_id, how)


async def hear_of_failure(node: Node, membership: Membership, on_failure: Callable[[str, str], None]) -> None:
    """Wait until another member of a round tells how its worker has failed; in the node's loop, until it is over.

    Args:
        node: This one.
        membership: Of the round.
        on_failure: Called with its name, and how, in a thread of its own: whatever it writes to may hold it up.
    """
    with contextlib.suppress(RendezvousError):  # the node is being closed
        link = await node.connect()
        shared = shared_store(node, membership, link.store)
        membership.call_when_over(shared.supersede)
        told = await who_failed_first(shared)
        if told is not None and told[0] != node.node_id:
            await node.loop.apart(partial(on_failure, *told))

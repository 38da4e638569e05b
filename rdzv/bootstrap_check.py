"""Shell: sees, before a round is handed out, whether all its members reach rank 0 where they are to meet.

A round is agreed on over the store. That says nothing of the way between the members: a firewall, or a wrong address,
lets all of them reach the store and none reach rank 0, and then the job hangs. So rank 0 listens at the very port that
was promised, each other member connects and says which rank it is, and rank 0 answers all once all have come. Whoever
does not hear that within a few seconds gives the round up.

What follows is rank 0's to say (`judge`), in a key that all read. Who has not come while most have is left out of the
next round, and the others go on: one node behind a firewall ends nobody's job. Where few have come, it is rank 0 that
is not reached, and another node takes its turn.

Nothing that comes is believed beyond "somebody who knows of this round has come"; a line too long, or wrong, is nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from typing import TYPE_CHECKING

import anyio

from rdzv.core.stored import Stored
from store.net.dialing import describe
from store.net.sockets import bound_sockets

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection

    from rdzv.core.round import Round

__all__ = ["WITHIN", "Verdict", "all_reach", "check_the_way", "judge", "reach"]

WITHIN = 5.0  # seconds for all to come
UNREACHED_NAMED = 3  # members that have not come to rank 0: one sentence names these
VERDICT_WITHIN = 2.0  # seconds more to hear of it
TRY_AGAIN_FIRST = 0.005  # seconds; rank 0 may not listen yet: it hears of the round when the others do ...
TRY_AGAIN_AFTER = 0.1  # ... or later; twice as long after each time, and no longer than this
LINE_BYTES_MOST = 128
ALL_HAVE_COME = b"all have come\n"
NO_TIME_WAIT = struct.pack("ii", 1, 0)  # linger: the port is to be free for its user at once


class Verdict(Stored, kw_only=True):
    """What becomes of a round that not all members could begin, as its rank 0 says."""

    called = "what became of a round"

    why: str  # who has not come to rank 0, and where that is, in words
    # The ranks that the next round is to do without; none if it is rank 0 that is not reached.
    left_out: tuple[int, ...] = ()


def judge(why: str, missing: Collection[int], *, size: int, needed: int, again: bool) -> Verdict:
    """Say, as rank 0, what becomes of a round in which these ranks have not come.

    Args:
        why: In words.
        missing: The ranks that have not come; none if nobody could listen for them.
        size: How many members the round has.
        needed: How many a round must have.
        again: This node was such a rank 0 before, and so was every other one that may be.
    """
    here = size - len(missing)
    # Of two nodes nobody knows which one is to blame: the other one is rank 0 once, before it is left out.
    most = here > len(missing) or (here == len(missing) and (size > 2 or again))
    if missing and here >= needed and most:
        return Verdict(why=f"{why}; the others go on", left_out=tuple(missing))
    return Verdict(why=why)


async def check_the_way(
    round: Round, rank: int, names_of: Callable[[Collection[int]], Awaitable[list[str]]]
) -> tuple[str, list[int]]:
    """Whether all reach rank 0 of this round.

    Args:
        round: The round.
        rank: This member's.
        names_of: Tells who has a rank.

    Returns:
        In words what is wrong, or nothing; and, to rank 0, the ranks that have not come.
    """
    at = f"{round.host}:{round.port}"
    if rank:
        problem = await reach(round, rank)
        return problem and f"rank 0 at {at}: {problem}", []
    try:
        missing = await all_reach(round)
    except OSError as error:
        return f"nobody can listen at {at}: {error.strerror or error}", []
    if not missing:
        return "", []
    more = f" and {len(missing) - UNREACHED_NAMED} more" if len(missing) > UNREACHED_NAMED else ""
    who = " and ".join(await names_of(missing[:UNREACHED_NAMED]))
    return f"{who}{more} did not come to {at} within {WITHIN:g} s", missing


async def all_reach(round: Round) -> list[int]:
    """As rank 0: wait for the others at the port that was promised; the ranks that have not come.

    Raises:
        OSError: Nobody can listen there.
    """
    missing = set(range(1, round.size))
    complete, told = asyncio.Event(), asyncio.Event()
    untold = set(missing)
    writers: list[asyncio.StreamWriter] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        with contextlib.suppress(OSError, ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            revision, rank = map(int, (await reader.readuntil()).split())
            if revision == round.revision:
                missing.discard(rank)
            if not missing:
                complete.set()
            await complete.wait()
            if missing:
                return  # the time is over
            writer.write(ALL_HAVE_COME)
            await reader.read()  # it hangs up first, and the port is free at once
            untold.discard(rank)
            if not untold:
                told.set()

    servers = [
        await asyncio.start_server(answer, sock=sock, limit=LINE_BYTES_MOST) for sock in bound_sockets("", round.port)
    ]
    try:
        with contextlib.suppress(TimeoutError):
            with anyio.fail_after(WITHIN):
                await complete.wait()
        if complete.is_set():
            with anyio.move_on_after(TRY_AGAIN_AFTER):
                await told.wait()
    finally:
        for server in servers:
            server.close()
        for writer in writers:
            sock = writer.get_extra_info("socket")
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_TIME_WAIT)
            writer.transport.abort()
        complete.set()  # whoever still waits for the others is let go
    return sorted(missing)


async def reach(round: Round, rank: int) -> str:
    """As any other rank: come to rank 0, and hear that all have; in words what is wrong, or nothing."""
    problem, reached = "it does not answer", False
    began, pause = anyio.current_time(), TRY_AGAIN_FIRST
    with anyio.move_on_after(WITHIN + VERDICT_WITHIN):
        while not (reached and anyio.current_time() - began > WITHIN / 2):  # whoever hung up at once may not be rank 0
            try:
                reader, writer = await asyncio.open_connection(round.host, round.port)
            except OSError as error:
                problem = problem if reached else describe(error)
            else:
                reached, problem = True, "it was reached, and has not seen all the others come"
                try:
                    writer.write(f"{round.revision} {rank}\n".encode())
                    if await reader.read(LINE_BYTES_MOST) == ALL_HAVE_COME:
                        return ""
                except OSError:
                    pass
                finally:
                    writer.close()
            await anyio.sleep(pause)
            pause = min(2 * pause, TRY_AGAIN_AFTER)
    return problem

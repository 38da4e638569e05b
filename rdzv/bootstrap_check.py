"""Shell: checks, before a round is returned to callers, that all members reach rank 0 at its promised address.

A round is agreed on over the store, which proves nothing about the network between the members: with a firewall, or a
wrong address, all may reach the store and none rank 0, and the job hangs. So rank 0 listens at the promised port, each
other member connects and sends its rank, and rank 0 answers once all have come. A member without that answer within a
few seconds gives the round up.

Rank 0 then writes a verdict (`judge`) into a key that all read. If most members have come, the next round leaves the
others out. If few have, rank 0 counts as unreachable, and another node takes its place. A connection proves only that
its peer knows of this round; a line that is too long, or wrong, is ignored.
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

WITHIN = 5.0  # seconds for all to come
UNREACHED_NAMED = 3  # members that have not reached rank 0, in one sentence
VERDICT_WITHIN = 2.0  # seconds more for the verdict
TRY_AGAIN_FIRST = 0.005  # seconds between the first two tries: rank 0 learns of the round when the others do, or later
TRY_AGAIN_AFTER = 0.1  # at most, after doubling
LINE_BYTES_MOST = 128
ALL_HAVE_COME = b"all have come\n"
NO_TIME_WAIT = struct.pack("ii", 1, 0)  # for SO_LINGER: frees the port for its user at once


class Verdict(Stored, kw_only=True):
    """Rank 0's verdict on a round that not all members could begin."""

    called = "what became of a round"

    why: str  # the nodes and addresses that have not reached rank 0, in words
    # The ranks that the next round leaves out; none if rank 0 is not reached.
    left_out: tuple[int, ...] = ()


def judge(why: str, missing: Collection[int], *, size: int, needed: int, again: bool) -> Verdict:
    """Return, as rank 0, the verdict on a round in which some ranks have not come.

    `missing` has these ranks; it is empty if rank 0 could not listen. `again`: this node has been rank 0 of such a
    round before, as has every other candidate.
    """
    here = size - len(missing)
    # Of two nodes, either may be to blame: the other one is rank 0 once, before it is left out.
    most = here > len(missing) or (here == len(missing) and (size > 2 or again))
    if missing and here >= needed and most:
        return Verdict(why=f"{why}; the others go on", left_out=tuple(missing))
    return Verdict(why=why)


async def check_the_way(
    round: Round, rank: int, names_of: Callable[[Collection[int]], Awaitable[list[str]]]
) -> tuple[str, list[int]]:
    """Check the way to rank 0; return the problem in words, or "", and, on rank 0, the ranks that have not come."""
    at = f"{round.host}:{round.port}"
    if rank:
        problem = await reach(round, rank)
        return problem and f"rank 0 at {at}: {problem}", []
    try:
        missing = await all_reach(round)
    except OSError as error:
        return f"rank 0 cannot listen at {at}: {error.strerror or error}", []
    if not missing:
        return "", []
    more = f" and {len(missing) - UNREACHED_NAMED} more" if len(missing) > UNREACHED_NAMED else ""
    who = " and ".join(await names_of(missing[:UNREACHED_NAMED]))
    return f"{who}{more} did not come to {at} within {WITHIN:g} s", missing


async def answers(host: str, port: int) -> bool:
    """Return True if a machine accepts or refuses a connection within some seconds: the network leads to it."""
    with anyio.move_on_after(WITHIN):
        try:
            _, writer = await asyncio.open_connection(host, port)
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
        writer.close()
        return True
    return False


async def all_reach(round: Round) -> list[int]:
    """As rank 0, wait for the others; return the missing ranks. Raise OSError if the promised port is not available."""
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
            await reader.read()  # the peer disconnects first, so the port is free at once
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
        complete.set()  # releases the handlers that wait for others
    return sorted(missing)


async def reach(round: Round, rank: int) -> str:
    """As another rank, reach rank 0 and wait until all have; return the problem in words, or ""."""
    problem, reached = "it does not answer", False
    began, pause = anyio.current_time(), TRY_AGAIN_FIRST
    with anyio.move_on_after(WITHIN + VERDICT_WITHIN):
        # try again after a connection that was closed: its server may not be rank 0
        while not (reached and anyio.current_time() - began > WITHIN / 2):
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

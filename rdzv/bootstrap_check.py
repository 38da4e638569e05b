"""Checks, before a round is returned to callers, that all members reach rank 0 at its promised address.

Members that reach the store may not reach rank 0 (a firewall, a wrong address); the job would hang. So rank 0 listens
at its promised port. The others connect to it and send their ranks. Rank 0 answers once all members have connected.
A member that gets no answer within a few seconds gives the round up.

If some members have not connected, rank 0 writes a verdict into a key that all members read. If at least half of
the round, rank 0 included, has connected (of two: see `judge_reach`), and enough for a round, the next round leaves out
the others. Otherwise, another node becomes rank 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from typing import TYPE_CHECKING

import anyio

from rdzv.core.stored import Stored
from store.net.dialing import error_text
from store.net.sockets import listen_on

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection

    from rdzv.core.round import Round

WITHIN = 5.0  # seconds for members, or a probe, to connect to rank 0
UNREACHED_NAMED = 3  # the most unreached members that a message names
VERDICT_WITHIN = 2.0  # seconds that other members keep trying after rank 0 has stopped listening
TRY_AGAIN_FIRST = 0.005  # seconds before a member's second attempt: rank 0 may not listen yet
TRY_AGAIN_AFTER = 0.1  # seconds; limits the doubling pauses between attempts, and rank 0's last wait
LINE_BYTES_MOST = 128
ALL_HAVE_COME = b"all have come\n"
NO_TIME_WAIT = struct.pack("ii", 1, 0)  # SO_LINGER: rank 0's port is free at once for the user's program


class ReachVerdict(Stored, kw_only=True):
    """Rank 0's verdict on a round that not all members could begin."""

    called = "what became of a round"

    why: str  # why not all members reached rank 0, in words
    # The ranks that the next round leaves out; empty if another node is to become rank 0 instead.
    left_out: tuple[int, ...] = ()


def judge_reach(why: str, missing: Collection[int], *, size: int, needed: int, again: bool) -> ReachVerdict:
    """Return rank 0's verdict on a round in which some ranks have not connected to it.

    `missing`: the unconnected ranks; none if rank 0 could not listen. `again`: this node, like every other member, was
    unreachable as rank 0 before.
    """
    here = size - len(missing)
    # Of two nodes, either may be to blame: leave the other out only if it was unreachable as rank 0, too.
    most = here > len(missing) or (here == len(missing) and (size > 2 or again))
    if missing and here >= needed and most:
        return ReachVerdict(why=f"{why}; the others go on", left_out=tuple(missing))
    return ReachVerdict(why=why)


async def check_rank0_reach(
    round: Round, rank: int, read_member_names: Callable[[Collection[int]], Awaitable[list[str]]]
) -> tuple[str, list[int]]:
    """Check that members reach rank 0; return the problem in words, or "", and, on rank 0, the missing ranks."""
    at = f"{round.host}:{round.port}"
    if rank:
        problem = await find_rank0_problem(round, rank)
        return problem and f"rank 0 at {at}: {problem}", []
    try:
        missing = await accept_other_ranks(round)
    except OSError as error:
        return f"rank 0 cannot listen at {at}: {error.strerror or error}", []
    if not missing:
        return "", []
    more = f" and {len(missing) - UNREACHED_NAMED} more" if len(missing) > UNREACHED_NAMED else ""
    who = " and ".join(await read_member_names(missing[:UNREACHED_NAMED]))
    return f"{who}{more} did not come to {at} within {WITHIN:g} s", missing


async def is_host_reachable(host: str, port: int) -> bool:
    """Return True if a machine accepts or refuses a connection within `WITHIN` seconds: the network leads to it."""
    with anyio.move_on_after(WITHIN), contextlib.suppress(OSError):
        with contextlib.suppress(ConnectionRefusedError):
            _, writer = await asyncio.open_connection(host, port)
            writer.close()
        return True
    return False


async def accept_other_ranks(round: Round) -> list[int]:
    """Listen as rank 0 for `WITHIN`, or until all connect; return the missing ranks. OSError if the port is in use."""
    missing = set(range(1, round.size))
    complete, told = asyncio.Event(), asyncio.Event()
    untold = set(missing)
    writers: list[asyncio.StreamWriter] = []

    async def serve_member(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        with contextlib.suppress(OSError, ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            revision, rank = map(int, (await reader.readuntil()).split())
            if revision != round.revision:
                writer.close()
                return
            missing.discard(rank)
            if not missing:
                complete.set()
            await complete.wait()
            if missing:
                return
            writer.write(ALL_HAVE_COME)
            await reader.read()  # let the peer disconnect first, so that the port is free at once
            untold.discard(rank)
            if not untold:
                told.set()

    servers = [
        await asyncio.start_server(serve_member, sock=sock, limit=LINE_BYTES_MOST) for sock in listen_on("", round.port)
    ]
    try:
        with anyio.move_on_after(WITHIN):
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
        complete.set()  # end the tasks of `serve_member` that still wait
    return sorted(missing)


async def find_rank0_problem(round: Round, rank: int) -> str:
    """Connect to rank 0, and wait until it confirms that all ranks have connected; return the problem, or ""."""
    problem, reached = "it does not answer", False
    began, pause = anyio.current_time(), TRY_AGAIN_FIRST
    with anyio.move_on_after(WITHIN + VERDICT_WITHIN):
        # In the first half of `WITHIN`, connect again if the peer closes without an answer: it may not be rank 0.
        while not (reached and anyio.current_time() - began > WITHIN / 2):
            try:
                reader, writer = await asyncio.open_connection(round.host, round.port)
            except OSError as error:
                problem = problem if reached else error_text(error)
            else:
                reached, problem = True, "it was reached, and has not seen all the others come"
                with contextlib.closing(writer), contextlib.suppress(OSError):
                    writer.write(f"{round.revision} {rank}\n".encode())
                    if await reader.read(LINE_BYTES_MOST) == ALL_HAVE_COME:
                        return ""
            await anyio.sleep(pause)
            pause = min(2 * pause, TRY_AGAIN_AFTER)
    return problem

"""One node of a chaotic run, as a process of its own: it continues after any error, and writes about all events.

    python -m tests.chaos.node URL NAME awaited|blocking

Each line is a JSON object with `what`, the time `at` on the clock that all processes of a machine share, and more:

    in        it is a member: round, rank, size, address of rank 0, and all members by rank if they could be read
    wrote     a write to the round's store was acknowledged: round, and when it `began`; only the first after a pause
              of the node, and one in ten of the others
    fenced    such a write was refused, or a wait ended, because the round is over for this node
    told      a change from `changes()`: kind, round, and the ids in it
    leaving   it is about to ask for the next round
    counted   it has counted in the run's tally, as SIGUSR1 asks: the tally so far
    error     a call failed with an error that a retry may solve
    closed    the run is over, and so is this node

With several hosts in the URL, the node also logs, so that it can be seen which process hosts the store.
"""

import asyncio
import contextlib
import json
import logging
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import CancelledError
from typing import Any

import rdzv
import rdzv.sync
from rdzv import Change, Participant

WRITES_EVERY = 0.02  # seconds; short, so that a node that resumes after a pause is about to write
STOOD_STILL = 0.5  # seconds between two writes after which a line is written
SAYS_ONE_IN = 10
TRIES_AGAIN_AFTER = 0.2  # seconds

_writing = threading.Lock()
_last_write = 0.0
_writes = 0
_must_count = threading.Event()


def say(what: str, **more: Any) -> None:
    """Write one line with a lock, since several threads write."""
    with _writing:
        print(json.dumps({"what": what, "at": time.monotonic(), **more}), flush=True)


def say_wrote(round: int, began: float) -> None:
    """Write a line about an acknowledged write, after a pause or for one write in ten."""
    global _last_write, _writes
    _writes += 1
    if began - _last_write > STOOD_STILL or _writes % SAYS_ONE_IN == 0:
        say("wrote", round=round, began=began)
    _last_write = began


def say_in(info: rdzv.RendezvousInfo | rdzv.sync.RendezvousInfo, members: Iterable[Participant] | None) -> None:
    """Write the facts of a new round."""
    ids = None if members is None else [one.node_id for one in members]
    where = {"round": info.round, "rank": info.rank, "size": info.world_size, "address": info.bootstrap_address}
    say("in", **where, members=ids)


def say_told(change: Change, round: int) -> bool:
    """Write a change. Return True if it is a reason for another round."""
    ids = list(getattr(change, "node_ids", ()))
    say("told", kind=type(change).__name__, round=round, ids=ids, count=getattr(change, "count", None))
    return not (isinstance(change, rdzv.NodesWaiting) and change.count == 0)


def one_more(tally: bytes) -> bytes:
    """Count once more."""
    return tally + b"1"


def say_counted(tally: bytes) -> None:
    """Write the tally after a count."""
    _must_count.clear()
    say("counted", tally=tally.decode())


def begin(url: str) -> None:
    """With several hosts, log, and count at each SIGUSR1."""
    if "," in url:
        logging.basicConfig(level=logging.INFO)
        signal.signal(signal.SIGUSR1, lambda *_: _must_count.set())


async def live(url: str, name: str) -> None:
    """Run a node that awaits."""
    async with rdzv.connect(url, node_id=name) as handler:
        round = -1
        changed = asyncio.Event()

        async def listen() -> None:
            async with handler.changes() as changes:
                async for change in changes:
                    if say_told(change, round):
                        changed.set()

        listening = asyncio.create_task(listen())
        try:
            while True:
                try:
                    info = await handler.next_rendezvous()
                except (rdzv.RendezvousConnectionError, rdzv.RendezvousTimeoutError) as error:
                    say("error", error=str(error))
                    await asyncio.sleep(TRIES_AGAIN_AFTER)
                    continue
                round = info.round
                changed.clear()
                try:
                    say_in(info, await info.participants())
                except rdzv.RendezvousError:
                    say_in(info, None)
                while not changed.is_set():
                    with outcome_said(info.round) as value:
                        await info.store.set(f"by/{info.rank}", value)
                    if _must_count.is_set():
                        say_counted(await handler.change_counts(one_more))
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(changed.wait(), WRITES_EVERY)
                say("leaving", round=round)
        finally:
            listening.cancel()


@contextlib.contextmanager
def outcome_said(round: int) -> Iterator[str]:
    """Write a line about the outcome of a write to the round's store; yield the value to write."""
    began = time.monotonic()
    try:
        yield str(began)
    except rdzv.RoundSupersededError:
        say("fenced", round=round)
    except rdzv.RendezvousError as error:
        say("error", error=str(error))
    else:
        say_wrote(round, began)


def live_blocking(url: str, name: str) -> None:
    """Run a node that blocks. It listens in another thread."""
    with rdzv.sync.connect(url, node_id=name) as handler:
        round = -1
        changed = threading.Event()

        def listen() -> None:
            with contextlib.suppress(rdzv.RendezvousError, CancelledError), handler.changes() as changes:
                for change in changes:
                    if say_told(change, round):
                        changed.set()

        threading.Thread(target=listen, daemon=True).start()
        while True:
            try:
                info = handler.next_rendezvous()
            except (rdzv.RendezvousConnectionError, rdzv.RendezvousTimeoutError) as error:
                say("error", error=str(error))
                time.sleep(TRIES_AGAIN_AFTER)
                continue
            round = info.round
            changed.clear()
            try:
                say_in(info, info.participants())
            except rdzv.RendezvousError:
                say_in(info, None)
            while not changed.is_set() and not handler.num_nodes_changed():
                with outcome_said(info.round) as value:
                    info.store.set(f"by/{info.rank}", value)
                if _must_count.is_set():
                    say_counted(handler.change_counts(one_more))
                changed.wait(WRITES_EVERY)
            say("leaving", round=round)


def main(url: str, name: str, twin: str) -> None:
    """Run a node until the run is closed."""
    begin(url)
    try:
        if twin == "awaited":
            asyncio.run(live(url, name))
        else:
            live_blocking(url, name)
    except (rdzv.RendezvousClosedError, rdzv.RendezvousGracefulExitError):
        say("closed")


if __name__ == "__main__":
    main(*sys.argv[1:4])

"""A member of a run on a host of a lab: it joins, joins again when its round changes, and reports events.

    python -m tests.hosts.member URL [--probe]

Each line on standard output is one JSON object with `event`: `round`, a change by its kind, `error`, and with `--probe`
`back`: the first answer of the store after a pause, by the clock that all hosts of a lab share (`time.monotonic`).
"""

import asyncio
import json
import sys
import time

import rdzv
from rdzv import Handler

PROBE_EVERY = 0.05  # seconds
PAUSE_TOLD = 0.3  # seconds without an answer after which a line is written


def say(event: str, **what: object) -> None:
    """Write one line."""
    print(json.dumps({"event": event, **what}), flush=True)


async def probe(handler: Handler) -> None:
    """Send requests to the store all the time, and report the first answer after a pause."""
    while True:
        asked = time.monotonic()
        try:
            await handler.status()
        except rdzv.RendezvousError as error:
            say("error", words=str(error))
        if (now := time.monotonic()) - asked > PAUSE_TOLD:
            say("back", at=now, after=now - asked)
        await asyncio.sleep(PROBE_EVERY)


async def take_part(handler: Handler) -> None:
    """Be a member of one round after the other, until the run is closed."""
    while True:
        info = await handler.next_rendezvous()
        say(
            "round",
            number=info.round,
            node=info.node_id,
            rank=info.rank,
            size=info.world_size,
            serves=handler.hosts_store,
            master=list(info.bootstrap_address),
            addresses=[one.address for one in await info.participants()],
        )
        async with handler.changes() as changes:
            async for change in changes:
                say(type(change).__name__, words=str(change))
                break


async def main(url: str, *, probing: bool) -> None:
    """Take part, and probe if requested."""
    async with rdzv.connect(url) as handler:
        asking = asyncio.create_task(probe(handler)) if probing else None
        try:
            await take_part(handler)
        except rdzv.RendezvousError as error:
            say("end", words=str(error))
        finally:
            if asking is not None:
                asking.cancel()
                await asyncio.wait([asking])


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], probing="--probe" in sys.argv))

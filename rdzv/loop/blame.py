"""Shell: who was the first of a round to fail, or to end it: one key of the round's store, which is written once.

Why it matters, and what follows from it, is said in `rdzv.core.round_life`. Beside its name, a member may say how it
has failed; others listen to that, where they would not notice by themselves, or hang in a collective.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final

import anyio

from rdzv.core.round_life import ASK_WITHIN
from rdzv.errors import RendezvousError, RoundSupersededError
from store import StoreError

if TYPE_CHECKING:
    from rdzv.shared_store.store import SharedStore

__all__ = ["BLAME", "be_first", "said_by", "who_failed_first"]

# Key in the round's shared store: who has ended it first, and how its work has failed, if it has.
BLAME: Final = "rdzv/ended_by"
LISTENS_FOR: Final = 1e9  # seconds: for as long as the round lasts
LISTENS_AGAIN: Final = 1.0  # seconds after the store was out of reach


def said_by(node_id: str, how: str = "") -> bytes:
    """What a member writes of itself."""
    return f"{node_id}\n{how}".encode()


async def be_first(store: SharedStore, node_id: str, how: str = "") -> bool:
    """Say that this node ends the round, and how, if its work has failed; whether it is the first that does.

    A node that cannot say so is cut off, or is in the round no more: it has that against it, not its work.
    """
    said = said_by(node_id, how)
    with anyio.move_on_after(ASK_WITHIN), contextlib.suppress(RendezvousError, StoreError):
        return await store.compare_set(BLAME, b"", said) == said
    return False


async def who_failed_first(store: SharedStore) -> tuple[str, str] | None:
    """Wait until a member has ended the round: its name, and how it has failed; None if the round is over by then."""
    listening = store.listening()
    while True:
        try:
            await listening.wait([BLAME], LISTENS_FOR)
            name, _, how = (await listening.get(BLAME)).decode().partition("\n")
        except RoundSupersededError:
            return None  # which everybody is told
        except (RendezvousError, StoreError):
            await anyio.sleep(LISTENS_AGAIN)
        else:
            return name, how

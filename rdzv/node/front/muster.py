"""Shell: waits until every member of a round has come out of `next_rendezvous`, or agrees that one never will.

For callers who then wait for one another without looking up, as PyTorch's agents do: each waits for what the others
write, for a minute, and fails if one of them died on the way. A member can die between the commit of a round and its
hearing of it, of which nobody in the round is at fault; those who are left should meet again instead.

All come to the same answer, because it is one key, which is written once: by the last member that comes (go on), or by
the first that sees one go before that (meet again). Who answered by itself would leave the others waiting for it.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final

import anyio

from rdzv.core.state import NodesLeft, NodesLost
from rdzv.errors import RendezvousError, RoundSupersededError, SharedStoreTimeoutError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from contextlib import AbstractAsyncContextManager

    from rdzv.core.state import Change
    from rdzv.shared_store.store import SharedStore

__all__ = ["wait_for_all"]

CAME: Final = "rdzv/muster/came"
ANSWER: Final = "rdzv/muster/answer"
GO_ON: Final = b"go on"
MEET_AGAIN: Final = b"meet again"


async def wait_for_all(
    changes: AbstractAsyncContextManager[AsyncIterator[Change]],
    shared: SharedStore,
    world_size: int,
    *,
    timeout: float,
) -> bool:
    """Wait for all members of the round; False if one has gone first, and all are to meet again.

    Every member calls it, once.

    Args:
        changes: What happens to the round.
        shared: What its members share.
        world_size: How many they are.
        timeout: Seconds; see `rdzv.node.front.verbs.all_here`.
    """
    store = shared.waiting_through_losses()  # whoever is lost, an answer comes
    store.set_timeout(timeout)
    answer = GO_ON
    failure: RendezvousError | None = None

    async def answer_if_one_goes() -> None:
        with contextlib.suppress(RendezvousError):  # of which the wait below hears, too
            async with changes as stream:
                async for change in stream:
                    if isinstance(change, NodesLost | NodesLeft):
                        break
            await store.compare_set(ANSWER, "", MEET_AGAIN)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(answer_if_one_goes)
        try:
            if await store.add(CAME, 1) >= world_size:
                await store.compare_set(ANSWER, "", GO_ON)
            answer = await store.get(ANSWER)
        except SharedStoreTimeoutError:
            pass
        except RoundSupersededError:
            answer = MEET_AGAIN  # it is this member that was dropped
        except RendezvousError as error:
            failure = error  # raised below, by itself and not in a group
        tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure
    return answer == GO_ON

"""Shell: the number and the handles for `torch.distributed._reconfigure`, from a round.

Since 2.14 PyTorch can change the members of a process group in place, as an experiment. All members need the same fresh
number and the handles of all by rank, exchanged in the round's store. `rdzv.torch.rounds` makes a group per round
instead: on 2.15, with 4 gloo ranks, both took equally long.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rdzv.errors import RendezvousSettingsError
from rdzv.torch.pytorch import RELEASE, reconfigure_handle
from rdzv.torch.rounds import AsyncTorchRound

if TYPE_CHECKING:
    from rdzv.loop.blocking import Round


def rendezvous_reconfigure(round: Round | AsyncTorchRound, group: Any = None) -> tuple[int, list[str]]:
    """Exchange the handles of a group's members in a round, for `torch.distributed._reconfigure`.

        uuid, handles = rdzv.torch.rendezvous_reconfigure(round)
        dist._reconfigure(uuid=uuid, handles=handles).wait()

    All members of the round call it, equally often and in the same order. It blocks.

    Args:
        round: A round of `rdzv.sync.rounds` or `rdzv.torch.rounds`; of an awaited one, call it `in_thread`.
        group: Made with `enable_reconfigure=True`; by default the process's default group.

    Returns:
        A number that is new in this run, and a handle for each rank of the round.

    Raises:
        RendezvousSettingsError: This PyTorch cannot reconfigure groups.
        RendezvousError: A member has gone, or has not called it within the store's timeout.
    """
    if reconfigure_handle is None:
        raise RendezvousSettingsError(
            f"PyTorch {'.'.join(map(str, RELEASE))} cannot reconfigure a group; 2.14 and later can"
        )
    store = round.blocking_store if isinstance(round, AsyncTorchRound) else round.store
    count = store.add(f"rdzv.reconfigure/calls/{round.rank}", 1)
    store.set(f"rdzv.reconfigure/{count}/{round.rank}", reconfigure_handle(group))
    handles = store.multi_get([f"rdzv.reconfigure/{count}/{rank}" for rank in range(round.world_size)])
    return (round.number << 16) + count, [handle.decode() for handle in handles]

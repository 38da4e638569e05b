"""The abstract handlers: the required methods, and the messages for the optional ones."""

import contextlib

import pytest

from rdzv.interface import BlockingRendezvousHandler, RendezvousHandler
from rdzv.membership import RendezvousInfo
from rdzv.sync import RendezvousInfo as BlockingInfo

FOUR = {"next_rendezvous", "num_nodes_waiting", "is_closed", "set_closed"}


class Smallest(RendezvousHandler):
    """A handler with only the required methods."""

    async def next_rendezvous(self) -> RendezvousInfo:
        raise NotImplementedError

    async def num_nodes_waiting(self) -> int:
        return 0

    async def is_closed(self) -> bool:
        return False

    async def set_closed(self, reason: str = "") -> None:
        """Do nothing."""


class BlockingSmallest(BlockingRendezvousHandler):
    def next_rendezvous(self) -> BlockingInfo:
        raise NotImplementedError

    def num_nodes_waiting(self) -> int:
        return 0

    def is_closed(self) -> bool:
        return False

    def set_closed(self, reason: str = "") -> None:
        """Do nothing."""


def test_a_backend_must_implement_four_methods() -> None:
    assert RendezvousHandler.__abstractmethods__ == FOUR
    assert BlockingRendezvousHandler.__abstractmethods__ == FOUR


@pytest.mark.parametrize("fails", [False, True])
async def test_leaving_the_block_closes_the_handler_and_lets_an_error_pass(fails: bool) -> None:
    closed = []

    class Closing(Smallest):
        async def aclose(self) -> None:
            await super().aclose()
            closed.append("awaited")

    class BlockingClosing(BlockingSmallest):
        def close(self) -> None:
            super().close()
            closed.append("blocking")

    with pytest.raises(ZeroDivisionError) if fails else contextlib.nullcontext():
        async with Closing():
            assert not fails or 1 / 0
    with pytest.raises(ZeroDivisionError) if fails else contextlib.nullcontext(), BlockingClosing():
        assert not fails or 1 / 0
    assert closed == ["awaited", "blocking"]

"""The abstract handlers: what must be written, and what is said about the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from rdzv.errors import RendezvousStateError
from rdzv.interface import BlockingRendezvousHandler, RendezvousHandler

if TYPE_CHECKING:
    from rdzv.node.handler import RendezvousInfo
    from rdzv.sync import RendezvousInfo as BlockingInfo

FOUR = {"next_rendezvous", "num_nodes_waiting", "is_closed", "set_closed"}


class Smallest(RendezvousHandler):
    """The least that a backend must write, and a note of whether it was closed."""

    closed = False

    async def next_rendezvous(self) -> RendezvousInfo:
        raise NotImplementedError

    async def num_nodes_waiting(self) -> int:
        return 0

    async def is_closed(self) -> bool:
        return False

    async def set_closed(self, reason: str = "") -> None:
        """Do nothing."""


class Closing(Smallest):
    async def aclose(self) -> None:
        await super().aclose()
        self.closed = True


class BlockingSmallest(BlockingRendezvousHandler):
    closed = False

    def next_rendezvous(self) -> BlockingInfo:
        raise NotImplementedError

    def num_nodes_waiting(self) -> int:
        return 0

    def is_closed(self) -> bool:
        return False

    def set_closed(self, reason: str = "") -> None:
        """Do nothing."""

    def close(self) -> None:
        super().close()
        self.closed = True


def test_four_methods_must_be_written() -> None:
    assert RendezvousHandler.__abstractmethods__ == FOUR
    assert BlockingRendezvousHandler.__abstractmethods__ == FOUR


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("status", ()), ("leave", ()), ("ban", ("host10", "broken")), ("unban", ("host10",))],
)
async def test_a_method_that_is_left_out_says_so(name: str, arguments: tuple[str, ...]) -> None:
    with pytest.raises(RendezvousStateError, match=f"does not offer {name}: Smallest would have to override it"):
        await getattr(Smallest(), name)(*arguments)


def test_changes_that_are_left_out_say_so() -> None:
    with pytest.raises(RendezvousStateError, match="does not offer changes"):
        Smallest().changes()


@pytest.mark.parametrize("name", ["run_id", "node_id"])
def test_a_property_that_is_left_out_says_so(name: str) -> None:
    with pytest.raises(RendezvousStateError, match=f"does not offer {name}"):
        getattr(Smallest(), name)


async def test_leaving_the_block_closes_the_handler() -> None:
    async with Closing() as handler:
        assert not handler.closed
    assert handler.closed


async def test_an_error_inside_the_block_passes_through_and_still_closes() -> None:
    handler = Closing()
    with pytest.raises(ZeroDivisionError):
        async with handler:
            raise ZeroDivisionError
    assert handler.closed


async def test_a_handler_with_nothing_open_has_nothing_to_close() -> None:
    async with Smallest() as handler:
        await handler.aclose()


def test_leaving_the_block_closes_the_blocking_handler() -> None:
    with BlockingSmallest() as handler:
        assert not handler.closed
    assert handler.closed

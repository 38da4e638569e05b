"""The public names as type checkers see them: `mypy --strict` checks this file, and it also runs."""

from typing import assert_type, get_type_hints

import rdzv
import store


async def awaited(url: str) -> None:
    """Never called; only type-checked."""
    overrides: rdzv.Overrides = {"min_nodes": 2, "join_timeout": "5m"}
    async with rdzv.connect(url, **overrides) as handler:
        info = await handler.next_rendezvous()
        shared, rank, world_size = info
        assert_type(shared, rdzv.SharedStore)
        assert_type(rank, int)
        assert_type(world_size, int)
        assert_type(await handler.history(), list[rdzv.Chapter])
        assert_type((await handler.status()).round, int | None)
        assert_type(handler, rdzv.Handler)
        await handler.drain(within=60)
        await handler.resize(min_nodes=2)
    rdzv.connect(url, min_node=2)  # type: ignore[call-arg]
    rdzv.connect(url, min_nodes=[2])  # type: ignore[arg-type]


def blocking(url: str) -> None:
    """Never called; only type-checked."""
    with rdzv.sync.connect(url, min_nodes=2) as handler:
        shared, rank, world_size = handler.next_rendezvous()
        assert_type(shared, rdzv.sync.SharedStore)
        assert_type(rank, int)
        assert_type(world_size, int)
        assert_type(handler.history(), list[rdzv.Chapter])
    rdzv.sync.connect(url, min_node=2)  # type: ignore[call-arg]


async def test_the_information_of_a_round_unpacks_as_three_values() -> None:
    async with store.serve() as server, rdzv.connect(f"{server.url}/job", min_nodes=1, is_host=False) as handler:
        info = await handler.next_rendezvous()
        shared, rank, world_size = info
        assert (shared, rank, world_size) == (info.store, info.rank, info.world_size)
        assert "RendezvousInfo(run_id='job'" in repr(info)
        assert hash(info) == hash(info)


def test_overrides_can_be_evaluated() -> None:
    assert get_type_hints(rdzv.Overrides)["min_nodes"] == int | str | None

"""Callers that are held back come in as there is room, first come first served."""

from __future__ import annotations

import asyncio

import pytest

from store.client.room import Room

pytestmark = pytest.mark.virtual_time


class House:
    """There is room for so many who have asked, or are about to."""

    def __init__(self, most: int) -> None:
        self.most, self.asked = most, 0
        self.room = Room(lambda about_to_ask: self.asked + about_to_ask < self.most)
        self.came: list[str] = []

    async def come(self, name: str, timeout: float | None = None) -> bool:
        if not self.room.free and not await self.room.wait(timeout):
            return False
        self.asked += 1
        self.came.append(name)
        return True

    def go(self) -> None:
        self.asked -= 1
        self.room.changed()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_who_came_first_comes_in_first_and_nobody_passes_those_who_wait() -> None:
    house = House(most=1)
    assert await house.come("a")
    waiting = [asyncio.create_task(house.come(name)) for name in "bcd"]
    await settle()
    house.go()
    late = asyncio.create_task(house.come("late"))
    for _ in range(4):
        await settle()
        house.go()
    await asyncio.gather(*waiting, late)
    assert house.came == ["a", "b", "c", "d", "late"]


async def test_a_turn_that_was_given_counts_until_its_caller_has_asked() -> None:
    house = House(most=2)
    await house.come("a")
    await house.come("b")
    waiting = [asyncio.create_task(house.come(name)) for name in "cde"]
    await settle()
    house.go()
    house.room.changed()  # as when several replies come in one packet
    await settle()
    assert house.came == ["a", "b", "c"]
    for task in waiting[1:]:
        task.cancel()
    assert await waiting[0]


async def test_who_gives_up_leaves_the_turn_to_the_next() -> None:
    house = House(most=1)
    await house.come("a")
    late = asyncio.create_task(house.come("late", timeout=1.0))
    gone, stays = asyncio.create_task(house.come("gone")), asyncio.create_task(house.come("stays"))
    await asyncio.sleep(2.0)
    assert await late is False
    house.go()  # its turn is given to the one that is cancelled before it has run
    gone.cancel()
    assert await stays
    assert house.came == ["a", "stays"]


async def test_all_are_let_in_when_there_is_nothing_to_wait_for() -> None:
    house = House(most=1)
    await house.come("a")
    waiting = [asyncio.create_task(house.come(name)) for name in "bc"]
    await settle()
    house.room.let_all_in()
    assert await asyncio.gather(*waiting) == [True, True]
    assert not house.room.free

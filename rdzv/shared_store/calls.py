"""Shell: the methods of a shared store, each with its plan.

The half that blocks is made from the one that awaits, by `tools/blocking.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable
    from datetime import timedelta

    from rdzv.shared_store.fencing import Plan
    from rdzv.shared_store.operations import Plans

__all__ = ["SharedCalls"]

T = TypeVar("T")


class SharedCalls(ABC):
    """Every method of `torch.distributed.Store` that asks for something."""

    _plans: Plans

    @abstractmethod
    async def _run(self, plan: Plan[T], timeout: timedelta | float | None = None) -> T:
        """Carry out a plan."""

    async def set(self, key: str, value: str | bytes) -> None:
        """Write a value."""
        await self._run(self._plans.set(key, value))

    async def get(self, key: str) -> bytes:
        """Wait for a key, and read it."""
        return await self._run(self._plans.get(key))

    async def add(self, key: str, amount: int) -> int:
        """Add to the number that a key holds in decimal, a missing key counting from 0; the sum."""
        return await self._run(self._plans.add(key, amount))

    async def append(self, key: str, value: str | bytes) -> None:
        """Append to what a key holds, a missing key counting as empty."""
        await self._run(self._plans.append(key, value))

    async def wait(self, keys: Iterable[str], timeout: timedelta | float | None = None) -> None:
        """Wait until all keys exist. A queue exists while it holds anything."""
        await self._run(self._plans.wait(keys), timeout)

    async def check(self, keys: Iterable[str]) -> bool:
        """Return whether all keys exist now."""
        return await self._run(self._plans.check(keys))

    async def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        """Write the desired value if the key holds the expected one, or is missing and nothing is expected.

        Returns:
            What the key holds now; if it is missing and something was expected, what was expected.
        """
        return await self._run(self._plans.compare_set(key, expected_value, desired_value))

    async def delete_key(self, key: str) -> bool:
        """Delete a key; whether it was there."""
        return await self._run(self._plans.delete_key(key))

    async def num_keys(self) -> int:
        """Return how many keys of this round hold values."""
        return await self._run(self._plans.num_keys())

    async def list_keys(self) -> list[str]:
        """Return the keys of this round that hold values, sorted."""
        return await self._run(self._plans.list_keys())

    async def multi_get(self, keys: Iterable[str]) -> list[bytes]:
        """Wait for all keys, and read them as they are at one moment."""
        return await self._run(self._plans.multi_get(keys))

    async def multi_set(self, keys: Iterable[str], values: Iterable[str | bytes]) -> None:
        """Write several values at once: nobody sees some of them without the others."""
        await self._run(self._plans.multi_set(keys, values))

    async def queue_push(self, key: str, value: str | bytes) -> None:
        """Append an item to a queue."""
        await self._run(self._plans.queue_push(key, value))

    async def queue_pop(self, key: str, block: bool = True) -> bytes:
        """Take the first item of a queue; with `block`, wait until there is one.

        Raises:
            QueueEmptyError: There is none, and `block` is False.
        """
        return await self._run(self._plans.queue_pop(key, block))

    async def queue_len(self, key: str) -> int:
        """Return how many items a queue holds."""
        return await self._run(self._plans.queue_len(key))

    async def barrier(self, key: str, world_size: int, timeout: timedelta | float | None = None) -> None:
        """Wait until `world_size` callers have come. Each key is good for one barrier; who gave up counts as come."""
        await self._run(self._plans.barrier(key, world_size), timeout)

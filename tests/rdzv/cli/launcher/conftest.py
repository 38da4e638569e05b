"""A store for launchers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import store

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@pytest.fixture
async def server() -> AsyncIterator[str]:
    async with store.serve("127.0.0.1", 0) as served:
        yield served.url

"""A store for launchers."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

import store


@pytest.fixture
async def server() -> AsyncIterator[str]:
    async with store.serve("127.0.0.1", 0) as served:
        yield served.url

"""Which event loop our own threads run on."""

from __future__ import annotations

import asyncio
import importlib.util

import pytest

import store
from store import loops
from tests.support.processes import require


def module_of_loop() -> str:
    async def here() -> str:
        return type(asyncio.get_running_loop()).__module__

    with asyncio.Runner(loop_factory=loops.loop_factory()) as runner:
        return runner.run(here())


def test_uvloop_is_used_where_it_is_installed() -> None:
    require("uvloop")
    assert module_of_loop().startswith("uvloop")


def test_asyncio_does_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert module_of_loop().startswith("asyncio")


@pytest.mark.parametrize("fast", [True, False])
def test_portals_take_the_same_loop(monkeypatch: pytest.MonkeyPatch, fast: bool) -> None:
    if fast:
        require("uvloop")
    else:
        monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert loops.backend_options() == {"loop_factory": loops.loop_factory()}
    with store.sync.serve() as server, store.sync.connect(server.url) as client:
        assert client.put("a", b"") == 1

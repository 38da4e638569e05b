"""Shell: which event loop our own threads run on: uvloop's where it is installed, through a loop factory."""

from __future__ import annotations

import asyncio
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["backend_options", "loop_factory"]


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """What makes the event loops of our threads and commands."""
    if importlib.util.find_spec("uvloop") is not None:
        import uvloop

        factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
        return factory
    return asyncio.new_event_loop


def backend_options() -> dict[str, Any]:
    """The same, as anyio's portals take it."""
    return {"loop_factory": loop_factory()}

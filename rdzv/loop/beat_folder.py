"""Shell: the steps of processes that know nothing of rdzv: each writes its number into a file of its own.

    echo 1204 > "$RDZV_BEAT_DIR/$LOCAL_RANK"

A node is as far as the last of its processes: one that hangs is seen, however far the others beside it are.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final

import anyio

from rdzv.core.stopping import step_of

if TYPE_CHECKING:
    from pathlib import Path

    from rdzv.membership import Membership
    from rdzv.node.front.known import Known
    from rdzv.node.node import Node

__all__ = ["BEAT_DIR", "forget_beats", "look_at_beats", "start_to_follow"]

BEAT_DIR: Final = "RDZV_BEAT_DIR"
"""In the environment of processes: in which folder they say how far they are."""

LOOKS_EVERY = 0.25  # seconds
DIGITS_MOST = 20


def start_to_follow(handler: Known, folder: Path) -> None:
    """Take the steps of a node's processes from a folder until its present round is over; from any thread."""
    node, membership = handler.own_node, handler.membership
    if membership is not None:
        handler.start(_follow(node, membership, folder))


def forget_beats(folder: Path) -> None:
    """Forget what the processes of another round have written; the folder is made anew if `/tmp` was cleaned up."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        with contextlib.suppress(OSError):
            path.unlink()


def look_at_beats(membership: Membership, folder: Path) -> None:
    """Take the step that a node's processes have told of last, without waiting for the next look."""
    step = _last_of(folder)
    if step is not None:
        membership.beats.beat(step)


async def _follow(node: Node, membership: Membership, folder: Path) -> None:
    while membership.over is None:
        step = await node.loop.apart(lambda: _last_of(folder))  # a disk that hangs must not hold the node up
        if step is not None:
            membership.beats.beat(step)
        await anyio.sleep(LOOKS_EVERY)


def _last_of(folder: Path) -> int | None:
    """The step of the process that is least far; None before any has said one."""
    steps = []
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            with contextlib.suppress(OSError, ValueError):  # it is being written
                steps.append(step_of(int(path.read_bytes()[:DIGITS_MOST])))
    return min(steps, default=None)

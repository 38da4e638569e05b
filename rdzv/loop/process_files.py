"""The files of processes that do not use rdzv: their begun steps, and PyTorch's error files.

The node's step is the lowest of its processes' steps, so that a hanging process is noticed.
"""

from __future__ import annotations

import contextlib
import json
import os
from typing import TYPE_CHECKING, Final

import anyio

from rdzv.core.stopping import as_step

if TYPE_CHECKING:
    from pathlib import Path

    from rdzv.membership import Membership
    from rdzv.node.front.node_view import NodeView
    from rdzv.node.node import Node

BEAT_DIR: Final = "RDZV_BEAT_DIR"

LOOKS_EVERY = 0.25  # seconds between readings of the files
DIGITS_MOST = 20
ERROR_BYTES_MOST: Final = 2**20
CHARACTERS_MAX: Final = 200  # the most characters of an exception's line that other nodes get


def follow_step_files(handler: NodeView, folder: Path) -> None:
    """Read the steps of a node's processes in a folder until the node's round is over; thread-safe."""
    node, membership = handler.own_node, handler.membership
    if membership is not None:
        handler.spawn(_note_process_steps(node, membership, folder))


def clear_step_folder(folder: Path) -> None:
    """Delete an earlier round's steps; make the folder anew if `/tmp` was cleaned up."""
    with contextlib.suppress(OSError):  # the disk is full or read-only, which must not end a healthy node
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.iterdir():
            with contextlib.suppress(OSError):
                path.unlink()


def note_lowest_step(membership: Membership, folder: Path) -> None:
    """Read and record the step of a node's processes now."""
    step = _lowest_step(folder)
    if step is not None:
        membership.beats.beat(step)


async def _note_process_steps(node: Node, membership: Membership, folder: Path) -> None:
    while membership.over is None:
        step = await node.loop.run_in_new_thread(lambda: _lowest_step(folder))  # a hung disk must not block the node
        if step is not None:
            membership.beats.beat(step)
        await anyio.sleep(LOOKS_EVERY)


def _lowest_step(folder: Path) -> int | None:
    steps = []
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            with contextlib.suppress(OSError, ValueError, TypeError):  # skip a file being written
                steps.append(as_step(int(_read_file_start(path, DIGITS_MOST))))
    return min(steps, default=None)


def _read_file_start(path: str | Path, most: int) -> bytes:
    # Do not block on a pipe without a writer.
    with open(path, "rb", buffering=0, opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as file:
        return file.read(most)


def read_exception_line(file: str | Path) -> str:
    """Return the first line of a process's exception, as `@record` wrote it; "" if its error file has none."""
    try:
        message = json.loads(_read_file_start(file, ERROR_BYTES_MOST))["message"]
        text = message["message"] if isinstance(message, dict) else message
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ""
    lines = text.strip().splitlines() if isinstance(text, str) else []
    return lines[0][:CHARACTERS_MAX] if lines else ""

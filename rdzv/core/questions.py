"""An operator's question to a node, and the answer. A question's key is below `head/`, which nodes watch."""

from __future__ import annotations

import zlib
from typing import Final

from rdzv.core.stored import Stored, checked_text
from rdzv.errors import RendezvousStateError

STACKS: Final = "stacks"  # asks a launcher for its processes' Python stacks
KILL: Final = "chaos kill"  # asks a launcher with `--allow-chaos` to kill itself and its processes at once
ANSWER_TTL: Final = 60.0  # seconds that a question and its answer are kept
ANSWER_BYTES_MOST: Final = 4 * 1024 * 1024  # limit of an unpacked answer: a few packed bytes could unpack to gigabytes


class OperatorQuestion(Stored, kw_only=True):
    """An operator's question to one node's launcher."""

    called = "a question to the nodes"

    what: str  # `STACKS` or `KILL`; other questions get no answer
    node_id: str


def compress_answer(text: str) -> bytes:
    """Compress an answer: the stacks of many threads are similar, and shrink to a tenth."""
    return zlib.compress(checked_text("the answer", text, most=ANSWER_BYTES_MOST).encode())


def decompress_answer(value: bytes) -> str:
    """Unpack an answer; raise `RendezvousStateError` if invalid."""
    unpacking = zlib.decompressobj()
    try:
        text = unpacking.decompress(value, ANSWER_BYTES_MOST)
    except zlib.error as error:
        raise RendezvousStateError(f"an answer cannot be read: {error}") from error
    if not unpacking.eof and not unpacking.unconsumed_tail:
        raise RendezvousStateError("an answer cannot be read: its end is missing")
    return text.decode(errors="replace")

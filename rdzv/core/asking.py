"""Pure: what an operator asks of a node of a run, and how it answers: for the stacks of their processes, say.

A question is a key under the head, so that every node hears it by the watch that it has anyway; it goes by itself after
a while. The node that it is for writes its answer under `answers/`, where whoever asks waits.
"""

from __future__ import annotations

import zlib
from typing import Final

from rdzv.core.stored import Stored
from rdzv.errors import RendezvousStateError

__all__ = ["ANSWER_TTL", "KILL", "STACKS", "Question", "pack_answer", "unpack_answer"]

STACKS: Final = "stacks"  # asks a launcher for the Python stacks of the processes that it runs
# Asks a launcher that allows it to end at once, with its processes, as a machine does that dies.
KILL: Final = "chaos kill"
ANSWER_TTL: Final = 60.0  # seconds for which a question and its answers are kept
ANSWER_BYTES_MOST: Final = 4 * 1024 * 1024  # of an answer that is unpacked; what packs well must not fill a memory


class Question(Stored, kw_only=True):
    """What is asked."""

    called = "a question to the nodes"

    what: str  # `STACKS`; a node that knows no such thing keeps silent
    node_id: str  # who is asked


def pack_answer(text: str) -> bytes:
    """Pack an answer; stacks of many threads are alike, and take a tenth of the room."""
    return zlib.compress(text.encode())


def unpack_answer(value: bytes) -> str:
    """Unpack an answer.

    Raises:
        RendezvousStateError: It is none of ours.
    """
    unpacking = zlib.decompressobj()
    try:
        text = unpacking.decompress(value, ANSWER_BYTES_MOST)
    except zlib.error as error:
        raise RendezvousStateError(f"an answer cannot be read: {error}") from error
    if not unpacking.eof and not unpacking.unconsumed_tail:
        raise RendezvousStateError("an answer cannot be read: its end is missing")
    return text.decode(errors="replace")

"""Pure: whether SQLite's write-ahead log has lost changes that were durable.

SQLite reads its log up to the first frame that is not as it was written, and takes whatever follows for the rest of a
write that a crash cut off. That is right for the last transaction, which may never have been synced. But with
`synchronous=FULL` no frame of the next transaction is written before the last is on the disk: a frame that follows on a
commit, beyond what SQLite has read, proves that the commit was durable, and that it was damaged later.

The layout (https://sqlite.org/walformat.html): a header of 32 bytes, then frames of 24 bytes and a page each. A frame
has the log's two salts, a mark if it ends a transaction, and a checksum of all frames up to it. Frames with other salts
are left over from before the log began anew. Frames that do not follow on the one before them by their checksums are
left over from a transaction that was rolled back.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import IO

__all__ = ["frames_read", "is_damaged"]

HEADER = struct.Struct(">8I")
FRAME = struct.Struct(">6I")
MAGIC = 0x377F0682  # and one more if checksums are of big-endian words
MX_FRAME_AT = 16  # in the index of the log, the -shm file: how many frames SQLite reads


def frames_read(index: bytes) -> int | None:
    """How many frames SQLite has found good, by the head of its index of the log; None if that says nothing."""
    if len(index) < MX_FRAME_AT + 4:
        return None
    (frames,) = struct.unpack_from("=I", index, MX_FRAME_AT)
    return int(frames)


@dataclass(frozen=True, slots=True)
class _Log:
    """The head of a log."""

    order: str
    page_size: int
    salts: tuple[int, int]

    @property
    def frame_bytes(self) -> int:
        return FRAME.size + self.page_size


def is_damaged(file: IO[bytes], *, size: int, frames_read: int) -> bool:
    """Whether there is proof beyond the frames that SQLite reads of changes that were durable.

    Args:
        file: The log.
        size: Its bytes.
        frames_read: How many of its frames SQLite has found good.
    """
    head = file.read(HEADER.size)
    if len(head) < HEADER.size or not any(head):
        return False  # nothing has been written to it
    log = _log_from(head)
    if log is None:
        return size > HEADER.size  # the head is synced before the first frame is written
    for index in range(frames_read, (size - HEADER.size) // log.frame_bytes - 1):
        file.seek(HEADER.size + index * log.frame_bytes)
        _, committed, *salts, check1, check2 = FRAME.unpack(file.read(FRAME.size))
        if committed and (*salts,) == log.salts:
            file.seek(HEADER.size + (index + 1) * log.frame_bytes)
            if _follows(file.read(log.frame_bytes), log, (check1, check2)):
                return True
    return False


def _log_from(head: bytes) -> _Log | None:
    magic, _, page_size, _, salt1, salt2, *checksum = HEADER.unpack(head)
    if magic & ~1 != MAGIC:
        return None
    order = ">" if magic & 1 else "<"
    if _checksum(head[: HEADER.size - 8], order, (0, 0)) != (*checksum,):
        return None
    return _Log(order, page_size, (salt1, salt2))


def _follows(frame: bytes, log: _Log, checksum: tuple[int, int]) -> bool:
    """Whether a frame was written after one of this checksum."""
    _, _, *salts, check1, check2 = FRAME.unpack_from(frame)
    if (*salts,) != log.salts:
        return False
    checksum = _checksum(frame[:8], log.order, checksum)
    return _checksum(frame[FRAME.size :], log.order, checksum) == (check1, check2)


def _checksum(data: bytes, order: str, start: tuple[int, int]) -> tuple[int, int]:
    first, second = start
    words = struct.unpack(f"{order}{len(data) // 4}I", data)
    for index in range(0, len(words), 2):
        first = (first + words[index] + second) & 0xFFFFFFFF
        second = (second + words[index + 1] + first) & 0xFFFFFFFF
    return first, second

"""Detects that SQLite's write-ahead log has lost durable changes.

SQLite reads its log up to the first damaged frame, and ignores the rest, as if a crash had cut it off. But with
`synchronous=FULL`, frames are written only after the previous transaction is on the disk. So if a valid frame follows a
commit that SQLite does not read, this commit was durable, and was damaged later.

The log's layout: https://sqlite.org/walformat.html. Frames with other salts than the log's header are from before the
log's restart; frames with other checksums are from a rolled-back transaction.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import IO

HEADER = struct.Struct(">8I")
FRAME = struct.Struct(">6I")
MAGIC = 0x377F0682  # the log's first number, plus 1 if checksums are of big-endian words
MX_FRAME_AT = 16  # the offset, in the -shm file, of the number of frames that SQLite reads


def frames_sqlite_reads(index: bytes) -> int | None:
    """Return how many frames SQLite reads, according to the index of its log; None if the index is too short."""
    if len(index) < MX_FRAME_AT + 4:
        return None
    (frames,) = struct.unpack_from("=I", index, MX_FRAME_AT)
    return int(frames)


def is_wal_damaged(file: IO[bytes], *, size: int, frames_sqlite_reads: int) -> bool:
    """Return True if the log proves that durable changes follow the frames that SQLite reads."""
    head = file.read(HEADER.size)
    if len(head) < HEADER.size or not any(head):
        return False  # no transaction was written to the log
    magic, _, page_size, _, *salts, check1, check2 = HEADER.unpack(head)
    order = ">" if magic & 1 else "<"
    if magic & ~1 != MAGIC or _checksum(head[: HEADER.size - 8], order, (0, 0)) != (check1, check2):
        return size > HEADER.size  # frames follow a header that is synced first, so the header was damaged later
    frame_bytes = FRAME.size + page_size
    for index in range(frames_sqlite_reads, (size - HEADER.size) // frame_bytes - 1):
        file.seek(HEADER.size + index * frame_bytes)
        _, committed, *its_salts, check1, check2 = FRAME.unpack(file.read(FRAME.size))
        if committed and its_salts == salts:
            file.seek(HEADER.size + (index + 1) * frame_bytes)
            if _is_next_frame(file.read(frame_bytes), salts, order, (check1, check2)):
                return True
    return False


def _is_next_frame(frame: bytes, salts: list[int], order: str, checksum: tuple[int, int]) -> bool:
    _, _, *its_salts, check1, check2 = FRAME.unpack_from(frame)
    checksum = _checksum(frame[:8], order, checksum)
    return its_salts == salts and _checksum(frame[FRAME.size :], order, checksum) == (check1, check2)


def _checksum(data: bytes, order: str, start: tuple[int, int]) -> tuple[int, int]:
    first, second = start
    words = struct.unpack(f"{order}{len(data) // 4}I", data)
    for index in range(0, len(words), 2):
        first = (first + words[index] + second) & 0xFFFFFFFF
        second = (second + words[index + 1] + first) & 0xFFFFFFFF
    return first, second

"""The outbox: what `tests/recorded/store_server.rows` does not show of it."""

import random

from store.engine.sessions import ByteCount
from store.server.outbox import PIECE_BYTES, Outbox


def test_a_frame_larger_than_a_piece_is_taken_in_pieces_without_a_copy() -> None:
    outbox = Outbox(ByteCount())
    large = random.Random(1).randbytes(3 * PIECE_BYTES + 5)
    outbox.queue(large)
    outbox.queue(b"after")
    pieces = []
    while outbox.ready:
        pieces.append(outbox.take_piece())
    assert [len(piece) for piece in pieces] == [PIECE_BYTES] * 3 + [5, 5]
    assert b"".join(pieces) == large + b"after"
    assert isinstance(pieces[0], memoryview)

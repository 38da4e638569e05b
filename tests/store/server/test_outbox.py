"""The outbox: frames in order, held until they may be sent, in pieces, and every byte counted until it has gone."""

import random

from store.engine.sessions import ByteCount
from store.server.outbox import PIECE_BYTES, Outbox, SharedChunks, SharedFrame, frame_memory


def taken(outbox: Outbox) -> bytes:
    sent = b""
    while outbox.ready:
        sent += outbox.take_piece()
    return sent


def test_frames_are_taken_in_order_and_those_that_are_held_after_their_release() -> None:
    outbox = Outbox(ByteCount())
    outbox.queue(b"a")
    outbox.hold(b"c", 7)
    outbox.hold(b"d", 8)
    outbox.queue(b"b")
    assert taken(outbox) == b"ab"
    assert outbox.held
    assert outbox.release_held(7)
    assert taken(outbox) == b"c"
    assert not outbox.release_held(8)
    assert taken(outbox) == b"d"
    assert outbox.bytes == 0


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


def test_queued_bytes_count_until_the_transport_has_sent_them() -> None:
    budget = ByteCount()
    one, other = Outbox(budget), Outbox(budget)
    one.queue(bytes(1000))
    other.hold(bytes(500), 1)
    assert budget.bytes == one.bytes + other.bytes == frame_memory(1000) + frame_memory(500)
    one.take_piece()
    one.note_unsent(400)
    assert one.bytes == 400
    one.note_unsent(0)
    assert one.bytes == 0
    other.note_unsent(30)
    other.clear()
    assert budget.bytes == other.bytes == 30, "what the transport has it keeps"


def test_the_rest_of_a_frame_that_has_begun_is_kept_so_that_a_farewell_is_understood() -> None:
    outbox = Outbox(ByteCount())
    outbox.queue(bytes(PIECE_BYTES + 9))
    outbox.queue(b"never said")
    outbox.take_piece()
    outbox.clear(but_begun=True)
    outbox.queue(b"sorry")
    assert taken(outbox) == bytes(9) + b"sorry"
    assert outbox.bytes == 0


def test_several_frames_are_taken_together_up_to_about_one_piece() -> None:
    outbox = Outbox(ByteCount())
    for _ in range(10):
        outbox.queue(bytes(PIECE_BYTES // 4))
    sizes = []
    while outbox.ready:
        sizes.append(len(outbox.take_piece()))
    assert sum(sizes) == 10 * (PIECE_BYTES // 4)
    assert max(sizes) <= PIECE_BYTES
    assert len(sizes) < 10


def test_shared_bytes_count_in_each_outbox_and_once_in_all_of_them_until_the_last_has_let_go() -> None:
    budget = ByteCount()
    outboxes = [Outbox(budget) for _ in range(4)]
    large = random.Random(1).randbytes(3 * PIECE_BYTES)
    shared = SharedChunks((b"before", large, b"after"))
    for number, outbox in enumerate(outboxes):
        if number % 2:
            outbox.hold(SharedFrame(b"head %d" % number, shared), 1)
        else:
            outbox.queue(SharedFrame(b"head %d" % number, shared))
    assert [outbox.bytes for outbox in outboxes] == [frame_memory(6 + shared.size)] * 4
    assert budget.bytes == 4 * frame_memory(6) + frame_memory(shared.size)
    outboxes[1].release_held(1)
    assert [taken(outbox) for outbox in outboxes[:2]] == [b"head %dbefore" % n + large + b"after" for n in range(2)]
    outboxes[2].take_piece()
    outboxes[2].clear(but_begun=True)
    assert budget.bytes == 2 * frame_memory(6) + frame_memory(shared.size)
    outboxes[3].clear()
    assert budget.bytes == frame_memory(6) + frame_memory(shared.size)
    outboxes[2].queue(b"sorry")
    assert taken(outboxes[2]) == (b"head 2before" + large + b"aftersorry")[PIECE_BYTES:], "the rest of it comes first"
    assert budget.bytes == shared.holders == 0


def test_a_large_chunk_of_a_shared_frame_is_not_copied() -> None:
    large = bytes(3 * PIECE_BYTES)
    frame = SharedFrame(b"head", SharedChunks((b"", large, b"")))
    part = frame.slice(PIECE_BYTES, 2 * PIECE_BYTES)
    assert isinstance(part, memoryview)
    assert part.obj is large
    small = Outbox(ByteCount())
    small.queue(b"a")
    small.queue(SharedFrame(b"b", SharedChunks((b"c", b"d"))))
    assert taken(small) == b"abcd"

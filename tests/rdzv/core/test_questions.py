"""Questions to nodes and their answers are packed and unpacked without loss; foreign bytes raise an error."""

import zlib

import pytest

from rdzv.core.questions import ANSWER_BYTES_MOST, compress_answer, decompress_answer
from rdzv.errors import RendezvousStateError


def test_an_answer_is_packed_and_unpacked_and_a_very_large_one_is_cut() -> None:
    assert decompress_answer(compress_answer("File «a.py»")) == "File «a.py»"
    assert len(decompress_answer(zlib.compress(b"a" * (ANSWER_BYTES_MOST + 1)))) == ANSWER_BYTES_MOST


def test_bytes_that_are_no_answer_are_an_error() -> None:
    with pytest.raises(RendezvousStateError):
        decompress_answer(b"\xc1")

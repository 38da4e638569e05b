"""Counts the elements that a msgpack body claims to hold, before any of them is decoded.

A byte on the wire, such as an empty array, can take seventy bytes of memory, and msgpack allocates the length that an
array claims. So `wire` counts the elements of bodies larger than a few kilobytes, and rejects a body with too many.
Counting reads the first byte of each element (https://github.com/msgpack/msgpack/blob/master/spec.md#formats), so a
large value costs no more than a small one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Generator


# Indexed by an element's first byte: its size without elements inside, or 0 if a length or a count follows.
_SIZE = [
    *[1] * 0xA0,  # from 0x00: small numbers, and maps and arrays of up to 15 entries
    *range(1, 33),  # from 0xA0: text of up to 31 bytes
    *[1] * 4,  # from 0xC0: nil, unused, false, true
    *[0] * 6,  # from 0xC4
    *(5, 9, 2, 3, 5, 9, 2, 3, 5, 9),  # from 0xCA: larger numbers
    *(3, 4, 6, 10, 18),  # from 0xD4: extensions of 1, 2, 4, 8 and 16 bytes
    *[0] * 7,  # from 0xD9
    *[1] * 32,  # from 0xE0: small negative numbers
]
# Indexed by an element's first byte: the number of elements inside, if it is a map or array of up to 15 entries.
_INSIDE = [*[0] * 0x80, *range(0, 32, 2), *range(16), *[0] * 0x60]
# Map an element's first byte to the number of bytes of the length, or of the count, that follows it.
_LENGTH = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xC7: 1, 0xC8: 2, 0xC9: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}  # bytes, extensions, text
_COUNT = {0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}  # arrays, maps
_EXTENSIONS = (0xC7, 0xC8, 0xC9)  # extensions have a byte for their type after the length
_MAPS = (0xDE, 0xDF)
_EMPTY = (0x80, 0x90)
COUNTED_AT_ONCE = 8192  # elements between two pauses: about 1.5 ms
EMPTY_MAX = 8  # the most empty arrays and maps, which cost most per byte; a valid message has up to four


def count_elements(body: memoryview | bytes, most: int) -> Generator[None, None, int]:
    """Count the elements of a body, nested ones included, until there are more than `most`; `ValueError` if invalid."""
    at, size = 0, len(body)
    count, met, empty = 1, 0, 0
    while met < count:
        if count > most:
            return count
        if count > size or at >= size:
            raise ValueError("it claims to hold more than it has bytes for")
        met += 1
        if not met % COUNTED_AT_ONCE:
            yield
        first = body[at]
        if _SIZE[first]:
            at += _SIZE[first]
            count += _INSIDE[first]
            if first in _EMPTY:
                empty += 1
                if empty > EMPTY_MAX:
                    raise ValueError("it has too many empty arrays")
        elif first in _COUNT:
            width = _COUNT[first]
            inside = int.from_bytes(body[at + 1 : at + 1 + width], "big")
            count += inside * 2 if first in _MAPS else inside
            at += 1 + width
        else:
            width = _LENGTH[first]
            at += 1 + width + int.from_bytes(body[at + 1 : at + 1 + width], "big") + (first in _EXTENSIONS)
    if at > size:
        raise ValueError("it claims to hold more than it has bytes for")
    return count

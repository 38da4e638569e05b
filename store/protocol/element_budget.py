"""Pure: counts the elements that a msgpack body claims to hold, before any of them is made.

A byte on the wire, such as an empty array, can take seventy bytes of memory, and msgpack allocates the length that an
array claims. So `wire` counts the elements of bodies larger than a few kilobytes, and rejects a body with more elements
than any message may have.

Empty arrays and maps, which cost most per byte, are counted separately: no message has more than a few.

Counting reads the first byte of each element (https://github.com/msgpack/msgpack/blob/master/spec.md#formats), so a
large value costs no more than a small one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Generator


def _small() -> tuple[list[int], list[int]]:
    """Return an element's size and its number of nested elements, by its first byte; 0 if that does not give both."""
    size, inside = [0] * 256, [0] * 256
    for first in range(256):
        if first < 0x80 or first >= 0xE0 or first in (0xC0, 0xC1, 0xC2, 0xC3):  # small numbers, nil, false, true
            size[first] = 1
        elif first < 0x90:  # a map of up to 15
            size[first], inside[first] = 1, 2 * (first & 0x0F)
        elif first < 0xA0:  # an array of up to 15
            size[first], inside[first] = 1, first & 0x0F
        elif first < 0xC0:  # text of up to 31 bytes
            size[first] = 1 + (first & 0x1F)
    for width, numbers in ((1, (0xCC, 0xD0)), (2, (0xCD, 0xD1)), (4, (0xCA, 0xCE, 0xD2)), (8, (0xCB, 0xCF, 0xD3))):
        for first in numbers:
            size[first] = 1 + width
    for power in range(5):  # extensions of 1, 2, 4, 8 and 16 bytes
        size[0xD4 + power] = 2 + 2**power
    return size, inside


_SIZE, _INSIDE = _small()
# By first byte: how many bytes the length of the content, or the number of elements, has.
_LENGTH = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xC7: 1, 0xC8: 2, 0xC9: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}  # bytes, extensions, text
_COUNT = {0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}  # arrays, maps
_EXTENSIONS = (0xC7, 0xC8, 0xC9)  # they have one byte more, for their type
_MAPS = (0xDE, 0xDF)
_EMPTY = (0x80, 0x90)
COUNTED_AT_ONCE = 8192  # elements: about a millisecond and a half
EMPTY_MAX = 8  # a guarded transaction without conditions and operations has four


def count_elements(body: memoryview | bytes, most: int) -> Generator[None, None, int]:
    """Count the elements of a body, nested ones included, in steps, until there are more than `most`.

    `ValueError`: the body claims more than it has bytes for, ends early, or has too many empty arrays.
    """
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

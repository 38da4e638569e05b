"""Pure: text of others, made fit for a terminal and a log.

Names, reasons and error messages come from whoever can connect. A control character among them could clear a screen,
change what a line seems to say, or forge a line of its own.
"""

from __future__ import annotations

import unicodedata

__all__ = ["printable"]

LETTERS_MOST = 1000  # of one text; a reason is a sentence, and a log is no place for more


def printable(text: str, *, most: int = LETTERS_MOST) -> str:
    r"""Return a text with its control characters escaped as Python writes them (`\x1b`), and shortened."""
    if len(text) > most:
        text = f"{text[:most]}..."
    if text.isprintable():
        return text
    return "".join(map(_escaped, text))


def _escaped(letter: str) -> str:
    # C: control, format (which turns the direction of writing), surrogate, unassigned; Z: separators of lines.
    if letter == " " or letter.isprintable() or unicodedata.category(letter) == "Zs":
        return letter
    return letter.encode("unicode_escape").decode("ascii")

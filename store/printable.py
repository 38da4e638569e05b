"""Escapes control characters, which could clear a screen or forge a log line; writes durations in words."""

from __future__ import annotations

import itertools
import logging
import re
import unicodedata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

LETTERS_MOST = 1000  # characters of a text, by default


def printable(text: str, *, most: int = LETTERS_MOST) -> str:
    r"""Return a text with its control characters escaped as Python writes them (`\x1b`), and shortened."""
    if len(text) > most:
        text = f"{text[:most]}..."
    return text if text.isprintable() else "".join(map(_escape_letter, text))


def make_logger(name: str) -> logging.Logger:
    """Return the logger of this name; it escapes the texts among its arguments."""
    log = logging.getLogger(name)
    log.addFilter(_escape_record)
    return log


def _escape_record(record: logging.LogRecord) -> bool:
    if isinstance(record.args, tuple):
        record.args = tuple(printable(str(one)) if isinstance(one, str | BaseException) else one for one in record.args)
    return True


def short_names(names: Collection[str], most: int) -> str:
    """Return the first `most` names, and the number of others: "a, b and 3 more"."""
    shown = ", ".join(itertools.islice(names, most))
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown


def plural(count: int, what: str = "node") -> str:
    """Return "1 node", "2 nodes"."""
    return f"{count} {what}{'' if count == 1 else 's'}"


def time_text(seconds: float) -> str:
    """Return a duration in words: "9 min 50 s", "10 s", "2 h"."""
    whole = round(seconds)
    parts = ((whole // 3600, "h"), (whole // 60 % 60, "min"), (whole % 60, "s"))
    return " ".join(f"{number} {unit}" for number, unit in parts if number) or "0 s"


_DURATION = re.compile(r"\b\d+(\.\d+)? (h|min|s)\b( \d+ (min|s)\b)*")


def without_durations(text: str) -> str:
    """Return a text without its durations, to see if anything else has changed."""
    return _DURATION.sub("...", text)


def _escape_letter(letter: str) -> str:
    # Escape the categories C (control and format characters, surrogates, unassigned) and Z (but not blanks: Zs).
    if letter == " " or letter.isprintable() or unicodedata.category(letter) == "Zs":
        return letter
    return letter.encode("unicode_escape").decode("ascii")

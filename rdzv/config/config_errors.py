"""Errors for wrong settings. Each message is one sentence with the value, its limit and a remedy."""

from __future__ import annotations

import difflib
import reprlib
from typing import TYPE_CHECKING, Final, NoReturn

from rdzv.errors import RendezvousSettingsError

if TYPE_CHECKING:
    from collections.abc import Mapping

_brief: Final = reprlib.Repr()
_brief.maxstring = _brief.maxother = 80
_brief.maxdict = _brief.maxlist = _brief.maxtuple = _brief.maxset = _brief.maxfrozenset = 4
_brief.maxlevel = 3

NUMBER_DIGITS_MAX: Final = 4000  # Python does not convert integers of more than 4,300 digits to text


def refuse(sentence: str) -> NoReturn:
    """Raise `RendezvousSettingsError`. A call, unlike `raise`, fits into an expression."""
    raise RendezvousSettingsError(sentence)


def brief(value: object) -> str:
    """Return a value's repr, shortened for an error."""
    if isinstance(value, int) and abs(value) >= 10**NUMBER_DIGITS_MAX:
        return f"a whole number of more than {NUMBER_DIGITS_MAX} digits"
    return _brief.repr(value)


def suggest(name: str, known: Mapping[str, object], *, within: float = 0.6) -> str:
    """Return " (did you mean ...?)" if a known name is similar, else ""."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=within)
    return f" (did you mean {close[0]}?)" if close else ""

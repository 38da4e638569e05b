"""Pure: what `rdzv top` draws: one screen of a run, however many nodes it has.

    summary       phase and reason, the round, how many are in, missing, waiting; what it has cost
    exceptions    who is missing, since when and why; who is refused; who waits
    members       a page of them

What does not fit is counted. A store that does not answer is said first, and what is shown below is then of before.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from rdzv.display.status import exceptions, member_lines, summary
from store.printable import in_words, printable

if TYPE_CHECKING:
    from rdzv.core.state import RunStatus
    from rdzv.display.history import Account

__all__ = ["Frame", "Line", "draw"]

EXCEPTIONS_SHARE: Final = 0.5  # of the lines below the summary, that exceptions may take
LEAST_LINES: Final = 6  # of a screen: with fewer, it is taken to have so many


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line, and how it is meant: "bad", "good", "soft", or "" for nothing in particular."""

    text: str
    meant: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """What is to be drawn.

    Attributes:
        status: How the run stood when it was last read.
        cost: What it has cost until then.
        read_ago: Seconds since it was read.
        silent_for: Seconds for which the store has not answered; None if it does.
        answers_in: Seconds that it took to answer the last time.
        page: Which page of members, from 0.
    """

    status: RunStatus
    cost: Account | None = None
    read_ago: float = 0.0
    silent_for: float | None = None
    answers_in: float = 0.0
    page: int = 0


def draw(frame: Frame, *, width: int, height: int) -> tuple[list[Line], int]:
    """Return the lines of a screen, `height` of `width` letters at most, and how many pages of members it has."""
    height = max(height, LEAST_LINES)
    status = _as_of_now(frame)
    lines = [_link(frame)]
    first, *rest = summary(status)
    lines.append(Line(text=first, meant="bad" if status.absent_count else "good" if status.members else ""))
    lines.extend(Line(text=text) for text in rest)
    if frame.cost is not None:
        lines.append(Line(text=str(frame.cost), meant="soft"))
    lines = lines[: height - 1]
    room = height - len(lines) - 1  # the last line says what can be pressed
    lines += _exceptions(status, max(int(room * EXCEPTIONS_SHARE), room - len(status.members)))
    count, room = len(status.members), max(height - len(lines) - 1, 0)
    pages = max(-(-count // room), 1) if room else 1
    page = frame.page % pages
    lines += [Line(text=text) for text in member_lines(status, slice(page * room, (page + 1) * room))]
    lines = lines[: height - 1]
    where = f"members {page * room + 1}-{min((page + 1) * room, count)} of {count:,}; " if pages > 1 else ""
    keys = "n next page, p previous, q quit" if pages > 1 else "q quit"
    lines.append(Line(text=f"{where}{keys}", meant="soft"))
    return [replace(line, text=_fitted(line.text, width)) for line in lines], pages


def _as_of_now(frame: Frame) -> RunStatus:
    """The status with what is missing for as long as it is by now."""
    absent = tuple(
        replace(one, ago=None if one.ago is None else one.ago + frame.read_ago) for one in frame.status.absent
    )
    return replace(frame.status, absent=absent)


def _link(frame: Frame) -> Line:
    if frame.silent_for is not None:
        text = f"the store has not answered for {in_words(frame.silent_for)}; what follows is as it was before"
        return Line(text=text, meant="bad")
    return Line(text=f"the store answers in {frame.answers_in * 1000:.1f} ms", meant="soft")


def _exceptions(status: RunStatus, room: int) -> list[Line]:
    texts = exceptions(status)
    lines = [Line(text=text, meant="bad" if text.lstrip().startswith("missing") else "") for text in texts]
    if len(lines) > room:
        more = len(lines) - max(room - 1, 0)
        lines = [
            *lines[: max(room - 1, 0)],
            Line(text=f"             and {more} more that are missing, refused or wait"),
        ]
    return lines[: max(room, 0)]


def _fitted(text: str, width: int) -> str:
    text = printable(text)
    return text if len(text) <= width else f"{text[: max(width - 1, 0)]}…"

"""Pure: what `rdzv top` draws: one screen of a run, however many nodes it has.

    summary       phase and reason, the round, how many are in, missing, waiting; what it has cost
    exceptions    who is missing, since when and why; who is refused; who waits
    members       the first of them

What does not fit is counted. A store that does not answer is said first, and what is shown below is then of before.
In a narrow window the summary and the exceptions go on in further lines, and those of members are cut.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from rdzv.display.status import exceptions, member_lines, summary
from store.printable import in_words, printable

if TYPE_CHECKING:
    from rdzv.core.report import RunStatus
    from rdzv.display.history import Account

__all__ = ["Frame", "Line", "draw"]

EXCEPTIONS_SHARE: Final = 0.5  # of the lines below the summary, that exceptions may take
LEAST_LINES: Final = 6  # of a screen: with fewer, it is taken to have so many
WRAPPED_FROM: Final = 16  # lines of a screen: a lower one has no room for a sentence in several
LEAST_WRAPPED: Final = 20  # letters of a line
FURTHER: Final = " " * 6  # before what goes on in a further line


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
    """

    status: RunStatus
    cost: Account | None = None
    read_ago: float = 0.0
    silent_for: float | None = None
    answers_in: float = 0.0


def draw(frame: Frame, *, width: int, height: int) -> list[Line]:
    """Return the lines of a screen, `height` of `width` letters at most."""
    height = max(height, LEAST_LINES)
    status = _as_of_now(frame)
    lines = [_link(frame)]
    first, *rest = summary(status)
    lines.append(Line(text=first, meant="bad" if status.absent_count else "good" if status.members else ""))
    lines.extend(Line(text=text) for text in rest)
    if frame.cost is not None:
        lines.append(Line(text=str(frame.cost), meant="soft"))
    wraps = height >= WRAPPED_FROM and width >= LEAST_WRAPPED
    if wraps:
        lines = [part for line in lines for part in _wrapped(line, width)]
    lines = lines[: height - 1]
    room = height - len(lines) - 1  # the last line counts the members that do not fit, and says what can be pressed
    most = max(int(room * EXCEPTIONS_SHARE), room - len(status.members))
    lines += _exceptions(status, most, width=width if wraps else None)
    room = max(height - len(lines) - 1, 0)
    lines += [Line(text=text) for text in member_lines(status, slice(room))]
    lines = lines[: height - 1]
    unseen = len(status.members) - room
    lines.append(Line(text=f"{f'and {unseen:,} more members; ' if unseen > 0 else ''}q quit", meant="soft"))
    return [replace(line, text=_fitted(line.text, width)) for line in lines]


def _as_of_now(frame: Frame) -> RunStatus:
    """The status with what is missing for as long as it is by now."""
    absent = tuple(
        one.replace(ago=None if one.ago is None else one.ago + frame.read_ago) for one in frame.status.absent
    )
    return replace(frame.status, absent=absent)


def _link(frame: Frame) -> Line:
    if frame.silent_for is not None:
        text = f"the store has not answered for {in_words(frame.silent_for)}; what follows is as it was before"
        return Line(text=text, meant="bad")
    return Line(text=f"the store answers in {frame.answers_in * 1000:.1f} ms", meant="soft")


def _exceptions(status: RunStatus, room: int, *, width: int | None) -> list[Line]:
    """Return the first of them that fit, each whole, and how many more there are."""
    texts = exceptions(status)
    lines: list[Line] = []
    for number, text in enumerate(texts):
        line = Line(text=text, meant="bad" if text.lstrip().startswith("missing") else "")
        parts = [line] if width is None else _wrapped(line, width)
        is_last = number == len(texts) - 1
        if len(lines) + len(parts) > room - (not is_last):  # one line is kept to count the others
            unnamed = status.absent_count - len(status.absent)  # for all of whom there is one line
            more = len(texts) - number + max(unnamed - 1, 0)
            return [*lines, Line(text=f"             and {more:,} more that are missing, refused or wait")][
                : max(room, 0)
            ]
        lines += parts
    return lines


def _wrapped(line: Line, width: int) -> list[Line]:
    """Return a line as several, none of them longer than the window."""
    text = printable(line.text)
    indent = text[: len(text) - len(text.lstrip())][: width // 2]
    parts = textwrap.wrap(text.lstrip(), width, initial_indent=indent, subsequent_indent=FURTHER)
    return [replace(line, text=part) for part in parts] or [line]


def _fitted(text: str, width: int) -> str:
    text = printable(text)
    return text if len(text) <= width else f"{text[: max(width - 1, 0)]}…"

"""Pure: the screen of `rdzv status --watch`.

    summary       phase and reason, the round, the numbers of members, missing and waiting nodes; its cost
    exceptions    nodes that are missing, since when and why; refused ones; waiting ones
    members       the first of them

Exceptions take at most half of the screen; the others are counted. If the store does not answer, the first line says
so, and the other lines are old. The caller wraps long lines, and cuts the screen at its height.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from rdzv.core.report import as_of
from rdzv.display.status import exceptions, member_lines, summary
from store.printable import in_words, printable

if TYPE_CHECKING:
    from rdzv.core.report import Account, RunStatus


class Line(NamedTuple):
    """One line. `meant` decides its colour: "bad", "good", "soft" or ""; if `may_be_cut`, it is not wrapped."""

    text: str
    meant: str = ""
    may_be_cut: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """The contents of a screen. Times are in seconds."""

    status: RunStatus  # the last one that was read
    cost: Account | None = None  # of the run until then
    read_ago: float = 0.0
    silent_for: float | None = None  # the time without an answer of the store; None if it answers
    answers_in: float = 0.0  # its last round trip


def draw(frame: Frame, *, height: int) -> list[Line]:
    """Return at least the lines for a screen of this height, if there are as many."""
    status = as_of(frame.status, frame.read_ago, reason=frame.status.reason)
    first, *rest = summary(status)
    lines = [_link(frame), Line(first, "bad" if status.missing_count else "good" if status.members else "")]
    lines += map(Line, rest)
    if frame.cost is not None:
        lines.append(Line(str(frame.cost), "soft"))
    texts, most = exceptions(status), max(height // 2, 1)
    lines += [Line(text, "bad" if text.lstrip().startswith("missing") else "") for text in texts[:most]]
    if len(texts) > most:
        unnamed = max(status.missing_count - len(status.missing) - 1, 0)  # `texts` has one line for all unnamed nodes
        lines.append(Line(f"             and {len(texts) - most + unnamed:,} more that are missing, refused or wait"))
    lines += [Line(text, may_be_cut=True) for text in member_lines(status, slice(height))]
    return [line._replace(text=printable(line.text)) for line in lines]


def _link(frame: Frame) -> Line:
    if frame.silent_for is not None:
        text = f"the store has not answered for {in_words(frame.silent_for)}; what follows is as it was before"
        return Line(text, "bad")
    return Line(f"the store answers in {frame.answers_in * 1000:.1f} ms; q quits", "soft")

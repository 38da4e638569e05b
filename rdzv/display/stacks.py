"""Pure: the stacks of many processes, grouped by equality, the odd ones first.

A launcher answers with a text of faulthandler's for each of its processes. Two processes are alike if their main
threads stand in the same lines of the same functions.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from rdzv.core.stuck.judging import describe
from store.printable import first_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from rdzv.core.stuck.judging import Heard

__all__ = ["ProcessStack", "describe_groups", "processes_in"]

NAMED_MOST: Final = 8
FRAMES_MOST: Final = 12

_PROCESS = re.compile(r"^(?:rank (?P<rank>\S+), )?process (?P<pid>\d+)(?: \(.*?\))?(?P<silent> does not answer.*)?:?$")
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+")
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<function>.*)$')


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessStack:
    """Where one process stands.

    Attributes:
        node_id: On which node.
        rank: Its rank, or its process id if it has none.
        frames: Of its main thread, the innermost first; empty if it did not answer.
        note: What is known of it instead.
    """

    node_id: str
    rank: str
    frames: tuple[str, ...]
    note: str = ""


def processes_in(node_id: str, text: str) -> list[ProcessStack]:
    """Read what a launcher has answered."""
    found: list[ProcessStack] = []
    rank, threads = "", list[list[str]]()

    def close() -> None:
        if rank:
            # faulthandler shows the thread that began last first, so that the main thread comes last.
            found.append(ProcessStack(node_id=node_id, rank=rank, frames=tuple(threads[-1]) if threads else ()))

    for line in text.splitlines():
        if (process := _PROCESS.match(line)) is not None:
            close()
            threads = []
            rank = process["rank"] or f"process {process['pid']}"
            if process["silent"]:
                note = process["silent"].strip().rstrip(":")
                found.append(ProcessStack(node_id=node_id, rank=rank, frames=(), note=note))
                rank = ""
        elif _THREAD.match(line):
            threads.append([])
        elif threads and (frame := _FRAME.match(line)) is not None:
            threads[-1].append(f"{frame['function']} ({frame['file']}:{frame['line']})")
    close()
    if not found:
        found.append(ProcessStack(node_id=node_id, rank="", frames=(), note=text.strip()[:200] or "it says nothing"))
    return found


def describe_groups(stacks: Iterable[ProcessStack], heard: Mapping[str, Heard], *, silent: Iterable[str]) -> list[str]:
    """Return the groups as lines of text, those of few processes first.

    Args:
        stacks: Of all processes.
        heard: How far each node has come that has said so.
        silent: Nodes that have not answered.
    """
    groups: dict[tuple[tuple[str, ...], str], list[ProcessStack]] = {}
    for one in stacks:
        groups.setdefault((one.frames, one.note), []).append(one)
    lines = []
    for (frames, note), alike in sorted(groups.items(), key=lambda group: (len(group[1]), group[0])):
        what = f"in {frames[0].partition(' ')[0]}" if frames else note
        nodes = dict.fromkeys(one.node_id for one in alike)
        steps = {heard[node_id].note.step for node_id in nodes if node_id in heard}
        at = _steps(sorted(step for step in steps if step is not None))
        lines.append(f"{len(alike)} {what}{at}: {first_of(list(nodes), NAMED_MOST)}")
        if len(alike) == 1 and alike[0].node_id in heard:
            known = heard[alike[0].node_id]
            lines.append(f"    {describe(known.note, ago=known.ago)}")
        lines.extend(f"    {frame}" for frame in frames[:FRAMES_MOST])
        if len(frames) > FRAMES_MOST:
            lines.append(f"    and {len(frames) - FRAMES_MOST} more frames")
    unheard = sorted(silent)
    if unheard:
        lines.append(f"no answer: {first_of(unheard, NAMED_MOST)}")
    return lines


def _steps(steps: list[int]) -> str:
    if not steps:
        return ""
    return f" (step {steps[0]:,})" if len(steps) == 1 else f" (steps {steps[0]:,} to {steps[-1]:,})"

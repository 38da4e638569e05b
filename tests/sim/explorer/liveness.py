"""Says which local variables of a suspended coroutine may still be read: what the others hold, nothing can come of.

A coroutine that waits keeps whatever its variables hold, such as the last event that it has dealt with. So two moments
from which the very same comes would be told apart by what is left over from the way to them. A variable is live at an
instruction if some way from there reads it before it is written: the dataflow analysis of every compiler, over
Python's own instructions, with the ways into exception handlers.
"""

from __future__ import annotations

import dis
import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import types

__all__ = ["dead_locals"]

_NEVER_GOES_ON = ("RETURN_", "RAISE_VARARGS", "RERAISE", "JUMP_FORWARD", "JUMP_BACKWARD")


def dead_locals(frame: types.FrameType) -> list[Any]:
    """Return what those local variables hold that are not read any more."""
    code = frame.f_code
    live = _live_at(code).get(frame.f_lasti)
    if live is None:
        return []
    there = dict(frame.f_locals)
    if type(frame.f_locals) is dict:
        frame.f_locals.clear()
    cells = code.co_cellvars
    return [there[name] for name in code.co_varnames if name in there and name not in live and name not in cells]


@functools.cache
def _live_at(code: types.CodeType) -> dict[int, frozenset[str]]:
    """Return the variables that are live after the instruction at each offset."""
    bytecode: Any = dis.Bytecode(code)  # `exception_entries` has no type in mypy's stubs
    instructions = list(bytecode)
    following = [one.offset for one in instructions[1:]] + [-1]
    ways: dict[int, list[int]] = {}
    for one, after in zip(instructions, following, strict=True):
        ends = one.opname.startswith(_NEVER_GOES_ON)
        jumps = [one.argval] if one.opcode in dis.hasjrel or one.opcode in dis.hasjabs else []
        ways[one.offset] = jumps + ([] if ends or after < 0 else [after])
    for entry in bytecode.exception_entries:
        for one in instructions:
            if entry.start <= one.offset < entry.end:
                ways[one.offset].append(entry.target)
    reads: dict[int, frozenset[str]] = {}
    writes: dict[int, frozenset[str]] = {}
    for one in instructions:
        reads[one.offset], writes[one.offset] = _effects(one)
    before: dict[int, frozenset[str]] = {one.offset: frozenset() for one in instructions}
    changed = True
    while changed:
        changed = False
        for one in reversed(instructions):
            after_it = frozenset().union(*(before[offset] for offset in ways[one.offset]))
            # An instruction that raises may not have written: what is live in its handler is so before it, too.
            handled = frozenset().union(
                *(before[entry.target] for entry in bytecode.exception_entries if entry.start <= one.offset < entry.end)
            )
            now = reads[one.offset] | (after_it - writes[one.offset]) | handled
            if now != before[one.offset]:
                before[one.offset], changed = now, True
    return {one.offset: frozenset().union(*(before[offset] for offset in ways[one.offset])) for one in instructions}


def _effects(one: dis.Instruction) -> tuple[frozenset[str], frozenset[str]]:
    """Return the local variables that an instruction reads first, and those that it then writes."""
    if "FAST" not in one.opname:
        return frozenset(), frozenset()
    names = one.argval if isinstance(one.argval, tuple) else (one.argval,)
    if one.opname == "STORE_FAST_LOAD_FAST":
        return frozenset(names[1:]) - {names[0]}, frozenset(names[:1])
    if one.opname.startswith("STORE_FAST"):
        return frozenset(), frozenset(names)
    return frozenset(names), frozenset()  # LOAD_..., DELETE_FAST, and what is not known: it counts as a reading

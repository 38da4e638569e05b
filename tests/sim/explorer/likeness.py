"""Writes down the state of a running program, so that two states with the same future have the same text.

The state of a node cannot be listed by hand: it is its objects, and the position of each of its coroutines. So every
object that is reachable from its tasks is walked, as the garbage collector does, also those that only a suspended frame
holds. Facts that the collector does not see are added: the position of a frame, and whether a future is done.

Numbers that serve only as ids, or for their order, are replaced by their rank: revisions, and the ids of requests and
leases. These begin at `REVISIONS`, `REQUESTS` and `LEASES`, so that their kind follows from their size. The product
only compares them. Revisions are compared only for some keys, each with those of its kind. Times are written as seconds
from now, and sentences are left out.
"""

import asyncio
import gc
import logging
import re
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from hashlib import blake2b
from operator import itemgetter
from typing import Any

from store.messages import CHOSEN_LEASE_LEAST

__all__ = ["LEASES", "REQUESTS", "REVISIONS", "digest", "written"]

REVISIONS = 1_000_000
REQUESTS = 2_000_000
LEASES = 3_000_000

FAR = 60.0  # seconds ahead; a later timer does not go off before a path has ended
LONG_AGO = 2.0  # seconds; the longest span that is measured from a past time is a last call of one second

_NUMBERS = re.compile(r"(?<![0-9.])([123])(\d{6})(?![0-9.])")
_PACKED = re.compile(rb"\xce(\x00[\x0f-\x3d]..)", re.DOTALL)

_PASSED_OVER = (
    type,
    types.ModuleType,
    types.CodeType,
    types.BuiltinFunctionType,
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
    logging.Logger,
    property,
    re.Pattern,
    weakref.ref,
)


_SUSPENDED = (types.CoroutineType, types.AsyncGeneratorType, types.GeneratorType)
_END: Any = object()


def written(
    roots: Iterable[Any], *, now: float, instead: Mapping[type, Callable[[Any], Iterable[Any] | None]]
) -> list[str]:
    """Write down every object that is reachable from these.

    Args:
        roots: The objects to begin with.
        now: The time.
        instead: For a type, a function that returns the parts of an object to write down; None for all of them.
    """
    out: list[str] = []
    seen: dict[int, int] = {}
    stack: list[Iterator[Any]] = [iter(roots)]
    while stack:
        one: Any = next(stack[-1], _END)
        if one is _END:
            stack.pop()
            out.append(")")
            continue
        kind = type(one)
        if one is None or kind is bool:
            out.append(repr(one))
        elif kind is int:
            chosen = one - CHOSEN_LEASE_LEAST
            out.append(str(chosen if LEASES <= chosen < 2 * LEASES else one))
        elif kind is str:
            out.append(f"'{one}'" if " " not in one else "words")
        elif kind is bytes or kind is bytearray:
            out.append(repr(_unpacked(bytes(one))))
        elif kind is float:
            out.append(_time(one - now) if one > 900.0 else f"{one:.6f}")
        elif isinstance(one, Enum):
            out.append(one.name)
        elif isinstance(one, _PASSED_OVER):
            out.append(getattr(one, "__name__", kind.__name__))
        elif id(one) in seen:
            out.append(f"#{seen[id(one)]}")
        else:
            seen[id(one)] = len(seen)
            out.append(f"{kind.__name__}(")
            parts = instead[kind](one) if kind in instead else None
            stack.append(iter(_parts(one, kind, out) if parts is None else parts))
    return out


def _time(ahead: float) -> str:
    if ahead > FAR:
        return "@far"
    return f"@{ahead:.6f}" if ahead >= -LONG_AGO else "@long ago"


def _parts(one: Any, kind: type, out: list[str]) -> Iterable[Any]:
    if kind is list or kind is tuple:
        return one  # type: ignore[no-any-return]
    if kind is dict:
        return [part for item in _sorted(one) for part in item]
    if isinstance(one, set | frozenset):
        futures = [part for part in one if isinstance(part, asyncio.Future) and not isinstance(part, asyncio.Task)]
        # futures in a set have no order; each is also reached from the task that awaits it
        out.append(str(len(futures)))
        return sorted((part for part in one if part not in futures), key=_name)
    if kind is types.FunctionType:
        out.append(one.__qualname__)
        return [*(_content(cell) for cell in one.__closure__ or ()), *(one.__defaults__ or ())]
    if kind is types.MethodType:
        return [one.__func__, one.__self__]
    if kind in _SUSPENDED:
        frame = _frame_of(one)
        out.append(f"{one.__qualname__}:{frame.f_lasti if frame is not None else -1}")
        return gc.get_referents(one)
    if kind is types.FrameType:
        out.append(f"{one.f_code.co_qualname}:{one.f_lasti}")
    elif isinstance(one, asyncio.Task):
        task: Any = one  # some of its state has no public name
        out.append(f"{task._state} {task.cancelling()} {task._must_cancel}")
        return [task.get_coro(), task._fut_waiter, *([] if not task.done() else [_result(task)]), task._callbacks]
    elif isinstance(one, asyncio.Future):
        out.append(one._state)
        return [*([] if not one.done() else [_result(one)]), one._callbacks]
    elif hasattr(one, "__length_hint__"):
        out.append(str(one.__length_hint__()))
    elif hasattr(one, "__dict__"):
        _ = one.__dict__  # makes a dictionary object; without it, the collector sees only the values
    return gc.get_referents(one)


def _sorted(items: dict[Any, Any]) -> Iterable[tuple[Any, Any]]:
    return sorted(items.items(), key=itemgetter(0)) if all(type(key) is str for key in items) else items.items()


def _frame_of(one: Any) -> types.FrameType | None:
    if type(one) is types.CoroutineType:
        return one.cr_frame
    frame: types.FrameType | None = one.ag_frame if type(one) is types.AsyncGeneratorType else one.gi_frame
    return frame


def _result(future: Any) -> Any:
    if future.cancelled():
        return "cancelled"
    error = future.exception()
    return (type(error).__name__, str(error)) if error is not None else future.result()


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _name(one: Any) -> str:
    if isinstance(one, asyncio.Task):
        return one.get_name()
    return repr(one) if isinstance(one, str | int | bytes | tuple) else type(one).__name__


def _unpacked(text: bytes) -> bytes:
    """Return the bytes with revisions and ids unpacked from msgpack into decimal text."""
    return _PACKED.sub(lambda found: b" %d " % int.from_bytes(found[1]), text)


def digest(texts: Iterable[str], revisions: Mapping[int, str]) -> bytes:
    """Return a hash of the written state."""
    return blake2b(ordered(" ".join(texts), revisions).encode(errors="replace"), digest_size=16).digest()


def ordered(text: str, revisions: Mapping[int, str]) -> str:
    """Return the text with each id replaced by its rank among the ids of its kind.

    Args:
        text: The written state.
        revisions: The kind of each revision that the product compares. All other revisions are written alike.
    """
    names: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for number in sorted({found[0] for found in _NUMBERS.finditer(text)}):
        kind = {"1": revisions.get(int(number), ""), "2": "request", "3": "lease"}[number[0]]
        counts[kind] += bool(kind)
        names[number] = f"~{kind}{counts[kind]}"
    return _NUMBERS.sub(lambda found: names[found[0]], text)

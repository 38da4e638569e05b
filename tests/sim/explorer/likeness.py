"""Says of two moments of a running program whether they are alike: whether the same can come of both.

What a node is cannot be listed by hand: it is its objects, and where each of its coroutines stands. So everything that
is reached from its tasks is walked, as the garbage collector walks it, also what only a suspended frame holds, and
written down. What the collector does not see is added: where a frame stands, whether a future is done.

Numbers that only tell things apart, or before from after, are written down by their order: revisions, and the ids of
requests and leases, which begin at `REVISIONS`, `REQUESTS` and `LEASES` so that they are known by their size. Nothing
in the product does more with them than compare them. Times are written down as seconds from now.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import re
import types
import weakref
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from store.messages import CHOSEN_LEASE_LEAST

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

__all__ = ["LEASES", "REQUESTS", "REVISIONS", "digest", "written"]

REVISIONS = 1_000_000
REQUESTS = 2_000_000
LEASES = 3_000_000

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


_END: Any = object()


def written(roots: Iterable[Any], *, now: float, until: float, passed_over: Callable[[Any], bool]) -> list[str]:
    """Write down everything that is reached from these objects.

    Args:
        roots: Where to begin.
        now: The time.
        until: Floats from the beginning of time to this are times.
        passed_over: Tells what is not to be entered.
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
            out.append(f"'{one}'")
        elif kind is bytes or kind is bytearray:
            out.append(repr(_unpacked(bytes(one))))
        elif kind is float:
            out.append(f"@{one - now:.6f}" if 900.0 < one < until else repr(one))
        elif isinstance(one, _PASSED_OVER):
            out.append(getattr(one, "__name__", kind.__name__))
        elif id(one) in seen:
            out.append(f"#{seen[id(one)]}")
        elif passed_over(one):
            out.append(f"<{kind.__name__}>")
        else:
            seen[id(one)] = len(seen)
            out.append(f"{kind.__name__}(")
            stack.append(iter(_parts(one, kind, out)))
    return out


def _parts(one: Any, kind: type, out: list[str]) -> Iterable[Any]:
    if kind is list or kind is tuple:
        return one  # type: ignore[no-any-return]
    if kind is dict:
        return [part for item in one.items() for part in item]
    if isinstance(one, set | frozenset):
        return sorted(one, key=_name)
    if kind is types.FunctionType:
        out.append(one.__qualname__)
        return [*(_content(cell) for cell in one.__closure__ or ()), *(one.__defaults__ or ())]
    if kind is types.MethodType:
        return [one.__func__, one.__self__]
    if kind is types.CoroutineType:
        out.append(f"{one.__qualname__}:{one.cr_frame.f_lasti if one.cr_frame is not None else -1}")
    elif kind is types.AsyncGeneratorType:
        out.append(f"{one.__qualname__}:{one.ag_frame.f_lasti if one.ag_frame is not None else -1}")
    elif kind is types.GeneratorType:
        out.append(f"{one.__qualname__}:{one.gi_frame.f_lasti if one.gi_frame is not None else -1}")
    elif kind is types.FrameType:
        out.append(f"{one.f_code.co_qualname}:{one.f_lasti}")
    elif isinstance(one, asyncio.Task):
        task: Any = one  # some of what it is has no public name
        out.append(f"{task._state} {task.cancelling()} {task._must_cancel}")
        return [task.get_coro(), task._fut_waiter, *([] if not task.done() else [_result(task)]), task._callbacks]
    elif isinstance(one, asyncio.Future):
        out.append(one._state)
        return [*([] if not one.done() else [_result(one)]), one._callbacks]
    elif hasattr(one, "__length_hint__"):
        out.append(str(one.__length_hint__()))
    elif hasattr(one, "__dict__"):
        _ = one.__dict__  # from now on it is an object of its own; before, the collector sees its values alone
    return gc.get_referents(one)


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
    """The same, with the numbers that stand in it as msgpack has them written out."""
    return _PACKED.sub(lambda found: b" %d " % int.from_bytes(found[1]), text)


def digest(texts: Iterable[str]) -> bytes:
    """A short name for what was written down; counted numbers by their order."""
    text = " ".join(texts)
    numbers = sorted(set(_NUMBERS.findall(text)))
    order = {number: f"~{index}" for index, number in enumerate(numbers)}
    text = _NUMBERS.sub(lambda found: order[found[1], found[2]], text)
    return blake2b(text.encode(errors="replace"), digest_size=16).digest()

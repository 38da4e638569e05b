"""The pure decisions of `rdzv.core`, as tables: each function is called with random arguments of its annotated types.

A recording has the results alone. To see the arguments of a line, too: `python -m tests.recorded.decisions FUNCTION`.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib
import inspect
import pkgutil
import random
import re
import sys
import types
import typing
import zlib
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Final, Literal, TypeVar, Union, get_args, get_origin

import rdzv.core
from rdzv.core import ranks
from rdzv.core.round import Member, Round
from rdzv.core.state import Ban, NodeRecord, Progress
from rdzv.core.view import View
from store.messages import Cause, Event, EventKind
from store.records import Record
from tests.recorded.recorder import flat, shortened

WIDTH: Final = 44  # characters of a result; a longer one has a checksum in the place of its rest
NODES: Final = "n/"
NAMES: Final = [*"abcde"]

core: dict[str, types.ModuleType] = {
    one.name.removeprefix("rdzv.core."): importlib.import_module(one.name)
    for one in pkgutil.walk_packages(rdzv.core.__path__, "rdzv.core.")
}
SPACE: Final[dict[str, Any]] = {name: one for module in core.values() for name, one in vars(module).items()} | {
    "Iterable": Iterable,
    "Mapping": Mapping,
    "Sequence": Sequence,
    "Collection": Collection,
    "Any": Any,
    "Callable": Callable,
    "Container": Container,
    "ClassVar": ClassVar,
    "Event": Event,
    "Cause": Cause,
    "SupportsIndex": int,
    "T": int,
    "RankOrder": ranks.RankOrder,
    "Round": Round,
    "Progress": Progress,
    "NodeRecord": NodeRecord,
    "EventKind": EventKind,
}


@functools.cache
def hints_of(thing: Any) -> dict[str, Any]:
    """Return the types of a function's arguments, or of a record's fields."""
    return typing.get_type_hints(thing, SPACE, SPACE, include_extras=True)


class Dice:
    """Random values by type. A time `now` only grows."""

    def __init__(self, seed: str) -> None:
        self.rng = random.Random(seed)
        self.now = 100.0

    def value(self, kind: Any, name: str = "", depth: int = 0) -> Any:
        """Return a value of this type; the name of its field or argument may narrow it."""
        rng, origin, arguments = self.rng, get_origin(kind), get_args(kind)
        if name == "now" and kind is float:
            self.now += rng.choice((0.0, 0.25, 1.0, 7.5))
            return self.now
        if name == "clock":
            return lambda: self.value(float, "now")
        if kind in (dict[str, Any], dict[str, Any] | None) and name in PLAIN:
            return PLAIN[name](self)
        if origin is Annotated:
            return self.value(arguments[0], name, depth)
        if origin is Literal:
            return rng.choice(arguments)
        if origin in (Union, types.UnionType):
            return self.value(rng.choice(sorted(arguments, key=str)), name, depth)
        if origin is tuple and arguments[1:] != (...,):
            return tuple(self.value(one, name, depth) for one in arguments)
        if origin in (tuple, list, Iterable, Sequence, Collection, Container, set, frozenset):
            many = [self.value(arguments[0], name, depth + 1) for _ in range(rng.randint(0, 4))]
            return (
                self.distinct(many)
                if origin in (Sequence, Iterable)
                else (origin if origin in (tuple, set, frozenset) else list)(many)
            )
        if origin in (dict, Mapping, types.MappingProxyType):
            many = [self.value(arguments[0], "node_id", depth) for _ in range(rng.randint(0, 3))]
            return {one: self.value(arguments[1], name, depth + 1) for one in many}
        if origin is Callable or origin is type(Callable):
            return rng.choice((ranks.survivors_first, ranks.by_name, ranks.in_place, ranks.by_topology("r")))
        return self.plain(kind, name, depth)

    def distinct(self, many: list[Any]) -> list[Any]:
        """Give records the arrivals and names of different nodes."""
        if not many or not isinstance(many[0], NodeRecord):
            return many
        names = self.rng.sample([*NAMES, "n10", "n9"], len(many))
        return [
            one.replace(node_id=name, arrival=place + 3)
            for place, (one, name) in enumerate(zip(many, names, strict=True))
        ]

    def plain(self, kind: Any, name: str, depth: int) -> Any:
        """Return a value of a type without arguments."""
        rng = self.rng
        if kind in (None, type(None), Any):
            return None
        if kind is object:
            return rng.choice((None, "text", 7, b"\xff"))
        if kind is bool:
            return rng.random() < 0.4
        if kind is int:
            return rng.choice((0, 1, 2, 2, 3, 5)) if rng.random() < 0.95 else 70
        if kind is float:
            return rng.choice((0.0, 0.5, 1.0, 2.5, 10.0, 40.0, 4000.0))
        if kind is str:
            return rng.choice(
                NAMES
                if name.endswith(("node_id", "ids", "by", "accused"))
                else ("", "", *NAMES[:3], "r=1", "10.0.0.1", "127.0.0.1")
            )
        if kind is bytes:
            return rng.choice((b"", b"\x80", b"\x81\xa1a\x01", b"\xc1", zlib.compress(b"stacks")))
        if isinstance(kind, TypeVar):
            return 1
        if isinstance(kind, type) and issubclass(kind, enum.Enum):
            return rng.choice(list(kind))
        return self.made(kind, depth)

    def made(self, kind: Any, depth: int) -> Any:
        """Return an object: of a record or dataclass with random fields; in great depth, mostly defaults."""
        if kind is View:
            return walked_view(self)
        if kind is BaseException or kind is Exception:
            return ValueError("a problem")
        if issubclass(kind, Record) or dataclasses.is_dataclass(kind) or hasattr(kind, "_fields"):
            hints = hints_of(kind)
            names = (
                getattr(kind, "fields", None)
                or getattr(kind, "_fields", None)
                or [one.name for one in dataclasses.fields(kind) if one.init]
            )
            defaults = set(
                getattr(kind, "defaults", None)
                or getattr(kind, "_field_defaults", None)
                or (
                    [
                        one.name
                        for one in dataclasses.fields(kind)
                        if (one.default, one.default_factory) != (dataclasses.MISSING,) * 2
                    ]
                    if dataclasses.is_dataclass(kind)
                    else ()
                )
            )
            keep = 0.5 + 0.15 * depth
            return kind(
                **{
                    name: self.value(hints[name], name, depth + 1)
                    for name in names
                    if name not in defaults or self.rng.random() > keep
                }
            )
        if issubclass(kind, dict):
            several = [self.made(SPACE["Accusation"], 0) for _ in range(5)]
            return kind({str(key): one for key, one in enumerate(several)})
        return kind(**self.arguments(kind.__init__))

    def arguments(self, function: Any) -> dict[str, Any]:
        """Return random arguments."""
        hints = hints_of(function)
        given = {}
        for name, one in inspect.signature(function).parameters.items():
            if name != "self" and not (one.default is not one.empty and self.rng.random() < 0.3):
                given[name] = self.value(hints[name], name)
        return given


def page_of(dice: Dice) -> dict[str, Any]:
    """Return the state of a page: of two runs, one of which is chosen."""
    status = dice.made(SPACE["RunStatus"], 0)
    run = SPACE["without_ages"](SPACE["report"](status))
    runs = [
        {"run_id": name, "phase": dice.rng.choice(("gathering", "training")), "now": 1.0}
        for name in dice.rng.sample("ab", 2)
    ]
    return {
        "now": 1.0,
        "store": "s",
        "runs": runs[: dice.rng.randint(1, 2)],
        "chosen": dice.rng.choice("aaab"),
        "run": dice.rng.choice((run, run, None)),
    }


PLAIN: Final[dict[str, Callable[[Dice], dict[str, Any]]]] = {
    "full": lambda dice: SPACE["report"](dice.made(SPACE["RunStatus"], 0)),
    "plain": lambda dice: SPACE["report"](dice.made(SPACE["RunStatus"], 0)),
    "before": page_of,
    "now": page_of,
}


def walked_view(dice: Dice) -> View:
    """Return the view of a coordinator after random events."""
    rng = dice.rng
    view = View(
        NODES, needed=rng.randint(1, 3), expected=dice.value(tuple[str, ...], "ids"), tells_causes=rng.random() < 0.8
    )
    revision = 3
    names = [*NAMES, "f"]

    def record(name: str, **fields: Any) -> NodeRecord:
        made: NodeRecord = dice.made(NodeRecord, 2)
        return made.replace(node_id=name, arrival=revision, left=False, **fields)

    def commit() -> None:
        chosen = list(view.waiting)[: rng.randint(1, 4)]
        members = [
            Member(node_id=name, rank=rank, arrival=view.waiting[name].arrival) for rank, name in enumerate(chosen)
        ]
        round = Round(
            number=view.next_number,
            term=1,
            size=len(members),
            buckets=1,
            host="a",
            port=1,
            revision=revision,
            in_steps=rng.random() < 0.5,
        )
        view.note_round(round, members, now=dice.value(float, "now"))

    if rng.random() < 0.4:
        members = [Member(node_id=name, rank=rank, arrival=rank + 3) for rank, name in enumerate(names[:3])]
        progress = dice.value(Progress | None)
        view.take_over(
            Round(number=1, term=1, size=3, buckets=1, host="a", port=1, revision=9, in_steps=rng.random() < 0.5),
            members,
            progress and progress.replace(round=rng.choice((1, 1, 2))),
            progress_at=dice.value(float, "now"),
            before=dice.value(SPACE["LastCoordinator"] | None),
        )
    last_call = rng.choice((1.0, 30.0))
    for turn in range(rng.randint(2, 14)):
        revision += 1
        name = rng.choice(names)
        what = rng.choice(
            ("put", "put", "put", "put", "leave", "delete", "accuse", "commit", "stuck", "expelled", "odd", "reset")
        )
        event = Event(
            kind="delete", revision=revision, key=NODES + name, cause=rng.choice(("", "gone", "silent", "disconnected"))
        )
        if turn == 1:
            event = Event(kind="synced", revision=revision)
        elif what == "put":
            event = Event(
                kind="put", revision=revision, key=NODES + name, value=record(name).pack(), create_revision=revision
            )
        elif what == "leave":
            event = Event(kind="put", revision=revision, key=NODES + name, value=record(name).replace(left=True).pack())
        elif what == "accuse":
            said = dice.made(SPACE["Accusation"], 0).replace(round=view.number)
            event = Event(
                kind="put", revision=revision, key=f"{NODES}/accused/{said.accused}/{said.by}", value=said.pack()
            )
        elif what == "odd":
            event = Event(kind="put", revision=revision, key=NODES + name, value=b"\xc1")
        elif what == "commit" and view.synced and view.waiting:
            commit()
            continue
        elif what in ("stuck", "expelled", "commit") or (what == "reset" and turn < 6):
            live = view.records.get(name)
            view.apply_fact(SPACE["Stuck"](view.number, live.arrival if live else 0, name, "slow"))
            if what == "expelled":
                view.note_expelled(name, "stuck")
                view.apply_fact(SPACE["Standstill"](view.number, "all stand"))
                view.note_own_departure(name, stopped=rng.random() < 0.5)
            continue
        elif what == "reset":
            view.fold(Event(kind="reset", revision=0), now=dice.value(float, "now"), last_call_timeout=last_call)
            continue
        view.fold(
            event,
            now=dice.value(float, "now"),
            last_call_timeout=last_call,
            bans=dice.value(Mapping[str, Ban]) if rng.random() < 0.2 else {},
        )
    if not view.synced:
        view.fold(Event(kind="synced", revision=revision), now=dice.value(float, "now"), last_call_timeout=last_call)
    return view


def shown(value: Any) -> str:
    """Return a result in one line."""
    if isinstance(value, types.GeneratorType):
        value = list(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}
        return f"{type(value).__name__} {shown(fields)}"
    told = ", ".join(f"{name}={one}" if name else one for name, one in flat(value)) or "-"
    return re.sub(r" at 0x[0-9a-f]+", "", told)


def called(function: Callable[..., Any], given: Mapping[str, Any]) -> str:
    """Return the result of a call, or its error."""
    try:
        return shown(function(**given))
    except Exception as error:  # noqa: BLE001  it is the result
        ours = type(error).__module__.startswith("rdzv")  # the words of Python's own errors differ by release
        return f"! {type(error).__name__}{f': {error}' if ours else ''}"


def state_of(thing: Any) -> dict[str, str]:
    """Return what an object shows."""
    names = [name for name in dir(type(thing)) if isinstance(inspect.getattr_static(thing, name), property)]
    names += getattr(thing, "__dict__", {})
    return {name: shown(getattr(thing, name)) for name in sorted(names) if not callable(getattr(thing, name))}


def cases_of(name: str, thing: Any, case: int) -> tuple[str, str]:
    """Return one call in words, and its result; of a class, some calls of its methods, and what an instance shows."""
    dice = Dice(f"{name} {case}")
    if not isinstance(thing, type):
        given = dice.arguments(thing)
        return shown(given), called(thing, given)
    methods = [one for one in vars(thing) if not one.startswith("_") and inspect.isfunction(vars(thing)[one])]
    one = dice.made(thing, 0)
    told, results = [shown(one)], []
    for _ in range(4 if methods else 0):
        method = dice.rng.choice(methods)
        given = dice.arguments(getattr(thing, method))
        told.append(f"{method}({shown(given)})")
        results.append(f"{method} {called(partial(getattr(thing, method), one), given)}")
    return "; ".join(told), " | ".join([*results, shown(state_of(one))])


def things_in(module: str) -> dict[str, Any]:
    """Return the functions of a module, and its classes with methods or properties."""
    found = {}
    for name, one in vars(core[module]).items():
        mine = getattr(one, "__module__", "") == core[module].__name__ and not name.startswith("_")
        public = isinstance(one, type) and any(
            inspect.isfunction(each) or isinstance(each, property)
            for key, each in vars(one).items()
            if not key.startswith("_")
        )
        if mine and (inspect.isfunction(one) or public) and name not in LEFT_OUT:
            found[name] = one
    return found


def table(module: str, *, only: str = "") -> list[str]:
    """Return the results of one module's functions; equal ones in one line. With `only`, also their arguments."""
    lines = []
    for name, thing in things_in(module).items():
        if only not in ("", name):
            continue
        lines.append(f"{name}:")
        cases: dict[str, list[int]] = {}
        for case in range(CASES.get(name, 40)):
            given, result = cases_of(name, thing, case)
            if only:
                lines.append(f"  {case}: {given} -> {result}")
            short = shortened(result, WIDTH)
            cases.setdefault(short, []).append(case)
        if not only:
            lines += [f"  {' '.join(map(str, numbers))}: {result}" for result, numbers in cases.items()]
    return lines


def record() -> list[str]:
    """Return all tables."""
    return [line for play in RECORDINGS.values() for line in play()]


LEFT_OUT: Final = {"View", "log_unreadable", "unpack", "pack", "Stored"}
CASES: Final = {"decide": 150, "next_round": 100}
RECORDINGS: Final[dict[str, Callable[[], Iterable[str]]]] = {one: partial(table, one) for one in core if things_in(one)}

if __name__ == "__main__":
    for module in core:
        print("\n".join(table(module, only=sys.argv[1])))

"""Writes down what happens in a scenario: one line an event, with stable names for what is random."""

from __future__ import annotations

import contextlib
import logging
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import msgpack

import rdzv
from rdzv.bootstrap_check import ReachVerdict
from rdzv.core.history import History, TimeOfDayNote
from rdzv.core.round import Member, Participant, Round
from rdzv.core.state import Ban, Closed, LostStore, NodeRecord, Progress, Unban
from rdzv.core.stopping import Drain, LastBegun, Resized, RoundStop
from rdzv.core.stuck.accusing import Accusation
from rdzv.core.stuck.step_log import StepNote
from rdzv.core.stuck.tally import RunCounts
from rdzv.testing.timeline import START
from store.messages import Condition, Grant, Guarded, KeepAlive, Target, Transact
from store.records import Record

DAY: Final = 1_700_000_000.0  # the time of day at the start of each scenario
ROOT: Final = "/rdzv/job/"
KINDS: Final[dict[str, Any]] = {  # the records of keys that begin so
    "nodes//accused/": Accusation,
    "nodes//marker": None,
    "nodes/": NodeRecord,
    "begun/": LastBegun,
    "head/round": Round,
    "head/closed": Closed,
    "head/progress": Progress,
    "head/stop": RoundStop,
    "history": History,
    "head/resized": Resized,
    "head/lost_store": LostStore,
    "head/draining/": Drain,
    "head/banned/": Ban,
    "head/unbanned/": Unban,
    "tally": RunCounts,
    "head/tally": RunCounts,
}
LINE: Final = 150  # characters of a line that are shown
QUIET: Final = "quietly"  # who says what is told by its checksum only
NEAR: Final = 9  # ms within which the same line of several nodes is written once
OUTSIDE: Final = {"node_id": "", "arrival": 0, "revision": 0, "ends_in": None, "seen_at": 0.0}


def flat(value: Any, at: str = "") -> Iterator[tuple[str, str]]:
    """Yield the parts of a value with their places; without fields that have their default."""
    match value:
        case Member():
            yield at, f"{value.node_id}/{value.rank}/{value.arrival}"
        case Record():
            defaults = type(value).defaults
            for name in type(value).fields:
                one = getattr(value, name)
                if name not in defaults or one != defaults[name]:
                    yield from flat(one, f"{at}.{name}" if at else name)
        case dict() if value:
            for name, one in value.items():
                if one not in (None, "", 0, [], {}, False):
                    yield from flat(one, f"{at}.{name}" if at else str(name))
        case set() | frozenset():
            yield from flat(sorted(value), at)
        case tuple() | list() if any(isinstance(one, dict | tuple | list) for one in value):
            for place, one in enumerate(value):
                yield from flat(one, f"{at}.{place}" if at else str(place))
        case tuple() | list():
            yield at, f"[{' '.join(map(plain, value))}]"
        case _ if hasattr(value, "items"):
            yield from flat(dict(value) or "{}", at)
        case _:
            yield at, plain(value)


def plain(value: Any) -> str:
    """Return one part in short."""
    if isinstance(value, float):
        return f"{value:.3f}".rstrip("0").rstrip(".")
    if isinstance(value, bytes):
        with contextlib.suppress(UnicodeDecodeError):
            return repr(value.decode())
        return f"0x{value.hex()}"
    return repr(value) if isinstance(value, str) and (not value or " " in value) else str(value)


def shortened(line: str, most: int = LINE) -> str:
    """Return the line, with a checksum in the place of what is too long."""
    return line if len(line) <= most else f"{line[:most]}~{zlib.crc32(line.encode()):08x}"


def conditions(when: Iterable[Condition]) -> str:
    """Return the conditions of a request: of a key@REVISION, of its creation ^REVISION, that there is none (!)."""
    told = []
    for one in when:
        key, is_ = one.key.removeprefix(ROOT), one.expected
        if isinstance(is_, bytes):
            told.append(f"{key}{'?' * (one.target is Target.VALUE_IF_ANY)}=#{zlib.crc32(is_):08x}")
        elif isinstance(is_, bool):
            told.append(key if is_ else f"!{key}")
        else:
            told.append(f"{key}{'^' if one.target is Target.CREATE_REVISION else '@'}{is_}")
    return f"if {' '.join(told)}"


class Recorder(logging.Handler):
    """The lines of one scenario."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[tuple[int, str, str]] = []
        self.last: dict[str, dict[str, str]] = {}  # the last value at each place, of which only changes are written
        self.now: Callable[[], float] = lambda: START
        self.dead: set[str] = set()
        self.over: bool = False  # True: what follows is not written
        self.brief: bool | str = False  # True: requests and events are told by a checksum only; "all": all is

    def note(self, who: str, what: str) -> None:
        if who not in self.dead and not self.over:
            if self.brief == "all" or (self.brief and who != "log" and what[0] not in "*>"):
                who, what = QUIET, f"{who} {what}"
            self.lines.append((round((self.now() - START) * 1000), who, what))

    def emit(self, record: logging.LogRecord) -> None:
        minor = record.levelno < logging.WARNING
        self.note(QUIET if minor else "log", f"{record.levelname.lower()}: {record.getMessage()}")

    def changed(self, place: str, value: Any) -> str:
        """Return the parts of a value that differ from the last one at this place."""
        before, now = self.last.get(place, {}), dict(flat(value))
        self.last[place] = now
        news = [f"{name}={one}".removeprefix("=") for name, one in now.items() if before.get(name) != one]
        return ", ".join([*news, *(f"-{name}" for name in before if name not in now)])

    def value_of(self, key: str, value: bytes) -> str:
        """Return what a key's value has become."""
        kind = next((kind for prefix, kind in KINDS.items() if key.startswith(prefix)), None)
        if "/ranks/" in key or "/roster/" in key:
            return self.changed(key, (Member if "/ranks/" in key else Participant).unpack_all(value))
        if key.endswith("/reached"):
            kind = ReachVerdict
        if kind is not None:
            told = self.changed(key, kind.unpack(value, **{name: OUTSIDE[name] for name in kind.outside}))
            return told.replace("node_id='', ", "")
        with contextlib.suppress(ValueError, msgpack.UnpackException):
            read = msgpack.unpackb(value)
            return self.changed(key, read if isinstance(read, dict | list) else value)
        return self.changed(key, value)

    def request(self, request: Any) -> str:
        """Return a request in words."""
        if isinstance(request, Transact):
            grants = "".join(f" {self.request(one)}" for one in request.grants)
            then, other = ("; ".join(map(self.request, each)) for each in (request.then, request.otherwise))
            told = f"{then}{grants} {conditions(request.when)}{f' else {other}' if other else ''}"
            return told.replace("; Get", "").replace(ROOT, "")
        if isinstance(request, Grant):
            return f"Grant {request.id} {request.ttl:g} {plain(request.disconnect_ttl)} {plain(request.gone_ttl)}"
        if isinstance(request, Guarded):
            return f"{self.request(request.request)} {conditions(request.when)}"
        if isinstance(request, KeepAlive):
            return f"KeepAlive {request.lease} {self.note_of(request.note)}".rstrip()
        parts = []
        for name in type(request).fields:
            one = getattr(request, name)
            if name == "value" and hasattr(request, "key"):
                parts.append(f"{{{self.value_of(request.key.removeprefix(ROOT), one)}}}")
            elif name in ("key", "keys", "prefix"):
                parts.append(plain(one) if isinstance(one, str) else " ".join(one))
            elif name == "lease":
                parts.append(f"on {one}" if one is not None else "")
            elif one != type(request).defaults.get(name, "-"):
                parts.append(f"{name}={plain(one)}")
        return f"{type(request).__name__} {' '.join(filter(None, parts))}".replace(ROOT, "")

    def note_of(self, note: bytes) -> str:
        for kind in (StepNote, TimeOfDayNote):
            with contextlib.suppress(Exception):
                return f"{{{', '.join(f'{name}={one}' for name, one in flat(kind.unpack(note)))}}}"
        return plain(note) if note else ""

    def text(self, *, whole: bool = False) -> list[str]:
        """Return the lines, those of one moment by node, with stable names for what is random.

        Regular keep-alives are written when their pace changes; what is said quietly by a checksum, unless `whole`.
        """
        quiet, quiet_sum = 0, 0
        names: dict[str, str] = {}
        kept: dict[str, tuple[int, int]] = {}
        told: list[list[Any]] = []
        for at, who, what in sorted(self.lines, key=lambda line: line[:2]):

            def name(found: re.Match[str], at: int = at) -> str:
                word = found[0]
                if "." in word or (word[:2] == "17" and len(word) == 10):
                    day = float(word) - DAY
                    return "now" if abs(day - at / 1000) < 0.0021 else f"day+{day:.3f}".rstrip("0").rstrip(".")
                return names.setdefault(word, f"{'L' if len(word) > 12 else ''}{len(names)}")

            known = re.sub(r"machine=\w+", "machine=M", what.replace(rdzv.__version__, "RELEASE"))
            known = re.sub(r"\b\d{1,6}\.\d{6,}", lambda long: plain(float(long[0])), known)
            stable = re.sub(r"\b\d{9,}(\.\d+)?\b", "" if who == QUIET else name, known)
            if stable.startswith("KeepAlive"):
                before, pace = kept.get(stable, (-9, -9))
                kept[stable] = at, at - before
                if abs(at - before - pace) <= 1:
                    continue
            if who == QUIET and not whole:
                quiet, quiet_sum = quiet + 1, zlib.crc32(f"{at} {stable}".encode(), quiet_sum)
                continue
            there = told[-1] if told else None
            if there is not None and there[2] == stable and at - there[0] <= NEAR:
                there[1] += f" {who}{at - there[0]:+d}"
            else:
                told.append([at, who, stable])
        lines = [f"{at / 1000:.3f} {who}: {what}" for at, who, what in told]
        return lines if whole else [*map(shortened, lines), f"{quiet} lines {QUIET}: {quiet_sum:08x}"]

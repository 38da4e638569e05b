"""The engine's answers, told the time: systematic rows, the tables of limits, and seeded walks through all requests."""

from __future__ import annotations

import contextlib
import itertools
import random
import re
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import astuple
from functools import partial
from typing import Any
from unittest import mock

from store import messages
from store.disk import rows
from store.engine.engine import Engine
from store.engine.keyspace import KeyChunk
from store.engine.processes import DisconnectKind
from store.messages import Condition, Request, Target
from tests.recorded.tables import constants, sections, text
from tests.store.engine.test_limits import CASES
from tests.support.limits import limits_with

FEW = ("0", "[]", "()", "500", "False")  # of facts: not written


class Book:
    """An engine and its clock; a line for each thing that it is asked, with all that it says and that changes."""

    def __init__(self, engine: Engine, lines: list[str]) -> None:
        self.engine, self.lines, self.now = engine, lines, 1000.0
        self.connected: set[int] = set()
        self.unwritten: list[str] = []
        self.usual = "replies=[[0, 0]]"  # the facts of a kept reply to the last request
        self.last: dict[int, int] = {}
        self.saved: list[Any] = []
        self.works: dict[int, Any] = {}
        self.figures: dict[str, Any] = {}

    def write(self, what: str, response: object = None, deliveries: Any = ()) -> None:
        """Write a line."""
        state = self.engine.state
        figures = {**self.engine.figures(), "requests": 0, "due": state.leases.seconds_to_next_expiry()}
        counted = ("stored_bytes", "history_bytes", "parked_bytes", "replies_bytes", "unread_bytes")
        figures["memory_bytes"] -= sum(figures[name] for name in counted)  # of leases and sessions
        figures |= {
            "chores": self.engine.has_chores,
            "past": len(state.past._order),
            "reader": getattr(state.snapshots.oldest_snapshot, "reader", 0),
            "longest": state.keys.answer_bytes_max,
        }
        new = [f"{name}={text(figures[name])}" for name in figures if figures[name] != self.figures.get(name, 0)]
        self.figures = figures
        facts, said = self.engine.take_changeset(), []
        for each in deliveries:
            names = [name for name in type(each).__slots__ if not name.startswith("_")]
            said.append(f" !{type(each).__name__}({', '.join(text(getattr(each, name)) for name in names)})")
        if facts is not None:
            self.saved.append(facts)
            told = {name: text(getattr(facts, name)) for name in ("compacted", "last_lease", "sessions")}
            told["leases"] = text({each: terms and astuple(terms)[1:] for each, terms in facts.leases.items()})
            replies = [(reply.acknowledged, reply.request_id) for reply in facts.replies]
            told |= {
                "changes": text([event for events in facts.revisions for event in events]),
                "replies": text(replies),
            }
            frees = bool(facts.only_frees_space and (facts.leases or facts.revisions))
            told |= {"size": str(facts.size), "frees": text(frees)}
            said.append(f" disk({', '.join(f'{name}={each}' for name, each in told.items() if each not in FEW)})")
        answer = "" if response is None else f" -> {text(response)}"
        line = (
            f"{what}{answer}{''.join(said)} {' '.join(new)}".rstrip()
            .replace("46116860184273879", "CHOSEN")
            .replace(self.usual, "reply")
        )
        self.lines.append(re.sub(r"(.)\1{11,}", lambda run: f"{run[1]}*{len(run[0])}", line))

    def connect(self, peer: int, session: bytes = b"", process: bytes = b"") -> None:
        """Let a peer say hello."""
        opened = self.engine.connect(peer, session_id=session or b"s%d" % peer, process=process, now=self.now)
        if opened is not None:
            self.connected.add(peer)
            self.last.setdefault(peer, 0)
        self.write(f"{peer} connects {text(process)}", opened)

    def ask(self, peer: int, request: Request[Any], number: int = 0, acknowledged: int | None = None) -> Any:
        """Carry out the first step of a request."""
        if peer not in self.connected:
            self.connect(peer)
        number = number or self.last[peer] + 1
        self.last[peer] = max(self.last[peer], number)
        done = number - 1 if acknowledged is None else acknowledged
        response, deliveries, work = self.engine.apply(request, peer, number, done, self.now)
        self.usual = f"replies=[[{done}, {number}]]"
        if work is not None:
            self.works[peer] = work
        more = " more" if work else ""
        ack = "" if acknowledged is None else f"/{acknowledged}"
        self.write(f"{peer}.{number}{ack} {text(request)}{more}", response, deliveries)
        return response

    def go_on(self, peer: int) -> None:
        """Do the next step of a peer's long request."""
        response, deliveries, work = self.engine.continue_long_request(self.works.pop(peer))
        if work is not None:
            self.works[peer] = work
        self.write(f"{peer} goes on{' more' if work else ''}", response, deliveries)

    def chore(self) -> None:
        """Do a part of the postponed work."""
        if self.engine.has_chores:
            self.write("chore", None, self.engine.do_postponed_work())

    def wait(self, seconds: float, **unheard: float) -> None:
        """Let time pass, and look at the clock."""
        self.now += seconds
        due = self.engine.advance_lease_clock(now=self.now)
        self.now += 0.0005 * bool(unheard)  # the sockets are read
        waiting = {int(peer[1:]): since for peer, since in unheard.items()}
        self.write(f"after {seconds:g} {text(waiting)} {due}", None, self.engine.tick(now=self.now, unheard=waiting))

    def leave(self, peer: int, how: DisconnectKind) -> None:
        """Close a peer's connection."""
        self.works.pop(peer, None)
        self.connected.remove(peer)
        self.engine.disconnect(peer, now=self.now, how=how)
        self.write(f"{peer} ends: {how.name}")

    def restart(self) -> None:
        """Begin another engine with the facts that were saved."""
        with contextlib.closing(sqlite3.connect(":memory:", isolation_level=None)) as database:
            database.executescript(rows.SCHEMA)
            database.execute("INSERT INTO meta VALUES (?, ?, ?)", rows.with_checksum("store_id", self.engine.store_id))
            rows.write_group(database, self.saved, number=len(self.saved))
            self.engine = Engine.restore(rows.load_store(database), limits=self.engine.limits, now=self.now)
        self.connected.clear()
        self.works.clear()
        self.write("restart")

    def play(self, step: Any) -> None:
        """Do one step of a table."""
        match step:
            case (int(peer), Request() as request, *rest):
                self.ask(peer, request, *rest)
            case (int(peer), DisconnectKind() as how):
                self.leave(peer, how)
            case (int(peer), bytes(process), *session):
                self.connect(peer, session[0] if session else b"", process)
            case dict(unheard):
                self.wait(0.05, **unheard)
            case float(seconds):
                self.wait(seconds)
            case int(peer) if peer in self.works:
                self.go_on(peer)
            case str() if step[0] == "+":  # time of which the engine hears only with the next request
                self.now += float(step)
            case "quiet" | "aloud":
                self.lines, self.unwritten = self.unwritten, self.lines
            case "chore":
                self.chore()
            case "restart":
                self.restart()
            case str() if "=" in step:  # of the disk
                setattr(self.engine.state, step.partition("=")[0], eval(step.partition("=")[2]))
            case _:
                self.finish()

    def what_is_left(self) -> str:
        """Let all peers and leases end; return what the engine still holds."""
        state = self.engine.state
        for peer in self.connected:
            self.engine.disconnect(peer, now=self.now, how=DisconnectKind.GOODBYE)
        for _ in range(220):
            self.now += 0.29
            self.engine.advance_lease_clock(now=self.now)
            self.engine.tick(now=self.now)
            while self.engine.has_chores:
                self.engine.do_postponed_work()
        parts = (state.leases, state.leases.processes, state.watches, state.waits, state.sessions, state.snapshots)
        sizes = {f"{type(each).__name__}.{name}": value for each in parts for name, value in vars(each).items()}
        return text({name: len(each) for name, each in sizes.items() if isinstance(each, dict | list | set) and each})

    def finish(self) -> None:
        """Do all that is left."""
        for peer in tuple(self.works):
            while peer in self.works:
                self.go_on(peer)
        while self.engine.has_chores:
            self.chore()


def new_book(lines: list[str], **limits: Any) -> Book:
    """Return a book of a new durable engine."""
    lines.append(f"== {text(limits)}")
    first = limits.pop("first_revision", 0)
    return Book(Engine(store_id="store", limits=limits_with(**limits), durable=True, first_revision=first), lines)


@contextlib.contextmanager
def steps_of(small: dict[str, float]) -> Iterator[None]:
    """Set constants of the engine's modules; the size of a list is the same for all releases of Python."""
    with contextlib.ExitStack() as stack:
        for name, value in small.items():
            stack.enter_context(mock.patch(name, value))
        stack.enter_context(mock.patch.object(KeyChunk, "__sizeof__", lambda chunk: 8 * len(chunk), create=True))
        yield


def _condition(target: Target, key: str, expected: Any) -> Condition:
    return Condition(key=key, target=target, expected=expected)


NAMES: dict[str, Any] = {**vars(messages), **DisconnectKind.__members__}
TARGETS = ["MOD", "CREATED", "VALUE", "EXISTS", "OR_NONE"]  # as the tables call them
NAMES |= {name: partial(_condition, target) for name, target in zip(TARGETS, Target, strict=True)}
NAMES["pairs"] = itertools.pairwise
NAMES["CHOSEN"] = CHOSEN = messages.CHOSEN_LEASE_LEAST
NAMES["KEPT"] = messages.Grant(ttl=1.0, disconnect_ttl=0.5, gone_ttl=0.1)


TABLES = sections(__file__)
SMALL = constants(TABLES, "store.engine")
KEYS, PREFIXES, VALUES, LITTLE = (eval(row) for row in TABLES["drawn"].splitlines())
SECTIONS = ("simple", "simple", "guarded", "others", "others")
WALKS = {section: re.split(r"; |\n", TABLES[section]) for section in (*SECTIONS, "created")}


def read(line: str) -> list[Any]:
    """Return the values that a line of a table names, with those of lists in it."""
    values: list[Any] = []
    for value in eval(f"[{line}]", NAMES):
        values += value if isinstance(value, list) else [value]
    return [
        each
        for value in values
        for each in (value if type(value) is tuple and isinstance(value[0], Request) else [value])
    ]


def single_requests() -> list[str]:
    """Return each request in each state, and what another watch and a wait are told of it."""
    lines: list[str] = []
    watched = read('Watch(prefix=""), Wait(keys=("n",)), Guarded((EXISTS("k", True),), Wait(keys=("y",)))')
    requests = [request for line in TABLES["requests"].splitlines() for request in read(line)]
    for state in TABLES["states"].splitlines():
        lines.append(f"== {state}")
        for request in requests:
            book = Book(Engine(store_id="store"), [])
            for each in (*read(state), *watched):
                book.ask(1, each)
            book.connect(2)
            book.lines = []
            book.ask(2, request)
            book.finish()
            lines += [line for line in book.lines if line not in lines]  # as in another state
    return lines


def limits() -> list[str]:
    """Return the requests that reach each limit, and the one past it."""
    lines: list[str] = []
    for case in (one for one in CASES if one.most < 1e6):
        told: dict[str, Any] = {case.limit: case.most, **dict(case.others)}
        book = new_book(lines, **told)
        for request in (*case.up_to, case.past):
            book.ask(1, request, acknowledged=0 if "replies" in case.limit else None)
            book.finish()
    return lines


class Walk:
    """Random steps of several peers: requests, repeats, time, lost connections, a full disk."""

    def __init__(self, seed: int, book: Book, keys: Sequence[str]) -> None:
        self.r, self.book, self.leases, self.keys = random.Random(seed), book, [99], keys

    def one(self, section: str) -> Request[Any]:
        """Return a request of a section of the tables, with fields at random."""
        r, known = self.r, self.book.engine.revision
        fields = {
            "key": r.choice(self.keys),
            "value": r.choice(VALUES),
            "prefix": r.choice(PREFIXES),
            "amount": r.randrange(-3, 4),
            "lease": r.choice(self.leases),
            "ttl": r.choice((None, None, 0.5, 2.0)),
            "few": r.randrange(1, 9),
            "known": known,
            "names": tuple(r.sample(self.keys, r.choice((1, 1, 2, 4)))),
            "one": self.one,
            "when": self.when,
            "branch": self.branch,
        }
        fields["maybe"] = r.choice((None, fields["lease"]))
        request: Request[Any] = eval(r.choice(WALKS[section]), NAMES, fields)
        return request

    def note(self, response: object) -> None:
        """Use a granted lease in later requests."""
        if isinstance(response, messages.Granted):
            self.leases = [*self.leases[-3:], response.lease]

    def branch(self) -> tuple[Any, ...]:
        """Return operations of different keys."""
        operations: list[Any] = [self.one("simple"), self.one("simple"), self.one("created")]
        return tuple({operation.key: operation for operation in operations}.values())

    def when(self) -> tuple[Condition, ...]:
        """Return some conditions that often hold."""
        return tuple(map(self.condition, self.r.choices(self.keys, k=self.r.choice((0, 1, 1, 2)))))

    def condition(self, key: str) -> Condition:
        """Return a condition of this key."""
        entry, target = self.book.engine._keys.get(key), self.r.choice(list(Target))
        there: dict[Target, Any] = {
            Target.MOD_REVISION: entry.mod_revision if entry else 0,
            Target.CREATE_REVISION: entry.create_revision if entry else 0,
            Target.EXISTS: (entry is None) == (self.r.random() < 0.1),
        }
        return Condition(key=key, target=target, expected=there.get(target, entry.value if entry else b"1"))

    def step(self) -> None:
        """Do one thing."""
        r, book, state, peer = self.r, self.book, self.book.engine.state, self.r.randrange(1, 6)
        dice = r.random()
        if dice < 0.1:
            book.wait(r.choice((0.01, 0.1, 0.25, 0.4, 1.0, 4.0)), **{f"p{peer}": r.choice((0.0, 0.2, 9.0))})
        elif dice < 0.16 and book.engine.has_chores:
            book.chore()
        elif peer in book.works:
            book.go_on(peer)
        elif dice < 0.21 and peer in book.connected:
            book.leave(peer, r.choice(list(DisconnectKind)))
        elif peer not in book.connected:
            book.connect(peer, process=b"p%d" % r.choice((0, peer, 3)))
        elif dice < 0.23:
            state.why_only_deletes = r.choice((None, "the disk is full"))
            state.writable_bytes, state.steering_bytes = r.choice(((0, 0), (330, 0), (0, 40000)))
            book.engine.read_only = r.choice((None, None, None, None, "the disk fails"))
        elif dice < 0.26 and book.last[peer]:
            book.ask(
                peer,
                self.one(self.r.choice(SECTIONS)),
                max(book.last[peer] - r.randrange(3), 1),
                max(book.last[peer] - 5, 0),
            )
        else:
            response = book.ask(
                peer,
                self.one(self.r.choice(SECTIONS)),
                acknowledged=r.choice((None, None, max(book.last[peer] - 2, 0))),
            )
            self.note(response)


def walks() -> list[str]:
    """Return three walks: with the default constants, with small steps, and with small limits, too."""
    lines: list[str] = []
    for seed, (sizes, told) in enumerate((({}, {}), (SMALL, {"history_bytes_max": 3000}), (SMALL, LITTLE))):
        with steps_of(sizes):
            walk = Walk(seed, new_book(lines, **told), KEYS[seed and 1 :: 1 + bool(seed)])
            for number in range(158):
                walk.step()
                if number % 100 == 90:
                    walk.book.restart()
            walk.book.finish()
            lines.append(text(walk.book.engine.figures()))
    return lines


def scenes() -> list[str]:
    """Return the lines of the scenes."""
    lines: list[str] = []
    for scene in TABLES["scenes"].split("\n\n"):
        (title, limits), *rest = scene.splitlines()[0].rsplit(":", 1), *scene.splitlines()[1:]
        lines.append(f"== {title}")
        with steps_of(SMALL):
            book = new_book(
                lines, **{name: read(most)[0] for name, most in (each.split("=") for each in limits.split())}
            )
            for step in read(", ".join("; ".join(rest).split("; "))):
                book.play(step)
            book.finish()
            lines.append(f"left: {book.what_is_left()}, {len(book.engine.state.history._revisions)} revisions")
    return lines


RECORDINGS = {"requests": single_requests, "limits": limits, "scenes": scenes, "walks": walks}

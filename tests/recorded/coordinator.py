"""A coordinator's decisions, event by event: its acts, in words, and what changes in its report and history.

A scenario is a row: rules, and lines of "seconds call". A call is one of `CurrentCoordinator`'s.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from rdzv.core import state, stopping, view
from rdzv.core.decision import (
    Act,
    ApplyResize,
    CommitRound,
    Expel,
    Idle,
    WriteRoundProgress,
    WriteRoundStop,
    act_of_joiner,
    decide,
    wait_reason_text,
)
from rdzv.core.history import History, HistoryWriter, nodes_gone_before_round, pack_history
from rdzv.core.ranks import rank_order_named
from rdzv.core.report import run_cost
from rdzv.core.stuck.accusing import Accusation
from store import Event
from tests.recorded.recorder import DAY, Recorder, plain, shortened
from tests.support.hand_fed import NODES, HandFed

SCENARIOS: Final[dict[str, Any]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
RECORDS: Final = {**vars(state), **vars(stopping), **vars(view)}
LINE: Final = 180  # characters of a line


class Led(HandFed):
    """A run whose coordinator carries out its decisions."""

    def __init__(self, *, order: str = "arrival", unit_within: str = "", ttl: float = 9.0, **rules: Any) -> None:
        self.lines: list[str] = []
        self.changed = Recorder().changed
        self.began: float | None = None
        self.picture: Any = None
        super().__init__(order=rank_order_named(order), **rules)
        self.rules = replace(self.rules, unit_within=unit_within, ttl=ttl)
        self.writer, self.written = HistoryWriter(), History()
        self.writer.take_over(self.written, began=None, now=self.now)
        self.picture = view.Picture(
            view=self.view, head=state.Head(coordinator=state.CurrentCoordinator(node_id="z", term=1))
        )

    def note(self, what: str, value: Any = None) -> None:
        """Write a line; of a value, what has changed, if something has."""
        told = "" if value is None else self.changed(what, value)
        if told or value is None:
            self.lines.append(shortened(f"{plain(self.now - 1000.0)}: {what}{told and f': {told}'}", LINE))

    def change(self, **news: Any) -> None:
        self.picture = replace(self.picture, **news)

    def set(self, **news: Any) -> None:
        """Change what all nodes watch."""
        self.change(head=replace(self.picture.head, **news))

    def feed(self, event: Event) -> None:
        bans = self.picture.head.bans if self.picture else {}
        self.view.apply_node_event(event, now=self.now, last_call_timeout=self.rules.last_call, bans=bans)

    def pass_time(self, until: float) -> None:
        """Act whenever an act is due."""
        while (due := self.settle()) is not None and self.now < due <= until:
            self.now = due
        self.now = until

    def settle(self) -> float | None:
        """Act until there is nothing to do but to wait; return until when."""
        while True:
            act: Act = decide(self.picture, self.rules, now=self.now)
            if not isinstance(act, ApplyResize | Expel):
                self.writer.note_progress(act.progress, now=self.now)
            getattr(self, f"do_{type(act).__name__.lower()}")(act)
            if isinstance(act, Idle):
                return act.until

    def do_idle(self, act: Idle) -> None:
        self.note("  waits", {"until": act.until and act.until - 1000.0, "error": act.error and repr(act.error)})

    def do_writeroundprogress(self, act: WriteRoundProgress) -> None:
        self.note(f"reports: {wait_reason_text(act.progress)}")
        facts: Any = {"now": self.now, "at": DAY + self.now, "why": self.view.why_gone, "unbans": act.unbans.values()}
        self.keep(self.writer.history_with_incidents(act.progress, self.picture.head.closed, **facts))
        self.tell(act.progress)
        last = max([self.picture.unbanned_at, *(one.revision for one in act.unbans.values())])
        self.change(unbanned_at=last)

    def do_commitround(self, act: CommitRound) -> None:
        self.note(f"completes round {act.number}: {', '.join(one.node_id for one in act.members)}")
        nodes, lost = {one.node_id: one.address for one in act.members}, self.picture.head.lost_store
        facts: Any = {
            "known": self.view.members,
            "now": self.now,
            "at": DAY + self.now,
            "arrived": self.view.arrived_at,
        }
        history = self.writer.history_with_round(act.number, nodes, lost_store=lost.host if lost else "", **facts)
        self.complete(act, in_steps=any(one.progress is not None for one in act.members))
        self.keep(history)
        self.began = self.now
        self.set(round=self.round)
        if (progress := act.progress.for_round_commit(act.number, size=len(nodes))) is not None:
            self.tell(progress)

    def do_writeroundstop(self, act: WriteRoundStop) -> None:
        self.revision += 1
        stop = act.stop.replace(revision=self.revision)
        self.note("asks or decides", stop)
        self.view.agreement.note_written(stop)
        self.set(stop=stop)

    def do_expel(self, act: Expel) -> None:
        self.note(f"expels {act.node_id}: {act.why}")
        self.view.why_lost[act.node_id] = act.why
        self.tell(act.progress)
        self.die(act.node_id)

    def do_applyresize(self, act: ApplyResize) -> None:
        new = self.picture.head.resized
        self.rules = replace(self.rules, needed=new.min_nodes, capacity=new.max_nodes)
        self.change(resized_at=act.revision)
        self.view.set_min_nodes(needed=new.min_nodes, now=self.now)

    def keep(self, history: History | None) -> None:
        if history is not None:
            self.written = History.unpack(pack_history(history))
            self.note("  history", self.written)
            self.writer.note_written(history, now=self.now)

    def tell(self, progress: Any) -> None:
        self.note("  report", progress)
        self.change(told=progress, told_at=self.now)
        self.set(progress=progress, progress_at=self.now)

    def goes(self, name: str, cause: Any = "", **record: Any) -> None:
        """A node leaves with this last record, or its lease ends."""
        if record:
            self.put(name, state.NodeRecord(node_id=name, incarnation="1", left=True, **record).pack())
        self.revision += 1
        self.stored.pop(name, None)
        self.feed(Event(kind="delete", revision=self.revision, key=NODES + name, cause=cause))

    def accuse(self, by: str, accused: str, why: str, round: int = 0) -> None:
        told, key = Accusation(round=round, accused=accused, by=by, why=why), f"{NODES}/accused/{by}/{accused}"
        self.feed(Event(kind="put", revision=self.revision, key=key, value=told.pack()))

    def fact(self, fact: Any) -> None:
        self.view.apply_fact(fact)

    def successor(self, *gone: str, last: str = "", cause: Any = "", seen: bool = True, moves: bool = False) -> None:
        """Another node takes over; meanwhile some nodes have gone unseen."""
        self.stored = {name: one for name, one in self.stored.items() if name not in gone}
        told, before = self.picture.told, state.LastCoordinator(node_id=last, cause=cause) if last else None
        waited = (told.absent.waited if told else None) or 0.0
        clock = {"began": self.began} if seen else {"began": None, "hour": DAY + self.now}
        self.view, self.writer = self._new_view(), HistoryWriter()
        at = self.picture.told_at
        self.view.take_over(self.round, self.members, told, progress_at=at, before=before, moves=moves)
        self.writer.take_over(self.written, now=self.now, waited=waited, **clock)
        self.snapshot()
        self.change(view=self.view)

    def asks(self, name: str, **known: Any) -> None:
        """A waiting node asks for its next act."""
        told = act_of_joiner(self.me(name, node_id=name, **known), self.picture.head, now=self.now)
        self.note(f"{name} shall {told}")

    def cost(self) -> None:
        self.note("  cost", run_cost("job", self.written, now=DAY + self.now).as_json())
        gone = nodes_gone_before_round(self.written, self.view.last_number, here=self.stored, now=DAY + self.now)
        self.note(f"  gone before: {gone}")


def play(name: str) -> list[str]:
    """Play a scenario; return its lines."""
    row = SCENARIOS[name]
    run = Led(**row.get("rules", {}))
    for line in filter(None, map(str.strip, row["play"].splitlines())):
        at, call = line.split(" ", 1)
        run.pass_time(1000.0 + float(at))
        run.note(f"> {call}")
        eval(f"run.{call}", RECORDS | {"run": run})
        run.settle()
    return run.lines


RECORDINGS: Final[dict[str, Callable[[], Iterable[str]]]] = {name: partial(play, name) for name in SCENARIOS}

"""The history of a run, across coordinators. Forgotten rounds are kept as sums."""

import asyncio
from typing import Any

import pytest

from rdzv.core.absent import AbsenceReport
from rdzv.core.history import (
    BYTES_MOST,
    CHAPTERS_MOST,
    INCIDENTS_MOST,
    Chapter,
    History,
    HistoryWriter,
    Incident,
    TimeSpent,
    nodes_gone_before_round,
    pack_history,
    seconds_between_rounds,
    time_spent,
)
from rdzv.core.state import NAMED_MOST, Closed, Phase, Progress
from tests.support.runs import VirtualRun

STANDS = Progress(phase=Phase.TRAINING, round=0)


def begun(*node_ids: str, now: float = 100.0) -> HistoryWriter:
    """Return the history writer of a coordinator that has just committed round 0."""
    chronicle = HistoryWriter()
    chronicle.note_written(chronicle.history_with_round(0, dict.fromkeys(node_ids, ""), known=(), now=now), now=now)
    return chronicle


def told(
    chronicle: HistoryWriter, progress: Progress, *, now: float, closed: Closed | None = None
) -> tuple[Incident, ...]:
    """Write this progress, and return the incidents of the round; none if nothing is new."""
    chronicle.note_progress(progress, now=now)
    history = chronicle.history_with_incidents(progress, closed, now=now)
    if history is None:
        return ()
    chronicle.note_written(history, now=now)
    return history.chapters[-1].incidents


def test_a_chapter_has_the_new_nodes_and_the_time_since_the_last_round() -> None:
    nodes = dict.fromkeys(["a", "c"], "")
    _, chapter = begun("a", "b").history_with_round(1, nodes, known=["a", "b"], now=112.5).chapters
    assert (chapter.node_ids, chapter.joined, chapter.joined_ids) == (("a", "c"), 1, ("c",))
    assert (chapter.number, chapter.size, chapter.after) == (1, 2, 12.5)


def test_each_loss_and_departure_is_recorded_once() -> None:
    chronicle = begun("a", "b", "c", "d")
    lost = STANDS.replace(lost=1, lost_ids=("b",))
    assert told(chronicle, STANDS, now=101) == ()
    first = Incident(kind="lost", after=2.0, count=1, node_ids=("b",))
    assert told(chronicle, lost, now=102) == (first,)
    assert told(chronicle, lost, now=103) == ()
    both = lost.replace(lost=2, lost_ids=("b", "c"), departed=1, departed_ids=("d",))
    assert told(chronicle, both, now=105) == (
        first,
        Incident(kind="lost", after=5.0, count=1, node_ids=("c",)),
        Incident(kind="left", after=5.0, count=1, node_ids=("d",)),
    )


def test_members_of_the_previous_round_that_are_missing_can_be_named() -> None:
    lost = Incident(kind="lost", after=1.0, count=2, node_ids=("b", "c"), reason="its process ended", at=1000.0)
    left = Incident(kind="left", after=2.0, count=1, node_ids=("d",))
    first = Chapter(
        number=0, size=4, node_ids=("a", "b", "c", "d"), joined=4, joined_ids=(), incidents=(lost, left),
        reached_at=("", "10.0.0.2"),
    )  # fmt: skip
    history = History(chapters=(first, Chapter(number=1, size=2, node_ids=("a", "c"), joined=0, joined_ids=())))
    assert [
        (one.node_id, one.describe(), one.address) for one in nodes_gone_before_round(history, 1, here="ac", now=1041.0)
    ] == [("b", "lost 41 s ago: its process ended", "10.0.0.2"), ("d", "left", "")]
    assert nodes_gone_before_round(history, 2, here="", now=1041.0) == [], (
        "of the round that stands nothing is remembered yet"
    )


@pytest.mark.parametrize(
    ("change", "closed", "incident"),
    [
        ({}, Closed(reason="done", by="a"), Incident(kind="closed", after=3.0, reason="by a: done")),
        (
            {"given_up": "round 0 was given up: node a (rank 0): b, rank 1, did not come"},
            None,
            Incident(kind="given up", after=3.0, reason="node a (rank 0): b, rank 1, did not come"),
        ),
        ({"round": 4, "lost": 1, "lost_ids": ("a",)}, None, None),  # of another round
    ],
)
def test_each_other_incident_of_a_round_is_recorded_once(
    change: dict[str, Any], closed: Closed | None, incident: Incident | None
) -> None:
    chronicle = begun("a", "b")
    # that commit was refused, so the round never existed
    chronicle.history_with_round(1, dict.fromkeys(["a"], ""), known=["a", "b"], now=102)
    expected = () if incident is None else (incident,)
    assert told(chronicle, STANDS.replace(**change), closed=closed, now=103) == expected
    assert told(chronicle, STANDS.replace(**change), closed=closed, now=104) == ()
    assert told(chronicle, STANDS.replace(lost=1, lost_ids=("b",)), closed=closed, now=105)[:-1] == expected


def test_a_chapter_keeps_addresses_that_differ_from_the_names() -> None:
    history = HistoryWriter().history_with_round(0, {"a": "10.0.0.1", "b": "b", "c": ""}, known=(), now=0)
    assert history.chapters[0].addresses == {"a": "10.0.0.1"}
    assert History.unpack(pack_history(history)) == history


def test_a_successor_continues_the_history_and_marks_the_gap_that_it_did_not_see() -> None:
    chronicle = begun("a", "b")
    lost = STANDS.replace(lost=1, lost_ids=("b",))
    (incident,) = told(chronicle, lost, now=101)
    successor = HistoryWriter()
    successor.take_over(chronicle._history, began=None, now=6)
    assert chronicle._history.chapters[-1].incidents == (incident,)
    assert told(successor, lost, now=7) == ()
    (_, new) = told(successor, lost.replace(departed=1, departed_ids=("a",)), now=8)
    assert new == Incident(kind="left", after=None, count=1, node_ids=("a",))
    assert successor.history_with_round(1, dict.fromkeys(["c"], ""), known=["a", "b"], now=9).chapters[-1].after is None


def test_names_and_incidents_are_bounded_but_counts_are_complete() -> None:
    names = [f"node-{number}" for number in range(200)]
    chronicle = begun(*names)
    for count in range(1, 150):
        told(chronicle, STANDS.replace(lost=count, lost_ids=tuple(names[: min(count, NAMED_MOST)])), now=100 + count)
    (chapter,) = chronicle._history.chapters
    assert (len(chapter.node_ids), len(chapter.joined_ids)) == (NAMED_MOST, NAMED_MOST)
    assert (chapter.size, chapter.joined, len(chapter.incidents)) == (200, 200, INCIDENTS_MOST)
    assert History.unpack(pack_history(chronicle._history)) == chronicle._history


def test_of_the_oldest_rounds_only_the_sums_remain_by_number_and_by_size() -> None:
    chronicle = begun("a", "b")
    for number in range(1, 3 * CHAPTERS_MOST):
        now = 100.0 + 10 * number
        lost = STANDS.replace(round=number - 1, phase=Phase.GATHERING, live=1, lost=1, lost_ids=("b",))
        told(chronicle, lost, now=now - 4)
        chronicle.note_written(chronicle.history_with_round(number, {"a": "", "b": ""}, known=["a"], now=now), now=now)
    assert len(chronicle._history.chapters) == CHAPTERS_MOST
    kept = History.unpack(pack_history(chronicle._history))
    assert [chapter.number for chapter in kept.chapters] == list(range(2 * CHAPTERS_MOST, 3 * CHAPTERS_MOST))
    forgotten = 2 * CHAPTERS_MOST
    assert (kept.past.rounds, kept.past.losses, dict(kept.past.lost)) == (forgotten, forgotten, {"b": forgotten})
    assert kept.past.spent == TimeSpent(trained=6.0 * forgotten, waited=4.0 * forgotten)
    assert kept.past.reasons == {"": forgotten}
    names = [f"a-node-with-a-long-name-{number}" for number in range(NAMED_MOST)]
    large = [kept.chapters[0].replace(number=number, node_ids=tuple(names)) for number in range(100)]
    packed = pack_history(History(chapters=tuple(large)))
    assert BYTES_MOST * 0.85 < len(packed) <= BYTES_MOST
    shorter = History.unpack(packed)
    assert list(shorter.chapters) == large[-len(shorter.chapters) :]
    assert shorter.past.rounds == 100 - len(shorter.chapters)


def test_the_time_without_a_round_is_split_into_meeting_and_waiting_for_nodes() -> None:
    chronicle = HistoryWriter()
    chronicle.take_over(History(), began=None, now=90, waited=5)
    chronicle.note_progress(Progress(phase=Phase.GATHERING, absent=AbsenceReport(waited=5)), now=90)
    chronicle.note_progress(Progress(phase=Phase.LAST_CALL), now=95)
    first = chronicle.history_with_round(0, {"a": "", "b": ""}, known=(), now=98, at=1_000_000.0)
    assert first.past.spent == TimeSpent(regrouped=3.0, waited=10.0)
    assert first.past.since == 1_000_000.0 - 13
    chronicle.note_written(first, now=98)
    chronicle.note_progress(STANDS.replace(live=2), now=99)
    chronicle.note_progress(STANDS.replace(live=1, lost=1), now=108)  # the other one leaves the round ...
    chronicle.note_progress(STANDS.replace(phase=Phase.GATHERING), now=109)  # ... and waits
    chronicle.note_progress(STANDS.replace(phase=Phase.LAST_CALL), now=129)
    second = chronicle.history_with_round(1, {"a": "", "c": ""}, known=["a", "b"], now=130, at=1_000_032.0)
    assert (second.chapters[0].stopped, second.chapters[0].short) == (10.0, 20.0)
    assert time_spent(second.chapters[0], 32.0) == TimeSpent(trained=10.0, regrouped=2.0, waited=20.0)
    assert seconds_between_rounds(*second.chapters) == 32.0


def test_losses_are_grouped_by_reason_with_unnamed_ones_apart() -> None:
    chronicle = begun("a", "b", "c", "d")
    lost = STANDS.replace(lost=4, lost_ids=("a", "b", "c"))
    history = chronicle.history_with_incidents(
        lost, None, now=101, at=7.0, why={"a": "silent", "c": "silent", "b": "gone"}
    )
    assert history is not None
    told_of = [(one.reason, one.node_ids, one.count, one.at) for one in history.chapters[-1].incidents]
    assert told_of == [("silent", ("a", "c"), 2, 7.0), ("gone", ("b",), 1, 7.0), ("", (), 1, 7.0)]


def test_the_length_of_an_unmeasured_round_follows_from_the_wall_clock() -> None:
    lost = Incident(kind="lost", after=3.0, count=1)
    one = Chapter(number=0, size=1, node_ids=("a",), joined=0, joined_ids=(), at=100.0, incidents=(lost,))
    assert seconds_between_rounds(one, one.replace(number=1, at=160.0)) == 60.0
    assert seconds_between_rounds(one, one.replace(number=1, at=None)) == 3.0
    assert seconds_between_rounds(one.replace(incidents=(), at=None), one.replace(number=1, at=160.0)) == 0.0


@pytest.mark.virtual_time
async def test_a_runs_history_survives_its_coordinators() -> None:
    async with VirtualRun(min_nodes=1, max_nodes=2) as run:
        a, b = await run.met("ab")
        await asyncio.sleep(20)
        dies, stays = ("a", b) if (await a.status()).coordinator == "a" else ("b", a)
        run.crash(dies)
        await asyncio.sleep(5)
        await run.meet(stays)
        await asyncio.sleep(10)
        joining = run.start(run.handler("late").next_rendezvous())
        await asyncio.sleep(1)
        await run.meet(stays)
        await joining
        await stays.set_closed("enough")
        await asyncio.sleep(1)
        chapters = await run.handler("observer", min_nodes=None, max_nodes=None).history()
    first, second, third = chapters
    assert set(first.node_ids) == {"a", "b"}
    (lost,) = first.incidents
    assert (lost.kind, lost.node_ids) == ("lost", (dies,))
    assert lost.after == pytest.approx(21, abs=1)  # 1 s to notice the death; the successor was a member from the start
    assert (second.size, second.joined) == (1, 0)
    assert second.after == pytest.approx(25, abs=1)
    assert third.joined_ids == ("late",)
    assert third.after == pytest.approx(11, abs=1)
    (closed,) = (one for one in third.incidents if one.kind == "closed")
    assert closed.reason == f"by {stays.node_id}: enough"

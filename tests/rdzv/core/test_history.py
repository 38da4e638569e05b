"""What happened in a run is remembered, whoever coordinated it, and told in words and as a timeline."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import msgpack
import pytest

from rdzv.core.history import (
    BYTES_MOST,
    CHAPTERS_MOST,
    INCIDENTS_MOST,
    Chapter,
    Chronicle,
    Incident,
    describe,
    pack_chapters,
    timeline,
    unpack_chapters,
)
from rdzv.core.state import NAMED_MOST, Closed, Phase, Progress
from rdzv.errors import RendezvousStateError
from tests.support.runs import VirtualRun

STANDS = Progress(phase=Phase.COMPLETE, round=0)


def begun(*node_ids: str, now: float = 100.0) -> Chronicle:
    """A coordinator's, which has just committed the first round."""
    chronicle = Chronicle()
    chronicle.written(chronicle.completed(0, dict.fromkeys(node_ids, ""), known=(), now=now), now=now)
    return chronicle


def told(chronicle: Chronicle, progress: Progress, *, now: float, closed: Closed | None = None) -> tuple[Incident, ...]:
    """The incidents once this progress is written; none if it brought no news."""
    chapters = chronicle.continued(progress, closed, now=now)
    if chapters is None:
        return ()
    chronicle.written(chapters, now=now)
    return chapters[-1].incidents


# -------------------------------------------------------------------------------------------------------- remembering


def test_a_chapter_says_who_is_new_and_how_long_after_the_last_round_it_was() -> None:
    _, chapter = begun("a", "b").completed(1, dict.fromkeys(["a", "c"], ""), known=["a", "b"], now=112.5)
    assert (chapter.node_ids, chapter.joined, chapter.joined_ids) == (("a", "c"), 1, ("c",))
    assert (chapter.number, chapter.size, chapter.after) == (1, 2, 12.5)


def test_losses_and_departures_are_told_once_each_with_those_that_are_new() -> None:
    chronicle = begun("a", "b", "c", "d")
    lost = replace(STANDS, lost=1, lost_ids=("b",))
    assert told(chronicle, STANDS, now=101) == ()
    first = Incident(kind="lost", after=2.0, count=1, node_ids=("b",))
    assert told(chronicle, lost, now=102) == (first,)
    assert told(chronicle, lost, now=103) == ()
    both = replace(lost, lost=2, lost_ids=("b", "c"), departed=1, departed_ids=("d",))
    assert told(chronicle, both, now=105) == (
        first,
        Incident(kind="lost", after=5.0, count=1, node_ids=("c",)),
        Incident(kind="left", after=5.0, count=1, node_ids=("d",)),
    )


def test_the_closing_is_told_once_with_who_and_why() -> None:
    chronicle = begun("a")
    closed = Closed(reason="done", by="a")
    expected = (Incident(kind="closed", after=3.0, reason="by a: done"),)
    assert told(chronicle, STANDS, closed=closed, now=103) == expected
    assert told(chronicle, STANDS, closed=closed, now=104) == ()


def test_a_round_that_was_given_up_is_told_once_with_who_did_not_reach_whom() -> None:
    chronicle = begun("a", "b")
    gave_up = replace(STANDS, given_up="round 0 was given up: node a (rank 0): b, rank 1, did not come")
    expected = Incident(kind="given up", after=3.0, reason="node a (rank 0): b, rank 1, did not come")
    assert told(chronicle, gave_up, now=103) == (expected,)
    assert told(chronicle, gave_up, now=104) == ()
    chapters = chronicle.continued(replace(gave_up, lost=1, lost_ids=("b",)), None, now=105)
    assert chapters is not None
    assert "         3.0 s later, given up: node a (rank 0): b, rank 1, did not come" in describe(chapters)


def test_a_chapter_remembers_where_its_members_were_if_that_says_more_than_their_names() -> None:
    chronicle = Chronicle()
    (chapter,) = chronicle.completed(0, {"a": "10.0.0.1", "b": "b", "c": ""}, known=(), now=0)
    assert chapter.addresses == {"a": "10.0.0.1"}
    (back,) = unpack_chapters(pack_chapters([chapter]))
    assert back == chapter


def test_a_successor_goes_on_and_says_that_it_does_not_know_what_it_did_not_see() -> None:
    chronicle = begun("a", "b")
    lost = replace(STANDS, lost=1, lost_ids=("b",))
    (incident,) = told(chronicle, lost, now=101)
    successor = Chronicle()
    successor.took_over(chronicle._chapters, began=None)
    assert chronicle._chapters[-1].incidents == (incident,)
    assert told(successor, lost, now=7) == ()
    (_, new) = told(successor, replace(lost, departed=1, departed_ids=("a",)), now=8)
    assert new == Incident(kind="left", after=None, count=1, node_ids=("a",))
    assert successor.completed(1, dict.fromkeys(["c"], ""), known=["a", "b"], now=9)[-1].after is None


def test_what_was_refused_was_never_there() -> None:
    chronicle = begun("a", "b")
    chronicle.completed(1, dict.fromkeys(["a"], ""), known=["a", "b"], now=105)  # and not `written`
    assert told(chronicle, replace(STANDS, lost=1, lost_ids=("b",)), now=106)[0].after == 6.0


def test_a_progress_of_another_round_is_no_news_of_this_one() -> None:
    assert told(begun("a"), replace(STANDS, round=4, lost=1, lost_ids=("a",)), now=101) == ()


def test_names_and_incidents_are_bounded_and_counts_go_on() -> None:
    names = [f"node-{number}" for number in range(200)]
    chronicle = begun(*names)
    for count in range(1, 150):
        told(chronicle, replace(STANDS, lost=count, lost_ids=tuple(names[: min(count, NAMED_MOST)])), now=100 + count)
    (chapter,) = chronicle._chapters
    assert (len(chapter.node_ids), len(chapter.joined_ids)) == (NAMED_MOST, NAMED_MOST)
    assert (chapter.size, chapter.joined, len(chapter.incidents)) == (200, 200, INCIDENTS_MOST)
    assert unpack_chapters(pack_chapters([chapter])) == (chapter,)


def test_the_oldest_rounds_are_forgotten_first_by_number_and_by_size() -> None:
    chronicle = begun("a")
    for number in range(1, 3 * CHAPTERS_MOST):
        chronicle.written(chronicle.completed(number, dict.fromkeys(["a"], ""), known=["a"], now=number), now=number)
    kept = unpack_chapters(pack_chapters(chronicle._chapters))
    assert [chapter.number for chapter in kept] == list(range(2 * CHAPTERS_MOST, 3 * CHAPTERS_MOST))
    names = [f"a-node-with-a-long-name-{number}" for number in range(NAMED_MOST)]
    large = [replace(kept[0], number=number, node_ids=tuple(names)) for number in range(100)]
    packed = pack_chapters(large)
    assert BYTES_MOST * 0.9 < len(packed) <= BYTES_MOST
    assert list(unpack_chapters(packed)) == large[-len(unpack_chapters(packed)) :]


@pytest.mark.parametrize("value", [b"", b"\xc1", b"\x01", b"\x91\x80", pack_chapters(begun("a")._chapters)[:-1]])
def test_what_is_no_history_is_refused(value: bytes) -> None:
    with pytest.raises(RendezvousStateError, match="cannot be read"):
        unpack_chapters(value)


# ------------------------------------------------------------------------------------------------------------ telling

STORY = [
    Chapter(
        number=0,
        size=2,
        node_ids=("a", "b"),
        joined=2,
        joined_ids=("a", "b"),
        incidents=(Incident(kind="lost", after=30.0, count=1, node_ids=("b",)),),
        addresses={"b": "10.77.0.12"},
    ),
    Chapter(
        number=1,
        size=70,
        node_ids=("a", "c"),
        joined=69,
        joined_ids=("c",),
        after=31.25,
        incidents=(
            Incident(kind="left", after=None, count=1, node_ids=("c",)),
            Incident(kind="closed", after=4.0, reason="by a: done"),
        ),
    ),
]


def test_the_history_in_words() -> None:
    assert describe(STORY) == [
        "round 0: 2 nodes: a, b (10.77.0.12)",
        "         30.0 s later, lost: b (10.77.0.12)",
        "round 1, 31.2 s after the one before: 70 nodes: a, c, and 68 more",
        "         joined: c, and 68 more",
        "         later, left: c",
        "         4.0 s later, closed by a: done",
    ]


def test_the_timeline_is_a_chrome_trace_with_a_row_for_each_node() -> None:
    trace = json.loads(json.dumps(timeline("job", STORY)))
    events: list[dict[str, Any]] = trace["traceEvents"]
    rows = {event["args"]["name"]: event["tid"] for event in events if event["name"] == "thread_name"}
    assert list(rows) == ["rounds", "a", "b", "c"]
    slices = [(e["tid"], e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert slices == [
        (rows["rounds"], "round 0", 0, 31.25e6),
        (rows["a"], "round 0", 0, 31.25e6),
        (rows["b"], "round 0", 0, 30e6),
        (rows["rounds"], "round 1", 31.25e6, 4e6),
        (rows["a"], "round 1", 31.25e6, 4e6),
        (rows["c"], "round 1", 31.25e6, 4e6),
    ]
    moments = [(e["tid"], e["name"], e["ts"]) for e in events if e["ph"] == "i"]
    assert moments == [
        (rows["b"], "lost", 30e6),
        (rows["c"], "left", 32.25e6),
        (rows["rounds"], "closed", 35.25e6),
    ]


def test_nothing_has_happened_yet() -> None:
    assert describe([]) == []
    assert [event["ph"] for event in timeline("job", [])["traceEvents"]] == ["M", "M"]


# ---------------------------------------------------------------------------------------------------------- in a run


@pytest.mark.virtual_time
async def test_a_runs_history_survives_its_coordinators() -> None:
    async with VirtualRun(min_nodes=1, max_nodes=2) as run:
        a, b = run.handler("a"), run.handler("b")
        await run.meet(a, b)
        await asyncio.sleep(20)
        coordinator = (await a.status()).coordinator
        dies, stays = ("a", b) if coordinator == "a" else ("b", a)
        run.crash(dies)
        await asyncio.sleep(5)
        await run.meet(stays)
        await asyncio.sleep(10)
        late = run.handler("late")
        joining = run.start(late.next_rendezvous())
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
    assert lost.after == pytest.approx(21, abs=1)  # 1 s to notice; its successor was there from the beginning
    assert (second.size, second.joined) == (1, 0)
    assert second.after == pytest.approx(25, abs=1)
    assert third.joined_ids == ("late",)
    assert third.after == pytest.approx(11, abs=1)
    (closed,) = (one for one in third.incidents if one.kind == "closed")
    assert closed.reason == f"by {stays.node_id}: enough"


def test_s12_an_incident_may_have_more_columns() -> None:
    lost = Incident(kind="lost", after=1.0, count=1)
    chapter = Chapter(number=0, size=1, node_ids=("a",), joined=0, joined_ids=(), incidents=(lost,))
    (plain,) = msgpack.unpackb(pack_chapters((chapter,)))
    plain["incidents"][0].append("a column of a later release")
    assert unpack_chapters(msgpack.packb([plain])) == (chapter,)

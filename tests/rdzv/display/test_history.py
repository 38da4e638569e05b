"""The history of a run as lines, as JSON by its schema, as one closing line, and as a timeline."""

import json
from pathlib import Path
from types import MappingProxyType

import jsonschema

from rdzv.core.history import CHAPTERS_MOST, Chapter, EarlierRoundTotals, History, Incident, TimeSpent, pack_history
from rdzv.core.report import long_duration, run_cost
from rdzv.display.history import history_as_json, history_text, timeline
from rdzv.display.pages import timeline_page

SCHEMA = json.loads((Path(__file__).parents[3] / "docs" / "history.schema.json").read_text(encoding="utf-8"))
NOON = 1_800_000_000.0  # 2027-01-15 08:00:00Z, to be exact
HOSTILE = "</script><script>document.title='hacked'</script>"

STORY = History(
    chapters=(
        Chapter(
            number=0,
            size=2,
            node_ids=("a", "b"),
            joined=2,
            joined_ids=("a", "b"),
            incidents=(Incident(kind="lost", after=30.0, count=1, node_ids=("b",), reason="silent", at=NOON + 30),),
            at=NOON,
            stopped=30.0,
            short=6.0,
            reached_at=("", "10.77.0.12"),
        ),
        Chapter(
            number=1,
            size=70,
            node_ids=("a", "c"),
            joined=69,
            joined_ids=("c",),
            after=40.0,
            incidents=(
                Incident(kind="left", after=None, count=1, node_ids=("c",)),
                Incident(kind="closed", after=4.0, reason="by a: done"),
            ),
            at=NOON + 40,
        ),
    )
)


def test_the_history_in_words_has_hours_durations_and_reasons() -> None:
    assert history_text(STORY) == [
        "2027-01-15 08:00:00Z  round 0: 2 nodes: a, b (10.77.0.12)",
        "         30.0 s later (08:00:30Z), lost: b (10.77.0.12): silent",
        "         30.0 s later, 10.0 s meeting again, 6.0 s of them waiting for nodes",
        "2027-01-15 08:00:40Z  round 1, 40.0 s after the one before: 70 nodes: a, c, and 68 more",
        "         joined: c, and 68 more",
        "         later, left: c",
        "         4.0 s later, closed by a: done",
    ]


def test_forgotten_rounds_are_mentioned() -> None:
    past = EarlierRoundTotals(rounds=7, since=NOON)
    assert history_text(History(past=past)) == ["7 earlier rounds are forgotten; the run began at 2027-01-15 08:00:00Z"]
    assert history_text(History()) == []


def test_the_closing_line_has_the_shares_of_time_and_the_node_lost_most_often() -> None:
    cost = run_cost("job-7", STORY)
    assert (cost.spent, cost.seconds) == (TimeSpent(trained=34.0, regrouped=4.0, waited=6.0), 44.0)
    assert str(cost) == "job-7: 44 s; training 77.3 %, regrouping 9.1 %, waiting for nodes 13.6 %; 1 loss, of b"
    past = EarlierRoundTotals(
        rounds=90,
        spent=TimeSpent(trained=50_000.0, regrouped=10.0, waited=490.0),
        losses=6,
        lost=MappingProxyType({"gpu-017": 4, "b": 1}),
    )
    long = run_cost("job-7", History(chapters=STORY.chapters, past=past))
    assert str(long).startswith("job-7: 14 h 2 min; training 99.0 %")
    assert str(long).endswith("; 7 losses, 4 of gpu-017")
    assert long.rounds == 92
    assert str(run_cost("job-7", History())) == "job-7: no round has completed"


def test_counts_by_reason_never_fall_when_rounds_are_forgotten() -> None:
    """Prometheus takes a counter that falls for one that was reset, and adds its whole value again."""

    def chapter(number: int, reason: str) -> Chapter:
        gone = Incident(kind="lost", after=20.0, count=1, node_ids=("b",), reason=reason)
        return Chapter(number=number, size=2, node_ids=("a", "b"), joined=0, joined_ids=(), incidents=(gone,))

    whole = tuple(chapter(number, ("its process ended", "silent")[number % 2]) for number in range(2 * CHAPTERS_MOST))
    kept = History.unpack(pack_history(History(chapters=whole)))
    assert len(kept.chapters) < len(whole)
    assert run_cost("job", kept).reasons == run_cost("job", History(chapters=whole)).reasons
    of_an_older_release = History(chapters=kept.chapters, past=EarlierRoundTotals(losses=CHAPTERS_MOST))
    assert run_cost("job", of_an_older_release).reasons["other"] == CHAPTERS_MOST


def test_an_open_run_is_counted_until_now_and_its_waits_are_no_training() -> None:
    one = Chapter(number=0, size=1, node_ids=("a",), joined=0, joined_ids=(), at=NOON)
    assert run_cost("job", History(chapters=(one,)), now=NOON + 60).spent == TimeSpent(trained=60.0)
    assert run_cost("job", History(chapters=(one,))).spent == TimeSpent()
    lost = Incident(kind="lost", after=20.0, count=1, node_ids=("a",))
    stopped = Chapter(
        number=0, size=1, node_ids=("a",), joined=0, joined_ids=(), at=NOON, stopped=20.0, incidents=(lost,)
    )
    cost = run_cost("job", History(chapters=(stopped,)), now=NOON + 60, waited=38.0)
    assert cost.spent == TimeSpent(trained=20.0, regrouped=2.0, waited=38.0)


def test_the_json_conforms_to_the_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    plain = json.loads(json.dumps(history_as_json("job", STORY, run_cost("job", STORY))))
    jsonschema.validate(plain, SCHEMA)
    assert set(plain) == set(SCHEMA["required"]) == set(SCHEMA["properties"])
    assert plain["cost"]["training"] == 34.0
    assert plain["rounds"][0]["incidents"][0]["reason"] == "silent"


def test_durations_have_their_two_largest_units() -> None:
    seconds = (0, 41, 60, 3 * 60 + 5, 14 * 3600 + 3 * 60 + 7, 49 * 3600 + 1)
    assert [long_duration(each) for each in seconds] == ["0 s", "41 s", "1 min", "3 min 5 s", "14 h 3 min", "2 d 1 h"]


def rows_of(history: History) -> dict[str, list[tuple[str, float, float]]]:
    return {name: [span[:3] for span in spans] for name, spans in timeline("job", history)["nodes"]}


def test_waits_and_outages_have_spans_of_their_length() -> None:
    assert rows_of(STORY) == {
        "a": [("round", 0.0, 30.0), ("meeting", 30.0, 10.0), ("round", 40.0, 4.0)],
        "b": [("round", 0.0, 30.0), ("lost", 30.0, 14.0)],
        "c": [("round", 40.0, 4.0), ("left", 44.0, 0.0)],
    }
    shown = timeline("job", STORY)
    assert [span[:3] for span in shown["rounds"]] == [
        ("round", 0.0, 30.0),
        ("meeting", 30.0, 10.0),
        ("round", 40.0, 4.0),
        ("closed", 44.0, 0.0),
    ]
    assert "lost: b (10.77.0.12): silent" in shown["rounds"][1].text
    assert shown["nodes"][1][1][1][3:] == ("lost: silent; away for 14 s", "silent")


def test_a_node_that_returns_was_away_until_then() -> None:
    again = Chapter(number=2, size=1, node_ids=("b",), joined=1, joined_ids=("b",), after=10.0)
    rows = rows_of(History(chapters=(STORY.chapters[0], again)))
    assert rows["b"] == [("round", 0.0, 10.0), ("lost", 10.0, 0.0), ("round", 10.0, 0.0)]


def test_a_lost_node_has_a_row_also_if_no_round_names_it() -> None:
    """Regression: a round names only some of a thousand nodes, so most outages were not shown."""

    def round_of_thousand(number: int, *, lost: str = "", joined: tuple[str, ...] = ()) -> Chapter:
        gone = Incident(kind="lost", after=30.0, count=1, node_ids=(lost,), reason="silent")
        return Chapter(
            number=number,
            size=1000,
            node_ids=("a", "b"),
            joined=len(joined),
            joined_ids=joined,
            after=40.0 if number else None,
            incidents=(gone,) if lost else (),
        )

    story = History(
        chapters=(
            round_of_thousand(0, lost="n900"),
            round_of_thousand(1),
            round_of_thousand(2, lost="n900", joined=("n900",)),
            round_of_thousand(3),
        )
    )
    spans = [("round", 0.0, 30.0), ("lost", 30.0, 50.0), ("round", 80.0, 30.0), ("lost", 110.0, 10.0)]
    assert rows_of(story)["n900"] == spans
    assert (
        timeline("job", story)["note"] == "of up to 1,000 nodes of a round, the first 2 have a row, and those that went"
    )


def test_the_page_is_one_file_in_which_a_hostile_name_stays_text() -> None:
    story = History(chapters=(Chapter(number=0, size=1, node_ids=(HOSTILE,), joined=0, joined_ids=(), at=NOON),))
    page = timeline_page(timeline("job", story), run_cost("job", story))
    assert "http" not in page.replace("http-equiv", "")
    assert "innerHTML" not in page
    assert HOSTILE not in page
    data = page.partition('id="data">')[2].partition("</script>")[0]
    assert json.loads(data)["timeline"]["nodes"][0][0] == HOSTILE

"""The missing nodes: their names, the last facts about each, and a bound on their number."""

import pytest

from rdzv.core.absent import NAMED_MOST, NAMED_OF_MANY, AbsenceBook, AbsenceReport, Missing, node_label
from rdzv.core.decision import next_progress_write_at, wait_reason_text
from rdzv.core.state import NodesLost, Progress
from rdzv.loop.round_monitor import describe_gone_nodes
from rdzv.membership import unreported_changes
from tests.support.hand_fed import HandFed, round_of


def test_a_lost_node_is_named_with_its_address_and_the_time_since() -> None:
    run = HandFed(needed=3, last_call=0)
    run.arrive("a", "b")
    run.arrive("gpu-017", address="10.0.0.3")
    run.commit()
    run.die("gpu-017")
    run.now += 150
    run.arrive("a", "b")
    run.now += 40
    assert (
        wait_reason_text(run.progress)
        == "2 of at least 3 nodes; waiting 40 s for gpu-017 at 10.0.0.3 (lost 3 min 10 s ago)"
    )
    assert "(lost 3 min 20 s ago)" in wait_reason_text(run.progress, elapsed=10), "durations go on where they are read"


def test_departures_are_told_from_losses_and_a_node_that_returns_is_not_missing() -> None:
    run = round_of("a", "b", "c", capacity=9)
    run.leave("c")
    run.die("b")
    run.arrive("a")
    assert [(one.node_id, one.how) for one in run.progress.absent.missing] == [("c", "left"), ("b", "lost")]
    first = run.progress
    run.now += 5
    assert first != run.progress
    assert next_progress_write_at(first, 0.0, run.progress, nodes=1, now=run.now) is None, "durations alone are no news"
    run.play("arrive b c stray, die stray")
    assert run.progress.absent == AbsenceReport(), "and only members are missing"


def test_an_expected_node_is_missing_from_the_start_and_in_every_round() -> None:
    run = HandFed(needed=2, capacity=3, last_call=0, expected=("a", "b", "x"))
    run.arrive("a")
    run.now += 7
    assert wait_reason_text(run.progress) == "1 of at least 2 nodes; waiting 7 s for b (never seen) and x (never seen)"
    run.arrive("x")
    run.die("x")
    run.now += 5
    assert run.progress.absent.describe() == "x (lost 5 s ago) and b (never seen)", "it was no member, but expected"
    run.arrive("b")
    run.commit()
    assert wait_reason_text(run.progress) == "round 0 stands with 2 nodes; missing: x (lost 5 s ago)"
    run.arrive("x")
    assert run.progress.absent.count == 0
    del run.stored["x"]
    run.reset()
    assert [one.node_id for one in run.progress.absent.missing] == ["x"], "the snapshot shows the missing nodes"


def test_members_that_stay_are_named_if_they_are_few() -> None:
    run = round_of("a", "b", capacity=9)
    run.arrive("c")
    assert wait_reason_text(run.progress).endswith("2 live members to leave: a and b")
    told = run.progress.absent
    assert (told.staying, told.staying_at) == (("a", "b"), ("a", "b"))
    elsewhere = HandFed(needed=2, capacity=9, last_call=0)
    elsewhere.arrive("a", "b", address="10.77.0.12")
    elsewhere.commit()
    elsewhere.arrive("c")
    assert wait_reason_text(elsewhere.progress).endswith("to leave: a (10.77.0.12) and b (10.77.0.12)")
    many = [f"n{at}" for at in range(NAMED_OF_MANY + 1)]
    crowd = HandFed(needed=2, capacity=20, last_call=0)
    crowd.arrive(*many)
    crowd.commit()
    crowd.arrive("c")
    assert wait_reason_text(crowd.progress).endswith("live members to leave")


def test_of_many_only_some_are_named_and_all_are_counted() -> None:
    book = AbsenceBook(f"n{at}" for at in range(NAMED_MOST))
    assert len(book.make_report(now=0).missing) == NAMED_MOST
    crowd = AbsenceBook(f"n{at}" for at in range(10_000)).make_report(now=0)
    assert (len(crowd.missing), crowd.count) == (NAMED_OF_MANY, 10_000)
    assert crowd.describe().endswith("n7 (never seen) and 9992 more")
    assert len(Progress.pack(Progress(phase=HandFed().progress.phase, absent=crowd))) < 300


def test_a_successor_continues_known_durations_and_invents_none() -> None:
    run = round_of("a", "b", "c", "d", capacity=9, expected=("x",))
    run.die("b")
    run.arrive("a", "d")
    run.leave("c")
    run.now += 30
    told, told_at = run.progress, run.now
    run.stored.pop("d")  # it dies while there is no coordinator
    run.now += 10
    run.succeed(told, said_at=told_at)
    words = "b (lost 40 s ago), c (left 40 s ago), d (lost: it went while nobody coordinated) and x (never seen)"
    assert wait_reason_text(run.progress) == f"1 of at least 4 nodes; waiting 40 s for {words}"


def test_only_what_time_alone_changes_is_no_news() -> None:
    gone = Missing(node_id="a", how="lost", ago=3.0, address="10.0.0.1", why="killed")
    whole = AbsenceReport(missing=(gone,), count=4, waited=7.0, staying=("b",), staying_at=("10.0.0.2",), said_at=1.8e9)
    rest = AbsenceReport(
        missing=(gone.replace(ago=None),), count=4, waited=0.0, staying=("b",), staying_at=("10.0.0.2",)
    )
    assert whole.without_durations() == rest
    assert whole.replace(waited=None).without_durations() == rest.replace(waited=None)


def test_a_name_cannot_disturb_a_terminal() -> None:
    absent = AbsenceReport(missing=(Missing(node_id="\x1b[2Jx" + "y" * 500, how="lost", address="1\n2"),), count=1)
    assert absent.describe().isprintable()
    assert len(absent.describe()) < 200


def test_a_loss_is_announced_with_the_address_of_the_lost_node() -> None:
    """Regression: the text was `1 lost: localhost-4535`. For the operator of sixty hosts that names none of them."""
    run = HandFed(needed=1, last_call=0)
    run.arrive("a", "localhost-4535", address="10.77.0.12")
    run.commit()
    run.die("localhost-4535")
    lost, *_ = unreported_changes([], run.head(), round=run.round, dropped=None)
    assert isinstance(lost, NodesLost)
    assert lost == NodesLost(1, ("localhost-4535",))
    assert describe_gone_nodes(lost) == "localhost-4535 (10.77.0.12)"


@pytest.mark.parametrize(("address", "words"), [(None, "a"), ("", "a"), ("a", "a"), ("b", "a (b)")])
def test_a_node_is_named_with_an_address_that_says_more(address: str | None, words: str) -> None:
    assert node_label("a", address) == words

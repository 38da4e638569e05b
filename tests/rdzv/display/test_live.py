"""The screen of `rdzv status --watch`: readable with ten thousand nodes in a narrow window, clear on a lost store."""

from rdzv.core.absent import Missing
from rdzv.core.report import RunStatus
from rdzv.core.round import Participant
from rdzv.core.state import Phase
from rdzv.display.status import TopData, screen_lines


def status_of(members: int, *, missing: int = 0, waiting: tuple[str, ...] = ()) -> RunStatus:
    named = min(missing, 64)
    return RunStatus(
        run_id="job",
        round=7,
        phase=Phase.TRAINING,
        reason=f"round 7 stands with {members} nodes",
        members=tuple(
            Participant(node_id=f"gpu-{rank:05}", rank=rank, address=f"10.0.{rank // 256}.{rank % 256}")
            for rank in range(members)
        ),
        waiting=waiting,
        spares=(),
        coordinator="gpu-00000",
        world_size=members + missing,
        bootstrap=("10.0.0.0", 29500),
        missing=tuple(
            Missing(node_id=f"bad-{number:03}", how="lost", ago=3.0, why="its process ended") for number in range(named)
        ),
        missing_count=missing,
    )


def texts(frame: TopData, *, height: int = 24) -> list[str]:
    return [line.text for line in screen_lines(frame, height=height)]


def test_missing_nodes_come_before_the_members() -> None:
    shown = texts(TopData(status=status_of(3, missing=1, waiting=("new",)), answers_in=0.0012, read_ago=4.0))
    assert shown[0] == "the store answers in 1.2 ms; q quits"
    assert shown[1] == "run job: training: round 7 stands with 3 nodes"
    assert shown[2] == "state: Training: 1 missing"
    assert "3 members, 1 waiting, 1 missing" in shown[4]
    at = shown.index("    missing  bad-000: lost 7 s ago: its process ended")
    assert shown[at + 1] == "    waiting  new"
    assert [line.split()[2] for line in shown[at + 2 :]] == ["gpu-00000", "gpu-00001", "gpu-00002"]


def test_one_member_is_written_in_the_singular() -> None:
    assert "1 member, 1 waiting; coordinator" in texts(TopData(status=status_of(1, waiting=("new",))))[4]


def test_of_ten_thousand_members_the_first_and_the_missing_are_shown() -> None:
    shown = texts(TopData(status=status_of(10_000, missing=300)), height=30)
    assert sum(line.strip().startswith("missing") for line in shown) == 15
    assert "             and 285 more that are missing, refused or wait" in shown, "unnamed ones, too"
    assert len([line for line in shown if line.startswith("  rank")]) == 30


def test_a_lost_store_is_in_the_first_line_as_an_alarm() -> None:
    lines = screen_lines(TopData(status=status_of(1), silent_for=2.0), height=24)
    assert lines[0].text == "the store has not answered for 2 s; what follows is as it was before"
    assert lines[0].meant == "bad"


def test_hostile_names_cannot_drive_the_terminal() -> None:
    shown = texts(TopData(status=status_of(1, waiting=("\x1b[2Jgone",))))
    assert any("\\x1b[2Jgone" in line for line in shown)
    assert not any("\x1b" in line for line in shown)

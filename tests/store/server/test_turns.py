"""The ring of turns: who asks little goes first, and nobody twice before all others once."""

from __future__ import annotations

from store.server.turns import PASS, TURN, Turns


def test_who_has_had_no_turn_goes_first_and_nobody_has_a_second_one_before_all_others_have_had_theirs() -> None:
    turns: Turns[str] = Turns()
    for name in ("a", "b", "gone"):
        turns.wait(name, used=True)
    turns.wait("little", used=False)
    assert "gone" in turns
    turns.leave("gone")
    turns.leave("who never stood there")
    had: list[str] = []
    while len(had) < 7:
        who = turns.next()
        assert who is not None
        had.append(who)
        if who != "little":
            turns.wait(who, used=True)
    assert had == ["little", *"ababab"]
    turns.leave("a")
    turns.leave("b")
    assert turns.next() is None


def test_turns_are_shorter_while_many_have_not_had_any_and_a_pass_is_over_when_its_time_is() -> None:
    turns: Turns[int] = Turns()
    assert turns.length == TURN
    for number in range(1000):
        turns.wait(number, used=False)
    assert turns.length == TURN / 20
    turns.spent = PASS / 2
    assert not turns.over
    turns.spent += PASS
    assert turns.over


def test_it_is_known_whether_all_have_had_a_turn_who_came_before_now() -> None:
    turns: Turns[str] = Turns()
    turns.wait("greedy", used=True)
    assert not turns.waits(turns.came)
    turns.wait("a", used=False)
    came = turns.came
    turns.wait("b", used=False)
    assert list(turns) == ["a", "b", "greedy"]
    assert turns.waits(came)
    assert turns.next() == "a"
    assert not turns.waits(came)
    turns.wait("a", used=False)
    assert not turns.waits(came), "it has come again, for something else"
    assert turns.waits(turns.came)

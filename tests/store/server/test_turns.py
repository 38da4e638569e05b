"""The ring of turns: who asks little goes first, and nobody twice before all others once."""

from __future__ import annotations

from store.server.turns import PASS, TURN, Turns


def test_who_has_had_no_turn_goes_before_those_who_have_used_one_up() -> None:
    turns: Turns[str] = Turns()
    for name in "abc":
        turns.wait(name, used=True)
    turns.wait("little", used=False)
    assert [turns.next() for _ in range(5)] == ["little", "a", "b", "c", None]


def test_nobody_has_a_second_turn_before_all_others_have_had_theirs() -> None:
    turns: Turns[str] = Turns()
    for name in "abc":
        turns.wait(name, used=True)
    had = []
    for _ in range(9):
        who = turns.next()
        assert who is not None
        had.append(who)
        turns.wait(who, used=True)
    assert had == list("abcabcabc")


def test_who_has_gone_stands_in_the_ring_no_longer() -> None:
    turns: Turns[str] = Turns()
    turns.wait("a", used=True)
    turns.wait("b", used=False)
    assert "a" in turns
    turns.leave("a")
    turns.leave("b")
    turns.leave("who never stood there")
    assert len(turns) == 0
    assert turns.next() is None


def test_turns_are_shorter_while_many_have_not_had_any() -> None:
    turns: Turns[int] = Turns()
    assert turns.length == TURN
    for number in range(1000):
        turns.wait(number, used=False)
    assert turns.length == TURN / 20


def test_a_pass_is_over_when_its_time_is() -> None:
    turns: Turns[str] = Turns()
    turns.spent = PASS / 2
    assert not turns.over
    turns.spent += PASS
    assert turns.over

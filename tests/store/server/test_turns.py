"""The ring of turns: who asks little goes first, and nobody twice before all others once."""

from __future__ import annotations

from store.server.turns import AT_ONCE, PASS, TURN, Announcement, Turns


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


def announced(items: list[tuple[int, str]]) -> tuple[Announcement[str], list[tuple[int, str]]]:
    told: list[tuple[int, str]] = []
    return Announcement(items, told.append), told


def test_many_are_told_a_few_at_a_time_and_each_once() -> None:
    items = [(number, "it") for number in range(2 * AT_ONCE + 1)]
    announcement, told = announced(items)
    for many in (AT_ONCE, 2 * AT_ONCE, 2 * AT_ONCE + 1):
        assert not announcement.over
        announcement.go_on()
        assert told == items[:many]
    assert announcement.over


def test_who_is_to_be_told_something_else_is_told_this_first_and_not_again() -> None:
    items = [(number % 100, f"watch {number}") for number in range(3 * AT_ONCE)]
    announcement, told = announced(items)
    announcement.go_on()
    announcement.tell_now(70)
    assert told[AT_ONCE:] == [(70, "watch 70"), (70, "watch 170")]
    announcement.tell_now(70)
    announcement.tell_now(1)
    assert told[AT_ONCE + 2 :] == [(1, "watch 101")], "the first of them it has been told"
    announcement.tell_now(4711)
    while not announcement.over:
        announcement.go_on()
    assert sorted(told) == sorted(items)
    assert [one for one in told if one[0] == 7] == [(7, "watch 7"), (7, "watch 107")]


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

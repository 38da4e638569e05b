"""The module `rdzv.core.stuck.accusing`."""

from rdzv.core.stuck.accusing import Accusation, Accusations


def against(accused: str, *by: str, round: int = 3) -> list[Accusation]:
    return [Accusation(round=round, accused=accused, by=one, why=f"{one} does not reach it") for one in by]


def believed(*said: Accusation, live: str = "abcd") -> tuple[str, str] | None:
    accusations = Accusations()
    for one in said:
        accusations[f"{one.accused}/{one.by}"] = one
    return accusations.member_to_expel(round=3, live=live)


def test_two_members_that_accuse_the_same_one_are_believed_and_one_is_not() -> None:
    assert believed() is None
    assert believed(*against("c", "a")) is None
    assert believed(*against("c", "a"), *against("a", "c")) is None, "in a round of two, either may be wrong"
    assert believed(*against("c", "a", "b")) == ("c", "accused by a: a does not reach it; b: b does not reach it")


def test_the_most_accused_member_is_removed_first_with_its_own_accusations() -> None:
    said = (*against("c", "a", "b", "d"), *against("a", "c", "d"))
    assert believed(*said) == ("c", "accused by a: a does not reach it; b: b does not reach it")
    assert believed(*said, live="abd") is None


def test_only_live_members_of_this_round_accuse_and_are_accused() -> None:
    assert believed(*against("c", "a", "b", round=2)) is None
    assert believed(*against("c", "a", "b"), live="acd") is None
    assert believed(*against("c", "a", "b"), live="abd") is None
    assert believed(*against("c", "c", "a")) is None


def test_accusations_that_were_withdrawn_or_precede_a_reset_do_not_count() -> None:
    accusations = Accusations()
    for one in against("c", "a", "b"):
        accusations[one.by] = one
    del accusations["a"]
    assert accusations.member_to_expel(round=3, live="abc") is None
    accusations["a"] = against("c", "a")[0]
    assert accusations.member_to_expel(round=3, live="abc") is not None
    accusations.clear()
    assert accusations.member_to_expel(round=3, live="abc") is None

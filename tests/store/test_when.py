"""Conditions read like their meaning, and expressions with another meaning are refused."""

import pytest

from store import when
from store.messages import Condition, Target


def test_each_sentence_makes_its_condition() -> None:
    assert (when.mod_revision("a") == 7) == Condition(key="a", target=Target.MOD_REVISION, expected=7)
    assert (when.create_revision("a") == 0) == Condition(key="a", target=Target.CREATE_REVISION, expected=0)
    assert (when.value("a") == b"x") == Condition(key="a", target=Target.VALUE, expected=b"x")
    assert when.exists("a") == Condition(key="a", target=Target.EXISTS, expected=True)
    assert when.missing("a") == Condition(key="a", target=Target.EXISTS, expected=False)


@pytest.mark.parametrize("term", [when.mod_revision("a"), when.create_revision("a")])
@pytest.mark.parametrize("other", [None, "7", 7.0, b"7", True])
def test_a_revision_is_compared_with_an_int(term: object, other: object) -> None:
    with pytest.raises(TypeError):
        _ = term == other


@pytest.mark.parametrize("other", [None, "x", 7])
def test_a_value_is_compared_with_bytes(other: object) -> None:
    with pytest.raises(TypeError):
        _ = when.value("a") == other


@pytest.mark.parametrize("term", [when.mod_revision("a"), when.create_revision("a"), when.value("a")])
def test_there_is_no_unequal(term: object) -> None:
    """Python derived one by itself, which was False: a transaction then sent a bool as a condition."""
    with pytest.raises(TypeError, match="cannot be negated"):
        _ = term != b"x"


@pytest.mark.parametrize("term", [when.mod_revision("a"), when.value("a")])
def test_half_a_sentence_is_no_dictionary_key(term: object) -> None:
    with pytest.raises(TypeError, match="unhashable"):
        hash(term)

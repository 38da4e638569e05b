"""The index agrees with a sorted list, after any sequence of additions, removals and lookups."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from store.engine import keyspace
from store.engine.keyspace import SortedKeys

KEYS = st.text(alphabet="ab/\U00010000\uffee", max_size=4)


def filled(*keys: str) -> SortedKeys:
    made = SortedKeys()
    for key in keys:
        made.add(key)
    return made


def under(made: SortedKeys, prefix: str) -> list[str]:
    return made.page(prefix, after=None, most=1000)


def test_the_order_is_that_of_the_utf8_bytes() -> None:
    keys = ["\U00010000", "\uffee", "z", "é"]
    assert under(filled(*keys), "") == sorted(keys, key=str.encode)


@given(st.lists(st.tuples(st.booleans(), KEYS), max_size=80), st.sampled_from([2, 4, keyspace.CHUNK_MAX]))
def test_the_index_is_a_sorted_list(steps: list[tuple[bool, str]], chunk_max: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keyspace, "CHUNK_MAX", chunk_max)
        made, model = SortedKeys(), list[str]()
        for adding, key in steps:
            if adding and key not in model:
                made.add(key)
                model = sorted([*model, key])
            elif not adding and key in model:
                made.remove(key)
                model.remove(key)
            assert len(made) == len(model)
            assert under(made, key) == [each for each in model if each.startswith(key)]
            assert made.page(key[:1], after=None, most=3) == [each for each in model if each.startswith(key[:1])][:3]
            assert made.count(key) == sum(each.startswith(key) for each in model)
            assert made.count(key[:1]) == sum(each.startswith(key[:1]) for each in model)
        assert under(made, "") == model

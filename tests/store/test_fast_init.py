"""What a constructor makes is the frozen noun, and nothing else."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest

from store.fast_init import constructor
from store.messages import Entry, Ping, Put, Request, Transact


@pytest.mark.parametrize("noun", [Entry, Put, Transact, Ping])
def test_a_maker_takes_the_fields_in_the_order_of_their_definition(noun: type) -> None:
    values = {field.name: number for number, field in enumerate(fields(noun))}
    made: Any = constructor(noun)(*values.values())
    assert type(made) is noun
    assert made == noun(**values)


def test_what_is_made_is_frozen_and_has_no_room_for_more() -> None:
    made = constructor(Put)("k", b"v", None, None)
    with pytest.raises(FrozenInstanceError):
        made.key = "other"  # type: ignore[misc]  # which is the point
    assert not hasattr(made, "__dict__")
    assert isinstance(made, Request)
    assert hash(made) == hash(Put("k", b"v"))


def test_a_field_that_is_left_out_is_an_error() -> None:
    with pytest.raises(TypeError):
        constructor(Put)("k")
    assert constructor(Put)("k", b"v") == Put("k", b"v"), "but for the last ones, if they have defaults"

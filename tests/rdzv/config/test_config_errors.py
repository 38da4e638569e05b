"""Refusals: a wrong value is shown, briefly, and a name that was mistyped is recognised."""

from __future__ import annotations

import pytest

from rdzv.config.config_errors import refuse, shown, suggest
from rdzv.errors import RendezvousSettingsError


def test_a_refusal_is_an_error_in_the_settings() -> None:
    with pytest.raises(RendezvousSettingsError, match=r"^one sentence$"):
        refuse("one sentence")


def test_a_value_is_shown_literally_but_not_at_length() -> None:
    assert shown("a\n") == r"'a\n'"
    assert len(shown("x" * 10_000)) <= 80
    assert len(shown(range(10**80))) <= 80 + len("range()")
    assert len(shown(bytes(10_000_000))) <= 80
    assert len(shown(dict.fromkeys(range(10000), "x" * 10000))) <= 400
    assert len(shown(2**100_000)) <= 80


def test_only_a_close_name_is_suggested() -> None:
    assert suggest("tll", {"ttl": 1, "prefix": 2}) == " (did you mean ttl?)"
    assert suggest("qqqqqq", {"ttl": 1}) == ""

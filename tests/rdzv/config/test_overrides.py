"""The keywords of `connect` that type checkers know are the parameters, under all their names."""

from __future__ import annotations

from rdzv.config.overrides import Overrides
from rdzv.config.parameters import KEEP_ALIVE, Source
from rdzv.config.settings import PARAMETERS, parse


def test_every_name_of_every_parameter_is_a_keyword_and_nothing_else_is() -> None:
    names = {
        name
        for parameter in (*PARAMETERS.values(), *KEEP_ALIVE.values())
        for name in (parameter.name, *parameter.aliases)
    }
    assert set(Overrides.__annotations__) == names
    assert all(Source.KEYWORD in parameter.sources for parameter in PARAMETERS.values())


def test_a_keyword_that_is_none_counts_as_not_given() -> None:
    overrides: Overrides = {"min_nodes": "2", "join_timeout": "5m", "is_host": None}
    settings = parse("tcp://head/job", overrides, {})
    assert (settings.min_nodes, settings.join_timeout) == (2, 300.0)

"""Conditions as Python expressions: `when.mod_revision(key) == 7`, `when.exists(key)`.

A term rejects `!=`, which Python would turn into a bool: the transaction would lack its condition.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

from store.messages import Condition, Target

__all__ = ["create_revision", "exists", "missing", "mod_revision", "value", "value_if_any"]


@dataclass(slots=True, eq=False)
class _ConditionBuilder:  # noqa: PLW1641  it does not compare, so it is no dictionary key
    _key: str
    _target: Target
    _kind: type[int | bytes]

    def __eq__(self, other: object) -> Condition:  # type: ignore[override]
        if not isinstance(other, self._kind) or isinstance(other, bool):
            what = self._target.name.lower()
            raise TypeError(
                f"the {what} of {self._key!r} is compared with {other!r}, which is no {self._kind.__name__}"
            )
        return Condition(key=self._key, target=self._target, expected=other)

    def __ne__(self, other: object) -> NoReturn:
        raise TypeError("a condition cannot be negated: use ==, exists or missing")


def mod_revision(key: str) -> _ConditionBuilder:
    """Return a term for the revision at which `key` was last changed; 0 if it does not exist."""
    return _ConditionBuilder(key, Target.MOD_REVISION, int)


def create_revision(key: str) -> _ConditionBuilder:
    """Return a term for the revision at which `key` was created; 0 if it does not exist."""
    return _ConditionBuilder(key, Target.CREATE_REVISION, int)


def value(key: str) -> _ConditionBuilder:
    """Return a term for the value of `key`; a missing key equals no value."""
    return _ConditionBuilder(key, Target.VALUE, bytes)


def value_if_any(key: str) -> _ConditionBuilder:
    """Return a term for the value of `key`; a missing key equals any value."""
    return _ConditionBuilder(key, Target.VALUE_IF_ANY, bytes)


def exists(key: str) -> Condition:
    """Return the condition that `key` exists."""
    return Condition(key=key, target=Target.EXISTS, expected=True)


def missing(key: str) -> Condition:
    """Return the condition that `key` does not exist."""
    return Condition(key=key, target=Target.EXISTS, expected=False)

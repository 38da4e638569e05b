"""Pure: a quicker way to make a frozen noun, for the rooms that make several in every call.

The constructor of a frozen dataclass sets each field by name, through `object.__setattr__`: an `Entry` takes 600 ns,
and one blocking call makes some ten nouns on both sides of the socket together. The functions made here fill an
ordinary dataclass of the same fields, and then say that it has been the frozen one all along, which the equal layout
of their slots permits: 180 ns, and of a call 10 % less. What comes out is the frozen noun and nothing else.
"""

from __future__ import annotations

from dataclasses import fields, make_dataclass
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["constructor"]

N = TypeVar("N")


def constructor(noun: type[N]) -> Callable[..., N]:
    """What makes a noun of all its fields, given in the order of their definition; none may be left out."""

    def become(self: Any) -> None:
        self.__class__ = noun

    names = [field.name for field in fields(noun)]  # type: ignore[arg-type]  # mypy has no word for "any dataclass"
    made: Any = make_dataclass(
        noun.__name__,
        [(name, Any) for name in names],
        bases=noun.__bases__,
        namespace={"__post_init__": become},
        eq=False,
        slots=True,
    )
    return made  # type: ignore[no-any-return]  # calling it gives a noun, though it is the class of something else

"""Parts of `rdzv`, with values at and beside their bounds: how many results there are, and a checksum of all.

The rows of `core.rows` define cases, functions of a random generator, and tell their results. So do those of
`parts.rows`, of parts of a member that the rooms above `rdzv.core` have.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any, Final

from tests.recorded import tables
from tests.recorded.coordinator import Led

TABLES: Final = tables.sections(__file__) | tables.sections(__file__.replace("core.py", "parts.py"))


class Values(random.Random):
    """A random generator of values."""

    def made(self, kind: Any, **choices: Any) -> Any:
        """Return a record of this kind, each field one of its choices."""
        return kind(**{name: self.choice(some) for name, some in choices.items()})


def shown(value: Any) -> str:
    """Return a value in short, its numbers rounded."""
    if is_dataclass(value):
        return shown((type(value).__name__, *(getattr(value, one.name) for one in fields(value))))
    if isinstance(value, dict):
        return shown([*value.items()])
    return f"[{', '.join(map(shown, value))}]" if isinstance(value, list | tuple) else tables.text(value)


def told(count: int, case: Callable[[Values], Any], *, whole: bool = False) -> str:
    """Return how many results a case has, and a checksum of all of them; the results themselves if `whole`."""
    results = []
    for seed in range(count):
        try:
            results.append(shown(case(Values(seed))))
        except Exception as error:  # noqa: BLE001  it is recorded
            results.append(tables.text(error))
    all_of_it = "\n".join(results)
    return all_of_it if whole else f"{len(set(results))} results, {zlib.crc32(all_of_it.encode()):08x}"


def play(name: str, *, whole: bool = False) -> Iterable[str]:
    """Play the rows of a table; `whole` tells all results."""
    if whole:
        return tables.evaluated(TABLES[name], {"told": lambda *case: print(told(*case, whole=True)), "Led": Led})
    return tables.evaluated(TABLES[name], {"told": told, "Led": Led})


RECORDINGS: Final[dict[str, Callable[[], Iterable[str]]]] = {name: partial(play, name) for name in TABLES}

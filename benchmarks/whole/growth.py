"""Pure: how a cost grows with N, and how much of it grows faster than N log N.

A cost is fitted as a sum of a constant and terms of N, N log N and N squared, none of them negative, by the least
squares of the relative errors: each size counts the same. The share of N squared at the largest size is the part that N
log N does not explain: next to nothing for a cost that grows like N log N, nearly all for one of N^1.5. The exponent
beside it is that of the best single power of N: easier to read, but misled by constants.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["ABOVE_MOST", "JUDGED_FROM", "TERMS", "Fit", "fit", "power"]

Point = tuple[float, float]

TERMS: dict[str, Callable[[float], float]] = {
    "1": lambda _: 1.0,
    "N": lambda n: n,
    "N log N": lambda n: n * math.log2(n),
    "N^2": lambda n: n * n,
}
ABOVE_MOST = 0.5
"""The largest share of N squared, at the largest size, of a cost that counts as N log N.

From 4 to 10,000 nodes, with errors of 15 %, costs of N log N exceed it once in a hundred times, and those of N^1.5
always, at 0.8 and more.
"""
JUDGED_FROM = 1000
"""Nodes at least, at the largest size, for a verdict: below, constants hide the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """How a cost grows.

    Attributes:
        terms: The factor of each of `TERMS`.
        exponent: Of the power of N that fits best; not a number below two sizes.
        above: The share of N squared in the cost at the largest size; not a number below four sizes.
    """

    terms: dict[str, float]
    exponent: float
    above: float

    def at(self, n: float) -> float:
        """Return the cost at this size."""
        return sum(factor * TERMS[name](n) for name, factor in self.terms.items())


def power(points: Sequence[Point]) -> float:
    """Return the exponent of the power of N that fits best; not a number below two sizes. N squared gives 2."""
    logs = [(math.log(n), math.log(value)) for n, value in points if n > 0 and value > 0]
    if len({n for n, _ in logs}) < 2:
        return math.nan
    mean_n, mean_value = (sum(each) / len(logs) for each in zip(*logs, strict=True))
    return float(
        sum((n - mean_n) * (value - mean_value) for n, value in logs) / sum((n - mean_n) ** 2 for n, _ in logs)
    )


def fit(points: Sequence[Point]) -> Fit:
    """Fit the terms to a cost; each point is a size and its total cost."""
    known = [(n, value) for n, value in points if n > 0 and value > 0]
    if len({n for n, _ in known}) < len(TERMS):
        return Fit(terms={}, exponent=power(known), above=math.nan)
    names = list(TERMS)
    best: tuple[float, dict[str, float]] = (math.inf, {})
    for count in range(1, len(names) + 1):
        for chosen in itertools.combinations(names, count):
            factors = _least_squares([[TERMS[name](n) / value for name in chosen] for n, value in known])
            if factors is None or min(factors) < 0:
                continue
            terms = dict(zip(chosen, factors, strict=True))
            error = sum(
                (sum(factor * TERMS[name](n) for name, factor in terms.items()) / value - 1) ** 2 for n, value in known
            )
            if error < best[0]:
                best = error, terms
    largest = max(n for n, _ in known)
    terms = best[1]
    whole = sum(factor * TERMS[name](largest) for name, factor in terms.items())
    return Fit(terms=terms, exponent=power(known), above=terms.get("N^2", 0.0) * largest * largest / whole)


def _least_squares(rows: list[list[float]]) -> list[float] | None:
    """Return the factors with which the columns come closest to 1 in every row; None if they are dependent."""
    size = len(rows[0])
    scales = [max(row[column] for row in rows) for column in range(size)]
    scaled = [[value / scale for value, scale in zip(row, scales, strict=True)] for row in rows]
    matrix = [
        [sum(row[i] * row[j] for row in scaled) for j in range(size)] + [sum(row[i] for row in scaled)]
        for i in range(size)
    ]
    for column in range(size):  # Gauss, the largest first
        pivot = max(range(column, size), key=lambda row: abs(matrix[row][column]))
        matrix[column], matrix[pivot] = matrix[pivot], matrix[column]
        if abs(matrix[column][column]) < 1e-12:
            return None
        for row in range(size):
            if row != column:
                times = matrix[row][column] / matrix[column][column]
                matrix[row] = [a - times * b for a, b in zip(matrix[row], matrix[column], strict=True)]
    return [matrix[i][size] / matrix[i][i] / scales[i] for i in range(size)]

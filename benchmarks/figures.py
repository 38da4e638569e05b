"""Pure: a figure as SVG, of a few lines: points over a logarithmic axis, one line for each who was measured.

The documents show these figures. They are drawn here, since a plotting library would be the largest thing that the
benchmarks need.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["Figure", "draw", "growth"]

WIDTH, HEIGHT = 640, 360
LEFT, RIGHT, TOP, BOTTOM = 70, 150, 40, 50
COLOURS = ("#1b6ca8", "#d1495b", "#66a182", "#edae49", "#5f5f5f")

Points = "Sequence[tuple[float, float]]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """What is to be drawn: both axes are logarithmic.

    Attributes:
        title: What is shown.
        across: What the horizontal axis counts.
        up: What the vertical one does.
        lines: The points of each line, by its name.
    """

    title: str
    across: str
    up: str
    lines: Mapping[str, Sequence[tuple[float, float]]]


def growth(points: Sequence[tuple[float, float]]) -> float:
    """How something grows with N: the exponent of the power of N that fits best; not a number below two points.

    1 is in step with N. N log N comes out as little more than 1, and N squared as 2.
    """
    logs = [(math.log(n), math.log(value)) for n, value in points if n > 0 and value > 0]
    if len({n for n, _ in logs}) < 2:
        return math.nan
    mean_n, mean_value = (sum(each) / len(logs) for each in zip(*logs, strict=True))
    return float(
        sum((n - mean_n) * (value - mean_value) for n, value in logs) / sum((n - mean_n) ** 2 for n, _ in logs)
    )


def draw(figure: Figure) -> str:
    """The figure, as the text of an SVG file."""
    points = [point for line in figure.lines.values() for point in line if point[0] > 0 and point[1] > 0]
    xs, ys = ([point[axis] for point in points] or [1.0] for axis in (0, 1))
    low_x, high_x = _decades(min(xs), max(xs))
    low_y, high_y = _decades(min(ys), max(ys))

    def x(value: float) -> float:
        return LEFT + (math.log10(value) - low_x) / (high_x - low_x) * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (math.log10(value) - low_y) / (high_y - low_y) * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="22" font-size="14">{escape(figure.title)}</text>',
        f'<text x="{LEFT}" y="{HEIGHT - 12}">{escape(figure.across)}</text>',
        f'<text x="14" y="{HEIGHT - BOTTOM}" transform="rotate(-90 14 {HEIGHT - BOTTOM})">{escape(figure.up)}</text>',
    ]
    for power in range(low_x, high_x + 1):
        at = x(10.0**power)
        parts.append(f'<path d="M{at:.1f} {TOP}V{HEIGHT - BOTTOM}" stroke="#ddd"/>')
        parts.append(f'<text x="{at:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{10.0**power:g}</text>')
    for power in range(low_y, high_y + 1):
        at = y(10.0**power)
        parts.append(f'<path d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{10.0**power:g}</text>')
    for number, (name, line) in enumerate(figure.lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        shown = sorted((a, b) for a, b in line if a > 0 and b > 0)
        path = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in shown)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.extend(f'<circle cx="{x(a):.1f}" cy="{y(b):.1f}" r="3" fill="{colour}"/>' for a, b in shown)
        at = TOP + 16 * number + 8
        parts.append(f'<text x="{WIDTH - RIGHT + 12}" y="{at}" fill="{colour}">{escape(name)}</text>')
    return "\n".join((*parts, "</svg>\n"))


def _decades(low: float, high: float) -> tuple[int, int]:
    """The powers of ten between which these lie; at least one apart."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    return first, max(last, first + 1)

"""Pure: a figure as SVG: lines over logarithmic axes.

The documents show these figures. They are drawn here, since a plotting library would be the largest dependency of the
benchmarks. The same values give the same text. There is no background, and all colours have contrast to white and to
the black of a dark page.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = ["COLOURS", "GRID", "TEXT", "Lines", "draw", "quantity"]

WIDTH, HEIGHT = 760, 400
LEFT, RIGHT, TOP, BOTTOM = 78, 200, 44, 54
COLOURS = ("#3a7fc1", "#d9534f", "#3f9457", "#b8760b", "#9468d0", "#178f96", "#c2558f", "#7a7a7a")
TEXT, GRID = "#777777", "#8888884d"
PREFIXES = {-3: "n", -2: "µ", -1: "m", 0: "", 1: "k", 2: "M", 3: "G"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """Points over a size, one line per contender; both axes are logarithmic.

    Attributes:
        title: The title.
        across: The quantity of the horizontal axis.
        up: The quantity of the vertical one, with its unit in words.
        unit: Of the vertical axis: "s", "B", or none.
        lines: The points of each line, by its name.
        dashed: The names of those that are not ours.
    """

    title: str
    across: str
    up: str
    unit: str = ""
    lines: Mapping[str, Sequence[tuple[float, float]]]
    dashed: frozenset[str] = field(default_factory=frozenset)


def quantity(value: float, unit: str) -> str:
    """Return a number with its unit and a fitting prefix: 0.0125 s are 12.5 ms."""
    if not unit:
        return f"{value:,.0f}" if value >= 1 else f"{value:.3g}"
    if value == 0:
        return f"0 {unit}"
    step = min(max(math.floor(math.log10(value) / 3 + 1e-9), -3), 3)
    if unit == "s":
        step = min(step, 0)
    scaled = value / 1000.0**step
    return f"{scaled:,.3g} {PREFIXES[step]}{unit}" if scaled < 1000 else f"{scaled:,.0f} {PREFIXES[step]}{unit}"


def draw(figure: Lines) -> str:
    """Return the figure as SVG."""
    middle = (HEIGHT - BOTTOM + TOP) / 2
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}">',
        f'<g font-family="system-ui, sans-serif" font-size="12" fill="{TEXT}">',
        f"<title>{escape(figure.title)}</title>",
        f'<text x="{LEFT}" y="24" font-size="15" font-weight="600">{escape(figure.title)}</text>',
        f'<text transform="translate(16 {middle:g}) rotate(-90)" text-anchor="middle">{escape(figure.up)}</text>',
        *_lines(figure),
    ]
    return "\n".join((*parts, "</g>", "</svg>\n"))


def _lines(figure: Lines) -> Iterator[str]:
    points = [point for line in figure.lines.values() for point in line if point[0] > 0 and point[1] > 0]
    xs, ys = ([point[axis] for point in points] or [1.0] for axis in (0, 1))
    low_x, high_x = math.log10(min(xs)) - 0.05, math.log10(max(xs)) + 0.05
    low_y, high_y = _decades(min(ys), max(ys))

    def x(value: float) -> float:
        return LEFT + (math.log10(value) - low_x) / (high_x - low_x) * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (math.log10(value) - low_y) / (high_y - low_y) * (HEIGHT - TOP - BOTTOM)

    for size in sorted(set(xs)):
        yield _line(x(size), TOP, x(size), HEIGHT - BOTTOM)
        yield _text(x(size), HEIGHT - BOTTOM + 18, quantity(size, ""), "middle")
    for decade in range(low_y, high_y + 1):
        yield _line(LEFT, y(10.0**decade), WIDTH - RIGHT, y(10.0**decade))
        yield _text(LEFT - 8, y(10.0**decade) + 4, quantity(10.0**decade, figure.unit), "end")
    yield _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, figure.across, "middle")
    for number, (name, line) in enumerate(figure.lines.items()):
        colour, dash = COLOURS[number % len(COLOURS)], ' stroke-dasharray="6 4"' * (name in figure.dashed)
        shown = [(x(a), y(b)) for a, b in sorted(line) if a > 0 and b > 0]
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in shown)
        yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>'
        yield from (f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3.5" fill="{colour}"/>' for a, b in shown)
        yield from _key(number, name, colour, dash)


def _key(number: int, name: str, colour: str, dash: str) -> Iterator[str]:
    left, at = WIDTH - RIGHT + 16, TOP + 20 * number + 10
    yield f'<path d="M{left} {at}h24" stroke="{colour}" stroke-width="3"{dash}/>'
    yield _text(left + 32, at + 4, name, "start")


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<path d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}" stroke="{GRID}"/>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _decades(low: float, high: float) -> tuple[int, int]:
    """Return the powers of ten around these; at least one apart."""
    first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    return first, max(last, first + 1)

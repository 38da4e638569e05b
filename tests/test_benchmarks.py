"""What the benchmarks reckon with, and draw: the parts of them that measure nothing."""

from __future__ import annotations

import math
from xml.etree import ElementTree

import pytest

from benchmarks import arrivals, support
from benchmarks.__main__ import Report
from benchmarks.figures import Figure, draw, growth

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize(
    ("cost", "power"),
    [(lambda n: 5 * n, 1.0), (lambda n: n * n, 2.0), (lambda _: 7, 0.0), (lambda n: n * math.log(n), 1.17)],
)
def test_growth_is_the_power_of_n_that_fits(cost: object, power: float) -> None:
    assert callable(cost)
    assert growth([(n, cost(n)) for n in (64, 256, 1024, 4096)]) == pytest.approx(power, abs=0.01)


@pytest.mark.parametrize("points", [[], [(4, 1.0)], [(4, 1.0), (4, 2.0)], [(4, 1.0), (8, 0.0)]])
def test_fewer_than_two_sizes_have_no_growth(points: list[tuple[float, float]]) -> None:
    assert math.isnan(growth(points))


def test_a_figure_has_a_line_for_each_who_was_measured_and_a_point_for_each_value_above_zero() -> None:
    lines = {"us & them": [(4, 0.1), (64, 1.0)], "theirs": [(4, 0.0), (64, 20.0)], "nobody": []}
    root = ElementTree.fromstring(draw(Figure(title="a < b", across="nodes", up="seconds", lines=lines)))
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert {"a < b", "nodes", "seconds", "us & them", "theirs", "nobody"} <= set(texts)
    assert len(list(root.iter(f"{SVG}polyline"))) == 3
    circles = [(float(one.attrib["cx"]), float(one.attrib["cy"])) for one in root.iter(f"{SVG}circle")]
    assert len(circles) == 3, "zero has no place on a logarithmic axis"
    assert circles[0][0] < circles[1][0]
    assert circles[0][1] > circles[1][1], "more is further up"


def test_a_figure_without_any_value_can_be_drawn() -> None:
    ElementTree.fromstring(draw(Figure(title="", across="", up="", lines={})))


def test_a_promise_is_kept_up_to_its_bound_and_by_what_could_not_be_measured() -> None:
    report = Report()
    report.check("small", 1.0, most=1.0)
    report.check("too large", 1.1, most=1.0)
    report.check("large", 20.0, least=20.0)
    report.check("too small", 19.0, least=20.0)
    report.check("unknown", math.nan, most=1.0)
    report.check("none at all", 0.0, most=0.0)
    assert [(what, kept) for what, _, _, kept in report.checks] == [
        ("small", True),
        ("too large", False),
        ("large", True),
        ("too small", False),
        ("unknown", True),
        ("none at all", True),
    ]


def test_nodes_are_shared_out_evenly_over_processes() -> None:
    assert support.shares(10, 4) == [range(2), range(2, 5), range(5, 7), range(7, 10)]
    assert support.shares(2, 4) == [range(1), range(1, 2)]


def test_bytes_are_those_between_two_looks_at_the_servers_figures() -> None:
    before, after = {"bytes_in": 5, "bytes_out": 10}, {"bytes_in": 25, "bytes_out": 11}
    assert arrivals.bytes_between(after, before) == 21


def test_what_was_not_measured_is_shown_as_that() -> None:
    assert (support.ms(math.nan), support.us(math.nan), support.ratio(math.nan, 1.0)) == ("-", "-", "-")
    assert (support.ms(0.0125), support.us(0.0000125), support.ratio(3.0, 1.5)) == ("12.5", "12.5", "2.00x")
    assert math.isnan(support.median([]))
    assert support.median([3.0, 1.0, 2.0]) == 2.0

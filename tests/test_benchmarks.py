"""The parts of the benchmarks that measure nothing: calculations, figures, judgement and pages."""

import json
import math
import random
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jsonschema
import pytest

from benchmarks import __main__ as command
from benchmarks.whole import growth, pages, pictures, promises, runner
from benchmarks.whole import parts as parts_room
from benchmarks.whole.figures import Lines, draw
from benchmarks.whole.parts import PARTS, Part, Plan, Step
from benchmarks.whole.promises import PROMISES, Limit
from benchmarks.whole.results import Results
from tools import stamps

ROOT = Path(__file__).parents[1]
SVG = "{http://www.w3.org/2000/svg}"
SIZES = (4, 64, 256, 1024, 4096, 10_000)


def kept_results() -> Results:
    """Return the results that the documents show."""
    return Results.load(ROOT / "docs" / "benchmarks.json")


def measured(cost: Callable[[float], float], seed: int = 0, noise: float = 0.0) -> list[tuple[float, float]]:
    chance = random.Random(seed)
    return [(n, cost(n) * math.exp(chance.gauss(0, noise))) for n in SIZES]


@pytest.mark.parametrize(
    ("cost", "exponent"),
    [(lambda n: 5 * n, 1.0), (lambda n: n * n, 2.0), (lambda _: 7, 0.0), (lambda n: n * math.log(n), 1.17)],
)
def test_the_power_of_n_is_found(cost: object, exponent: float) -> None:
    assert callable(cost)
    assert growth.power([(n, cost(n)) for n in (64, 256, 1024, 4096)]) == pytest.approx(exponent, abs=0.01)


@pytest.mark.parametrize(
    ("cost", "terms"),
    [
        (lambda n: 3 + 2 * n, {"1": 3, "N": 2}),
        (lambda n: 2 * n * math.log2(n), {"N log N": 2}),
        (lambda n: 40 + n * n / 50, {"1": 40, "N^2": 0.02}),
    ],
)
def test_the_terms_of_a_cost_are_found(cost: Any, terms: dict[str, float]) -> None:
    found = {name: factor for name, factor in growth.fit(measured(cost)).terms.items() if factor > 1e-6}
    assert found == pytest.approx(terms, rel=1e-3)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    "cost", [lambda n: 0.3 * n, lambda n: 30 + 0.3 * n, lambda n: n * math.log2(n), lambda n: 9 + n * math.log2(n)]
)
def test_growth_like_n_log_n_passes_with_errors_of_ten_percent(cost: Any, seed: int) -> None:
    assert growth.fit(measured(cost, seed, 0.1)).above <= growth.ABOVE_MOST


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("cost", [lambda n: n**1.5, lambda n: n * n, lambda n: 1000 + n + n * n / 1000])
def test_faster_growth_fails(cost: Any, seed: int) -> None:
    assert growth.fit(measured(cost, seed, 0.1)).above > growth.ABOVE_MOST


def test_a_figure_has_a_line_for_each_series_and_a_point_for_each_value_above_zero() -> None:
    lines = {"us & them": [(4, 0.1), (64, 1.0)], "theirs": [(4, 0.0), (64, 20.0)], "nobody": []}
    figure = Lines(title="a < b", across="nodes", up="seconds", unit="s", lines=lines, dashed=frozenset({"theirs"}))
    root = ElementTree.fromstring(draw(figure))
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert {"a < b", "nodes", "seconds", "us & them", "theirs", "nobody", "4", "64", "100 ms", "10 s"} <= set(texts)
    assert len(list(root.iter(f"{SVG}polyline"))) == 3
    assert sum("stroke-dasharray" in line.attrib for line in root.iter(f"{SVG}polyline")) == 1
    circles = [(float(one.attrib["cx"]), float(one.attrib["cy"])) for one in root.iter(f"{SVG}circle")]
    assert len(circles) == 3, "zero has no place on a logarithmic axis"
    assert circles[0][0] < circles[1][0]
    assert circles[0][1] > circles[1][1], "more is further up"


def test_results_are_saved_after_each_row_and_can_be_continued(tmp_path: Path) -> None:
    path = tmp_path / "out" / "results.json"
    results = Results.load(path)
    results.begin("idle")
    results.add("idle", {"nodes": 4, "cpu": math.nan})
    for cpu in (3.0, 1.0, 2.0):
        results.add("idle", {"nodes": 64, "cpu": cpu})
    results.save(path)
    again = Results.load(path)
    assert again.data == results.data
    assert again.points("idle", "nodes", "cpu") == [(64, 2.0)], "the median; a value that is not a number is no point"
    assert again.totals("idle", "cpu") == [(64, 128.0)]
    assert math.isnan(again.value("idle", "cpu", nodes=4))
    assert again.rows("rendezvous") == []
    again.begin("idle")
    assert again.rows("idle") == [], "a new measurement replaces the old"


def test_a_promise_holds_up_to_its_bound_and_is_not_judged_without_results() -> None:
    up_to, from_on = partial(Limit, sentence="", most=1.0), partial(Limit, sentence="", least=20.0)
    cases = [
        (1.0, up_to, True),
        (1.1, up_to, False),
        (20, from_on, True),
        (19, from_on, False),
        (math.nan, up_to, None),
    ]
    limits = [limit(measured=partial(lambda value, _: value, value)) for value, limit, _ in cases]
    assert [verdict.kept for verdict in promises.judge(limits, Results())] == [kept for *_, kept in cases]


def test_a_broken_promise_is_named_and_so_is_a_part_that_has_failed(capsys: pytest.CaptureFixture[str]) -> None:
    results = Results()
    results.begin("fan-out")
    for who, cost in (("rdzv", 4.0), ("echo", 1.0)):
        results.add("fan-out", {"who": who, "watchers": 1000, "server_cpu": cost})
    results.begin("idle")
    results.data["parts"]["idle"]["errors"] = ["64 members: TimeoutError"]
    broken, failed = command.tell(results)
    assert broken.startswith("broken: a change is told to 1,000 watchers")
    assert failed == "failed: idle: 64 members: TimeoutError"
    assert broken in capsys.readouterr().out


def test_a_cost_that_grows_with_the_square_breaks_the_promise_of_n_log_n() -> None:
    (limit,) = (each for each in PROMISES if "N log N" in each.sentence)
    for power, kept in ((1, True), (2, False)):
        results = Results()
        results.begin("idle")
        for nodes in SIZES:
            results.add("idle", {"who": "rdzv", "nodes": nodes, "cpu": nodes**power / 1e9})
        assert [verdict.kept for verdict in promises.judge([limit], results)] == [kept]


def plan_of(*steps: Step) -> Part:
    def make(_: Plan) -> Iterator[Step]:
        yield from steps

    return Part(section="a", says="", seconds=1, steps=make)


def test_a_failing_step_is_reported_and_the_others_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> list[dict[str, Any]]:
        raise ValueError("no\nluck")

    monkeypatch.setitem(PARTS, "two", plan_of(Step("first", fail), Step("second", lambda: [{"a": 1}])))
    parts_room.run("two", Plan(), 60)
    lines = capsys.readouterr().out.splitlines()
    assert "FAILED first: ValueError: no luck" in lines
    assert 'ROW {"a": 1}' in lines


def test_no_step_begins_after_the_time_limit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [0.0]

    def slow() -> list[dict[str, Any]]:
        clock[0] += 60
        return [{}]

    def quick() -> list[dict[str, Any]]:
        clock[0] += 1
        return [{}]

    steps = [Step("slow", slow), Step("quick", quick), Step("slow", slow), Step("quick", quick)]
    monkeypatch.setitem(PARTS, "two", plan_of(*steps))
    parts_room.run("two", Plan(), 100, clock=lambda: clock[0])
    told = [line.partition(":")[0] for line in capsys.readouterr().out.splitlines() if not line.startswith("ROW")]
    slow_twice = "the second slow one would take longer than is left"
    assert told == ["slow", "quick", "quick", "SKIPPED 1 measurements for want of time"], slow_twice


def test_a_part_yields_its_rows_and_its_end(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = []
    said: list[str] = []

    def ran(code: str, seconds: float = 60.0) -> tuple[str, list[str]]:
        return runner.run(
            [sys.executable, "-c", code], seconds=seconds, row=rows.append, say=said.append, log=tmp_path / "x.log"
        )

    assert ran("print('ROW {\"a\": NaN}'); print('going on'); import sys; print('trouble', file=sys.stderr)") == (
        "done",
        [],
    )
    assert math.isnan(rows[0]["a"])
    assert said == ["going on"]
    assert (tmp_path / "x.log").read_text() == "trouble\n"
    assert ran("print('SKIPPED x: 1 s are left')") == ("stopped", [])
    assert ran("print('FAILED x: no'); raise SystemExit(3)") == ("failed", ["x: no", "ended with exit status 3"])
    hangs = "print('ROW {\"b\": 1}', flush=True); import time; time.sleep(600)"
    assert ran(hangs, seconds=0.5 - runner.GRACE) == ("failed", [f"killed {runner.GRACE:g} s after its time"])
    assert len(rows) <= 2, "earlier measurements are kept, if there are any"


@pytest.mark.parametrize("name", list(PARTS))
@pytest.mark.parametrize("quick", [True, False])
def test_every_part_runs_each_size_once_before_it_repeats_one(name: str, quick: bool) -> None:
    names = [step.name for step in PARTS[name].steps(Plan(quick=quick))]
    assert names or PARTS[name].lacks() or name.endswith("-peers")
    first = list(dict.fromkeys(names))
    assert names[: len(first)] == first


def test_the_results_in_the_documents_conform_to_the_schema() -> None:
    schema = json.loads((ROOT / "docs" / "benchmarks.schema.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(kept_results().data, schema)
    assert set(schema["properties"]["parts"]["properties"]) == set(PARTS)


@pytest.mark.parametrize("page", ["README.md", *pages.BLOCKS])
def test_a_page_shows_the_kept_results(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert text == pages.render(page, text, kept_results()), "python -m benchmarks --draw --docs writes it"


def test_the_figures_show_the_kept_results() -> None:
    drawn = pictures.svgs(kept_results())
    assert set(drawn) == {path.name for path in (ROOT / "docs" / "pictures").glob("bench-*.svg")}
    mark = stamps.digest(["docs/benchmarks.json"])
    for name, text in drawn.items():
        kept = (ROOT / "docs" / "pictures" / name).read_bytes()
        assert kept == stamps.stamped(".svg", text.encode(), mark), f"{name}: python -m tools.pictures bench"
        ElementTree.fromstring(kept)


def test_every_promised_ratio_is_on_the_page() -> None:
    page = " ".join((ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8").split())
    assert [each.sentence for each in PROMISES if each.sentence not in page] == []

"""The tool that plants defects: its mutants, the tests that it runs, and that its kept list is up to date."""

import ast
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.seeds import FRESH
from tools import mutants

SOURCE = '''
def grown(numbers: list[int], limit: int = 3) -> list[int]:
    """Not a word of this is changed."""
    log.info("%d", 1)
    assert limit > 2
    for one in numbers:
        if one < limit and not one == 1:
            continue
        numbers.append(max(one, 5))
    return numbers if numbers else [f"é{limit + 1}"]
'''
CHANGED = """
3 -> 4; one < limit and not one == 1 -> (one < limit or not one == 1); one < limit and not one == 1 -> (one < limit);
one < limit and not one == 1 -> (not one == 1); one < limit -> (one <= limit); one < limit -> (one >= limit);
not one == 1 -> (one == 1); one == 1 -> (one != 1); 1 -> 2; continue -> break; numbers.append(max(one, 5)) -> pass;
max(one, 5) -> (min(one, 5)); 5 -> 6; return numbers if numbers else [f"é{limit + 1}"] -> return None;
numbers if numbers else [f"é{limit + 1}"] -> (numbers); numbers if numbers else [f"é{limit + 1}"] -> ([f'é{limit + 1}'])
"""


def defects_of(files: set[str]) -> Iterator[mutants.Mutant]:
    for file in sorted(files):
        yield from mutants.mutants_of(file, (mutants.ROOT / file).read_text())


def test_a_defect_changes_one_place_of_a_function() -> None:
    found = list(mutants.mutants_of("a.py", SOURCE))
    assert {one.name.removeprefix("a.py grown: ") for one in found} == {*re.split(r";\s", CHANGED.strip())}
    for one in found:
        ast.parse(one.planted(SOURCE))
        assert one.planted(SOURCE).count("\n") == SOURCE.count("\n")


def test_each_defect_of_our_rooms_can_be_planted() -> None:
    files = [
        str(path.relative_to(mutants.ROOT)) for room in mutants.ROOMS for path in (mutants.ROOT / room).rglob("*.py")
    ]
    chosen = random.Random(FRESH)
    for one in chosen.sample(list(defects_of({*chosen.sample(sorted(files), 5)})), 50):
        ast.parse(one.planted((mutants.ROOT / one.file).read_text()))


def test_each_defect_that_is_kept_has_a_reason_and_still_exists() -> None:
    lines = [line for line in mutants.KEPT.read_text().splitlines() if not line.startswith("# ")]
    kept = {name: reason for name, _, reason in (line.partition("  # ") for line in lines)}
    assert [name for name, reason in kept.items() if not reason] == []
    assert kept.keys() - {one.name for one in defects_of({name.split()[0] for name in kept})} == set()


@pytest.mark.in_ci
def test_defects_do_not_survive_where_no_test_can_run(tmp_path: Path) -> None:
    told = {
        "test": "tests/rdzv/core/test_of_another_tree.py::test_it",
        "seconds": 1.0,
        "lines": {"rdzv/core/absent.py": "f" * 99},
    }
    (tmp_path / "map.jsonl").write_text(json.dumps(told))
    with pytest.raises(SystemExit, match="can run, without this defect, too: tests/rdzv/core/test_of_another_tree"):
        mutants.main(["play", str(tmp_path), "--count", "1", "--seed", "1", "--jobs", "1"])


@pytest.mark.in_ci
def test_tests_that_run_a_line_find_its_defect(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert mutants.main(["cover", str(tmp_path), "tests/rdzv/core/test_acts.py"]) == 0
    mutants.main(["play", str(tmp_path), "--count", "2", "--seed", "1", "--jobs", "1"])
    told = capfd.readouterr().out
    assert re.search(r"^2 of \d+ defects, by seed 1$", told, re.MULTILINE)
    found = re.findall(r"^(found by tests/rdzv/core/test_acts.py|SURVIVES):?", told, re.MULTILINE)
    assert len(found) == 2
    assert f"{2 - found.count('SURVIVES')} of 2 found" in told

"""Plants small defects, and looks whether tests find them.

python -m tools.mutants cover MAP PYTEST_ARGUMENTS     run tests, and note in the folder MAP which lines each one runs
python -m tools.mutants play MAP --count 100 --seed 7  plant defects at random in those lines, in copies of the tree

`cover` may be called for one folder of tests after the other: a later run of a test replaces an earlier one. `play`
runs the recorded scenes that run the line, and then other tests that do, the nearest first, at most 60 s each. It
prints each defect that none of them finds, and the share that was found. `tools/mutants.txt` keeps the survivors that
change nothing a test could see, with the reason: these do not count.

This module is also the pytest plugin by which `cover` traces tests. It sees threads, but no child processes.
"""

from __future__ import annotations

import argparse
import ast
import copy
import functools
import itertools
import json
import operator
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pytest

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator
    from types import CodeType, FrameType

ROOT: Final = Path(__file__).resolve().parents[1]
STORE_ROOMS: Final = ("engine", "server", "client", "protocol", "disk")
ROOMS: Final = ("rdzv/core", "rdzv/node", "rdzv/loop", *(f"store/{room}" for room in STORE_ROOMS))
MAP_VARIABLE: Final = "RDZV_MUTANTS_MAP"
KEPT: Final = ROOT / "tools" / "mutants.txt"
RECORDED: Final = "tests/recorded/"  # its scenes take tenths of a second, and tell the most
BUDGET: Final = 50.0  # seconds that the other chosen tests of one defect took when they were traced
LIMIT: Final = 60.0  # seconds for either; a defect that makes them wait longer is found
NO_END: Final = f"no end within {LIMIT:g} s"
ENVIRONMENT: Final = {"RDZV_TEST_SEED": "1", "PYTHONHASHSEED": "0"}  # the same cases of large tables each time


class Tracer:
    """A pytest plugin that writes a line for each test that has passed: its name, seconds, and lines of the rooms.

    Of a function that a test calls more than 200 times, every eighth further call is traced: all would take too long.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / f"{time.time_ns()}-{os.getpid()}.jsonl").open("a")
        self._rooms = tuple(f"{ROOT / room}{os.sep}" for room in ROOMS)
        self._lines: dict[CodeType, frozenset[int]] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Trace one test, with its fixtures. Tests of interrupts trace, too, and leave nothing set."""
        self._unseen: dict[CodeType, set[int]] = {}
        self._calls: Counter[CodeType] = Counter()
        self._failed, began = False, time.monotonic()
        sys.settrace(self)
        threading.settrace(self)
        result = yield
        found: dict[str, int] = {}
        for code, unseen in list(self._unseen.items()):
            name = os.path.relpath(code.co_filename, ROOT)
            found[name] = found.get(name, 0) | sum(1 << line for line in self._lines[code] - unseen)
        if not self._failed:
            lines = {name: f"{bits:x}" for name, bits in found.items() if bits}
            told = {"test": item.nodeid, "seconds": time.monotonic() - began, "lines": lines}
            self._file.write(f"{json.dumps(told)}\n")
            self._file.flush()
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a failure: such a test could not tell a defect."""
        self._failed |= report.outcome != "passed"

    def __call__(self, frame: FrameType, *_: Any) -> Any:
        """Begin to trace a function of the rooms, unless all of its lines have been seen."""
        code = frame.f_code
        lines = self._lines.get(code)
        if lines is None:
            ours = code.co_filename.startswith(self._rooms) and code.co_name != "<module>"  # which runs in no test
            all_lines = {line for _, _, line in code.co_lines() if line}
            lines = self._lines[code] = frozenset((all_lines - {code.co_firstlineno} or all_lines) if ours else ())
        if not lines or not self._unseen.setdefault(code, set(lines)):
            return None
        self._calls[code] += 1
        return self._line if self._calls[code] <= 200 or self._calls[code] % 8 == 0 else None

    def _line(self, frame: FrameType, *_: Any) -> Any:
        unseen = self._unseen.setdefault(frame.f_code, set(self._lines[frame.f_code]))
        unseen.discard(frame.f_lineno)
        return self._line if unseen else None


def pytest_configure(config: pytest.Config) -> None:
    """Trace in the process that runs the tests: each worker, if there are some."""
    folder = os.environ.get(MAP_VARIABLE)
    if folder and (hasattr(config, "workerinput") or not getattr(config.option, "numprocesses", None)):
        config.pluginmanager.register(Tracer(Path(folder)), "mutants")


def cover(folder: Path, arguments: list[str]) -> int:
    """Run tests with this module as a plugin; return pytest's status."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tools.mutants", *arguments]
    environ = {**os.environ, **ENVIRONMENT, MAP_VARIABLE: str(folder.resolve())}
    status = subprocess.run(command, cwd=ROOT, env=environ, check=False).returncode
    runs = read_map(folder)
    for room in ROOMS:
        lines = {name: _any_of(runs, name) for run in runs for name in run.lines if name.startswith(f"{room}/")}
        print(f"{room}: {sum(bits.bit_count() for bits in lines.values())} lines of {len(lines)} files")
    return status


def _any_of(runs: list[Run], file: str) -> int:
    return functools.reduce(operator.or_, (run.lines.get(file, 0) for run in runs), 0)


class Run(NamedTuple):
    """A test as it ran: its lines by file, as bits."""

    test: str
    seconds: float
    lines: dict[str, int]


def read_map(folder: Path) -> list[Run]:
    """Return the last run of each test that the folder has."""
    runs: dict[str, Run] = {}
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            told = json.loads(line)
            lines = {name: int(bits, 16) for name, bits in told["lines"].items()}
            runs[told["test"]] = Run(told["test"], told["seconds"], lines)
    return list(runs.values())


class Mutant(NamedTuple):
    """A small defect: other text in the place of one expression or statement."""

    file: str
    function: str
    line: int
    begin: int  # in the bytes of the source
    end: int
    old: str
    new: str

    @property
    def name(self) -> str:
        """A name that stays when lines move, as `mutants.txt` has it."""
        return f"{self.file} {self.function}: {' '.join(self.old.split())} -> {' '.join(self.new.split())}"

    def planted(self, source: str) -> str:
        """Return the source with this defect."""
        whole = source.encode()
        return (whole[: self.begin] + self.new.encode() + whole[self.end :]).decode()


_PAIRS: Final = (
    "Lt:LtE Lt:GtE LtE:Lt LtE:Gt Gt:GtE Gt:LtE GtE:Gt GtE:Lt Eq:NotEq NotEq:Eq Is:IsNot IsNot:Is In:NotIn NotIn:In "
    "And:Or Or:And Add:Sub Sub:Add Mult:Add FloorDiv:Mult Div:Mult BitOr:BitAnd BitAnd:BitOr"
)
OPERATORS: Final = [(getattr(ast, one), getattr(ast, other)) for one, other in (p.split(":") for p in _PAIRS.split())]
FUNCTIONS: Final = {"min": "max", "max": "min", "any": "all", "all": "any"}
LEFT_OUT: Final = ("annotation", "returns", "decorator_list", "pattern")


def mutants_of(file: str, source: str) -> Iterator[Mutant]:
    """Yield all defects of the functions of a file, but of messages, annotations, assertions and logging."""
    whole = source.encode()
    starts = list(itertools.accumulate((len(line) for line in whole.splitlines(keepends=True)), initial=0))
    nodes: list[tuple[ast.AST, str]] = [(ast.parse(source), "")]
    while nodes:
        node, function = nodes.pop()
        if isinstance(node, (ast.JoinedStr, ast.Assert, ast.Raise)) or _is_log(node):
            continue
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            function = f"{function}.{node.name}".lstrip(".")
        elif function and isinstance(node, (ast.expr, ast.stmt)):
            begin = starts[node.lineno - 1] + node.col_offset
            end = starts[(node.end_lineno or 1) - 1] + (node.end_col_offset or 0)
            for new in _others(node):
                yield Mutant(file, function, node.lineno, begin, end, whole[begin:end].decode(), new)
        for field, value in ast.iter_fields(node):
            children = value if isinstance(value, list) else [value]
            nodes += [(one, function) for one in children if isinstance(one, ast.AST) and field not in LEFT_OUT]


def _others(node: ast.expr | ast.stmt) -> Iterator[str]:
    """Yield the texts that may stand in a node's place."""
    match node:
        case ast.Compare(ops=[op]):
            yield from (_text(node, ops=[other()]) for one, other in OPERATORS if isinstance(op, one))
        case ast.BoolOp(op=op) | ast.BinOp(op=op):
            yield from (_text(node, op=other()) for one, other in OPERATORS if isinstance(op, one))
            if isinstance(node, ast.BoolOp):
                yield from (_text(one) for one in (node.values[0], node.values[-1]))
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield _text(operand)
        case ast.Constant(value=bool() | int() | float() as value):
            yield repr(not value if isinstance(value, bool) else value + 1)
        case ast.Call(func=ast.Name(id=name)) if name in FUNCTIONS:
            yield _text(node, func=ast.Name(FUNCTIONS[name]))
        case ast.IfExp(body=body, orelse=orelse):
            yield from (_text(one) for one in (body, orelse))
        case ast.Expr(ast.Call() | ast.Await()) | ast.AugAssign() | ast.Assign([ast.Attribute() | ast.Subscript()]):
            yield "pass"
        case ast.Continue() | ast.Break():
            yield "break" if isinstance(node, ast.Continue) else "continue"
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            yield "return None"
        case _:
            pass


def _text(node: ast.AST, **changed: Any) -> str:
    other = copy.copy(node)
    vars(other).update(changed)
    return f"({ast.unparse(other)})"


def _is_log(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and ast.unparse(node).startswith(("log.", "_log.", "self._log"))


def covered(runs: list[Run], rooms: list[str]) -> list[Mutant]:
    """Return all defects in lines that a test runs, in these rooms; as the tree is now."""
    found, inside = [], tuple(f"{room}/" for room in rooms)
    for file in sorted({name for run in runs for name in run.lines if name.startswith(inside)}):
        lines = _any_of(runs, file)
        found += [one for one in mutants_of(file, (ROOT / file).read_text()) if lines >> one.line & 1]
    return found


class Copies:
    """Copies of the tree, one for each defect that is played at the time."""

    def __init__(self, folder: Path, count: int) -> None:
        self._free = [folder / f"{number}" for number in range(count)]
        for tree in self._free:
            shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".git", ".venv", ".*_cache", "__pycache__"))
        self._changed_at = itertools.count(int(time.time()))

    def play(self, mutant: Mutant, tests: list[str]) -> str:
        """Plant a defect and run the tests; return the one that has found it, or "".

        A test that fails without the defect, too, is left out. One that hangs without it has not found anything.

        Raises:
            SystemExit: No test is left: the tests cannot run here, or the map is of another tree.
        """
        tree, without = self._free.pop(), ""
        try:
            source = (ROOT / mutant.file).read_text()
            while tests:
                self._write(tree / mutant.file, mutant.planted(source))
                failed = self._run(tree, tests)
                self._write(tree / mutant.file, source)
                named = [one for one in tests if one == failed] or tests
                without = self._run(tree, named) if failed else ""
                if not without:
                    return failed
                tests = [one for one in tests if one not in named]
            if without != NO_END:
                raise SystemExit(f"No test for {mutant.name} can run, without this defect, too: {without}")
            return ""
        finally:
            self._free.append(tree)

    def _write(self, path: Path, source: str) -> None:
        """Write the file with another time of change each time: by that, Python knows compiled code for out of date."""
        path.write_text(source)
        os.utime(path, (next(self._changed_at),) * 2)

    def _run(self, tree: Path, tests: list[str]) -> str:
        """Run tests up to the first failure; return the failed one, or ""."""
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
        environ = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(tree)}
        piped: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        with subprocess.Popen(command, cwd=tree, env=environ, start_new_session=True, **piped) as child:
            try:
                output, _ = child.communicate(timeout=LIMIT)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)
                return NO_END
        failure = re.search(
            r"^(?:FAILED|ERROR|ERROR: .*not found:) (?:/\S*/)?(tests/.*?)(?: - |$)", output, re.MULTILINE
        )
        return "" if not child.returncode else failure[1] if failure else f"pytest ended: {output[-500:]}"


def batches_for(mutant: Mutant, runs: list[Run]) -> tuple[list[str], list[str]]:
    """Return the tests that run its line: all recorded scenes, the quick ones first, and others while time is left.

    Of the others a case of each comes first, and the near and quick ones first.
    """
    there, those, cases, left = mutant.file.split("/"), [], Counter[str](), BUDGET
    runs = [run for run in runs if run.lines.get(mutant.file, 0) >> mutant.line & 1]
    scenes = sorted((run.seconds, run.test) for run in runs if run.test.startswith(RECORDED))
    for run in (one for one in runs if not one.test.startswith(RECORDED)):
        function = run.test.partition("[")[0]
        near = sum(one == other for one, other in zip(there, function.split("/")[1:], strict=False))
        those.append((cases[function], -near, run.seconds, run.test))
        cases[function] += 1
    chosen = []
    for _, _, seconds, test in sorted(those):
        if seconds <= left:
            chosen.append(test)
            left -= seconds + 0.02
    return [test for _, test in scenes], chosen


def play(folder: Path, count: int, seed: int, rooms: list[str], jobs: int) -> int:
    """Plant defects at random; return 1 if one survives that is not kept."""
    runs = read_map(folder)
    kept = {line.partition("  # ")[0] for line in KEPT.read_text().splitlines()}
    pool = [one for one in covered(runs, rooms) if one.name not in kept]
    chosen = random.Random(seed).sample(pool, min(count, len(pool)))
    print(f"{len(chosen)} of {len(pool)} defects, by seed {seed}", flush=True)
    found: Counter[bool] = Counter()
    with tempfile.TemporaryDirectory() as place, ThreadPoolExecutor(jobs) as threads:
        copies = Copies(Path(place), jobs)

        def finder_of(one: Mutant) -> str:
            return next(filter(None, (copies.play(one, batch) for batch in batches_for(one, runs) if batch)), "")

        finders = threads.map(finder_of, chosen)
        for mutant, finder in zip(chosen, finders, strict=True):
            found[bool(finder)] += 1
            print(f"{f'found by {finder}' if finder else 'SURVIVES'}: line {mutant.line}, {mutant.name}", flush=True)
    print(f"{found[True]} of {found.total()} found: {found[True] / max(found.total(), 1):.1%}")
    return int(found[False] > 0)


def main(arguments: list[str] | None = None) -> int:
    """Run a command; return its status."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m tools.mutants", description=__doc__, formatter_class=raw)
    parser.add_argument("command", choices=("cover", "play"))
    parser.add_argument("map", type=Path)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--rooms", nargs="+", default=list(ROOMS))
    parser.add_argument("--jobs", type=int, default=2)
    asked, rest = parser.parse_known_args(arguments)
    of_play = asked.count, asked.seed, asked.rooms, asked.jobs
    return cover(asked.map, rest) if asked.command == "cover" else play(asked.map, *of_play)


if __name__ == "__main__":
    sys.exit(main())

"""Run all benchmarks beside their peers, draw them, and check the promises.

    python -m benchmarks --quick                    a few minutes: a check that all of it works, with rough figures
    python -m benchmarks                            all of it, within 25 minutes
    python -m benchmarks --only a idle              the parts of section (a), and the part `idle`; the rest is kept
    python -m benchmarks --draw                     figures and judgement once more; of docs/benchmarks.json if the
                                                    folder of results is empty
    python -m benchmarks --draw --docs              the same into the documents: tables, figures, the README's lines

Sections: (a) a rendezvous of N nodes, in both ways of arriving, the first and the second one, beside PyTorch's `c10d`
and `etcd-v2`; (b) the cost of a request, a call, a change sent to many, and process groups, beside an echo, TCPStore
and redis; (c) the cost of idle members; (d) the time to detect a death.

Results are written to `benchmark-results/results.json` after each measurement, so an interruption loses nothing and
`--only` adds the missing parts. The standard error of a part is in NAME.log beside it. The output names peers that are
not installed and parts that fail; the others continue. The exit status is 1 if a promised ratio is broken, or a part
failed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import load, pytorch, support
from benchmarks.whole import pages, pictures, promises, runner
from benchmarks.whole.parts import PARTS
from benchmarks.whole.results import Results

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.whole.promises import Verdict
    from benchmarks.whole.results import Row

ROOT = Path(__file__).resolve().parents[1]
KEPT = ROOT / "docs" / "benchmarks.json"
BUDGET = 25.0  # minutes
QUICK = 0.4  # the share of it for `--quick`


def chosen(only: Sequence[str]) -> list[str]:
    """Return the parts of these names: parts, and the letters of sections."""
    unknown = set(only) - set(PARTS) - {part.section for part in PARTS.values()}
    if unknown:
        raise SystemExit(f"no part or section is called {', '.join(sorted(unknown))}; parts: {', '.join(PARTS)}")
    return [name for name, part in PARTS.items() if not only or name in only or part.section in only]


def left_out() -> dict[str, str]:
    """Return the peers that cannot take part on this machine, with reasons."""
    missing = {kind: pytorch.why_not(kind) for kind in pytorch.KINDS}
    if not support.HAS_TORCH:
        missing["TCPStore"] = "PyTorch is not installed"
    if not load.HAS_REDIS:
        missing["redis"] = "redis-server or the package redis is not installed"
    return {name: why for name, why in missing.items() if why}


def measure(results: Results, path: Path, parts: Sequence[str], seconds: float, options: Sequence[str]) -> None:
    """Measure these parts within `seconds`: each has its share of the rest."""
    machine = support.describe_machine(load=False)
    missing = left_out()
    if not results.data["parts"].keys() - set(parts):  # else kept parts would be described by this run
        results.data |= {"machine": machine, "left_out": missing}
    print(support.describe_machine())
    for name, why in missing.items():
        print(f"left out: {name}: {why}")
    began = time.monotonic()
    for number, name in enumerate(parts):
        part = PARTS[name]
        results.begin(name)
        of_part = results.data["parts"][name]
        of_part |= {"date": time.strftime("%Y-%m-%d"), "commit": _commit(), "load": round(os.getloadavg()[0], 1)}
        if results.data["machine"] != machine:
            of_part["machine"] = machine
        if part.lacks():
            of_part["status"] = f"left out: {part.lacks()}"
            print(f"[{number + 1}/{len(parts)}] {name} is left out: {part.lacks()}", flush=True)
            results.save(path)
            continue
        since = time.monotonic()
        share = part.seconds / sum(PARTS[each].seconds for each in parts[number:] if not PARTS[each].lacks())
        allowed = max(1.0, (began + seconds - since) * share)
        print(f"[{number + 1}/{len(parts)}] {name}: {part.says}; at most {allowed:.0f} s", flush=True)

        path.parent.mkdir(parents=True, exist_ok=True)

        def keep(row: Row, name: str = name) -> None:
            results.add(name, row)
            results.save(path)

        of_part["status"], of_part["errors"] = runner.run(
            runner.command_of(name, ["--seconds", f"{allowed:.0f}", *options]),
            seconds=allowed,
            row=keep,
            say=lambda line: print(f"    {line}", flush=True),
            log=path.parent / f"{name}.log",
        )
        of_part["seconds"] = round(time.monotonic() - since, 1)
        results.save(path)
        print(
            f"    {of_part['status']} after {of_part['seconds']:.0f} s; {_clock(time.monotonic() - began)} so far",
            flush=True,
        )


def _commit() -> str:
    try:
        said = subprocess.run(
            ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return said.stdout.strip()


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def _line(verdict: Verdict) -> str:
    measured = "" if verdict.kept is None else f": {verdict.limit.shown(verdict.value)}"
    return f"{verdict.limit.sentence}{measured} ({verdict.limit.bound})"


def tell(results: Results) -> list[str]:
    """Print the verdict of each promise; return the failures."""
    wrong = []
    words = {True: "kept", False: "BROKEN", None: "not measured"}
    print("\nPromised:")
    for verdict in promises.judge(promises.PROMISES, results):
        line = _line(verdict)
        print(f"  {words[verdict.kept]:12}  {line}")
        if verdict.kept is False:
            wrong.append(f"broken: {line}")
    for name, part in results.data["parts"].items():
        wrong += [f"failed: {name}: {error}" for error in part["errors"]]
    print("\n" + ("\n".join(wrong) if wrong else "Nothing that is promised is broken."), flush=True)
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few nodes, and one run of each")
    parser.add_argument("--budget", type=float, metavar="MINUTES", help=f"for all of it (default: {BUDGET:g})")
    parser.add_argument("--nodes", type=int, nargs="+", help="how many meet, and idle (default: 4 to 10000)")
    parser.add_argument("--processes", type=int, default=4, help="that carry the nodes")
    parser.add_argument("--only", nargs="+", default=[], metavar="PART", help="these parts, or sections: a b c d")
    parser.add_argument("--draw", action="store_true", help="measure nothing: draw and judge what was measured")
    parser.add_argument("--docs", action="store_true", help="write the documents, too")
    parser.add_argument("--out", type=Path, default=Path("benchmark-results"), help="where results and figures go")
    options = parser.parse_args()
    path = options.out / "results.json"
    results = Results.load(KEPT if options.draw and not path.exists() else path)
    if options.draw:
        if not results.data["parts"]:
            parser.exit(2, f"there are no results at {path}\n")
    else:
        more = ["--processes", f"{options.processes}", *(["--quick"] if options.quick else [])]
        more += ["--nodes", *map(str, options.nodes)] if options.nodes else []
        minutes = options.budget or (BUDGET * QUICK if options.quick else BUDGET)
        try:
            measure(results, path, chosen(options.only), minutes * 60, more)
        except KeyboardInterrupt:
            print(f"\ninterrupted; what was measured is in {path}")
    options.out.mkdir(parents=True, exist_ok=True)
    for name, text in pictures.svgs(results).items():
        (options.out / name).write_text(text, encoding="utf-8")
    if options.docs:
        for written in pages.write(ROOT, results):
            print(f"wrote {written.relative_to(ROOT)}")
    wrong = tell(results)
    print(f"{path}")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()

"""The tables in the documents, made of the results: each between two comments in a page, which name it.

    <!-- measured: NAME -->
    ...
    <!-- measured: end -->

`python -m benchmarks --docs` writes them; a test compares the pages with the results beside them. The README's lines
with figures are in `README_LINES`; all come from the part `beside`, which is one run.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from benchmarks.load import MANY, OPERATIONS
from benchmarks.whole import pictures, promises
from benchmarks.whole.figures import quantity
from tools import stamps

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from benchmarks.whole.promises import Verdict
    from benchmarks.whole.results import Results

__all__ = ["BLOCKS", "README_LINES", "render", "write"]

US = {"who": "rdzv"}
TURNS = [(way, which) for way in ("at once", "parked") for which in ("first", "again")]
PEERS = ("c10d", "etcd-v2")
MARKED = re.compile(r"<!-- measured: ([\w-]+) -->\n.*?<!-- measured: end -->", re.DOTALL)
HUNDRED_THOUSAND = 100_000
VERDICTS = {True: "kept", False: "**broken**", None: "not measured"}


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _shown(value: float, unit: str = "s") -> str:
    return "-" if math.isnan(value) else quantity(value, unit)


def _number(value: float, digits: int = 1) -> str:
    return "-" if math.isnan(value) else f"{value:,.{digits}f}"


def _sizes(results: Results, part: str, across: str = "nodes") -> list[int]:
    return sorted({row[across] for row in results.rows(part)})


# ------------------------------------------------------------------------------------------ docs/benchmarks.md


def _machine(results: Results) -> str:
    parts = results.data["parts"]
    troubles = [f"`{name}`: {'; '.join(part['errors'])}" for name, part in parts.items() if part["errors"]]
    left_out = [f"{name} ({why})" for name, why in results.data["left_out"].items()]
    known = [part for part in parts.values() if part["rows"] and "machine" not in part]
    dates, commits = (sorted({part.get(what, "") for part in known} - {""}) for what in ("date", "commit"))
    loads = [part["load"] for part in known if "load" in part]
    when = f", {' and '.join(dates)}, of commit {', '.join(commits)}" if dates else ""
    busy = f" The machine's load was {min(loads):g} to {max(loads):g} when the parts began." if loads else ""
    return "\n".join(
        [
            f"{results.data['machine']}{when}; everything on this one machine, medians.{busy}",
            *([f"Left out: {', '.join(left_out)}."] if left_out else []),
            *([f"What went wrong: {'. '.join(troubles)}."] if troubles else []),
        ]
    )


def _beside(results: Results) -> str:
    part = results.data["parts"]["beside"]
    sizes = _sizes(results, "beside")

    def row(who: str) -> list[str]:
        figures = [
            *(_shown(results.value("beside", "seconds", who=who, nodes=nodes)) for nodes in sizes),
            *(_shown(results.value("beside", "bytes", who=who, nodes=nodes), "B") for nodes in sizes),
            *(_shown(results.value("beside", each, who=who)) for each in ("next_round", "removed")),
        ]
        return [f"`{who}`", *figures]

    header = [
        "",
        *(f"last arrival to all ranks, {nodes} nodes" for nodes in sizes),
        *(f"bytes per node, {nodes}" for nodes in sizes),
        "SIGKILL to the survivors' next round",
        "SIGKILL to removal from the record",
    ]
    says = (
        f"{part.get('machine', results.data['machine'])}, {part['date']}, of commit {part['commit']}; medians of "
        f"{1 + max(each['run'] for each in part['rows'])}. The machine's load was {part['load']:g} when the part began."
    )
    return f"{says}\n\n" + _table(header, map(row, (US["who"], *PEERS)))


def _rendezvous(results: Results) -> str:
    def row(nodes: int) -> list[str]:
        ours = [
            _shown(results.value("rendezvous", "seconds", **US, nodes=nodes, way=way, which=which))
            for way, which in TURNS
        ]
        theirs = [
            _shown(results.value(kind, "seconds", nodes=nodes, way=way))
            for way in ("at once", "parked")
            for kind in PEERS
        ]
        return [f"{nodes:,}", *ours[:2], *theirs[:2], *ours[2:], *theirs[2:]]

    header = [
        *("nodes", "at once, first", "again", "`c10d`", "`etcd-v2`"),
        *("parked, first", "again", "`c10d`", "`etcd-v2`"),
    ]
    sizes = sorted({*_sizes(results, "rendezvous"), *_sizes(results, "c10d"), *_sizes(results, "etcd-v2")})
    return _table(header, map(row, sizes))


def _peers_bytes(results: Results) -> str:
    def row(nodes: int) -> list[str]:
        ours = results.value("rendezvous", "bytes", **US, nodes=nodes, way="parked", which="first")
        theirs = [results.value(kind, "bytes", nodes=nodes, way="parked") for kind in PEERS]
        cpu = [results.value(kind, "server_cpu", nodes=nodes, way="at once") for kind in PEERS]
        mine = results.value("rendezvous", "server_cpu", **US, nodes=nodes, way="at once", which="first")
        return [
            f"{nodes:,}",
            *(_shown(value, "B") for value in (ours, *theirs)),
            *(_shown(value) for value in (mine, *cpu)),
        ]

    header = [
        "nodes",
        "bytes per node: `rdzv`",
        "`c10d`",
        "`etcd-v2`",
        "server per node: `rdzv`",
        "`c10d`",
        "`etcd-v2`",
    ]
    return _table(header, map(row, sorted({*_sizes(results, "c10d"), *_sizes(results, "etcd-v2")})))


def _requests(results: Results) -> str:
    def row(who: str) -> list[str]:
        costs = [results.value("requests", "server_cpu", who=who, operation=each) for each in (*OPERATIONS, MANY)]
        rates = [results.value("requests", "per_second", who=who, operation=each) for each in ("get", "set")]
        return [who, *map(_shown, costs), *(_number(rate, 0) for rate in rates)]

    header = ["", *OPERATIONS, "100 keys", "gets per second", "sets per second"]
    return _table(header, map(row, dict.fromkeys(each["who"] for each in results.rows("requests"))))


def _calls(results: Results) -> str:
    def row(who: str) -> list[str]:
        return [who, *(_shown(results.value("calls", "seconds", who=who, operation=each)) for each in OPERATIONS)]

    return _table(["", *OPERATIONS], map(row, dict.fromkeys(each["who"] for each in results.rows("calls"))))


def _fan_out(results: Results) -> str:
    def row(watchers: int) -> list[str]:
        ours, bare = (results.value("fan-out", "server_cpu", who=who, watchers=watchers) for who in ("rdzv", "echo"))
        told = results.value("fan-out", "seconds", who="rdzv", watchers=watchers)
        return [f"{watchers:,}", _shown(ours), _shown(bare), _number(ours / bare, 2), _shown(told)]

    header = ["watchers", "server's processor", "bare broadcast's", "ratio", "until the last has it"]
    rates = [(clients, results.value("throughput", "per_second", clients=clients)) for clients in (1, 8)]
    puts = ", ".join(f"{_number(rate, 0)} from {clients}" for clients, rate in rates)
    says = f"Acknowledged puts per second, of 256 concurrent callers in so many processes: {puts}."
    return _table(header, map(row, _sizes(results, "fan-out", "watchers"))) + f"\n\n{says}"


def _groups(results: Results) -> str:
    def row(ranks: int) -> list[str]:
        cells = []
        for phase in ("both", "new_group"):
            pair = [results.value("groups", "seconds", who=who, ranks=ranks, phase=phase) for who in sides]
            cells += [*map(_shown, pair), _number(pair[0] / pair[1], 2)]
        return [f"{ranks}", *cells]

    sides = ("TorchStore", "TCPStore")
    header = [
        "ranks",
        "first group: `TorchStore`",
        "`TCPStore`",
        "ratio",
        "10 more: `TorchStore`",
        "`TCPStore`",
        "ratio",
    ]
    return _table(header, map(row, _sizes(results, "groups", "ranks")))


def _idle(results: Results) -> str:
    def row(part: str, who: str, nodes: int) -> list[str]:
        cpu, sent, memory = (results.value(part, each, who=who, nodes=nodes) for each in ("cpu", "bytes", "memory"))
        return [f"{nodes:,}", who, f"{cpu:.2%}", f"{_shown(sent, 'B')}/s", _shown(memory, "B")]

    rows = [row("idle", "rdzv", nodes) for nodes in _sizes(results, "idle")]
    rows += [row("idle-peers", each["who"], each["nodes"]) for each in results.rows("idle-peers")]
    return _table(["members", "", "server's core", "bytes", "server's memory"], rows)


def _detection(results: Results) -> str:
    def row(nodes: int, victim: str) -> list[str]:
        figures = [
            results.value("detection", each, nodes=nodes, victim=victim) for each in ("told", "told_last", "next_round")
        ]
        return [f"{nodes}", f"`rdzv`, a {victim}", *map(_shown, figures), "-"]

    rows = [row(nodes, victim) for nodes in _sizes(results, "detection") for victim in ("member", "coordinator")]
    rows += [
        [f"{each['nodes']}", f"`{each['who']}`, a member", "never", "never", "-", _shown(each["removed"])]
        for each in results.rows("detection-peers")
    ]
    header = [
        "nodes",
        "killed",
        "survivors are told",
        "the last of them",
        "in the next round",
        "removed from the record",
    ]
    return _table(header, rows)


def _promises(results: Results) -> str:
    def row(verdict: Verdict) -> list[str]:
        value = "-" if verdict.kept is None else verdict.limit.shown(verdict.value)
        return [verdict.limit.sentence, verdict.limit.bound, value, VERDICTS[verdict.kept]]

    return _table(["", "limit", "measured", ""], map(row, promises.judge(promises.PROMISES, results)))


def _figures(*names: str) -> Callable[[Results], str]:
    def shown(results: Results) -> str:
        known = pictures.figures(results)
        lines = [f"![{known[name].title}](pictures/bench-{name}.svg)" for name in names if name in known]
        return "\n\n".join(lines) or "Nothing of this was measured."

    return shown


# ------------------------------------------------------------------------------------------ docs/scaling.md


def _largest(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return max(points, default=(math.nan, math.nan))


class Constants:
    """The cost of one more node, at the largest measured size."""

    def __init__(self, results: Results) -> None:
        first = {**US, "way": "at once", "which": "first"}
        again = {**first, "which": "again"}
        self.nodes, self.server_first = _largest(results.points("rendezvous", "nodes", "server_cpu", **first))
        _, self.server_again = _largest(results.points("rendezvous", "nodes", "server_cpu", **again))
        _, self.requests_first = _largest(results.points("rendezvous", "nodes", "requests", **first))
        _, self.requests_again = _largest(results.points("rendezvous", "nodes", "requests", **again))
        _, self.bytes_first = _largest(results.points("rendezvous", "nodes", "bytes", **first))
        _, self.bytes_again = _largest(results.points("rendezvous", "nodes", "bytes", **again))
        _, self.node_first = _largest(results.points("rendezvous", "nodes", "node_cpu", **first))
        parked = {**US, "way": "parked", "which": "again"}  # the coordinator has a process of its own
        size, coordinator = _largest(results.points("rendezvous", "nodes", "coordinator_cpu", **parked))
        self.coordinator = coordinator / size
        size, connections = _largest(results.points("rendezvous", "nodes", "connections", **again))
        self.connections = connections / size
        self.idle_nodes, cpu = _largest(results.points("idle", "nodes", "cpu", **US))
        _, requests = _largest(results.points("idle", "nodes", "requests", **US))
        _, sent = _largest(results.points("idle", "nodes", "bytes", **US))
        self.renewals = requests / self.idle_nodes
        self.renewal = cpu / requests
        self.idle_bytes = sent / self.idle_nodes
        memory = results.points("idle", "nodes", "memory", **US)
        (few, least), (many, most) = min(memory, default=(math.nan,) * 2), _largest(memory)
        self.memory = (most - least) / (many - few) if many > few else math.nan


def _constants(results: Results) -> str:
    known = Constants(results)
    at, idle = f"{known.nodes:,.0f} nodes at once", f"{known.idle_nodes:,.0f} idle members"
    rows = [
        ("requests per node", f"{_number(known.requests_first)} first, {_number(known.requests_again)} again", at),
        (
            "the server's processor, per node",
            f"{_shown(known.server_first)} first, {_shown(known.server_again)} again",
            at,
        ),
        ("bytes per node", f"{_shown(known.bytes_first, 'B')} first, {_shown(known.bytes_again, 'B')} again", at),
        ("a node's own processor", f"{_shown(known.node_first)} first", at),
        ("the coordinator's processor, per node", f"{_shown(known.coordinator)} again", "as many, parked"),
        ("connections per node", _number(known.connections, 2), f"{at}; one more once it uses its round's store"),
        ("renewals, per member and second", _number(known.renewals, 2), idle),
        ("the server's processor, per renewal", _shown(known.renewal), idle),
        ("bytes per second, per member", _shown(known.idle_bytes, "B"), idle),
        ("the server's memory, per member", _shown(known.memory, "B"), idle),
    ]
    return _table(["constant", "measured", "with"], rows)


def _on_paper(results: Results) -> str:
    known, many = Constants(results), HUNDRED_THOUSAND
    renewals = many * 3 / 10  # three in a `ttl`
    share = renewals * known.renewal
    rows = [
        ("the first round", f"{_number(many * known.server_first)} s of one core", "the server's one loop"),
        ("each further round", f"{_number(many * known.server_again)} s of one core", "the same"),
        (
            "the coordinator, each further round",
            f"{_number(many * known.coordinator)} s of one core",
            "its node's loop: beside the server's, and less",
        ),
        (
            "renewals, `ttl=10`",
            f"{_number(renewals, 0)} a second, {_percent(share)} of one core",
            "the server's one loop, before any other request",
        ),
        ("renewals, `ttl=60`", f"{_number(renewals / 6, 0)} a second, {_percent(share / 6)} of one core", "nothing"),
        ("bytes of the first round", _shown(many * known.bytes_first, "B"), "nothing"),
        ("memory", _shown(many * known.memory, "B"), "`memory_bytes_max`, 2 GiB, for the part that the store counts"),
    ]
    return _table(["what", "at 100,000", "where it breaks"], rows)


def _percent(share: float) -> str:
    return "-" if math.isnan(share) else f"{share:.0%}"


BLOCKS: dict[str, dict[str, Callable[[Results], str]]] = {
    "docs/benchmarks.md": {
        "machine": _machine,
        "beside": _beside,
        "promises": _promises,
        "rendezvous": _rendezvous,
        "rendezvous-figures": _figures("rendezvous", "messages", "processor", "coordinator", "memory"),
        "peers": _peers_bytes,
        "peers-figures": _figures("bytes"),
        "requests": _requests,
        "calls": _calls,
        "fan-out": _fan_out,
        "groups": _groups,
        "idle": _idle,
        "idle-figures": _figures("idle"),
        "detection": _detection,
        "detection-figures": _figures("detection"),
    },
    "docs/scaling.md": {"constants": _constants, "on-paper": _on_paper},
}
"""The function of each block, by page."""


# ------------------------------------------------------------------------------------------ README.md


def _of(results: Results, figure: str, unit: str, *nodes: int, who: str = "rdzv") -> str:
    """Return a figure of the part `beside` for each of these numbers of nodes."""
    return " / ".join(_shown(results.value("beside", figure, who=who, nodes=each), unit) for each in nodes)


def _sentence_of_death(results: Results) -> tuple[str, str]:
    ours, theirs = _of(results, "next_round", "s", 4), _of(results, "removed", "s", 4, who="c10d")
    return (
        "- After SIGKILL of one of 4 nodes,",
        f" the others are in the next round in {ours}; `c10d` removes the dead node after {theirs}.",
    )


def _sentence_of_barrier(results: Results) -> tuple[str, str]:
    ours, theirs = (_of(results, "seconds", "s", 4, 64, who=who) for who in ("rdzv", "c10d"))
    return "- From the last arrival until every node has its rank,", f" 4 / 64 nodes take {ours}; with `c10d` {theirs}."


def _sentence_of_bytes(results: Results) -> tuple[str, str]:
    ours, theirs = (_of(results, "bytes", "B", 4, 64, who=who) for who in ("rdzv", "c10d"))
    return "- One round of 4 / 64 nodes moves", f" {ours} per node; with `c10d` {theirs}."


def _row(name: str, *cells: str) -> tuple[str, str]:
    return f"| {name} |", f" {' | '.join(cells)} |"


def _row_of_death(results: Results) -> tuple[str, str]:
    ours = f"the others' next round: {_of(results, 'next_round', 's', 4)}"
    theirs = (f"removed: {_of(results, 'removed', 's', 4, who=kind)}; no member is told" for kind in PEERS)
    return _row("SIGKILL of one of 4 nodes", ours, *theirs)


def _row_of_barrier(results: Results) -> tuple[str, str]:
    cells = (_of(results, "seconds", "s", 4, 64, who=who) for who in ("rdzv", *PEERS))
    return _row("last arrival to all ranks, 4 / 64 nodes", *cells)


def _row_of_bytes(results: Results) -> tuple[str, str]:
    cells = (_of(results, "bytes", "B", 4, 64, who=who) for who in ("rdzv", *PEERS))
    return _row("bytes per node of a round, 4 / 64 nodes", *cells)


README_LINES: tuple[Callable[[Results], tuple[str, str]], ...] = (
    _sentence_of_death,
    _sentence_of_barrier,
    _sentence_of_bytes,
    _row_of_death,
    _row_of_barrier,
    _row_of_bytes,
)
"""Lines of the README: the beginning, which finds the line, and the rest, with the figures."""


# ------------------------------------------------------------------------------------------ writing


def render(page: str, text: str, results: Results) -> str:
    """Return the page with the results in its blocks, or in the README's lines."""
    if page == "README.md":
        for make in README_LINES:
            beginning, rest = make(results)
            line = (beginning + rest).replace("\\", r"\\")
            text, found = re.subn(rf"^{re.escape(beginning)}.*$", line, text, flags=re.MULTILINE)
            if found != 1:
                raise ValueError(f"README.md has {found} lines that begin with {beginning!r}, and not one")
        return text
    blocks = BLOCKS[page]
    named = [match[1] for match in MARKED.finditer(text)]
    if sorted(named) != sorted(blocks):
        raise ValueError(f"{page} has the blocks {sorted(named)}, and not {sorted(blocks)}")
    return MARKED.sub(
        lambda match: f"<!-- measured: {match[1]} -->\n\n{blocks[match[1]](results)}\n\n<!-- measured: end -->", text
    )


def write(root: Path, results: Results) -> list[Path]:
    """Write the results, the figures and the pages of a tree; return their paths."""
    kept = root / "docs" / "benchmarks.json"
    results.save(kept)
    written = [kept]
    mark = stamps.digest(["docs/benchmarks.json"])
    for name, text in pictures.svgs(results).items():
        written.append(root / "docs" / "pictures" / name)
        written[-1].write_bytes(stamps.stamped(".svg", text.encode(), mark))
    for page in ("README.md", *BLOCKS):
        path = root / page
        path.write_text(render(page, path.read_text(encoding="utf-8"), results), encoding="utf-8")
        written.append(path)
    return written

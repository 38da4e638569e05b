"""The documentation is true as far as a program can check: links, paths, options, tables, and samples that run."""

import ast
import asyncio
import importlib.util
import itertools
import json
import re
import shlex
import sys
import tomllib
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import anyio
import pytest

import rdzv
import store
from rdzv.cli import main as command
from rdzv.config.settings import PARAMETERS
from rdzv.node.handler import Handler
from store.messages import REQUESTS, RESPONSES
from store.records import Record

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CODE_SPAN = re.compile(r"`([^`\n]+)`")

of_every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def prose(page: Path) -> str:
    return FENCED.sub("", page.read_text(encoding="utf-8"))


def blocks(page: Path, language: str) -> list[str]:
    return [text for kind, text in FENCED.findall(page.read_text(encoding="utf-8")) if kind == language]


def lines_of_shell() -> Iterator[str]:
    """Yield every command in the documentation, without its comment and its redirection."""
    for page in PAGES:
        for line in "".join(blocks(page, "")).replace("\\\n", "").splitlines():
            for part in re.split(r"\s+#\s|\s{3,}|\s+\(", line)[0].split("&&"):
                yield part.partition(" > ")[0].strip().rstrip("&").strip()


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@of_every_page
def test_every_link_has_a_target(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", prose(page)):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        there = page.parent / path if path else page
        assert there.exists(), target
        assert not anchor or anchor in anchors(there), target


@of_every_page
def test_every_path_in_the_docs_exists(page: Path) -> None:
    named = {span for span in CODE_SPAN.findall(prose(page)) if re.fullmatch(r"\.?\w+(/\w+)*/(\w+\.\w+)?", span)}
    assert {path for path in named if not (ROOT / path).exists() and not (page.parent / path).exists()} == set()


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 170


def test_every_page_is_linked_from_another() -> None:
    linked = {
        (page.parent / target.partition("#")[0]).resolve()
        for page in PAGES
        for target in re.findall(r"\]\(([^)]+)\)", prose(page))
    }
    assert {page for page in PAGES if page.name != "README.md"} <= linked


def said_of_parameters() -> dict[str, str]:
    """Return the docstring below each field of the settings."""
    tree = ast.parse((ROOT / "rdzv" / "config" / "settings.py").read_text(encoding="utf-8"))
    (fields,) = (each.body for each in tree.body if isinstance(each, ast.ClassDef) and each.name == "Settings")
    return {
        ast.unparse(field.target): " ".join(ast.literal_eval(said.value).split())
        for field, said in itertools.pairwise(fields)
        if isinstance(field, ast.AnnAssign) and isinstance(said, ast.Expr)
    }


def rows_of_parameters() -> dict[str, str]:
    """Return each parameter's row of the table of all."""
    rows, said = {}, said_of_parameters()
    for name, parameter in PARAMETERS.items():
        also = f" (also {', '.join(f'`{alias}`' for alias in parameter.aliases)})" if parameter.aliases else ""
        given = parameter.default
        shown = "none" if given is None else f"{given:g} s" if isinstance(given, float) else str(given).lower()
        rows[name] = f"| `{name}`{also} | {parameter.default_text or shown} | {said[name]} |"
    return rows


def test_the_table_of_all_parameters_is_made_of_them() -> None:
    rows, page = "\n".join(rows_of_parameters().values()), (DOCS / "all-parameters.md").read_text(encoding="utf-8")
    assert rows in page, f"put this into docs/all-parameters.md:\n\n{rows}\n"


def test_each_parameter_is_in_front_or_on_the_page_of_its_topic() -> None:
    rows, page = rows_of_parameters(), (DOCS / "parameters.md").read_text(encoding="utf-8")
    front, topics = page.split("| topic |")
    in_front = [name for name, row in rows.items() if row in front]
    assert len(in_front) == front.count("\n| `") == 12, "rows as in docs/all-parameters.md"
    elsewhere = []
    for target, cell in re.findall(r"^\| \[[^]]+\]\(([^)#]+)[^)]*\) \| (.*) \|$", topics, re.MULTILINE):
        names = re.findall(r"`(\w+)`", cell)
        said = (DOCS / target).read_text(encoding="utf-8")
        assert [name for name in names if not re.search(rf"\b{name}\b", said)] == [], target
        elsewhere += names
    assert sorted(in_front + elsewhere) == sorted(rows)


def codes(table: Mapping[int, type[Record]]) -> str:
    return "\n".join(
        f"| {code} | `{kind.__name__}` | {', '.join(kind.fields) or 'none'} |" for code, kind in sorted(table.items())
    )


@pytest.mark.parametrize("table", [REQUESTS, RESPONSES], ids=["requests", "responses"])
def test_the_codes_of_all_messages_are_in_the_docs(table: Mapping[int, type[Record]]) -> None:
    rows = codes(table)
    page = (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8")
    assert rows in page, f"put this into docs/protocol.md:\n\n{rows}\n"


def promised(page: str) -> list[str]:
    return re.findall(r"^- \*\*([RS]\d+)\b", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)


def test_every_promise_has_a_test() -> None:
    tests = "\n".join(path.name + path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    assert [
        number for number in promised("docs/promises.md") if not re.search(rf"test_(\w+_)?{number.lower()}_", tests)
    ] == []


def messages() -> str:
    """Return all strings in the sources, and the names of errors, one a line. Inserted values are left out."""
    found: list[str] = []
    for package in (rdzv, store):
        for path in Path(str(package.__file__)).parent.rglob("*.py"):
            for part in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                match part:
                    case ast.Constant(value=str(text)):
                        found.append(text)
                    case ast.JoinedStr(values=values):
                        found.append("".join(str(one.value) for one in values if isinstance(one, ast.Constant)))
                    case ast.ClassDef(name=name):
                        found.append(name)
    return "\n".join(found)


def test_the_messages_in_troubleshooting_are_in_the_code() -> None:
    """Shown messages are split at numbers, runs, addresses and "...", which vary. Each part must be in the code."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    shown = [span for row in re.findall(r"^\| (`.*?) \|", page, re.MULTILINE) for span in CODE_SPAN.findall(row)]
    parts = {part.strip() for span in shown for part in re.split(r"\.\.\.|\d+|tcp://|\bjob\b", span)} - {""}
    said = messages()
    assert len(parts) > 15
    assert {part for part in parts if part not in said} == set()


def commands_of_rdzv() -> Iterator[str]:
    """Yield commands on their own lines, and those inside others: `srun ... rdzv run slurm`, `"$(rdzv token)"`."""
    for line in lines_of_shell():
        inner = re.findall(r"\$\((rdzv [^)]*)\)|\(.*?; (rdzv [^)]*)\)", line)
        yield from (first or second for first, second in inner)
        words = line.partition(" rdzv ")
        if line.startswith("rdzv "):
            yield line
        elif words[0].split()[:1] == ["srun"]:
            yield f"rdzv {words[2]}"


COMMANDS = sorted(set(commands_of_rdzv()))


def test_commands_inside_other_commands_are_checked_too() -> None:
    assert {"rdzv token", "rdzv run slurm -- python train.py"} <= set(COMMANDS)
    starts = {line.split()[0] for line in lines_of_shell() if re.match(r"[\w./-]+ ", line)}
    assert "rdzv" in starts


def test_every_extra_in_the_docs_exists() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    named = {
        extra
        for page in PAGES
        for found in re.findall(r"'(?:rdzv|\.)\[([\w,]+)\]'", page.read_text(encoding="utf-8"))
        for extra in found.split(",")
    }
    assert named >= {"torch", "http", "live", "etcd"}
    assert named <= set(extras)


@pytest.mark.parametrize("line", COMMANDS)
def test_every_rdzv_command_in_the_docs_is_valid(line: str) -> None:
    words = shlex.split(line)[1:]
    options = command._parse(words)
    assert options is not None
    assert options.command == words[0]


def test_every_option_in_the_docs_exists() -> None:
    named = {
        match[1]
        for name in ("README.md", "docs/command.md", "docs/limits.md")
        for span in CODE_SPAN.findall(prose(ROOT / name))
        if (match := re.match(r"(?:rdzv \w+ )?(--[a-z-]+)(?![=\w])", span))
    }
    assert named
    parsers = [command.parser_of(command.command_named(name)) for name in command.ROOMS]
    assert named <= {option for parser in parsers for option in parser._option_string_actions}


def test_every_module_and_test_in_a_command_exists() -> None:
    named = 0
    for line in lines_of_shell():
        if match := re.search(r"python3? -m ((?:tests|benchmarks|rdzv)[\w.]*)", line):
            assert importlib.util.find_spec(match[1]), line
            named += 1
        for path in re.findall(r"\b(?:tests|examples)/\S+", line):
            assert (ROOT / path).exists(), line
            named += 1
    assert named > 10


def test_every_variable_that_a_command_sets_is_used() -> None:
    sources = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py"))
    named = {match[1] for line in lines_of_shell() if (match := re.match(r"(RDZV_\w+)=", line))}
    assert named
    assert {name for name in named if f'"{name}"' not in sources} == set()


SAMPLES = [(page, text) for page in PAGES for text in blocks(page, "python")]
BLOCKING, ASYNC = "import rdzv.sync", "import asyncio, json, rdzv"


@pytest.mark.parametrize(("page", "sample"), SAMPLES, ids=lambda value: getattr(value, "name", ""))
def test_every_sample_compiles(page: Path, sample: str) -> None:
    ast.parse(sample, str(page))


def sample_beginning(first: str, *, page: str, port: int) -> str:
    """Return a sample of a page, for two nodes on this machine."""
    (sample,) = (text for each, text in SAMPLES if each.name == page and text.startswith(first))
    text = re.sub(r"tcp://[\w.]+:29400", f"tcp://127.0.0.1:{port}", sample)
    return text.replace("max_nodes=4", "max_nodes=2")


@asynccontextmanager
async def two_nodes(sample: str) -> AsyncIterator[list[asyncio.subprocess.Process]]:
    pipe = asyncio.subprocess.PIPE
    nodes = [
        await asyncio.create_subprocess_exec(sys.executable, "-u", "-c", sample, cwd=ROOT, stdout=pipe)
        for _ in range(2)
    ]
    try:
        with anyio.fail_after(60):
            yield nodes
    finally:
        for node in nodes:
            if node.returncode is None:
                node.kill()
            await node.communicate()


async def test_the_blocking_sample_runs_on_two_nodes() -> None:
    async with (
        store.serve() as server,
        two_nodes(sample_beginning(BLOCKING, page="start.md", port=server.port)) as nodes,
    ):
        said = [(await node.communicate())[0].decode().splitlines() for node in nodes]
        assert [node.returncode for node in nodes] == [0, 0]
        assert [[line.split()[0] for line in lines] for lines in said] == [["0", "1"], ["0", "1"]]


async def test_the_async_sample_is_told_of_a_killed_node() -> None:
    async with (
        store.serve() as server,
        two_nodes(sample_beginning(ASYNC, page="README.md", port=server.port)) as (survivor, killed),
    ):
        async with rdzv.connect(f"{server.url}/job-7", is_host=False) as onlooker:
            assert isinstance(onlooker, Handler)
            async with aclosing(onlooker.statuses()) as statuses:
                async for status in statuses:
                    if status.phase is rdzv.Phase.TRAINING:
                        break
        assert survivor.stdout is not None
        first = await survivor.stdout.readline()
        assert b"of 2 meet at" in first
        assert first.endswith(b" None\n"), "there was no round before"
        killed.kill()
        async with rdzv.connect(f"{server.url}/job-7?min_nodes=2&max_nodes=2", is_host=False) as replacement:
            meeting = asyncio.create_task(replacement.next_rendezvous())
            again = await survivor.stdout.readline()
            assert b"of 2 meet at" in again
            assert not again.endswith(b" None\n"), "it knows the lost node"
            state = json.loads(await (await meeting).store.get("state"))
            assert state.keys() == {"step", "weight"}, "a newcomer gets the state of the member that is furthest"


def test_the_readme_on_an_index_has_no_broken_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative links would lead nowhere. They become text there, or absolute if pyproject.toml names the source."""
    interface = ModuleType("interface")
    interface.MetadataHookInterface = object  # type: ignore[attr-defined]  # hatchling exists only during a build
    monkeypatch.setitem(sys.modules, "hatchling.metadata.plugin.interface", interface)
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    plain = hook.for_an_index(readme, source=None, tag="v1")
    assert re.findall(r"\]\((?!https?:)", plain) == []
    assert "[" not in re.sub(r"```.*?```|`[^`]*`", "", plain, flags=re.DOTALL), "no half of a link is left"
    assert "the whole sentences (docs/promises.md)" in plain or "docs/promises.md" in plain
    linked = hook.for_an_index(readme, source="https://example.org/rdzv/", tag="v1")
    assert "](https://example.org/rdzv/blob/v1/docs/operating.md#an-etcd-cluster)" in linked
    assert "](https://example.org/rdzv/raw/v1/docs/pictures/demo.svg)" in linked
    assert re.findall(r"\]\((?!https?:)", linked) == []
    build = hook.Readme()
    build.root = str(ROOT)
    metadata: dict[str, Any] = {}
    build.update(metadata)
    assert metadata["readme"] == {"content-type": "text/markdown", "text": plain}


def test_the_map_names_each_file() -> None:
    """Each file has one row, below its folder; a row of several files says of each what it decides."""
    mapped, folder = [], ""
    rows = (DOCS / "architecture.md").read_text(encoding="utf-8").partition("\n## The files\n")[2]
    for names, parts in re.findall(r"^\| (.+?) \| (.*?) ?\|$", rows, re.MULTILINE):
        if heading := re.fullmatch(r"\*\*`([\w/]+/)`\*\*", names):
            folder = heading[1]
        elif found := re.findall(r"`(\w+\.\w+)`", names):
            assert parts.count(";") == names.count(";"), names
            mapped += [folder + name for name in found]
    files = [path for package in ("rdzv", "store") for path in (ROOT / package).rglob("*.*") if path.is_file()]
    shown = [path for path in files if path.suffix in {".py", ".js", ".css", ".html"}]
    unmapped = {"__init__.py", "__main__.py", "etcd_pb2.py"}
    assert sorted(mapped) == sorted(str(path.relative_to(ROOT)) for path in shown if path.name not in unmapped)

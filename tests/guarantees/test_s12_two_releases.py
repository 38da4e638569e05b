"""Promise S12: "Servers and clients of releases with the same major number work together: both sides name the versions
they speak and take the highest common one; unknown fields, trailing columns and new words are tolerated, unknown
requests answered with an error of their own. Else one sentence says which side is older."

The neighbour is this tree with a patch: it speaks one version more, and has one more request, field, column and event.
"""

# ruff: noqa: E501 - the patch quotes lines as they stand
from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

import store
from store import Client, sync

ROOT = Path(__file__).parents[2]

LATER = {
    "store/protocol/wire.py": [
        ("\nVERSION = 1\n", "\nVERSION = 2\n"),
        ("return frame(_pack((MAGIC, fields)))", 'return frame(_pack((MAGIC, (*said, "new", 1), 7)))'),
        # An event of a new kind comes before the others, and each has one column more.
        (
            "    return _pack(events)\n",
            '    return _pack([("frozen", {"since": events[-1].revision}), *((*event, 1.5) for event in events)])\n',
        ),
    ],
    "store/messages.py": [
        ("    lease: int | None = None\n\n    @prop", "    lease: int | None = None\n    author: str = \"me\"\n\n    @prop"),
        ("    expected: int | bytes | bool\n", "    expected: int | bytes | bool\n    why: str = \"\"\n"),
        ("    ttl: float | None = None\n    lease: int | None = None\n", "    ttl: float | None = None\n    lease: int | None = None\n    note: str = \"\"\n"),
        ('    """The request was carried out."""\n', '    """The request was carried out."""\n\n    mood: str = "fine"\n'),
        ("class TooLargeRequest(", "class Tickle(Request[Done], code=63):\n    key: str\n\n\nclass TooLargeRequest("),
    ],
}  # fmt: skip


def patched(tree: Path, *patches: Mapping[str, Sequence[tuple[str, str]]]) -> Path:
    """Write this tree, of both packages, with patches to a folder, and return that."""
    for path in [*(ROOT / "store").rglob("*.py"), *(ROOT / "rdzv").rglob("*.py")]:
        name = str(path.relative_to(ROOT))
        text = path.read_text(encoding="utf-8")
        for before, after in [each for patch in patches for each in patch.get(name, ())]:
            assert before in text, f"{name} has changed: {before!r} is not there"
            text = text.replace(before, after, 1)
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(text, encoding="utf-8")
    return tree


@pytest.fixture(scope="module")
def later(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tree of the next release."""
    return patched(tmp_path_factory.mktemp("later"), LATER)


STORY = """
async def story(client):
    lease = await client.grant(60.0)
    await client.put("a", b"1")
    await client.put("b", b"2", lease=lease)
    async with client.watch("", snapshot=True) as watch:
        events = aiter(watch)
        assert [(await anext(events)).kind for _ in range(3)] == ["put", "put", "synced"]
        assert (await client.compare_and_set("a", b"3", expected_value=b"1")).succeeded
        event = await anext(events)
        assert (event.kind, event.key, event.value) == ("put", "a", b"3"), event
        assert await client.delete("a")
        assert (await anext(events)).kind == "delete"
    done = await client.transact(when=[store.when.exists("b")], then=[store.Put("c", b"4"), store.Get("b")])
    assert done.succeeded and done.results[1].value == b"2"
    await lease.keep_alive()
    await lease.revoke()
    assert [entry.key for entry in await client.list("")] == ["c"]
    assert client.limits["writes_max"] == 2048
"""

SERVER = """
import asyncio, sys, store
async def main():
    async with store.serve() as server:
        print(server.url, flush=True)
        await asyncio.to_thread(sys.stdin.read)
asyncio.run(main())
"""

CLIENT = (
    "import asyncio, sys, store\nfrom store.messages import Tickle\n"
    + STORY
    + textwrap.dedent("""
    async def main():
        async with store.connect(sys.argv[1]) as client:
            await story(client)
            try:
                await client.call(Tickle(key="a"))
            except store.Unsupported as error:
                assert "request 63" in str(error) and "older release" in str(error), error
            else:
                raise AssertionError("an older server knows no Tickle")
            await client.ping()  # on the same connection
            assert (await client.stats())["connections"] == 1
    asyncio.run(main())
    """)
)


def environment(tree: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(tree)}


@pytest.fixture
def later_server(later: Path) -> Iterator[str]:
    with subprocess.Popen(
        [sys.executable, "-c", SERVER],
        cwd=later,
        env=environment(later),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.communicate()
    assert process.returncode == 0


async def test_s12_a_client_of_this_release_at_a_server_of_the_next(later_server: str) -> None:
    scope: dict[str, Callable[[Client], asyncio.Future[None]]] = {"store": store}  # type: ignore[dict-item]
    exec(STORY, scope)
    async with store.connect(later_server) as client:
        await scope["story"](client)
        assert client.failure is None


def test_s12_a_blocking_client_of_this_release_at_a_server_of_the_next(later_server: str) -> None:
    with sync.connect(later_server) as client, client.watch("k") as watch:
        client.put("k", b"v")
        entry = client.get("k")
        assert entry is not None
        assert entry.value == b"v"
        assert next(iter(watch)).value == b"v"


async def test_s12_a_client_of_the_next_release_at_a_server_of_this_one(later: Path) -> None:
    async with store.serve() as server:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", CLIENT, server.url),
            cwd=later,
            env=environment(later),
            stderr=asyncio.subprocess.PIPE,
        )
        _, said = await process.communicate()
    assert process.returncode == 0, said.decode()

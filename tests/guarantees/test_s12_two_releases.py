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
from pathlib import Path
from typing import TYPE_CHECKING

import msgpack
import pytest

import store
from rdzv.testing.network import MemoryNetwork
from store import ProtocolError, sync
from store.messages import FailureKind
from store.protocol import wire
from store.protocol.wire import Events, Hello, Reply, Welcome
from tests.support.by_hand import Town
from tests.support.stores import introduce, serve_in_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from store import Client

ROOT = Path(__file__).parents[2]

LATER = {
    "store/protocol/wire.py": [
        ("\nVERSION = 1 ", "\nVERSION = 2 "),
        ("return frame(_pack((MAGIC, said)))", 'return frame(_pack((MAGIC, (*said, "new", 1), 7)))'),
        # An event of a new kind comes before the others, and each has one column more.
        (
            "    return _pack(events)\n",
            '    return _pack([("frozen", {"since": events[-1].revision}), *((*event, 1.5) for event in events)])\n',
        ),
    ],
    "store/messages.py": [
        ("    lease: int | None = None\n\n\nEventKind", "    lease: int | None = None\n    author: str = \"me\"\n\n\nEventKind"),
        ("    expected: int | bytes | bool\n", "    expected: int | bytes | bool\n    why: str = \"\"\n"),
        ("    ttl: float | None = None\n    lease: int | None = None\n", "    ttl: float | None = None\n    lease: int | None = None\n    note: str = \"\"\n"),
        ('    """The request was done."""\n', '    """The request was done."""\n\n    mood: str = "fine"\n'),
        ("class Excessive(", "class Tickle(Request[Done], code=63):\n    key: str\n\n\nclass Excessive("),
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def later(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tree of the next release."""
    tree = tmp_path_factory.mktemp("later")
    for path in (ROOT / "store").rglob("*.py"):
        name = str(path.relative_to(ROOT))
        text = path.read_text(encoding="utf-8")
        for before, after in LATER.get(name, ()):
            if after:
                assert before in text, f"{name} has changed: {before!r} is not there"
                text = text.replace(before, after, 1)
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(text, encoding="utf-8")
    return tree


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


@pytest.mark.parametrize(
    ("theirs", "older"), [((2, 3), "client"), ((7, 9), "client"), ((0, 0), "server")], ids=["next", "later", "older"]
)
def test_s12_where_there_is_no_common_version_one_sentence_says_who_is_older(
    theirs: tuple[int, int], older: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from store.protocol.connection import ClientConnection

    monkeypatch.setattr(wire, "VERSION_MIN", theirs[0])
    monkeypatch.setattr(wire, "VERSION", theirs[1])
    greeting = bytes(Town().accept().to_client)
    monkeypatch.undo()
    client = ClientConnection(session_id=bytes(16), token=None, name="tcp://head:29400")
    client.connected(nonce=bytes(16))
    with pytest.raises(ProtocolError, match=f"upgrade the {older}"):
        list(client.receive(greeting))


def test_s12_the_highest_common_version_is_spoken(monkeypatch: pytest.MonkeyPatch) -> None:
    from store.protocol.connection import ClientConnection

    for server, client, spoken in [((1, 4), (2, 3), 3), ((2, 3), (1, 9), 3), ((1, 1), (1, 2), 1), ((3, 5), (1, 3), 3)]:
        monkeypatch.setattr(wire, "VERSION_MIN", server[0])
        monkeypatch.setattr(wire, "VERSION", server[1])
        greeting = bytes(Town().accept().to_client)
        monkeypatch.setattr(wire, "VERSION_MIN", client[0])
        monkeypatch.setattr(wire, "VERSION", client[1])
        connection = ClientConnection(session_id=bytes(16), token=None, name="the store")
        connection.connected(nonce=bytes(16))
        (hello,) = connection.receive(greeting)
        assert isinstance(hello, bytes)
        said = wire.decode_opening(hello[4:], Hello)
        assert isinstance(said, Hello)
        assert said.version == spoken


@pytest.mark.virtual_time
async def test_s12_a_request_that_nobody_knows_costs_no_connection() -> None:
    network = MemoryNetwork()
    async with serve_in_memory(network):
        peer = await introduce(network)
        strange: list[tuple[object, ...]] = [
            (1, 0, [99]),
            (2, 0, [62, "a", {}]),
            (3, 0, [13, [["a", 9, True]], [2, "a"]]),
            (4, 0, [11, [], [[40, "a"]], []]),
        ]
        for number, fields in enumerate(strange, 1):
            peer.connection.ask(store.Get("a"), None)  # what counts the ids
            body = msgpack.packb(fields)
            peer.transport.write(len(body).to_bytes(4, "big") + body)
            answer = await peer.answer(number)
            assert getattr(answer, "kind", None) is FailureKind.UNSUPPORTED, answer
        (request,) = peer.ask(store.Get("a"))
        assert await peer.answer(request) is not None
        peer.transport.close()


def test_s12_words_that_this_release_does_not_know_say_nothing() -> None:
    decode = wire.decode_server_frame
    assert decode(msgpack.packb((5, [126, [["frozen", 1, "a"], ["delete", 2, "b"]]]))) == Events(
        5, (store.Event(kind="delete", revision=2, key="b"),)
    )
    assert decode(msgpack.packb((5, [126, [["thawed", {}]], "new"]))) == Events(5, ())
    assert decode(msgpack.packb((5, [110, "a push of a later release"]))) == Events(5, ())
    failed = decode(msgpack.packb((1, [77, 99, "because", "new"])))
    assert isinstance(failed, Reply)
    assert getattr(failed.response, "kind", None) is FailureKind.OTHER


def test_s12_an_absent_field_has_its_default() -> None:
    """A release before `lease` was added to `Put` would send this."""
    _, _, request = wire.decode_request(msgpack.packb((1, 0, [1, "a", b"v"])))  # type: ignore[misc]
    assert request == store.Put("a", b"v")


def test_s12_a_store_that_does_not_say_whether_it_is_durable_is_not_given_up() -> None:
    """A release before `durable` was added to `Welcome` would send this."""
    body = msgpack.packb(("rdzv", (1, "10.0.0.1", 7, 1000, b"", {})))
    assert wire.decode_opening(body, Welcome).durable  # type: ignore[union-attr]


PACKING = """
import sys, threading
from store.messages import Put
from store.protocol import wire
sys.setswitchinterval(1e-5)
corrupt = []
def work(letter):
    for _ in range(1000):
        frame = wire.encode_request(7, 0, Put("key", letter * 200))
        try:
            assert wire.decode_request(memoryview(frame)[4:])[2].value == letter * 200
        except Exception as error:
            corrupt.append(error)
threads = [threading.Thread(target=work, args=(bytes([number]),)) for number in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert not corrupt, f"{len(corrupt)} of 4000 frames"
"""


@pytest.mark.parametrize("pure", ["0", "1"])
def test_s12_frames_of_several_threads_are_whole_with_either_msgpack(pure: str) -> None:
    """One packer of msgpack's pure-Python fallback, shared by threads, mixed their frames up."""
    made = {**environment(ROOT), **({"MSGPACK_PUREPYTHON": "1"} if pure == "1" else {})}
    done = subprocess.run([sys.executable, "-c", PACKING], env=made, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

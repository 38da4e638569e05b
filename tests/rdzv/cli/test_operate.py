"""Operator commands against a run: the nodes that they affect, and mistyped names."""

import asyncio
import socket

import pytest

import rdzv
import store
from rdzv.backends.registry import rendezvous_handler_registry
from rdzv.cli import main as command
from rdzv.core.state import Unban
from store.server.server import Server


async def said(server: Server, *arguments: str, what: str = "ban") -> int:
    """Run `rdzv ban`, or another command, against a run of this server."""
    return await asyncio.to_thread(command.main, [what, f"{server.url}/job", *arguments])


async def test_all_nodes_with_an_attribute_are_banned_also_those_that_come_later(
    capsys: pytest.CaptureFixture[str],
) -> None:
    racks = {"a": "17", "b": "18", "c": "17"}
    async with store.serve() as server:
        url = f"{server.url}/job?min_nodes=3&is_host=false"
        handlers = [await rdzv.connect(url, node_id=name, attributes={"rack": rack}) for name, rack in racks.items()]
        late = await rdzv.connect(url, node_id="d", attributes={"rack": "17"})
        try:
            await asyncio.gather(*(handler.next_rendezvous() for handler in handlers))
            assert await said(server, "--where", "rack=99") == 0
            there = "nodes with rack=99 are banned from run job: only nodes that come later; its nodes have 17, 18\n"
            assert capsys.readouterr().out == there
            assert await said(server, "--where", "rack=99", what="unban") == 0
            assert capsys.readouterr().out == "nodes with rack=99 may come again to run job\n"
            # regression: a mistyped unban lifted no ban, and exited with 0
            for who in (("--where", "rack=99"), ("b",)):
                assert await said(server, *who, what="unban") == 1
            assert "there is no ban of node b in run job" in capsys.readouterr().err
            assert await said(server, "a", "--where", "rack=17") == await said(server) == 2
            assert await said(server, "--where", "rack=17", "--reason", "its switch", "--for", "1h") == 0
            assert "nodes with rack=17 are banned from run job for 1 h: now a, c\n" in capsys.readouterr().out
            assert set((await handlers[1].status()).banned_where) == {"rack=17"}
            with pytest.raises(rdzv.RendezvousRefusedError, match="node d is banned, as all nodes with rack=17, by"):
                await late.next_rendezvous()
        finally:
            for handler in (*handlers, late):
                await handler.aclose()


async def test_the_reason_for_lifting_a_ban_reaches_the_history() -> None:
    async with store.serve() as server, store.connect(server.url) as client:
        async with rdzv.connect(f"{server.url}/job?min_nodes=1&is_host=false") as handler:  # it never coordinates
            await handler.ban("b")
            await handler.ban(where=("rack", "17"))
        for who in (["b"], ["--where", "rack=17"]):
            assert await said(server, *who, "--reason", "repaired", what="unban") == 0
        notes = [Unban.unpack(entry.value) for entry in await client.list("/rdzv/job/head/unbanned/")]
        assert [(note.who, note.reason) for note in notes] == [("b", "repaired"), ("nodes with rack=17", "repaired")]


@pytest.mark.parametrize(
    "arguments",
    [
        *(("status",), ("close",), ("reopen",), ("ban", "a"), ("unban", "a"), ("drain", "a"), ("resize", "--min", "2")),
        *(("forget",), ("history",), ("timeline", "-o", "-")),
    ],
)
async def test_an_unknown_run_is_an_error_that_lists_the_runs_and_nothing_is_written(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: a mistyped run id was closed, and the run that was meant went on."""
    what, *rest = arguments
    async with store.serve() as server, store.connect(server.url) as client:
        assert await said(server, *rest, what=what) == 1
        assert "has no run job; it has none under /rdzv" in capsys.readouterr().err
        assert await client.count("") == 0
        await client.put("/rdzv/jbo/settings", b"")
        assert await said(server, *rest, what=what) == 1
        assert "has no run job; it has jbo" in capsys.readouterr().err


async def test_chaos_that_no_launcher_answers_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: on a run without launchers no node was killed, and the exit status was that of success."""
    monkeypatch.setattr("rdzv.cli.operate.ANSWER_WITHIN", 0.1)
    async with store.serve() as server, rdzv.connect(f"{server.url}/job?min_nodes=1&is_host=false") as node:
        await node.next_rendezvous()
        assert await said(server, "--kill", "100/1s", "--for", "1", "--seed", "1", "--yes", what="chaos") == 1


async def test_a_run_can_be_closed_before_a_node_has_joined() -> None:
    async with store.serve() as server:
        assert await said(server, "--create", what="close") == 0
        with pytest.raises(rdzv.RendezvousClosedError):
            async with rdzv.connect(f"{server.url}/job?min_nodes=1&is_host=false") as late:
                await late.next_rendezvous()


EVERY_COMMAND = [
    *("status", "close", "reopen", "history", "runs", "stats", "ping", "forget", "doctor"),
    *("drain n", "ban n", "unban n", "stacks n", "resize --min 2", "timeline -o -"),
]


@pytest.mark.parametrize("words", EVERY_COMMAND)
def test_a_url_of_a_third_party_backend_is_refused_in_one_sentence(
    words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: half of the commands said that no such backend exists."""
    monkeypatch.setattr(rendezvous_handler_registry, "_creators", {"theirs": print})
    name, *rest = words.split()
    assert command.main([name, "theirs://head:1/job", *rest]) == 2
    assert "the backend 'theirs' is not one of ours" in capsys.readouterr().err


@pytest.mark.parametrize("words", [each for each in EVERY_COMMAND if each != "doctor"])
def test_every_command_has_the_same_message_for_an_unreachable_store(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        url = f"tcp://127.0.0.1:{held.getsockname()[1]}"
        name, *rest = words.split()
        assert command.main([name, f"{url}/job", *rest, "--timeout", "0.2"]) == 5
        said = f"rdzv {name}: no store at {url} within 0.2 s: nobody listens there\n"
        assert capsys.readouterr().err == said

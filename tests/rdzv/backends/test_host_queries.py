"""The hosts of a URL are asked which of them serves: real sockets, and each kind of answer."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import ssl
import threading
from typing import TYPE_CHECKING, Any

import pytest

import rdzv
import store
from rdzv.backends.credentials import Credentials
from rdzv.backends.host_queries import (
    Host,
    HostReply,
    LostHostClaim,
    MultiHostDial,
    ask_all_hosts,
    report_lost_host,
    wait_for_serving_host,
    why_no_host_serves,
)
from rdzv.backends.hosting import HostedStore, serve_store_on
from rdzv.backends.succession import HostSuccession
from rdzv.config.settings import parse
from rdzv.core.hosts.succession import Answer
from rdzv.errors import RendezvousConnectionError, RendezvousSettingsError, RendezvousStateError
from store.net.address import Address
from store.net.dialing import TcpDialer
from store.net.threads import in_thread
from tests.rdzv.backends.test_renewal import Authority
from tests.support.processes import free_port

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

UNREACHABLE = "127.0.0.1: no answer; if that address alone is dead, take it off the name"
TOKEN = "0123456789abcdef0123456789abcdef"


def host_at(port: int, name: str = "127.0.0.1") -> Host:
    return Host(Address(host=name, port=port))


@contextlib.asynccontextmanager
async def silent() -> AsyncIterator[int]:
    """A port that takes connections, and on which no process answers."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        yield sock.getsockname()[1]


def succession(hosts: list[int], **parameters: object) -> HostSuccession:
    listed = ",".join(f"127.0.0.1:{port}" for port in hosts)
    settings = parse(f"tcp://{listed}/job", {"min_nodes": 1, "token": TOKEN, **parameters}, {})
    return HostSuccession(settings, Credentials(settings), contextlib.nullcontext, random.Random(7))  # type: ignore[arg-type]


async def wait_until_hosting(one: HostSuccession) -> None:
    async with asyncio.timeout(10):
        while not one.is_hosting:  # noqa: ASYNC110 - its end is only seen by looking
            await asyncio.sleep(0.01)


async def test_a_free_port_refuses_a_store_serves_and_anything_else_is_silent() -> None:
    async def garbage(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    http = await asyncio.start_server(garbage, "127.0.0.1", 0)
    async with store.serve() as server, silent() as mute, http:
        ports = [free_port(), server.port, mute, http.sockets[0].getsockname()[1]]
        found = [await host_at(port).ask(None, within=1.0) for port in ports]
        assert [asked.answer for asked in found] == [Answer.REFUSED, Answer.SERVES, Answer.SILENT, Answer.SILENT]
        unknown = await host_at(1, "no.such.host.invalid").ask(None)
        assert unknown.answer is Answer.SILENT


async def test_a_host_refuses_only_if_each_address_of_its_name_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a silent address hid the store, or the candidate, that answered at another one; and an address that
    led back to the candidate itself hid the silent one.
    """
    async with silent() as mute, store.serve() as server:
        closed, own = free_port(), free_port()
        candidate = succession([mute, own])
        await candidate.try_to_start()
        host, word = host_at(closed, "a.name.of.two.addresses"), LostHostClaim(f"127.0.0.1:{mute}", TOKEN.encode())

        async def ask(*ports: int, name: str = "") -> HostReply:
            resolved = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port)) for port in ports]
            monkeypatch.setattr(host.addresses, "resolve", lambda: resolved)
            return await host.ask(None, within=0.3, own=name)

        try:
            name = (await ask(own)).name
            for ports, answer in (
                ((closed, mute), Answer.SILENT),
                ((closed, server.port), Answer.SERVES),
                ((mute, server.port), Answer.SERVES),
                ((mute, own), Answer.CANDIDATE),
                ((closed, closed), Answer.REFUSED),
            ):
                for order in (ports, ports[::-1]):
                    assert (await ask(*order)).answer is answer, ports
            assert (await ask(closed, own, name=name)).answer is Answer.REFUSED
            assert (await ask(mute, own, name=name)).answer is Answer.SILENT
            unclear = await ask(closed, mute)
            assert str(unclear) == f"does not answer ({UNREACHABLE})"
            assert f"({UNREACHABLE}) does not answer" in why_no_host_serves([host], [unclear])
            await ask(mute, own)
            assert (await host.ask(None, word=word)).answer is Answer.CANDIDATE
        finally:
            candidate.note_store_found()
            await candidate.aclose()


async def test_a_failed_tls_handshake_is_silence_and_no_refusal() -> None:
    """A server whose certificate is another authority's, or that speaks no TLS, may serve the store."""
    theirs, ours = Authority(), Authority()
    context = ssl.create_default_context(cadata=ours.files["ca"].decode())
    async with store.serve(token=TOKEN, tls=theirs.serving()) as server, store.serve() as plain:
        for one in (server, plain):
            found = await host_at(one.port).ask(context, within=2.0)
            assert found.answer is Answer.SILENT
            assert isinstance(found.error, OSError)
        listed = ",".join(f"127.0.0.1:{port}" for port in (server.port, free_port()))
        with pytest.raises(rdzv.RendezvousError, match="certificate"):
            async with rdzv.connect(f"tcps://{listed}/job?join_timeout=3", tls=context, token=TOKEN) as node:
                await node.next_rendezvous()


async def test_of_two_stores_nodes_take_the_one_of_the_later_generation() -> None:
    """Two serve after `rdzv lost` for a host at work: the survivors' store is the later one, at any place."""
    async with store.serve() as first, store.serve() as second, silent() as mute:
        dialer = TcpDialer(Address(host="127.0.0.1", port=second.port), None)
        async with store.Client(dialer, name="a survivor", generation=3):
            for ports in ([first.port, second.port], [second.port, first.port], [mute, first.port, second.port]):
                settings = parse(f"tcp://{','.join(f'127.0.0.1:{port}' for port in ports)}/job", {"min_nodes": 1}, {})
                dial = MultiHostDial(settings, Credentials(settings))
                async with store.Client(dial, name="a newcomer", timeout=2.0) as newcomer:
                    assert newcomer.store_id == second.store_id
                found = await ask_all_hosts([host_at(port) for port in ports], None)
                said = [str(asked) for asked in found if asked.answer is Answer.SERVES]
                assert sorted(said) == ["serves (generation 1)", "serves (generation 3)"]


async def test_a_server_that_hands_over_has_ended_and_keeps_its_clients() -> None:
    async with store.serve() as server, store.connect(server.url) as client:
        server.end_when_alone.reject_new_clients()
        assert (await host_at(server.port).ask(None)).answer is Answer.ENDED
        await client.put("still", b"served")
    assert (await host_at(server.port).ask(None)).answer is Answer.REFUSED


async def test_a_candidate_says_so_and_serves_once_the_others_refuse() -> None:
    async with silent() as mute:
        own = free_port()
        candidate = succession([mute, own])
        await candidate.try_to_start()
        try:
            assert not candidate.is_hosting
            (asked,) = await ask_all_hosts([host_at(own)], None)
            assert asked.answer is Answer.CANDIDATE
            assert asked.name
        finally:
            candidate.note_store_found()
            await candidate.aclose()
        assert (await host_at(own).ask(None)).answer is Answer.REFUSED, "it listens no more"


async def test_a_host_that_dies_before_a_node_has_connected_is_succeeded() -> None:
    """That node never became a candidate: if all nodes were as late, the run ended after `join_timeout`."""
    async with contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(store.serve())
        waiting = succession([server.port, free_port()])
        await waiting.try_to_start()
        await stack.aclose()
        try:
            await wait_until_hosting(waiting)
        finally:
            waiting.note_store_found()
            if waiting._store_if_started is not None:
                await waiting._store_if_started.end()
            await waiting.aclose()


async def test_only_one_of_several_processes_serves() -> None:
    hosts = [free_port(), free_port()]
    several = [succession(hosts) for _ in range(4)]
    try:
        await asyncio.gather(*(one.try_to_start() for one in several))
        async with asyncio.timeout(10):
            tasks = [one._task for one in several if one._task is not None]
            _, others = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait(others, timeout=1)
        assert sum(one.is_hosting for one in several) == 1
    finally:
        for one in several:
            one.note_store_found()
        for one in several:
            if one._store_if_started is not None:
                await one._store_if_started.end()
            await one.aclose()


async def test_a_store_that_cannot_tell_its_nodes_that_it_ends_does_not_hand_over() -> None:
    """The next host began to serve, while nodes that had not heard of it could meet in the store that was ending."""
    hosts = [free_port(), free_port()]
    one = succession(hosts)
    await one.try_to_start()
    await wait_until_hosting(one)
    async with asyncio.timeout(10):
        assert one._store_if_started is not None
        found = [await host_at(port).ask(None) for port in hosts]
        (port,) = [port for port, asked in zip(hosts, found, strict=True) if asked.answer is Answer.SERVES]
        async with store.connect(f"tcp://127.0.0.1:{port}", token=TOKEN):
            one.note_store_found()
            await one._store_if_started.aclose(lambda _: store.connect("tcp://127.0.0.1:1", timeout=0.2))
            await one.aclose()
            assert (await host_at(port).ask(None)).answer is Answer.REFUSED


@pytest.mark.parametrize("other_answers", [True, False])
async def test_a_node_told_to_end_while_it_is_a_candidate_or_starts_the_store_gives_way(
    other_answers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: it served after the signal, and its store ended with it."""
    leaves = threading.Event()

    def start(*arguments: Any) -> HostedStore:
        leaves.set()
        return serve_store_on(*arguments)

    monkeypatch.setattr("rdzv.backends.succession.serve_store_on", start)
    async with silent() as mute:
        own = free_port()
        one = succession([free_port() if other_answers else mute, own])
        one.may_host = lambda away: away > 60 or not leaves.is_set()
        await one.try_to_start()
        async with asyncio.timeout(10):
            if other_answers:
                await in_thread(leaves.wait)
            else:
                while (await host_at(own).ask(None)).answer is not Answer.CANDIDATE:
                    pass
                leaves.set()
                while (await host_at(own).ask(None)).answer is not Answer.REFUSED:
                    pass
        one.note_store_found()
        assert one._task is not None
        await asyncio.wait([one._task])
        assert not one.is_hosting


async def test_a_word_counts_only_with_the_token_and_for_a_silent_host(monkeypatch: pytest.MonkeyPatch) -> None:
    async with silent() as mute:
        own = free_port()
        candidate = succession([mute, own])
        await candidate.try_to_start()
        monkeypatch.setattr("rdzv.backends.succession.ANSWERS_WITHIN", 60.0)  # the word ends the question under way
        settings = candidate._settings
        try:
            with pytest.raises(RendezvousSettingsError, match="is not one of the several hosts"):
                await report_lost_host(settings, Credentials(settings), "elsewhere")
            with pytest.raises(RendezvousStateError, match="is a candidate, so its machine is not lost"):
                await report_lost_host(settings, Credentials(settings), f"127.0.0.1:{own}")
            forged = LostHostClaim(f"127.0.0.1:{mute}", b"another token")
            assert (await host_at(own).ask(None, word=forged)).answer is not Answer.CANDIDATE
            assert not candidate.is_hosting
            told = await report_lost_host(settings, Credentials(settings), f"127.0.0.1:{mute}")
            assert told == f"127.0.0.1:{own} was told that 127.0.0.1:{mute} is lost"
            await wait_until_hosting(candidate)
        finally:
            candidate.note_store_found()
            if candidate._task is not None:
                await asyncio.wait([candidate._task])
            if candidate._store_if_started is not None:
                await candidate._store_if_started.end()
            await candidate.aclose()


def test_a_blocking_caller_without_a_node_is_told_why_no_host_serves() -> None:
    ports = [free_port(), free_port()]
    settings = parse(f"tcp://127.0.0.1:{ports[0]},127.0.0.1:{ports[1]}/job", {"min_nodes": 1}, {})
    dial = MultiHostDial(settings, Credentials(settings))
    with pytest.raises(RendezvousConnectionError, match=rf"none of 127.0.0.1:{ports[0]}, .* nobody listens there"):
        wait_for_serving_host(dial, within=0.5)


async def test_a_store_that_cannot_be_started_is_an_error_before_the_node_joins() -> None:
    ports = [free_port(), free_port()]
    broken = succession(ports, token="short")
    with pytest.raises(RendezvousSettingsError, match="the token has 5 bytes"):
        await broken.try_to_start()


@pytest.mark.virtual_time
async def test_hosts_of_which_none_serves_are_asked_and_named_ever_more_rarely(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: each node of a job whose hosts are not up yet made some sixty connections a second. On the network of
    a host that is off, whose silence alternates with "no route", each change was a warning.
    """
    asked: list[float] = []

    async def none_serves(hosts: list[Host], *_: object, **__: object) -> list[HostReply]:
        asked.append(asyncio.get_running_loop().time())
        error = OSError("No route to host") if len(asked) % 2 else None
        return [HostReply(Answer.SILENT, error=error)] * len(hosts)

    monkeypatch.setattr("rdzv.backends.succession.ask_all_hosts", none_serves)
    waiting = succession([free_port(), free_port()])
    for outage in range(2):
        asked.clear()
        caplog.clear()
        await waiting.try_to_start()
        await asyncio.sleep(60)
        assert sum(at - asked[0] < 1.0 for at in asked) >= 15, "at first the others wait for the host"
        assert sum(at - asked[0] > 30.0 for at in asked) <= 62
        assert 3 <= len(caplog.records) <= 6, outage
        waiting.note_store_found()
        await waiting.aclose()

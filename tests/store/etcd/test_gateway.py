"""What members may answer that a real etcd cannot be made to: other releases' words, broken pieces, silence."""

from __future__ import annotations

import asyncio
import json
import random
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from store.errors import (
    AuthenticationError,
    ConnectionLost,
    LeaseNotFound,
    ProtocolError,
    StoreReplaced,
)
from store.etcd import gateway as gateway_room
from store.etcd.codec import Cluster, FailureKind, range_of
from store.etcd.gateway import Failure, Gateway, RetryState

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    Script = Callable[[str, bytes, asyncio.StreamWriter], Awaitable[None]]

GONE = "etcdserver: requested lease not found"
HEADER = {"cluster_id": "7", "member_id": "1", "revision": "5"}


class Member:
    """A member that answers by a script, one answer per request, the last one again and again."""

    def __init__(self, *answers: Script) -> None:
        self._answers = list(answers)
        self.asked: list[str] = []
        self.tokens: list[str | None] = []
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one connection."""
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                fields = dict(line.lower().split(": ", 1) for line in head.splitlines()[1:] if line)
                body = await reader.readexactly(int(fields["content-length"]))
                self.asked.append(head.split()[1].removeprefix("/v3/"))
                self.tokens.append(fields.get("authorization"))
                answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
                await answer(self.asked[-1], body, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


def says(content: Any, status: int = 200) -> Script:
    """Answer with this, as JSON unless it is bytes."""

    async def answer(_: str, __: bytes, writer: asyncio.StreamWriter) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%b" % (status, len(data), data))

    return answer


def streams(*pieces: bytes, end: bool = False, pause: float = 0.0) -> Script:
    """Answer with a stream, in these pieces."""

    async def answer(_: str, __: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for piece in pieces:
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            await writer.drain()
            await asyncio.sleep(pause)
        if end:
            writer.write(b"0\r\n\r\n")

    return answer


async def hangs_up(_: str, __: bytes, writer: asyncio.StreamWriter) -> None:
    """Answer nothing, and close."""
    writer.close()


async def says_nothing(_: str, __: bytes, ___: asyncio.StreamWriter) -> None:
    """Answer nothing, and keep the connection."""


class First(random.Random):
    """Dice for a client that begins with the first member, and makes no pauses."""

    def randrange(self, *_: Any) -> int:
        """The first."""
        return 0

    def uniform(self, *_: Any) -> float:
        """None."""
        return 0.0


@asynccontextmanager
async def gateway_to(*members: Member, **options: Any) -> AsyncIterator[Gateway]:
    async with AsyncExitStack() as stack:
        for member in members:
            server = await asyncio.start_server(member.serve, "127.0.0.1", 0)
            stack.callback(server.close)
            member.port = server.sockets[0].getsockname()[1]
        cluster = Cluster(hosts=tuple(("127.0.0.1", member.port) for member in members))
        gateway = Gateway(cluster, probe=range_of("probe"), rng=First(), **options)
        await gateway.start()
        stack.push_async_callback(gateway.aclose)
        yield gateway


def soon(seconds: float = 5.0) -> float:
    return asyncio.get_running_loop().time() + seconds


GOOD = says({"header": HEADER, "count": "1"})


@pytest.mark.parametrize(
    "problem",
    [
        {
            "error": "etcdserver: requested lease not found",
            "code": 5,
            "message": "etcdserver: requested lease not found",
        },
        {"error": "etcdserver: requested lease not found", "code": 5},
        {"code": 5, "message": "etcdserver: requested lease not found", "details": []},
    ],
    ids=["3.4", "3.5", "3.6"],
)
async def test_refusals_are_read_in_the_words_of_every_release(problem: dict[str, Any]) -> None:
    async with gateway_to(Member(says(problem, 404))) as gateway:
        with pytest.raises(LeaseNotFound):
            await gateway.ask("lease/revoke", {}, deadline=soon())


@pytest.mark.parametrize("trouble", [hangs_up, says({"code": 14, "message": "etcdserver: no leader"}, 503)])
async def test_a_member_in_trouble_is_left_for_the_next_and_stays_left(trouble: Script) -> None:
    bad, good = Member(trouble), Member(GOOD)
    async with gateway_to(bad, good) as gateway:
        for _ in range(3):
            await gateway.ask("kv/range", {}, deadline=soon())
        assert (len(bad.asked), len(good.asked)) == (1, 3)
        assert gateway.connected


async def test_whether_it_may_have_been_done_depends_on_how_it_failed() -> None:
    for trouble, any_doubt in (
        (hangs_up, True),
        (says(b"<html>", 502), True),
        (says({"code": 14, "message": "etcdserver: request timed out"}, 503), True),
        (says({"code": 14, "message": "etcdserver: no leader"}, 503), False),
        (says({"code": 8, "message": "etcdserver: too many requests"}, 429), False),
    ):
        doubt = RetryState()
        async with gateway_to(Member(trouble, GOOD)) as gateway:
            await gateway.ask("kv/txn", {}, deadline=soon(), doubt=doubt)
        assert doubt.any is any_doubt


async def test_a_member_that_says_nothing_has_a_time_limit_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_room, "ATTEMPT_FIRST", 0.1)
    silent, good = Member(says_nothing), Member(GOOD)
    async with gateway_to(silent, good) as gateway:
        await gateway.ask("kv/range", {}, deadline=soon())
    assert len(silent.asked) == 1


async def test_when_the_time_is_over_the_last_reason_that_was_given_is_told() -> None:
    async with gateway_to(Member(says({"code": 14, "message": "etcdserver: no leader"}, 503), says_nothing)) as gateway:
        doubt = RetryState()
        with pytest.raises(ConnectionLost, match=r"writing at .*: etcdserver: no leader") as caught:
            await gateway.ask("kv/txn", {}, deadline=soon(0.3), what="writing", doubt=doubt)
        assert caught.value.maybe_applied
        assert not gateway.connected


async def test_what_is_asked_once_is_not_asked_again_after_a_doubt() -> None:
    member = Member(hangs_up, GOOD)
    async with gateway_to(member) as gateway:
        with pytest.raises(ConnectionLost):
            await gateway.ask("kv/txn", {}, deadline=soon(), doubt=RetryState(), once=True)
    assert member.asked == ["kv/txn"]


async def test_a_token_that_is_refused_is_fetched_anew_and_one_that_always_is_ends_it() -> None:
    old = says({"code": 16, "message": "etcdserver: invalid auth token"}, 401)
    member = Member(says({"header": HEADER, "token": "t1"}), old, says({"header": HEADER, "token": "t2"}), GOOD)
    async with gateway_to(member, user="me", password="secret") as gateway:
        await gateway.ask("kv/range", {}, deadline=soon())
        assert member.asked == ["auth/authenticate", "kv/range"] * 2
        assert member.tokens == [None, "t1", None, "t2"]

    async def always_old(path: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        await (says({"header": HEADER, "token": "t"}) if path == "auth/authenticate" else old)(path, body, writer)

    async with gateway_to(Member(always_old), user="me", password="secret") as gateway:
        with pytest.raises(AuthenticationError, match="'me'"):
            await gateway.ask("kv/range", {}, deadline=soon())


async def test_a_revision_that_went_back_is_another_store_and_one_of_a_member_that_lags_is_not() -> None:
    older = {**HEADER, "revision": "4"}
    async with gateway_to(Member(GOOD, says({"header": older}))) as gateway:
        failed: list[Any] = []
        gateway.failed = failed.append
        await gateway.ask("kv/range", {}, deadline=soon())
        await gateway.ask("maintenance/status", {}, deadline=soon())
        assert failed == []
        with pytest.raises(StoreReplaced, match="is at revision 4, and was at 5"):
            await gateway.ask("kv/range", {}, deadline=soon())
        assert len(failed) == 1


async def test_what_is_no_json_is_no_etcd() -> None:
    async with gateway_to(Member(says(b"hello"))) as gateway:
        with pytest.raises(ProtocolError, match="no JSON; it is no etcd"):
            await gateway.ask("kv/range", {}, deadline=soon())


async def test_what_does_not_speak_http_is_said_in_words_and_not_in_its_own() -> None:
    async def greets(_: str, __: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(b"\x00\x00\x00\x07\x96\xa4rdzv\x01\n")
        writer.close()

    async with gateway_to(Member(greets)) as gateway:
        with pytest.raises(ConnectionLost, match=r"it does not answer in HTTP; to a store of ours write tcp://$"):
            await gateway.ask("kv/range", {}, deadline=soon(0.3))


# ------------------------------------------------------------------------------------------ streams


def line(**result: Any) -> bytes:
    return json.dumps({"result": {"header": HEADER, **result}}).encode() + b"\n"


CREATED = line(created=True)


async def test_messages_come_whole_however_they_were_cut() -> None:
    messages = [line(events=[{"number": number, "filler": "x" * 300_000}]) for number in range(4)]
    whole = b"".join(messages)
    pieces = [CREATED, whole[:10], whole[10:600_000], whole[600_000 : len(whole) - 1], whole[-1:]]
    async with gateway_to(Member(streams(*pieces))) as gateway:
        stream = await gateway.stream([{}], deadline=soon())
        seen: list[int] = []
        async with asyncio.timeout(5):
            while len(seen) < 4:
                seen += [message["events"][0]["number"] for message in await stream.read() or ()]
        assert seen == [0, 1, 2, 3]


async def test_what_comes_while_other_watches_of_a_stream_are_opened_is_not_lost() -> None:
    async with gateway_to(Member(streams(CREATED, line(events=[1]), CREATED, line(events=[2])))) as gateway:
        stream = await gateway.stream([{}, {}], deadline=soon())
        seen: list[Any] = []
        async with asyncio.timeout(5):
            while len(seen) < 2:
                seen += [message["events"] for message in await stream.read() or ()]
        assert seen == [[1], [2]]


@pytest.mark.parametrize(
    "end",
    [
        line(canceled=True, cancel_reason="etcdserver: no leader"),
        b'{"error": {"grpc_code": 14, "http_code": 503, "message": "etcdserver: no leader"}}\n',
        b'{"error": {"code": 14, "message": "etcdserver: no leader", "details": []}}\n',
    ],
)
async def test_a_stream_that_etcd_ends_is_over_in_the_words_of_every_release(end: bytes) -> None:
    async with gateway_to(Member(streams(CREATED, end, pause=0.05))) as gateway:
        stream = await gateway.stream([{}], deadline=soon())
        with pytest.raises(Failure, match="no leader") as caught:
            while True:
                await stream.read()
        assert caught.value.trouble is FailureKind.UNDONE


async def test_a_stream_overtaken_by_compaction_says_so_at_once_or_later() -> None:
    gone = line(canceled=True, compact_revision="9")
    async with gateway_to(Member(streams(gone))) as gateway:
        with pytest.raises(Failure) as caught:
            await gateway.stream([{}], deadline=soon())
        assert caught.value.trouble is FailureKind.COMPACTED


async def test_a_stream_is_opened_at_the_next_member_if_one_ends_it_before_it_is_open() -> None:
    async with gateway_to(Member(streams(end=True)), Member(streams(CREATED, line(events=[1])))) as gateway:
        stream = await gateway.stream([{}], deadline=soon())
        async with asyncio.timeout(5):
            while not (seen := await stream.read()):
                pass
        assert seen[0]["events"] == [1]


async def test_a_silent_stream_is_kept_while_its_member_answers_and_left_when_it_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gateway_room, "IDLE", 0.05)
    monkeypatch.setattr(gateway_room, "ATTEMPT_ALONE", 0.1)
    member = Member(streams(CREATED), GOOD, GOOD, says_nothing)
    async with gateway_to(member) as gateway:
        stream = await gateway.stream([{}], deadline=soon())
        with pytest.raises(Failure, match="has not answered"):
            await stream.read()
    assert member.asked == ["watch", "kv/range", "kv/range", "kv/range"]


async def test_a_stream_that_was_silent_for_long_is_to_be_opened_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_room, "IDLE", 0.02)
    monkeypatch.setattr(gateway_room, "REOPEN", 0.05)
    async with gateway_to(Member(streams(CREATED), GOOD)) as gateway:
        stream = await gateway.stream([{}], deadline=soon())
        assert await stream.read() is None

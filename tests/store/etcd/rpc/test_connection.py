"""One connection to one member: what its answers and refusals mean, the stream of renewals, and the end."""

from __future__ import annotations

import asyncio
import gc
import os
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import pytest

from store.errors import ProtocolError, StoreError, StoreReplaced, StoreUsageError, UsedAfterFork
from store.etcd.codec import Failure, FailureKind, range_of
from store.etcd.rpc import connection as connection_room
from store.etcd.rpc import etcd_pb2 as pb
from store.etcd.rpc.connection import RENEWING_AT_ONCE, Connection
from tests.store.etcd.test_members import HEADER, Member, refuses, says, says_nothing
from tests.support.processes import free_port

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

READ = "KV/Range"
CLOSED = Failure("the client is closed", FailureKind.UNDONE)


class Renewing(Member):
    """A member that answers renewals: in the order of asking, each but those of lease 0."""

    async def _renew(self, requests: Any, _: Any) -> AsyncIterator[bytes]:
        async for data in requests:
            lease = pb.LeaseKeepAliveRequest.FromString(data).ID
            self.asked.append(f"renew {lease}")
            if lease:
                yield pb.LeaseKeepAliveResponse(header=HEADER, ID=lease, TTL=lease).SerializeToString()

    def service(self, details: Any) -> Any:
        """Answer whatever is asked."""
        if details.method.endswith("Lease/LeaseKeepAlive"):
            return grpc.stream_stream_rpc_method_handler(self._renew)
        return super().service(details)


@asynccontextmanager
async def connected(member: Member, met: Any = lambda _: None) -> AsyncIterator[Connection]:
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((member,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with to(port, met) as connection:
            yield connection
    finally:
        await server.stop(None)


def to(port: int, met: Any = lambda _: None) -> Connection:
    return Connection(0, f"127.0.0.1:{port}", credentials=None, name="the cluster", met=met)


async def ask(connection: Connection, *, limit: float = 30.0, **fields: Any) -> Any:
    return await connection.ask(READ, fields or {"key": b"key"}, token=None, limit=limit)


async def renew(connection: Connection, lease: int, *, limit: float = 30.0) -> Any:
    return await connection.ask("Lease/LeaseKeepAlive", {"ID": lease}, token=None, limit=limit)


async def test_a_request_shows_its_token_and_notes_when_something_came() -> None:
    member = Member(says())
    async with connected(member) as connection:
        connection.heard_at = 0.0
        reply = await connection.ask(READ, {"key": b"key"}, token="t", limit=30.0)
        assert (reply.count, member.tokens) == (1, ["t"])
        assert connection.heard_at > 0
        assert connection.under_way == 0


@pytest.mark.parametrize(
    ("code", "words", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, "etcdserver: no leader", FailureKind.UNDONE),
        (grpc.StatusCode.UNAVAILABLE, "etcdserver: request timed out", FailureKind.DOUBT),
        (grpc.StatusCode.UNAUTHENTICATED, "etcdserver: invalid auth token", FailureKind.TOKEN),
    ],
)
async def test_a_refusal_that_another_attempt_may_mend_is_a_failure(
    code: grpc.StatusCode, words: str, kind: FailureKind
) -> None:
    async with connected(Member(refuses(code, words))) as connection:
        with pytest.raises(Failure, match=words) as caught:
            await ask(connection)
        assert (caught.value.trouble, caught.value.silent) == (kind, False)


async def test_what_no_attempt_mends_is_an_error() -> None:
    async with connected(Member(refuses(grpc.StatusCode.UNIMPLEMENTED, "unknown service"))) as connection:
        with pytest.raises(ProtocolError, match=r"etcd 3\.4 or later"):
            await ask(connection)
        with pytest.raises(StoreUsageError, match="RangeRequest cannot be sent"):
            await ask(connection, key=7)
        with pytest.raises(UnicodeEncodeError):
            await ask(connection, **range_of("\ud800"))


async def test_silence_and_nobody_are_told_apart() -> None:
    async with connected(Member(says_nothing)) as connection:
        with pytest.raises(Failure, match=r"has not answered within 0\.1 s") as caught:
            await ask(connection, limit=0.1)
        assert (caught.value.trouble, caught.value.silent) == (FailureKind.DOUBT, True)
    async with to(free_port()) as nobody:
        with pytest.raises(Failure, match="nobody listens there") as caught:
            await ask(nobody)
        assert caught.value.trouble is FailureKind.UNDONE


async def test_renewals_share_streams_and_each_is_answered() -> None:
    member = Renewing(says())
    async with connected(member) as connection:
        replies = await asyncio.gather(*(renew(connection, lease) for lease in (3, 4, 3)))
        assert [reply.TTL for reply in replies] == [3, 4, 3]
        with pytest.raises(Failure, match="has not answered") as caught:
            await renew(connection, 0, limit=0.1)
        assert caught.value.silent
        assert (await renew(connection, 5)).TTL == 5
        await asyncio.gather(*(renew(connection, lease) for lease in range(3, 99)))
        assert len(connection._streams) == RENEWING_AT_ONCE


async def test_what_is_closed_ends_its_streams_and_lets_requests_be_answered() -> None:
    async with connected(Renewing(says_nothing)) as connection:
        subscription = connection.watches(None).subscribe([range_of("a")])
        await subscription.opened()
        assert connection.watching
        renewing = asyncio.ensure_future(renew(connection, 0))
        asking = asyncio.ensure_future(ask(connection, limit=0.3))
        while not connection.under_way:  # noqa: ASYNC110  nothing announces it
            await asyncio.sleep(0)
        await connection.close(CLOSED)
        with pytest.raises(Failure, match="client is closed"):
            await subscription.read()
        with pytest.raises(Failure, match="client is closed"):
            await renewing
        with pytest.raises(Failure, match="has not answered"):  # it had its time
            await asking
        for late in (ask(connection), renew(connection, 1)):
            with pytest.raises(Failure, match="client is closed"):
                await late


async def test_a_caller_that_is_cancelled_is_cancelled_and_leaves_nothing_under_way() -> None:
    async with connected(Member(says_nothing)) as connection:
        asking = asyncio.ensure_future(ask(connection))
        while not connection.under_way:  # noqa: ASYNC110  nothing announces it
            await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert connection.under_way == 0


async def test_an_answer_that_comes_while_its_caller_is_cancelled_is_not_reported_as_lost() -> None:
    lost: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: lost.append(context))
    async with connected(Member(says())) as connection:

        async def refused() -> Any:
            callers.pop().cancel()
            raise grpc.aio.AioRpcError(grpc.StatusCode.NOT_FOUND, grpc.aio.Metadata(), grpc.aio.Metadata())

        connection._call = lambda _: lambda *_, **__: refused()  # type: ignore[assignment, method-assign]
        callers = [asyncio.ensure_future(ask(connection))]
        done, _ = await asyncio.wait(callers)
        assert done.pop().cancelled()
        gc.collect()
        assert lost == []


async def test_a_stream_of_another_cluster_ends_for_that_reason() -> None:
    """S10: a watch that only listens must hear of it as well."""

    def met(_: pb.ResponseHeader) -> None:
        raise StoreReplaced("another one")

    async with connected(Member(says()), met) as connection:
        subscription = connection.watches(None).subscribe([range_of("a")])
        with pytest.raises(StoreError, match="another one"):
            await subscription.opened()


async def test_the_watches_are_opened_anew_with_another_token() -> None:
    async with connected(Member(says())) as connection:
        first = connection.watches("old")
        subscription = first.subscribe([range_of("a")])
        assert connection.watches("old") is first
        second = connection.watches("new")
        with pytest.raises(Failure, match="new token") as caught:
            await subscription.read()
        assert caught.value.trouble is FailureKind.REOPEN
        second.end(Failure("etcdserver: invalid auth token", FailureKind.TOKEN))
        assert connection.watches("new") is not second, "a login within the same second brings the same token"


async def test_a_child_of_a_process_that_has_used_grpc_is_told_that_it_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_room, "_used_by", os.getpid() + 1)
    with pytest.raises(UsedAfterFork, match=r"before it forked this one, and gRPC cannot"):
        to(free_port())

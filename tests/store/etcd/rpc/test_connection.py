"""One connection to one member: the meaning of its answers and refusals, the stream of watches, and the end."""

import asyncio
import gc
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

from store.errors import ProtocolError, StoreReplaced, StoreUsageError, UsedAfterFork
from store.etcd.codec import Failure, FailureKind, range_of
from store.etcd.rpc import connection as connection_room
from store.etcd.rpc import etcd_pb2 as pb
from store.etcd.rpc.connection import Connection
from tests.store.etcd.test_members import Member, refuses, says, says_nothing
from tests.support.processes import free_port

READ = "KV/Range"
CLOSED = Failure("the client is closed", FailureKind.UNDONE)


@asynccontextmanager
async def connected(member: Member | None, met: Any = lambda _: None) -> AsyncIterator[Connection]:
    """Connect to a scripted member, or to a port without a listener."""
    server, port = grpc.aio.server(), free_port()
    if member is not None:
        server.add_generic_rpc_handlers((member,))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
    connection = to(port, met)
    yield connection
    await connection.close(CLOSED)
    await server.stop(None)


def to(port: int, met: Any = lambda _: None) -> Connection:
    return Connection(0, f"127.0.0.1:{port}", credentials=None, name="the cluster", met=met)


async def ask(connection: Connection, *, limit: float = 30.0, **fields: Any) -> Any:
    return await connection.ask(READ, fields or {"key": b"key"}, token="t", limit=limit)


async def asking(connection: Connection, **options: Any) -> asyncio.Task[Any]:
    """A request that is under way."""
    task = asyncio.ensure_future(ask(connection, **options))
    while not connection.under_way:  # noqa: ASYNC110  there is no event for it
        await asyncio.sleep(0)
    return task


async def test_a_request_shows_its_token_and_notes_when_something_came() -> None:
    member = Member(says())
    async with connected(member) as connection:
        connection.heard_at = 0.0
        assert (await ask(connection)).count == 1
        assert member.tokens == ["t"]
        assert connection.heard_at > 0


@pytest.mark.parametrize(
    ("member", "kind", "silent"),
    [
        (refuses(grpc.StatusCode.UNAVAILABLE, "etcdserver: no leader"), FailureKind.UNDONE, False),
        (refuses(grpc.StatusCode.UNAVAILABLE, "etcdserver: request timed out"), FailureKind.DOUBT, False),
        (refuses(grpc.StatusCode.UNAUTHENTICATED, "etcdserver: invalid auth token"), FailureKind.TOKEN, False),
        (says_nothing, FailureKind.DOUBT, True),
        (None, FailureKind.UNDONE, False),
    ],
)
async def test_a_failure_says_whether_another_attempt_may_mend_it(member: Any, kind: FailureKind, silent: bool) -> None:
    async with connected(Member(member) if member else None) as connection:
        with pytest.raises(Failure) as caught:
            await ask(connection, limit=0.1 if silent else 30.0)
        assert (caught.value.trouble, caught.value.silent) == (kind, silent)


async def test_a_permanent_failure_is_an_error() -> None:
    async with connected(Member(refuses(grpc.StatusCode.UNIMPLEMENTED, "unknown service"))) as connection:
        with pytest.raises(ProtocolError, match=r"etcd 3\.4 or later"):
            await ask(connection)
        with pytest.raises(StoreUsageError):
            await ask(connection, key=7)


async def test_a_closed_connection_ends_its_watches_and_finishes_its_requests() -> None:
    async with connected(Member(says_nothing)) as connection:
        subscription = connection.watch_stream(None).subscribe([range_of("a")])
        await subscription.wait_until_open()
        assert connection.has_watches
        under_way = await asking(connection, limit=0.3)
        await connection.close(CLOSED)
        with pytest.raises(Failure, match="client is closed"):
            await subscription.read()
        with pytest.raises(Failure, match="has not answered"):  # it had its time
            await under_way
        with pytest.raises(Failure, match="client is closed"):
            await ask(connection)


async def test_a_caller_that_is_cancelled_is_cancelled_and_leaves_nothing_under_way() -> None:
    async with connected(Member(says_nothing)) as connection:
        task = await asking(connection)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert connection.under_way == 0


async def test_an_answer_that_comes_while_its_caller_is_cancelled_is_not_reported_as_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lost: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: lost.append(context))
    async with connected(Member(says())) as connection:

        async def refused(_: Any) -> Any:
            callers.pop().cancel()
            raise grpc.aio.AioRpcError(grpc.StatusCode.NOT_FOUND, grpc.aio.Metadata(), grpc.aio.Metadata())

        monkeypatch.setattr(connection_room, "_await_call", refused)
        callers = [asyncio.ensure_future(ask(connection))]
        done, _ = await asyncio.wait(callers)
        assert done.pop().cancelled()
        gc.collect()
        assert lost == []


async def test_a_stream_of_another_cluster_ends_for_that_reason() -> None:
    """S10: a client that only has a watch must notice it as well."""

    def met(_: pb.ResponseHeader) -> None:
        raise StoreReplaced("another one")

    async with connected(Member(says()), met) as connection:
        with pytest.raises(StoreReplaced):
            await connection.watch_stream(None).subscribe([range_of("a")]).wait_until_open()


async def test_the_watches_are_opened_anew_with_another_token() -> None:
    async with connected(Member(says())) as connection:
        first = connection.watch_stream("old")
        subscription = first.subscribe([range_of("a")])
        assert connection.watch_stream("old") is first
        second = connection.watch_stream("new")
        with pytest.raises(Failure) as caught:
            await subscription.read()
        assert caught.value.trouble is FailureKind.REOPEN
        second.end(Failure("etcdserver: invalid auth token", FailureKind.TOKEN))
        assert connection.watch_stream("new") is not second, "a login within the same second brings the same token"


async def test_a_child_of_a_process_that_has_used_grpc_gets_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_room, "_used_by", os.getpid() + 1)
    with pytest.raises(UsedAfterFork):
        to(free_port())

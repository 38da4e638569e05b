"""Answers of members that a real etcd cannot be made to give: those of other releases, broken ones, and none."""

from __future__ import annotations

import asyncio
import random
from contextlib import AsyncExitStack, asynccontextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import pytest

from store.errors import ConnectionLost, StoreReplaced
from store.etcd import members as members_room
from store.etcd.codec import Endpoints, Failure, FailureKind, range_of
from store.etcd.member_choice import MemberSelector
from store.etcd.members import DoubtFlag, Members
from store.etcd.rpc import etcd_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    Script = Callable[[Any], Awaitable[Any]]

HEADER = pb.ResponseHeader(cluster_id=7, member_id=1, revision=5)
READ = "KV/Range"


class Member(grpc.GenericRpcHandler):  # type: ignore[misc]  # gRPC has no types
    """A member that answers by a script, one answer per request, the last one again and again.

    The first read of a client is answered, and not counted, unless `probed` gives another answer.
    """

    def __init__(self, *answers: Script, probed: Script | None = None) -> None:
        self._answers = list(answers)
        self._probed = probed
        self.asked: list[str] = []
        self.tokens: list[str | None] = []
        self.probes = 0
        self.watched: asyncio.Queue[Any] = asyncio.Queue()
        self.to_tell: asyncio.Queue[Any] = asyncio.Queue()  # messages of watches; an exception aborts the stream

    def service(self, details: Any) -> Any:
        """Answer any method."""
        method = details.method.removeprefix("/etcdserverpb.")
        if method == "Watch/Watch":
            return grpc.stream_stream_rpc_method_handler(self._watch)

        async def unary(data: bytes, context: Any) -> bytes:
            return await self._unary(method, data, context)

        return grpc.unary_unary_rpc_method_handler(unary)

    async def _unary(self, method: str, data: bytes, context: Any) -> bytes:
        if method == READ and pb.RangeRequest.FromString(data).key == b"probe":
            self.probes += 1
            reply = await (self._probed or says())(context)
        else:
            self.asked.append(method)
            self.tokens.append(dict(context.invocation_metadata()).get("token"))
            reply = await (self._answers.pop(0) if len(self._answers) > 1 else self._answers[0])(context)
        answer: bytes = reply.SerializeToString()
        return answer

    async def _watch(self, requests: Any, context: Any) -> AsyncIterator[bytes]:
        async def read() -> None:
            async for data in requests:
                request = pb.WatchRequest.FromString(data)
                self.watched.put_nowait(request)
                if request.HasField("create_request"):
                    created = pb.WatchResponse(header=HEADER, watch_id=request.create_request.watch_id, created=True)
                    self.to_tell.put_nowait(created)

        reading = asyncio.create_task(read())
        try:
            while True:
                message = await self.to_tell.get()
                if isinstance(message, str):
                    await context.abort(grpc.StatusCode.UNAVAILABLE, message)
                yield message.SerializeToString()
        finally:
            reading.cancel()


def says(message: Any = None) -> Script:
    """Answer with a message, or without one: with an empty answer to a read."""

    async def answer(_: Any) -> Any:
        return message if message is not None else pb.RangeResponse(header=HEADER, count=1)

    return answer


def refuses(code: grpc.StatusCode, words: str) -> Script:
    """Answer with a refusal."""

    async def answer(context: Any) -> Any:
        await context.abort(code, words)

    return answer


async def says_nothing(_: Any) -> Any:
    """Answer nothing, and keep the connection."""
    await asyncio.Event().wait()


class First(random.Random):
    """A source of randomness for a client that begins with the first member, and makes the shortest pauses."""

    def randrange(self, *_: Any) -> int:
        """Return the first."""
        return 0

    def uniform(self, least: float, _: float) -> float:
        """Return the least."""
        return least


class Second(First):
    """A source of randomness for a client that goes on with the second member."""

    def randrange(self, *_: Any) -> int:
        """Return the second."""
        return 1


@asynccontextmanager
async def members_of(*scripted: Member, **options: Any) -> AsyncIterator[Members]:
    async with AsyncExitStack() as stack:
        hosts = []
        for member in scripted:
            server = grpc.aio.server()
            server.add_generic_rpc_handlers((member,))
            hosts.append(("127.0.0.1", server.add_insecure_port("127.0.0.1:0")))
            await server.start()
            stack.push_async_callback(server.stop, None)
        members = Members(Endpoints(hosts=tuple(hosts)), probe=range_of("probe"), rng=First(), **options)
        await members.start()
        stack.push_async_callback(members.aclose)
        yield members


def soon(seconds: float = 30.0) -> float:
    return asyncio.get_running_loop().time() + seconds


def time_is_over(members: Members) -> None:
    """Let every deadline pass: the test is about the error, and not about the speed of this machine."""
    members._loop_time = lambda: asyncio.get_running_loop().time() + 1e6  # type: ignore[method-assign]


NO_LEADER = refuses(grpc.StatusCode.UNAVAILABLE, "etcdserver: no leader")
TIMED_OUT = refuses(grpc.StatusCode.UNAVAILABLE, "etcdserver: request timed out")


async def ask(members: Members, **options: Any) -> Any:
    return await members.ask(READ, {"key": b"key"}, **{"deadline": soon(), "what": "reading", **options})


async def test_a_member_in_trouble_is_left_for_another_and_stays_left() -> None:
    bad, good = Member(TIMED_OUT), Member(says())
    async with members_of(bad, good) as members:
        for _ in range(3):
            await ask(members)
        assert (len(bad.asked), len(good.asked)) == (1, 3)
        assert members.is_connected


async def test_a_member_without_a_leader_is_asked_nothing() -> None:
    bad, good = Member(says(), probed=NO_LEADER), Member(says())
    async with members_of(bad, good) as members:
        await ask(members)
        assert (bad.probes, bad.asked, len(good.asked)) == (1, [], 1)


async def test_without_a_leader_one_attempt_at_a_time_is_made_for_all_callers() -> None:
    probes = iter([NO_LEADER] * 4)

    async def at_last(context: Any) -> Any:
        assert member.asked == []
        return await next(probes, says())(context)

    member = Member(says(), probed=at_last)
    async with members_of(member) as members:
        members.choice = MemberSelector(1, random.Random(1))  # with pauses
        async with asyncio.timeout(30):
            await asyncio.gather(*(ask(members) for _ in range(40)))
        assert member.probes == 5, "not one for each caller"
        assert len(member.asked) == 40


async def test_a_timeout_without_a_leader_says_so() -> None:
    async with members_of(Member(says(), probed=NO_LEADER)) as members:
        await members._try_to_connect(30)
        with pytest.raises(ConnectionLost, match="no leader"):
            await ask(members, deadline=soon(0))


@pytest.mark.parametrize(
    ("trouble", "any_doubt"),
    [
        (TIMED_OUT, True),
        (NO_LEADER, False),
        (refuses(grpc.StatusCode.RESOURCE_EXHAUSTED, "etcdserver: too many requests"), False),
    ],
)
async def test_whether_it_may_have_been_done_depends_on_how_it_failed(trouble: Script, any_doubt: bool) -> None:
    doubt = DoubtFlag()
    async with members_of(Member(trouble, says())) as members:
        await ask(members, doubt=doubt)
    assert doubt.any is any_doubt


async def test_a_member_that_says_nothing_has_a_time_limit_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    async def falls_silent(_: Any) -> Any:
        monkeypatch.undo()
        await says_nothing(_)

    silent, good = Member(says(), falls_silent), Member(says())
    async with members_of(silent, good) as members:
        await ask(members)  # it is connected now
        monkeypatch.setattr(members_room, "ATTEMPT_FIRST", 0.2)
        await ask(members)
    assert (len(silent.asked), len(good.asked)) == (2, 1)


async def test_a_request_queued_behind_unanswered_ones_keeps_its_timeout() -> None:
    """Regression: it waited for as long as those took, 2 s or 8, and was sent after its time."""
    member = Member(says(), says_nothing)
    async with members_of(member) as members, asyncio.timeout(30):
        await ask(members)  # it is connected now
        members._room = asyncio.Semaphore(1)
        first = asyncio.create_task(ask(members, deadline=soon(600)))
        while len(member.asked) < 2:  # noqa: ASYNC110  there is no event for it
            await asyncio.sleep(0.01)
        doubt = DoubtFlag()
        with pytest.raises(ConnectionLost):
            await ask(members, deadline=soon(0.1), doubt=doubt)
        assert not doubt.any, "it was never sent"
        first.cancel()


async def test_an_attempt_to_renew_a_lease_takes_at_most_half_of_the_time_left() -> None:
    limits = []
    async with members_of(Member(says())) as members:
        await ask(members)  # it is connected now

        async def send(_: Any, __: str, ___: Any, ____: Any, limit: float) -> Any:
            limits.append(limit)
            if len(limits) == 2:
                time_is_over(members)
            raise Failure("frozen", FailureKind.DOUBT, silent=True)

        members._send = send  # type: ignore[assignment, method-assign]
        with pytest.raises(ConnectionLost):
            await members.ask("Lease/LeaseKeepAlive", {"ID": 1}, deadline=soon(3.0), what="KeepAlive")
    assert limits[0] <= 1.5
    assert len(limits) == 2


async def test_the_timeout_error_has_the_last_reason() -> None:
    """By then the client may be connected again or not; this changes neither the error nor the reason."""
    for connected in (False, True):
        async with members_of(Member(TIMED_OUT)) as members:
            real = members._send
            attempts = iter((1, 2))

            async def send(*asked: Any, real: Any = real, attempts: Any = attempts, members: Members = members) -> Any:
                if next(attempts) == 1:
                    return await real(*asked)
                time_is_over(members)
                raise Failure("it has not answered", FailureKind.DOUBT, silent=True)

            members._send = send  # type: ignore[assignment, method-assign]
            if connected:
                members.drop_failed_connection = nowhere  # type: ignore[assignment, method-assign]
            with pytest.raises(ConnectionLost, match=r"writing at .*: etcdserver: request timed out") as caught:
                await ask(members, deadline=soon(), what="writing", doubt=DoubtFlag())
            assert caught.value.maybe_applied
            assert members.is_connected is connected


async def nowhere(*_: Any) -> None:
    """Stay with the connection, as if another caller had made one anew."""


TOKEN_OLD = refuses(grpc.StatusCode.UNAUTHENTICATED, "etcdserver: invalid auth token")


def token(text: str) -> Script:
    return says(pb.AuthenticateResponse(header=HEADER, token=text))


async def test_a_token_that_is_refused_is_fetched_anew() -> None:
    member = Member(token("t1"), TOKEN_OLD, token("t2"), says())
    async with members_of(member, user="me", password="secret") as members:
        await ask(members)
        assert member.asked == ["Auth/Authenticate", READ] * 2
        assert member.tokens == [None, "t1", None, "t2"]


async def test_a_revision_that_went_back_is_another_store_and_one_of_a_member_that_lags_is_not() -> None:
    older = pb.ResponseHeader(cluster_id=7, revision=4)
    lagging, gone = pb.StatusResponse(header=older), pb.RangeResponse(header=older)
    async with members_of(Member(says(), says(lagging), says(gone))) as members:
        failed: list[Any] = []
        members.clients.append(SimpleNamespace(fail=failed.append, tell=bool))
        await ask(members)
        await members.ask("Maintenance/Status", {}, deadline=soon())
        assert failed == []
        with pytest.raises(StoreReplaced, match="is at revision 4, and was at 5"):
            await ask(members)
        assert len(failed) == 1


async def test_a_stream_that_ends_is_over_for_all_its_readers_and_reopened_elsewhere() -> None:
    member, other = Member(says()), Member(says())
    async with members_of(member, other) as members, asyncio.timeout(30):
        streams = [await members.watch([range_of(key)], deadline=soon()) for key in ("a", "b")]
        member.to_tell.put_nowait("etcdserver: no leader")
        for stream in streams:
            with pytest.raises(Failure, match="no leader") as caught:
                await stream.read()
            assert caught.value.trouble is FailureKind.UNDONE
            await members.handle_stream_failure(stream, caught.value)
        for _ in range(10):
            await asyncio.sleep(0)
        left = [task for task in asyncio.all_tasks() if "_consume_request_iterator" in repr(task.get_coro())]
        assert left == [], "gRPC would leave it pending for ever"
        await members.watch([range_of("a")], deadline=soon())
        assert other.watched.qsize() == 1


async def test_a_silent_member_is_left_when_it_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members_room, "IDLE", 0.05)
    answers = iter([says(), says()])

    async def at_first(context: Any) -> Any:
        return await next(answers, says_nothing)(context)

    member = Member(says(), probed=at_first)
    async with members_of(member) as members, asyncio.timeout(30):
        stream = await members.watch([range_of("a")], deadline=soon())
        monkeypatch.setattr(members_room, "ATTEMPT_ALONE", 0.2)
        with pytest.raises(Failure, match="has not answered"):
            await stream.read()
    assert member.probes >= 2


async def test_on_a_slow_clock_another_member_is_chosen_and_watches_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members_room, "BALANCE_AFTER", 0.1)
    here, there = Member(says()), Member(says())
    async with members_of(here, there) as members, asyncio.timeout(30):
        stream = await members.watch([range_of("a")], deadline=soon())
        members.choice._rng = Second()
        with pytest.raises(Failure, match="anew") as caught:
            await stream.read()
        assert caught.value.trouble is FailureKind.REOPEN
        await members.handle_stream_failure(stream, caught.value)
        await members.watch([range_of("a")], deadline=soon())
        assert there.watched.qsize() == 1
        assert members.is_connected

"""Shell: one connection to one member of an etcd cluster, over gRPC: requests, and the two streams that callers share.

A connection is made, used and closed in one event loop. All watches and waits of a client share one stream, and the
renewals of its leases a few; each stream is opened when it is first needed. When a connection is closed, its streams
end at once, and requests that are under way may still be answered: each has a time limit of its own.

Every request asks for a member that has a leader (`hasleader`). So one that is cut off from the others says so, where
it would otherwise keep a watch open for ever without a word.
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
from collections import deque
from typing import TYPE_CHECKING, Any, Final

import anyio

from store.errors import ProtocolError, StoreError, StoreUsageError, UsedAfterFork
from store.etcd.codec import Failure, FailureKind, classify
from store.etcd.rpc.extra import etcd_pb2 as pb
from store.etcd.rpc.extra import grpc
from store.etcd.rpc.watch_stream import Outgoing, WatchStream
from store.net.dialing import describe
from store.net.tasks import cancel_and_wait

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Self

    from store.etcd.codec import Fields

__all__ = ["Connection"]

METHODS: Final[dict[str, tuple[Any, Any]]] = {
    "KV/Range": (pb.RangeRequest, pb.RangeResponse),
    "KV/Txn": (pb.TxnRequest, pb.TxnResponse),
    "KV/DeleteRange": (pb.DeleteRangeRequest, pb.DeleteRangeResponse),
    "Lease/LeaseGrant": (pb.LeaseGrantRequest, pb.LeaseGrantResponse),
    "Lease/LeaseRevoke": (pb.LeaseRevokeRequest, pb.LeaseRevokeResponse),
    "Lease/LeaseTimeToLive": (pb.LeaseTimeToLiveRequest, pb.LeaseTimeToLiveResponse),
    "Maintenance/Status": (pb.StatusRequest, pb.StatusResponse),
    "Auth/Authenticate": (pb.AuthenticateRequest, pb.AuthenticateResponse),
}
"""The requests that have one answer, below `etcdserverpb.`, and their messages."""

RENEWING_AT_ONCE: Final = 16
"""Streams for the renewals of many leases. Over each etcd renews one after the other, once all writes are applied."""

MESSAGE_BYTES_MAX: Final = 256 * 1024 * 1024
"""Of one answer; gRPC's own limit is 4 MiB, which a page of a listing passes, and a snapshot's events."""

OPTIONS: Final = (
    ("grpc.enable_http_proxy", 0),  # `http_proxy` is for the web, and knows no way to a cluster
    ("grpc.use_local_subchannel_pool", 1),  # else all clients of a process share one connection, and its streams
    ("grpc.service_config_disable_resolution", 1),  # no question to the name server about TXT records
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),  # etcd has a limit of its own, and says so
    ("grpc.enable_retries", 0),  # what is sent again is decided in one place, which is not gRPC
)

_CONNECT_FAILED = re.compile(r"failed to connect to (?:remote host|all addresses)|name resolution|DNS|handshak", re.I)
_OS_ERRORS = {
    "Connection refused": errno.ECONNREFUSED,
    "Connection reset": errno.ECONNRESET,
    "No route to host": errno.EHOSTUNREACH,
    "Network is unreachable": errno.ENETUNREACH,
    "Connection timed out": errno.ETIMEDOUT,
}

_used_by: int | None = None
"""The process that has used gRPC here: a child forked from it has gRPC's state and none of its threads."""


def _note_use() -> None:
    global _used_by
    if _used_by is None:
        _used_by = os.getpid()
    if _used_by != os.getpid():
        raise UsedAfterFork(
            f"process {_used_by} had used etcd before it forked this one, and gRPC cannot be used on both sides of a "
            f"fork(): start the child by spawn (or exec), or fork before the first use of etcd"
        )


class Connection:
    """One connection to one member.

    Args:
        place: Which of the cluster's members it is.
        target: Where the member is, as gRPC takes it.
        credentials: For TLS; None: without.
        name: The cluster's.
        met: Is told the header of everything that a stream brings; may raise `StoreError`.

    Attributes:
        heard_at: When something came last, on the loop's clock.
    """

    def __init__(
        self,
        place: int,
        target: str,
        *,
        credentials: grpc.ChannelCredentials | None,
        name: str,
        met: Callable[[pb.ResponseHeader], None],
    ) -> None:
        _note_use()
        self.place = place
        self.heard_at: float = self._time()
        self._name, self._met = name, met
        self._channel = (
            grpc.aio.insecure_channel(target, options=OPTIONS)
            if credentials is None
            else grpc.aio.secure_channel(target, credentials, options=OPTIONS)
        )
        self._calls: dict[str, Any] = {}
        self._under_way = 0
        self._closed: Failure | None = None
        self._streams: dict[asyncio.Task[None], Callable[[Exception], None]] = {}  # and whom to tell of their end
        self._watches: WatchStream | None = None
        self._renewals: dict[int, _Renewals] = {}

    @property
    def under_way(self) -> int:
        """How many requests are waited for."""
        return self._under_way

    @property
    def watching(self) -> bool:
        """Whether some watch is open."""
        return self._watches is not None and self._watches.busy

    # ------------------------------------------------------------------------------------------ requests

    async def ask(self, method: str, fields: Fields, *, token: str | None, limit: float) -> Any:
        """Make one request and return its answer.

        Raises:
            Failure: There was no answer, or one after which another attempt may do better.
            StoreError: The request was refused.
        """
        if method == "Lease/LeaseKeepAlive":
            return await self._renew(fields["ID"], token, limit)
        kind, _ = METHODS[method]
        message = _message(kind, fields)
        if self._closed is not None:
            raise self._closed
        self._under_way += 1
        # In a task of its own: when its caller is cancelled, gRPC raises a new `CancelledError` in place of the one
        # that a cancel scope has sent, and the scope would not know it for its own.
        answering = asyncio.create_task(_answer(self._call(method)(message, timeout=limit, metadata=_metadata(token))))
        try:
            await asyncio.wait([answering])
            reply = answering.result()
        except grpc.aio.AioRpcError as error:
            raise self._explained(error, limit) from None
        except asyncio.CancelledError:
            if answering.cancelled():  # by gRPC, and not by our caller
                raise Failure("the connection was closed", FailureKind.DOUBT) from None
            raise
        finally:
            if not answering.done():
                await cancel_and_wait(answering)
            if not answering.cancelled():
                answering.exception()  # one that came while our caller was being cancelled would be reported as lost
            self._under_way -= 1
            await self._close_if_idle()
        self.heard_at = self._time()
        return reply

    def _call(self, method: str) -> Any:
        if method not in self._calls:
            _, answered = METHODS[method]
            self._calls[method] = self._channel.unary_unary(
                f"/etcdserverpb.{method}", request_serializer=_bytes_of, response_deserializer=answered.FromString
            )
        return self._calls[method]

    def _explained(self, error: grpc.aio.AioRpcError, limit: float | None = None) -> Exception:
        """Return what gRPC's error means."""
        code, words = error.code(), error.details() or "no reason was given"
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            within = "in time" if limit is None else f"within {limit:.1f} s"
            return Failure(f"it has not answered {within}", FailureKind.DOUBT, silent=True)
        if code is grpc.StatusCode.UNAVAILABLE and _CONNECT_FAILED.search(words):
            return Failure(_connect_problem(words), FailureKind.UNDONE)
        if code is grpc.StatusCode.UNIMPLEMENTED:
            return ProtocolError(f"{self._name} has no such service ({words}); etcd 3.4 or later is needed")
        verdict = classify(code.value[0], words, name=self._name)
        return Failure(words, verdict) if isinstance(verdict, FailureKind) else verdict

    # ------------------------------------------------------------------------------------------ streams

    def watches(self, token: str | None) -> WatchStream:
        """Return the stream that all watches share; it is opened with the first watch, and again with a new token."""
        watches = self._watches
        if watches is None or watches.over or watches.token != token:
            if watches is not None:
                watches.end(Failure("it is opened again with a new token", FailureKind.REOPEN))
            watches = self._watches = WatchStream(name=self._name, token=token)
            self._open("Watch/Watch", watches.requests(), watches.told, watches.end, pb.WatchResponse, token)
        return watches

    async def _renew(self, lease: int, token: str | None, limit: float) -> pb.LeaseKeepAliveResponse:
        place = lease % RENEWING_AT_ONCE
        renewals = self._renewals.get(place)
        if renewals is None or renewals.over or renewals.token != token:
            if renewals is not None:
                renewals.requests().close()  # the member answers what was asked before, and ends it
            renewals = self._renewals[place] = _Renewals(token)
            self._open(
                "Lease/LeaseKeepAlive",
                renewals.requests(),
                renewals.told,
                renewals.end,
                pb.LeaseKeepAliveResponse,
                token,
            )
        try:
            with anyio.fail_after(limit):
                return await renewals.ask(lease)
        except TimeoutError:
            raise Failure(f"it has not answered within {limit:.1f} s", FailureKind.DOUBT, silent=True) from None

    def _open(
        self,
        method: str,
        requests: Outgoing,
        told: Callable[[Any], None],
        end: Callable[[Exception], None],
        kind: Any,
        token: str | None,
    ) -> None:
        if self._closed is not None:
            end(self._closed)
            return
        streams = self._channel.stream_stream(
            f"/etcdserverpb.{method}", request_serializer=_bytes_of, response_deserializer=kind.FromString
        )
        call = streams(requests, metadata=_metadata(token))
        task = asyncio.create_task(self._read(call, requests, told, end), name=f"{method} of {self._name}")
        self._streams[task] = end  # awaited in `close`

    async def _read(
        self, call: Any, requests: Outgoing, told: Callable[[Any], None], end: Callable[[Exception], None]
    ) -> None:
        """Read one stream to its end, and tell those who use it why it has ended."""
        problem: Exception = Failure("it ended the stream", FailureKind.UNDONE)
        try:
            async for message in call:
                self.heard_at = self._time()
                self._met(message.header)
                told(message)
        except grpc.aio.AioRpcError as error:
            problem = self._explained(error)
        except StoreError as error:
            problem = error
        except asyncio.CancelledError:  # `close` has told them already; if it was gRPC, they are told here
            pass
        finally:
            call.cancel()
            requests.close()
            end(problem)

    # ------------------------------------------------------------------------------------------ the end

    async def close(self, reason: Failure) -> None:
        """End the streams, for this reason; and hang up once nothing is under way."""
        if self._closed is None:
            self._closed = reason
            for end in self._streams.values():
                end(reason)
            await cancel_and_wait(*self._streams)
            self._streams.clear()
        await self._close_if_idle()

    async def _close_if_idle(self) -> None:
        if self._closed is not None and not self._under_way:
            with anyio.CancelScope(shield=True):  # what follows takes no longer than a few turns of the loop
                await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close(Failure("the connection was closed", FailureKind.UNDONE))

    def _time(self) -> float:
        return asyncio.get_running_loop().time()


async def _answer(call: Any) -> Any:
    return await call


class _Renewals:
    """The renewals of leases, over one stream: etcd answers each in its turn, naming the lease."""

    def __init__(self, token: str | None) -> None:
        self.token: str | None = token
        self._asked: asyncio.Queue[pb.LeaseKeepAliveRequest] = asyncio.Queue()  # one for each that waits
        self._waiting: dict[int, deque[asyncio.Future[pb.LeaseKeepAliveResponse]]] = {}
        self._ended: Exception | None = None

    @property
    def over(self) -> bool:
        return self._ended is not None

    def requests(self) -> Outgoing:
        return Outgoing(self._asked)

    async def ask(self, lease: int) -> pb.LeaseKeepAliveResponse:
        if self._ended is not None:
            raise self._ended
        message = _message(pb.LeaseKeepAliveRequest, {"ID": lease})
        answer: asyncio.Future[pb.LeaseKeepAliveResponse] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(lease, deque()).append(answer)
        self._asked.put_nowait(message)
        return await answer

    def told(self, message: pb.LeaseKeepAliveResponse) -> None:
        waiting = self._waiting.get(message.ID)
        if not waiting:
            return
        answer = waiting.popleft()
        if not waiting:
            del self._waiting[message.ID]
        if not answer.done():  # else whoever asked has given up
            answer.set_result(message)

    def end(self, problem: Exception) -> None:
        if self._ended is not None:
            return
        self._ended = problem
        for waiting in self._waiting.values():
            for answer in waiting:
                if not answer.done():
                    answer.set_exception(problem)
        self._waiting.clear()


def _message(kind: Any, fields: Fields) -> Any:
    """Make a message of plain fields.

    Raises:
        StoreUsageError: One of them does not fit.
    """
    try:
        return kind(**fields)
    except UnicodeEncodeError:
        raise
    except (ValueError, TypeError) as error:
        raise StoreUsageError(f"{kind.__name__} cannot be sent: {error}") from None


def _bytes_of(message: Any) -> bytes:
    data: bytes = message.SerializeToString()
    return data


def _metadata(token: str | None) -> tuple[tuple[str, str], ...]:
    leader = ("hasleader", "true")
    return (leader,) if token is None else (leader, ("token", token))


def _connect_problem(words: str) -> str:
    """Return in our words why gRPC could not connect."""
    for told, number in _OS_ERRORS.items():
        if told in words:
            return describe(OSError(number, os.strerror(number)))
    return words.rpartition("last error: ")[2][:300]

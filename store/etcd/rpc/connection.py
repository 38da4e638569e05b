"""One connection to one member of an etcd cluster, over gRPC: requests, and the stream of all watches.

Requests require that the member has a leader (`hasleader`): a member that is cut off would otherwise keep watches open,
without events.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import ssl
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import anyio

from store.errors import ProtocolError, StoreError, StoreUsageError, UsedAfterFork
from store.etcd.codec import Failure, FailureKind, classify_error
from store.etcd.rpc.grpc_import import etcd_pb2 as pb
from store.etcd.rpc.grpc_import import grpc
from store.etcd.rpc.watch_stream import WatchStream
from store.net.certificates import ClientContext
from store.net.tasks import cancel_and_wait

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from store.etcd.codec import Fields
    from store.etcd.rpc.watch_stream import Subscription

MESSAGE_BYTES_MAX: Final = 256 * 1024 * 1024
"""The limit of an answer; gRPC's own, 4 MiB, is less than a page of a listing, or a snapshot's events."""

OPTIONS: Final = (
    ("grpc.enable_http_proxy", 0),  # ignore `http_proxy`, which is for the web
    ("grpc.use_local_subchannel_pool", 1),  # each client of a process has its own connection
    ("grpc.service_config_disable_resolution", 1),  # no DNS queries for TXT records
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),  # etcd itself rejects too large messages
    ("grpc.enable_retries", 0),  # this client itself retries
)

SYSTEM_BUNDLES: Final = (
    "/etc/ssl/certs/ca-certificates.crt",  # Debian, Ubuntu, Alpine, Arch
    "/etc/pki/tls/certs/ca-bundle.crt",  # Fedora, Red Hat
    "/etc/ssl/cert.pem",  # macOS
)
"""The systems' files of trusted authorities, for a context that has loaded none: it reads a folder on demand."""

_CONNECT_FAILED = re.compile(r"failed to connect to (?:remote host|all addresses)|name resolution|DNS|handshak", re.I)

_used_by: int | None = None  # the pid of the first user of gRPC; a forked child has gRPC's state, but not its threads


def _check_not_forked() -> None:
    global _used_by
    _used_by = _used_by or os.getpid()
    if _used_by != os.getpid():
        raise UsedAfterFork(
            f"process {_used_by} had used etcd before it forked this one, and gRPC cannot be used on both sides of a "
            f"fork(): start the child by spawn (or exec), or fork before the first use of etcd"
        )


class Connection:
    """One connection to one member. `met` gets each watch message's header; its `StoreError` ends all watches."""

    def __init__(
        self,
        place: int,
        target: str,
        *,
        credentials: grpc.ChannelCredentials | None,
        name: str,
        met: Callable[[pb.ResponseHeader], None],
    ) -> None:
        _check_not_forked()
        self.place = place
        self.heard_at: float = anyio.current_time()  # when the last message arrived
        self.under_way: int = 0  # pending requests
        self._name, self._met = name, met
        self._channel = (
            grpc.aio.insecure_channel(target, options=OPTIONS)
            if credentials is None
            else grpc.aio.secure_channel(target, credentials, options=OPTIONS)
        )
        self._closed: Failure | None = None
        self._watches: WatchStream | None = None
        self._reading: set[asyncio.Task[None]] = set()  # tasks that read streams; awaited in `close`

    async def ask(self, method: str, fields: Fields, *, token: str | None, limit: float) -> Any:
        """Call a method of `etcdserverpb`, and return its answer; raise `Failure` if the client handles the error."""
        name = method.partition("/")[2]
        kind, answered = getattr(pb, f"{name}Request"), getattr(pb, f"{name}Response")
        try:
            message = kind(**fields)
        except (ValueError, TypeError) as error:
            raise StoreUsageError(f"{kind.__name__} cannot be sent: {error}") from None
        if self._closed is not None:
            raise self._closed
        call = self._channel.unary_unary(
            f"/etcdserverpb.{method}",
            request_serializer=kind.SerializeToString,
            response_deserializer=answered.FromString,
        )
        self.under_way += 1
        # Call in another task: when cancelled, gRPC raises a new `CancelledError`, which no cancel scope recognizes.
        answering = asyncio.create_task(_await_call(call(message, timeout=limit, metadata=_request_metadata(token))))
        try:
            await asyncio.wait([answering])
        finally:
            if not answering.done():
                await cancel_and_wait(answering)
            # Read the task's error, or asyncio logs that it was never retrieved.
            refusal = None if answering.cancelled() else answering.exception()
            self.under_way -= 1
            await self._close_if_idle()
        if answering.cancelled():  # cancelled by gRPC, and not by the caller
            raise Failure("the connection was closed", FailureKind.DOUBT)
        if isinstance(refusal, grpc.aio.AioRpcError):
            raise self._translate_error(refusal, limit)
        self.heard_at = anyio.current_time()
        return answering.result()

    def _translate_error(self, error: grpc.aio.AioRpcError, limit: float = 0.0) -> Exception:
        code, words = error.code(), error.details() or "no reason was given"
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return Failure(f"it has not answered within {limit:.1f} s", FailureKind.DOUBT, silent=True)
        if code is grpc.StatusCode.UNAVAILABLE and _CONNECT_FAILED.search(words):
            return Failure(words.rpartition("last error: ")[2][:300], FailureKind.UNDONE)
        if code is grpc.StatusCode.UNIMPLEMENTED:
            return ProtocolError(f"{self._name} has no such service ({words}); etcd 3.4 or later is needed")
        verdict = classify_error(code.value[0], words, name=self._name)
        return Failure(words, verdict) if isinstance(verdict, FailureKind) else verdict

    @property
    def has_watches(self) -> bool:
        """True if some watch is open."""
        return self._watches is not None and bool(self._watches.subscriptions)

    def owns_subscription(self, subscription: Subscription) -> bool:
        """Return whether these watches are open on this connection's current stream."""
        return subscription.stream is self._watches

    def watch_stream(self, token: str | None) -> WatchStream:
        """Return the stream that all watches share; a new token opens another stream."""
        watches = self._watches
        if watches is None or watches.ended is not None or watches.token != token:
            if watches is not None:
                watches.end(Failure("it is opened again with a new token", FailureKind.REOPEN))
            watches = self._watches = WatchStream(name=self._name, token=token)
            if self._closed is not None:
                watches.end(self._closed)
                return watches
            reading = asyncio.create_task(self._read_stream(watches), name=f"watches of {self._name}")
            self._reading.add(reading)
            reading.add_done_callback(self._reading.discard)
        return watches

    async def _read_stream(self, watches: WatchStream) -> None:
        problem: Exception = Failure("it ended the stream", FailureKind.UNDONE)
        opening = self._channel.stream_stream(
            "/etcdserverpb.Watch/Watch",
            request_serializer=pb.WatchRequest.SerializeToString,
            response_deserializer=pb.WatchResponse.FromString,
        )
        call = opening(watches.requests(), metadata=_request_metadata(watches.token))
        try:
            async for message in call:
                self.heard_at = anyio.current_time()
                self._met(message.header)
                watches.dispatch(message)
        except grpc.aio.AioRpcError as error:
            problem = self._translate_error(error)
        except StoreError as error:
            problem = error
        except asyncio.CancelledError:  # cancelled by `close`, which has ended the watches
            pass
        finally:
            call.cancel()
            watches.end(problem)

    async def close(self, reason: Failure) -> None:
        """End the watches at once, with this error; close the connection once all pending requests have ended."""
        if self._closed is None:
            self._closed = reason
            if self._watches is not None:
                self._watches.end(reason)
            await cancel_and_wait(*self._reading)
        await self._close_if_idle()

    async def _close_if_idle(self) -> None:
        if self._closed is not None and not self.under_way:
            with anyio.CancelScope(shield=True):
                await self._channel.close()


async def _await_call(call: Any) -> Any:
    return await call


def _request_metadata(token: str | None) -> tuple[tuple[str, str], ...]:
    leader = ("hasleader", "true")
    return (leader,) if token is None else (leader, ("token", token))


def channel_credentials(context: ssl.SSLContext) -> grpc.ChannelCredentials:
    """Return gRPC's credentials for a client-side context."""
    trusted = [ssl.DER_cert_to_PEM_cert(each) for each in context.get_ca_certs(binary_form=True)]
    roots = "".join(trusted).encode() or _read_first_file((ssl.get_default_verify_paths().cafile, *SYSTEM_BUNDLES))
    shown = context.shown if isinstance(context, ClientContext) else None
    certificate, key = shown or (None, None)
    return grpc.ssl_channel_credentials(root_certificates=roots, private_key=key, certificate_chain=certificate)


def _read_first_file(paths: Iterable[str | None]) -> bytes | None:
    for path in filter(None, paths):
        with contextlib.suppress(OSError):
            return Path(path).read_bytes()
    return None

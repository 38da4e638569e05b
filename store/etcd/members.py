"""One client's requests to an etcd cluster, over one connection to any member that answers.

**Members.** After a failed attempt, this client and its watches move to a member (`MemberSelector`) that answers a
linearizable read. Every few minutes the client chooses a member anew: otherwise all clients would stay at one member
after a rolling restart.

**Without a leader** every member rejects requests. While all members fail, the callers share one attempt at a time, and
the pauses between attempts grow, to keep the load low.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import ssl
from typing import TYPE_CHECKING, Any, TypeVar

import anyio

from store.errors import AuthenticationError, ConnectionLost, StoreError, StoreReplaced, StoreTimeoutError
from store.etcd.codec import Failure, FailureKind
from store.etcd.login import Login
from store.etcd.member_choice import ClusterIdentity, MemberSelector
from store.etcd.rpc.connection import Connection, channel_credentials
from store.etcd.rpc.diagnosis import explain_outage
from store.net.absence import OutageLog
from store.net.certificates import ClientContext
from store.net.dialing import reload_tls
from store.net.tasks import cancel_and_wait

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from store.etcd.codec import Endpoints, Fields
    from store.etcd.rpc import etcd_pb2 as pb
    from store.etcd.rpc.watch_stream import Subscription
    from store.net.dialing import Renew

T = TypeVar("T")

log: logging.Logger = logging.getLogger(__name__)

ATTEMPT_FIRST = 1.0  # seconds for a probe or first attempt, with several members; doubled after every two failures
ATTEMPT_MOST = 8.0  # the most seconds for one attempt: etcd itself gives up after 7
ATTEMPT_ALONE = 2.0  # seconds; replaces `ATTEMPT_FIRST` in a cluster of one member
ATTEMPT_LEAST = 0.05  # the fewest seconds for an attempt
IDLE = 5.0  # seconds of silence before a probe of the member, while watches are open
BALANCE_AFTER = 300.0  # seconds until the client chooses a member anew; times 0.5 to 1.5, at random
AT_ONCE = 64  # concurrent requests besides renewals: etcd may allow only 100 streams per connection
RENEWING_AT_ONCE = 16  # concurrent renewals of leases, which do not queue with other requests


class DoubtFlag:
    """The doubt about a request: `any` is True if an unanswered attempt may have been carried out."""

    def __init__(self) -> None:
        self.any: bool = False


class Members:
    """The members of a cluster; `probe` is a linearizable read that the user is permitted to make."""

    def __init__(
        self,
        cluster: Endpoints,
        *,
        probe: Fields,
        tls: ssl.SSLContext | None = None,
        renew: Renew = None,
        user: str | None = None,
        password: str | Callable[[], str | None] | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self.name: str = str(cluster)
        self.identity: ClusterIdentity = ClusterIdentity(self.name)
        self._cluster = cluster
        self._probe_fields = probe
        self._tls = (tls or ssl.create_default_context()) if cluster.secure else None
        self._renew = renew
        self._outages = OutageLog(self.name, lambda: self.choice.problem or "no member answers", log)
        self.login: Login = Login(self.name, user, password)
        self.choice: MemberSelector = MemberSelector(len(cluster.hosts), rng or random.Random())
        self.choice.on_reach = self._notify_connected
        self.clients: list[Any] = []
        self.failed: bool = False
        self._current: Connection | None = None
        self._probes_refused = 0  # consecutive probes refused for their token
        self._lasting: StoreError | None = None  # a permanent problem, raised once all members fail
        self._connecting = asyncio.Lock()
        self._room = asyncio.Semaphore(AT_ONCE)
        self._room_for_renewals = asyncio.Semaphore(RENEWING_AT_ONCE)
        self._open = False
        self._minding: asyncio.Task[None] | None = None
        self._balance_at = math.inf

    async def start(self, deadline: float | None = None) -> None:
        """Prepare for requests; with a deadline, connect to a member that answers."""
        self._open = True
        if deadline is not None:
            await self._get_connection(deadline, 1.0, "a question", None)

    async def aclose(self) -> None:
        """Close the connection."""
        self._open = False
        minding, self._minding = self._minding, None
        if minding is not None:
            await cancel_and_wait(minding)
        self._outages.note_end()
        await self._close_when_answered(Failure("the client is closed", FailureKind.UNDONE))

    @property
    def hosts(self) -> list[tuple[str, int]]:
        """The members' addresses; the address of the present or last member is first."""
        here = self._cluster.hosts[self.choice.place]
        return [here, *(host for host in self._cluster.hosts if host != here)]

    @property
    def is_connected(self) -> bool:
        """True if a member has answered since its last failure, or is untried."""
        return not self.choice.all_fail

    def _notify_connected(self, connected: bool) -> None:
        if connected:
            self._outages.note_end(self._loop_time())
        elif self.identity.cluster_id is not None:
            self._outages.note_loss(asyncio.get_running_loop())
        for client in tuple(self.clients):
            client.notify_connection_change(connected)

    def _check_header(self, header: pb.ResponseHeader, *, floor: int = 0) -> None:
        try:
            self.identity.check_header(header, floor=floor)
        except StoreReplaced as error:
            self.failed = True
            for client in tuple(self.clients):
                client.fail(error)
            raise

    async def ask(
        self,
        method: str,
        fields: Fields | Callable[[], Fields],
        *,
        deadline: float = math.inf,
        what: str = "",
        doubt: DoubtFlag | None = None,
    ) -> Any:
        """Repeat a request until a member answers, or until `deadline` on the loop's clock; errors call it `what`.

        `fields` may be a function, called before each attempt. `doubt.any` is set if a failed attempt may have been
        carried out. Raise `Failure` with `COMPACTED` or `LEASE_EXISTS`, or a `StoreError`.
        """
        renews = method == "Lease/LeaseKeepAlive"
        room = self._room_for_renewals if renews else self._room
        # A renewal's attempt gets half of the remaining time, so a second one is possible.
        share = 0.5 if renews else 1.0

        async def attempt(connection: Connection, token: str | None, limit: float) -> Any:
            floor = self.identity.revision if method.startswith("KV/") else 0
            asked = fields if isinstance(fields, dict) else fields()
            with anyio.move_on_after(deadline - self._loop_time()) as in_line:
                await room.acquire()
            if in_line.cancelled_caught:
                raise Failure("the requests before it are not answered", FailureKind.UNDONE, silent=True)
            try:
                reply = await self._send(connection, method, asked, token, min(limit, deadline - self._loop_time()))
            except asyncio.CancelledError:  # the request may have been sent
                if doubt is not None:
                    doubt.any = True
                raise
            finally:
                room.release()
            self._check_header(reply.header, floor=floor)
            return reply

        return await self._attempt_until_done(attempt, deadline, what or method, doubt, share=share)

    async def _send(self, connection: Connection, method: str, asked: Fields, token: str | None, limit: float) -> Any:
        return await connection.ask(method, asked, token=token, limit=limit)

    async def current_revision(self, deadline: float) -> int:
        """Return the store's revision, by a linearizable read."""
        reply = await self.ask("KV/Range", self._probe_fields, deadline=deadline, what="a question")
        return int(reply.header.revision)

    async def watch(self, requests: Sequence[Fields], *, deadline: float = math.inf, what: str = "") -> Subscription:
        """Open watches that are read together, at a member that answers; raise the errors of `ask`."""

        async def attempt(connection: Connection, token: str | None, limit: float) -> Subscription:
            subscription = connection.watch_stream(token).subscribe(requests)
            try:
                with anyio.fail_after(limit):
                    await subscription.wait_until_open()
            except BaseException as error:
                subscription.close()
                if not isinstance(error, TimeoutError):
                    raise
                raise Failure(f"it has not answered within {limit:.1f} s", FailureKind.DOUBT, silent=True) from None
            return subscription

        return await self._attempt_until_done(attempt, deadline, what, None)

    async def handle_stream_failure(self, subscription: Subscription, failure: Failure) -> None:
        """Handle the end of a stream. Unless the failure is `REOPEN`, pause, to limit the load of retries."""
        self.login.forget_rejected_token(failure, subscription.stream.token, 1)
        if self._current is not None and self._current.owns_subscription(subscription):
            await self.drop_failed_connection(self._current, failure)
        if failure.trouble is not FailureKind.REOPEN:
            await self._pause_before_retry(1, math.inf)

    async def _attempt_until_done(
        self,
        attempt: Callable[[Connection, str | None, float], Awaitable[T]],
        deadline: float,
        what: str,
        doubt: DoubtFlag | None,
        *,
        share: float = 1.0,
    ) -> T:
        failures, tokens, token = 0, 0, None
        told = ""  # the last failure that a member reported; else empty
        while True:
            connection = await self._get_connection(deadline, share, what, doubt, told)
            left = deadline - self._loop_time()
            if left <= 0:
                raise self.timeout_error(what, doubt, told)
            limit = min(self._attempt_timeout(failures), max(left * share, min(left, ATTEMPT_LEAST)))
            asked_at = self._loop_time()
            try:
                token = await self.login.token(connection, limit)
                result = await attempt(connection, token, max(limit + asked_at - self._loop_time(), 0.001))
            except Failure as failure:
                if failure.trouble in (FailureKind.COMPACTED, FailureKind.LEASE_EXISTS):
                    self.choice.note_answer(connection.place)
                    raise
                tokens += failure.trouble is FailureKind.TOKEN
                self.login.forget_rejected_token(failure, token, tokens)
                failures += 1
                told = told if failure.silent else str(failure)
                # A silent member that answers other requests is only busy.
                patient = failures == 1 or self.choice.is_single
                if not (failure.silent and patient and connection.heard_at > asked_at):
                    await self.drop_failed_connection(connection, failure)
                if doubt is not None and failure.trouble is FailureKind.DOUBT:
                    doubt.any = True
                await self._pause_before_retry(failures - 1, deadline)
            except StoreError:
                self.choice.note_answer(connection.place)
                raise
            else:
                self.choice.note_answer(connection.place)
                return result

    def _attempt_timeout(self, failures: int) -> float:
        first = ATTEMPT_ALONE if self.choice.is_single else ATTEMPT_FIRST
        return min(first * 2.0 ** min(failures // 2, 8), ATTEMPT_MOST)

    async def _pause_before_retry(self, failures: int, deadline: float) -> None:
        seconds = min(self.choice.random_retry_pause(failures), max(deadline - self._loop_time(), 0))
        if seconds:
            await anyio.sleep(seconds)

    def timeout_error(self, what: str, doubt: DoubtFlag | None, told: str = "") -> StoreError:
        """Return the error of a call that was not answered in time; `told` is a failure that a member reported."""
        maybe = doubt is not None and doubt.any
        reason = told or self.choice.problem
        asked = f"{what} at {self.name} was not answered" if self.identity.cluster_id else f"no store at {self.name}"
        message = f"{asked} in time{': ' if reason else ''}{reason}"
        kind = StoreTimeoutError if self.is_connected and not told else ConnectionLost
        return kind(message, maybe_applied=maybe)

    async def _get_connection(
        self, deadline: float, share: float, what: str, doubt: DoubtFlag | None, told: str = ""
    ) -> Connection:
        current = self._current
        if current is not None:
            return current
        with anyio.move_on_after(deadline - self._loop_time()):
            async with self._connecting:
                while (current := self._current) is None:  # another caller may have connected while this one waited
                    await self._try_to_connect(max((deadline - self._loop_time()) * share, ATTEMPT_LEAST))
                return current
        raise self.timeout_error(what, doubt, told)

    async def _try_to_connect(self, most: float) -> None:
        await anyio.sleep(max(self.choice.try_at - self._loop_time(), 0))
        if not self._open:
            raise ConnectionLost(f"the client of {self.name} is closed", maybe_applied=False)
        place = self.choice.choose_member()
        target = self._cluster.targets[place]
        self._tls = await reload_tls(self._tls, self._renew)
        credentials = channel_credentials(self._tls) if self._tls is not None else None
        connection = Connection(place, target, credentials=credentials, name=self.name, met=self._check_header)
        try:
            await self._probe_member(connection, min(self._attempt_timeout(self.choice.misses), most))
        except BaseException as error:
            with anyio.CancelScope(shield=True):
                await connection.close(Failure("it was given up", FailureKind.UNDONE))
            if not isinstance(error, Failure):
                raise
            self._note_failed_member(place, error)
            if self.identity.cluster_id is None:
                await self._diagnose_member(place, error)
            return
        self._current = connection
        self.choice.misses = 0
        self.choice.note_answer(place)
        if self._minding is None:
            self._minding = asyncio.create_task(self._keep_healthy(), name=f"mind {self.name}")  # awaited in `aclose`
        self._balance_at = math.inf if self.choice.is_single else self._loop_time() + self.choice.jitter(BALANCE_AFTER)

    async def _probe_member(self, connection: Connection, limit: float) -> None:
        """Raise `Failure` if a member does not answer or has no leader; `StoreReplaced` if its cluster was replaced."""
        floor = self.identity.revision
        token = await self.login.token(connection, limit)
        try:
            reply = await connection.ask("KV/Range", self._probe_fields, token=token, limit=limit)
        except Failure as failure:
            self._probes_refused += failure.trouble is FailureKind.TOKEN
            self.login.forget_rejected_token(failure, token, self._probes_refused)
            raise
        self._probes_refused = 0
        self._check_header(reply.header, floor=floor)

    async def _diagnose_member(self, place: int, failure: Failure) -> None:
        """Look for a permanent problem of a member; if all members fail, raise the last one found."""
        host, port = self._cluster.hosts[place]
        found = await explain_outage(host, port, self._tls, name=self.name)
        if isinstance(found, Failure):
            self.choice.problem = str(found)
        elif found is None and self._tls and not isinstance(self._tls, ClientContext) and not failure.silent:
            found = AuthenticationError(
                f"{self.name} takes a connection made with this ssl.SSLContext, and none of gRPC's, which cannot get "
                f"at the certificate that it shows ({failure}): make it with store.client_context(ca, cert, key)"
            )
        if isinstance(found, StoreError):
            self._lasting = found
        if self._lasting is not None and self.choice.all_fail:
            lasting, self._lasting = self._lasting, None
            raise lasting

    def _note_failed_member(self, place: int, failure: Failure) -> None:
        log.debug("etcd at %s: %s", self._cluster.targets[place], failure)
        self.choice.note_failure(place, failure, self._loop_time())

    async def drop_failed_connection(self, connection: Connection, failure: Failure) -> None:
        """Close a failed connection, unless its member works; the next request makes another one."""
        if failure.trouble in (FailureKind.REOPEN, FailureKind.TOKEN):  # the member works
            return
        if self._current is connection:
            self._note_failed_member(connection.place, failure)
            await self._close_when_answered(failure)
        else:
            self.choice.note_problem(connection.place, failure)

    async def _close_when_answered(self, reason: Failure) -> None:
        connection, self._current = self._current, None
        self._balance_at = math.inf
        if connection is not None:
            await connection.close(reason)

    async def _keep_healthy(self) -> None:
        while True:
            connection = self._current
            heard_at = connection.heard_at if connection is not None and connection.has_watches else self._loop_time()
            await anyio.sleep(max(min(heard_at + IDLE, self._balance_at) - self._loop_time(), 0.001))
            connection = self._current
            if connection is None:
                continue
            if self._loop_time() >= self._balance_at:
                self.choice.forget_failures()
                await self._close_when_answered(Failure("the client chooses a member anew", FailureKind.REOPEN))
            elif connection.has_watches and self._loop_time() >= connection.heard_at + IDLE:
                try:
                    await self._probe_member(connection, self._attempt_timeout(0))
                except Failure as failure:
                    await self.drop_failed_connection(connection, failure)
                except StoreError as error:  # the next request raises the same error
                    log.debug("etcd at %s: %s", self.name, error)
                    connection.heard_at = self._loop_time()

    def _loop_time(self) -> float:
        return asyncio.get_running_loop().time()

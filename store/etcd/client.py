"""Shell: the store's interface on an etcd v3 cluster.

    async with store.connect("etcd://a:2379,b:2379,c:2379") as client: ...

The same calls mean the same things; what differs is listed in `store.interface`. What is said to etcd is worked out in
`etcd_messages` and `etcd_writes`, and said by `etcd_gateway`; here it is decided what to ask, and when to ask again.

**Writes** are sent again until they are answered, and done once: each leaves a receipt, as `etcd_writes` explains. The
receipts of a client are a handful of empty keys on a lease of their own, so that nothing is left of a client that has
gone. If that lease has lapsed before an answer could be had, nobody can know any more, and the caller is told so.

**Waits** look, and if a key is missing watch it (a hundred at most at one time), and look again once it has come.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import os
import random
import socket
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import anyio

from store import interface
from store.errors import (
    ConnectionLost,
    LeaseNotFound,
    StoreError,
    StoreReplaced,
    StoreTimeoutError,
    StoreUsageError,
    UsedAfterFork,
    unsent,
)
from store.etcd.codec import (
    OPERATIONS_MAX,
    Cluster,
    FailureKind,
    NoSpace,
    broken,
    entry_in,
    entry_of,
    events_of,
    range_of,
    spans,
    watch_request,
)
from store.etcd.gateway import Failure, Gateway, RetryState
from store.etcd.receipts import HANG_UP_WITHIN, Receipts, granted
from store.etcd.transactions import (
    Receipt,
    Write,
    answer,
    normal,
    outcome,
    recovered,
    recovery,
    resolved,
    rests_on,
    transaction,
)
from store.etcd.watch import Watch
from store.interface import DEFAULT_TIMEOUT
from store.messages import (
    Condition,
    Count,
    Counted,
    Done,
    Entry,
    Figures,
    Found,
    Get,
    GetMany,
    Grant,
    Granted,
    Guarded,
    KeepAlive,
    LeaseState,
    List,
    Listing,
    Ping,
    Pong,
    Put,
    Request,
    Response,
    Revoke,
    Stats,
    TimeToLive,
    Wait,
    waits,
)
from store.watch_cursor import WatchCursor

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Awaitable, Sequence
    from typing import Self

    from store.etcd.codec import Json
    from store.etcd.transactions import Outcome

__all__ = ["RECEIPTS", "Client", "Watch"]

R = TypeVar("R", bound=Response)
T = TypeVar("T")

RECEIPTS: Final = "rdzv-receipts/"
"""Where receipts are kept, unless the client is told otherwise."""

WATCHES_MOST: Final = 100
"""Keys watched for one wait at one time."""

GETS_MOST: Final = 100
"""Keys read in one request; etcd takes 128 operations."""

PAGE: Final = 1_000
"""Keys listed in one request."""


class Client(interface.Store):
    """A client of an etcd cluster; use it as `async with store.connect(url) as client`.

    Args:
        cluster: Where it is.
        tls: A client-side context for `etcds`; without it the system's certificates are trusted.
        user: Whom to log in as, if anybody.
        password: The user's.
        timeout: Seconds that every call without its own `timeout` may take.
        connect_timeout: Seconds that the first answer may take; without it, as `timeout`.
        receipts: What the keys of receipts start with; the user must be allowed to write there.
        rng: For jitter, and the member to begin with.
    """

    operations_max = OPERATIONS_MAX
    fail_over = 2.0  # etcd's members wait 1 to 2 s for a leader that has gone, unless --election-timeout says otherwise

    def __init__(
        self,
        cluster: Cluster,
        *,
        tls: ssl.SSLContext | None = None,
        user: str | None = None,
        password: str | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        connect_timeout: float | None = None,
        receipts: str = RECEIPTS,
        rng: random.Random | None = None,
    ) -> None:
        self.name = str(cluster)
        self.timeout = timeout
        self._connect_timeout = timeout if connect_timeout is None else connect_timeout
        self.hidden = receipts
        self.gateway = Gateway(
            cluster,
            probe=range_of(receipts, count_only=True),
            tls=tls,
            user=user,
            password=password,
            rng=rng or random.Random(),
        )
        self.gateway.failed = self.fail
        self._receipts = Receipts(self.gateway, receipts)
        self._failed: StoreError | None = None
        self._scopes: set[anyio.CancelScope] = set()  # of everything under way
        self._seen_as: str | None = None
        self._pid = os.getpid()

    # ------------------------------------------------------------------------------------------ life

    async def __aenter__(self) -> Self:
        await self.open()
        try:
            await self.call(Ping(), timeout=self._connect_timeout)
            self._seen_as = await self._own_address()
        except StoreTimeoutError as error:
            await self.aclose()
            raise ConnectionLost(str(error), maybe_applied=False) from None
        except BaseException:
            await self.aclose()
            raise
        return self

    async def open(self) -> None:
        """Be ready for calls; the first one connects."""
        await self.gateway.start()

    async def aclose(self) -> None:
        """Hang up for good; everything that still waits gets `ConnectionLost`."""
        if self._pid != os.getpid():
            return  # it is the parent's
        useful = not isinstance(self._failed, StoreReplaced)
        self.fail(ConnectionLost(f"the client of {self.name} is closed", maybe_applied=False))
        with anyio.CancelScope(shield=True):
            if useful:
                with anyio.move_on_after(HANG_UP_WITHIN), contextlib.suppress(StoreError, Failure):
                    await self._receipts.give_up()
            await self.gateway.aclose()

    def fail(self, error: StoreError) -> None:
        """This client is of no more use; everyone who waits is told why, and the first reason counts."""
        if self._failed is None:
            self._failed = error
            for scope in tuple(self._scopes):
                scope.cancel()

    @property
    def connected(self) -> bool:
        """Whether some member of the cluster is in reach, as far as is known."""
        return self._failed is None and self.gateway.connected

    @property
    def store_id(self) -> str | None:
        """The cluster's id, once it has been met."""
        return self.gateway.cluster_id

    @property
    def seen_as(self) -> str | None:
        """The address from which this client reaches the cluster, which does not tell how it sees us."""
        return self._seen_as

    @property
    def failure(self) -> StoreError | None:
        """Why this client is of no more use, if so."""
        return self._failed

    def time(self) -> float:
        """Seconds on the event loop's clock."""
        return asyncio.get_running_loop().time()

    async def _own_address(self) -> str | None:
        """This machine's address on the way to the cluster."""
        host, port = self.gateway.here
        with contextlib.suppress(OSError):
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_DGRAM)
            for family, kind, _, _, target in found:
                with socket.socket(family, kind) as sock, contextlib.suppress(OSError):
                    sock.connect(target)  # which sends nothing: it only chooses the way
                    address: str = sock.getsockname()[0]
                    return address
        return None

    def check_usable(self) -> None:
        """Raise what this client failed of, or that it was inherited over `fork()`."""
        if self._pid != os.getpid():
            raise UsedAfterFork(f"this client of {self.name} was made before fork(); make a new one in the child")
        if self._failed is not None:
            raise unsent(self._failed)

    async def while_usable(self, work: Awaitable[T], doubt: RetryState | None = None) -> T:
        """Await something for as long as this client is of use."""
        with anyio.CancelScope() as scope:
            self._scopes.add(scope)
            try:
                return await work
            finally:
                self._scopes.discard(scope)
        assert self._failed is not None, "nobody else cancels the scope"
        if isinstance(self._failed, ConnectionLost) and doubt is not None:
            raise type(self._failed)(str(self._failed), maybe_applied=doubt.any)
        raise unsent(self._failed)

    # ------------------------------------------------------------------------------------------ requests

    async def call(self, request: Request[R], *, timeout: float | None = None) -> R:
        """Make one request and give its response; see `Store.call`."""
        self.check_usable()
        if timeout is None and not waits(request):
            timeout = self.timeout
        deadline = math.inf if timeout is None else self.time() + timeout
        guard: tuple[Condition, ...] = ()
        asked: Request[Any] = request
        if isinstance(request, Guarded):
            guard, asked = request.when, request.request
        doubt = RetryState()
        try:
            response = await self.while_usable(self._dispatch(asked, guard, deadline, doubt), doubt)
        except Failure as failure:  # what none of the calls below expects of etcd
            raise StoreError(f"{type(asked).__name__} at {self.name}: {failure}") from failure
        except UnicodeEncodeError as error:
            raise StoreUsageError(f"{type(asked).__name__} cannot be sent: {error}") from None
        return cast("R", response)

    async def _dispatch(
        self, request: Request[Any], guard: tuple[Condition, ...], deadline: float, doubt: RetryState
    ) -> Response:
        match request:
            case Get(key=key):
                replies, revision = await self._read(guard, [range_of(key)], deadline)
                return Found(entry=entry_in(replies[0]))
            case GetMany(keys=keys):
                return await self._get_many(keys, guard, deadline)
            case List():
                return await self._list(request, guard, deadline)
            case Count(prefix=prefix):
                asked = [range_of(span, count_only=True) for span in spans(prefix, self.hidden)]
                replies, revision = await self._read(guard, asked, deadline)
                return Counted(count=sum(int(reply.get("count", 0)) for reply in replies), revision=revision)
            case Wait(keys=keys):
                return await self._wait(keys, guard, deadline)
            case Ping():
                return Pong(revision=await self.gateway.current_revision(deadline))
            case Stats():
                return await self._stats(deadline)
            case Grant() | KeepAlive() | Revoke() | TimeToLive():
                return await self._lease_call(request, deadline)
            case _:
                return await self._write(request, guard, deadline, doubt)

    # ------------------------------------------------------------------------------------------ reads

    async def _read(self, guard: Sequence[Condition], asked: list[Json], deadline: float) -> tuple[list[Json], int]:
        """Several reads at one revision; what each found, and the revision."""
        if not guard and len(asked) == 1:
            reply = await self.gateway.ask("kv/range", asked[0], deadline=deadline, what="reading")
            return [reply], int(reply["header"]["revision"])
        write = Write(guard=tuple(guard))
        body = transaction(write, None, hidden=self.hidden)
        requests = [{"request_range": each} for each in asked]
        if guard:
            body["success"][0]["request_txn"]["success"] = requests
        else:
            body["success"] = requests
        reply = await self.gateway.ask("kv/txn", body, deadline=deadline, what="reading")
        responses = reply.get("responses", [])
        if guard:
            inner = responses[0].get("response_txn", {})
            if not inner.get("succeeded"):
                raise broken(guard)
            responses = inner.get("responses", [])
        return [response["response_range"] for response in responses], int(reply["header"]["revision"])

    async def _get_many(self, keys: Sequence[str], guard: tuple[Condition, ...], deadline: float) -> Listing:
        """Several keys at one revision, that of the first of perhaps several requests."""
        while True:
            entries: list[Entry | None] = []
            revision = 0
            try:
                for at in range(0, max(len(keys), 1), GETS_MOST):
                    pinned = {"revision": str(revision)} if revision else {}
                    asked = [range_of(key, **pinned) for key in keys[at : at + GETS_MOST]]
                    replies, now = await self._read(() if revision else guard, asked, deadline)
                    revision = revision or now
                    entries.extend(map(entry_in, replies))
            except Failure as failure:
                if failure.trouble is not FailureKind.COMPACTED:
                    raise
            else:
                return Listing(entries=tuple(entries), revision=revision)

    async def _list(self, request: List, guard: tuple[Condition, ...], deadline: float) -> Listing:
        while True:
            try:
                pages = [
                    page async for page in self.pages(request.prefix, guard, deadline, keys_only=request.keys_only)
                ]
            except Failure as failure:
                if failure.trouble is not FailureKind.COMPACTED:
                    raise
            else:
                entries = tuple(entry for page, _ in pages for entry in page)
                return Listing(entries=entries, revision=pages[-1][1])

    async def pages(
        self, prefix: str, guard: tuple[Condition, ...], deadline: float, *, keys_only: bool = False
    ) -> AsyncIterator[tuple[list[Entry], int]]:
        """All entries under a prefix, sorted, in pieces of one revision; and that revision."""
        revision = 0
        for first, last in spans(prefix, self.hidden):
            after: bytes | None = first
            while after is not None:
                pinned = {"revision": str(revision)} if revision else {}
                asked = range_of((after, last), limit=str(PAGE), keys_only=keys_only, **pinned)
                replies, now = await self._read(() if revision else guard, [asked], deadline)
                revision = revision or now
                kvs = replies[0].get("kvs", [])
                entries = [entry_of(kv) for kv in kvs]
                yield entries, revision
                more = replies[0].get("more") and entries
                after = entries[-1].key.encode(errors="surrogateescape") + b"\0" if more else None

    async def _stats(self, deadline: float) -> Figures:
        revision = await self.gateway.current_revision(deadline)
        status = await self.gateway.ask("maintenance/status", {}, deadline=deadline, what="stats")
        return Figures(
            figures={
                "store_id": self.gateway.cluster_id,
                "revision": revision,
                "version": status.get("version"),
                "stored_bytes": int(status.get("dbSize", 0)),
                "leader": f"{int(status.get('leader', 0)):x}",
                "member": f"{int(status['header'].get('member_id', 0)):x}",
            }
        )

    # ------------------------------------------------------------------------------------------ leases

    async def _lease_call(self, request: Grant | KeepAlive | Revoke | TimeToLive, deadline: float) -> Response:
        match request:
            case Grant(ttl=ttl):
                return await self._grant(ttl, deadline)
            case KeepAlive(lease=lease):
                reply = await self.gateway.ask(
                    "lease/keepalive", {"ID": str(lease)}, deadline=deadline, what="KeepAlive"
                )
                left = int(reply.get("TTL", 0))
                if left <= 0:
                    raise _no_lease(lease)
                return Granted(lease=lease, ttl=float(left))
            case TimeToLive(lease=lease):
                asked = {"ID": str(lease), "keys": True}
                reply = await self.gateway.ask("lease/timetolive", asked, deadline=deadline, what="TimeToLive")
                left = int(reply.get("TTL", 0))
                if left < 0 or "grantedTTL" not in reply:
                    raise _no_lease(lease)
                keys = tuple(sorted(entry_of({"key": key}).key for key in reply.get("keys", ())))
                return LeaseState(remaining=float(left), ttl=float(reply["grantedTTL"]), keys=keys)
            case Revoke(lease=lease):
                doubt = RetryState()
                try:
                    await self.gateway.ask(
                        "lease/revoke", {"ID": str(lease)}, deadline=deadline, what="Revoke", doubt=doubt
                    )
                except LeaseNotFound:
                    if not doubt.any:  # else it was we who ended it
                        raise _no_lease(lease) from None
                return Done()

    async def _grant(self, ttl: float, deadline: float) -> Granted:
        """A lease, under an id of our own making, so that asking again grants no second one."""
        if not ttl > 0:
            raise StoreUsageError(f"ttl is {ttl:g} s; it must be above 0")
        lease, ttl_granted = await granted(self.gateway, ttl, deadline)
        return Granted(lease=lease, ttl=ttl_granted)

    # ------------------------------------------------------------------------------------------ writes

    async def _write(
        self, request: Request[Any], guard: tuple[Condition, ...], deadline: float, doubt: RetryState
    ) -> Response:
        write = normal(request, guard)
        leases: list[int] = []
        try:
            write, leases = await self._on_leases(write, deadline)
            done = await self._until_done(write, deadline, doubt)
        except BaseException:
            await self._let_go(leases)
            raise
        if done.refused:
            await self._let_go(leases)
            raise broken(guard)
        branch = write.then if done.succeeded else write.otherwise
        used = {operation.lease for operation in branch.operations if isinstance(operation, Put)}
        await self._let_go([lease for lease in leases if lease not in used])
        return answer(request, done)

    async def _on_leases(self, write: Write, deadline: float) -> tuple[Write, list[int]]:
        """The write with a lease of its own for each put that has a TTL; and these leases."""
        leases = []
        branches = []
        for branch in (write.then, write.otherwise):
            operations = list(branch.operations)
            for place, operation in enumerate(operations):
                if isinstance(operation, Put) and operation.ttl is not None:
                    lease = (await self._grant(operation.ttl, deadline)).lease
                    leases.append(lease)
                    operations[place] = Put(operation.key, operation.value, lease=lease)
            branches.append(replace(branch, operations=tuple(operations)))
        return replace(write, then=branches[0], otherwise=branches[1]), leases

    async def _let_go(self, leases: Sequence[int]) -> None:
        """Revoke what turned out not to be needed; what cannot be revoked lapses."""
        with anyio.move_on_after(HANG_UP_WITHIN, shield=True):
            for lease in leases:
                with contextlib.suppress(StoreError, Failure):
                    await self._lease_call(Revoke(lease=lease), self.time() + HANG_UP_WITHIN)

    async def _until_done(self, write: Write, deadline: float, doubt: RetryState) -> Outcome:
        """Carry out a write; again and again if what it adds to changes meanwhile."""
        keys = list(dict.fromkeys((*rests_on(write.then), *rests_on(write.otherwise))))
        entries: dict[str, Entry | None] = {}
        if keys:
            listing = await self._get_many(keys, (), deadline)
            entries.update(zip(keys, listing.entries, strict=True))
        while True:
            now = write
            if keys:
                now = replace(write, then=resolved(write.then, entries), otherwise=resolved(write.otherwise, entries))
            done = await self._once(now, deadline, doubt)
            if not done.stale:
                return done
            doubt.any = False  # that it was found stale is an answer: nothing was done
            if done.reread:
                entries.update(done.reread)
            else:
                listing = await self._get_many(keys, (), deadline)
                entries.update(zip(keys, listing.entries, strict=True))

    async def _once(self, write: Write, deadline: float, doubt: RetryState) -> Outcome:
        """Send a write until it is answered, so that it is done once."""
        while True:
            receipt = await self._receipts.take(deadline)
            fenced = False

            def body(receipt: Receipt = receipt) -> Json:
                nonlocal fenced
                fenced = doubt.any
                return transaction(write, receipt, hidden=self.hidden, fence=fenced)

            try:
                reply = await self.gateway.ask("kv/txn", body, deadline=deadline, what="writing", doubt=doubt)
            except NoSpace:
                if not write.only_deletes or doubt.any:
                    raise
                return await self._delete_without_receipt(write, deadline, doubt)
            except LeaseNotFound:
                if doubt.any:
                    raise _nobody_knows(self.name) from None
                if await self._receipts.stand(deadline):
                    raise
                continue  # it was the receipts' lease that has lapsed
            except StoreError as error:
                if not doubt.any or isinstance(error, ConnectionLost | StoreTimeoutError):
                    raise
                raise ConnectionLost(str(error), maybe_applied=True) from error
            done = outcome(write, receipt, reply, hidden=self.hidden, fence=fenced)
            if done.mark is None and not doubt.any:
                await self._receipts.stand(deadline)  # its lease has lapsed while we slept, and nothing was done
                continue
            if done.mark is None:
                done = await self._recovered(write, receipt, done.found, deadline)
            self._receipts.give_back(replace(receipt, revision=done.receipt))
            return done

    async def _recovered(self, write: Write, receipt: Receipt, found: Entry | None, deadline: float) -> Outcome:
        """What came of an attempt whose answer was lost: its receipt says which way it went."""
        if found is None or found.mod_revision <= receipt.revision:
            raise _nobody_knows(self.name)
        body = recovery(write, found, hidden=self.hidden)
        try:
            reply = await self.gateway.ask("kv/txn", body, deadline=deadline, what="reading", doubt=None)
        except Failure:  # it was compacted meanwhile: what was done is known, and what it found is not
            raise _nobody_knows(self.name) from None
        return recovered(write, found, reply, hidden=self.hidden)

    async def _delete_without_receipt(self, write: Write, deadline: float, doubt: RetryState) -> Outcome:
        """Delete where there is no space for as much as a receipt; sent once, since twice might delete more."""
        body = transaction(write, None, hidden=self.hidden)
        reply = await self.gateway.ask("kv/txn", body, deadline=deadline, what="deleting", doubt=doubt, once=True)
        return outcome(write, None, reply, hidden=self.hidden)

    # ------------------------------------------------------------------------------------------ waits

    async def _wait(self, keys: Sequence[str], guard: tuple[Condition, ...], deadline: float) -> Listing:
        if not all(keys):
            raise StoreUsageError("a key has at least one character")
        while True:
            listing = await self._get_many(keys, guard, deadline)
            missing = {key for key, entry in zip(keys, listing.entries, strict=True) if entry is None}
            if not missing:
                return listing
            watched = set(sorted(missing)[:WATCHES_MOST])
            others = {condition.key for condition in guard} - watched
            left = deadline - self.time()
            if left <= 0:
                raise self.gateway.late("Wait", None)
            with anyio.move_on_after(None if left == math.inf else left):
                await self._until_changed(watched, others, listing.revision + 1)

    async def _until_changed(self, missing: set[str], others: set[str], start_revision: int) -> None:
        """Return once all of the missing keys have come, or one of the others has changed, or it is time to look."""
        requests = watch_request([*missing, *others], start_revision=start_revision)
        try:
            stream = await self.gateway.stream(requests, what="Wait")
        except Failure:  # compacted: look again
            return
        try:
            while missing and (told := await stream.read()) is not None:
                batches = [batch for message in told for batch in events_of(message, self.hidden)]
                for event in itertools.chain.from_iterable(batches):
                    if event.key in others:
                        return
                    if event.kind == "put":
                        missing.discard(event.key)
        except Failure as failure:
            await stream.failed(failure)
        finally:
            stream.close()

    # ------------------------------------------------------------------------------------------ watches

    def watch(self, prefix: str, *, start_revision: int | None = None, snapshot: bool = False) -> Watch:
        """Watch all keys that start with `prefix`; see `Store.watch`. Each watch has a connection of its own."""
        return Watch(self, prefix, WatchCursor(prefix, start_revision=start_revision, snapshot=snapshot))


def _no_lease(lease: int) -> LeaseNotFound:
    return LeaseNotFound(f"lease {lease} has lapsed or was revoked; grant a new one")


def _nobody_knows(name: str) -> ConnectionLost:
    return ConnectionLost(
        f"an answer by {name} was lost, and the receipt that would tell what it was is gone", maybe_applied=True
    )

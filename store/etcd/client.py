"""The store's interface on an etcd v3 cluster; `store.interface` lists the differences from the built-in server.

For a `Wait` request, the client in turn reads the keys and watches some missing ones, until no key is missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast
from weakref import WeakKeyDictionary, WeakValueDictionary

import anyio

from store import interface, messages
from store.calls import checked_timeout
from store.errors import (
    ConnectionLost,
    StoreError,
    StoreReplaced,
    StoreTimeoutError,
    StoreUsageError,
    Unsupported,
    unsent_error,
)
from store.etcd import leases
from store.etcd.codec import OPERATIONS_MAX, Endpoints, Failure, events_by_revision, one_entry, range_of, watch_requests
from store.etcd.members import DoubtFlag, Members
from store.etcd.reads import ReadOperations
from store.etcd.receipts import HANG_UP_WITHIN, WriteReceipts
from store.etcd.watch import Watch
from store.etcd.writes import WriteAttempts
from store.interface import DEFAULT_TIMEOUT
from store.net.absence import warn_if_silent
from store.net.dialing import find_route
from store.net.process import process_identity
from store.net.tasks import require_loop
from store.watch_cursor import WatchCursor

if TYPE_CHECKING:
    import random
    import ssl
    from collections.abc import Awaitable, Callable, Hashable, Sequence
    from typing import Self


R = TypeVar("R", bound=messages.Response)
T = TypeVar("T")

RECEIPTS: Final = "rdzv-receipts/"
WATCHES_MOST: Final = 100  # missing keys that one `Wait` request watches


_shared: WeakKeyDictionary[asyncio.AbstractEventLoop, WeakValueDictionary[Hashable, Members]] = WeakKeyDictionary()


def _get_shared_members(name: Hashable | None, make: Callable[[], Members]) -> Members:
    if name is None:
        return make()
    here = _shared.setdefault(asyncio.get_running_loop(), WeakValueDictionary())
    members = here.get(name)
    if members is None or members.failed:
        members = here[name] = make()
    return members


class Client(interface.Store):
    """The client of an etcd cluster, as `async with store.connect(url) as client`.

    `renew` reads the files of certificates again before each connection, and returns the context. `password` may be a
    function, called again after a rejected login. `receipts` is the prefix of this client's own keys; the user
    needs write permission there. Clients of one event loop with the same `shared_as`, and equal
    arguments except for timeouts, share one connection.
    """

    tells_causes: bool = False
    operations_max: int = OPERATIONS_MAX
    writes_max: int = OPERATIONS_MAX
    fail_over: float = 2.0  # etcd replaces a lost leader after 1 to 2 s by default
    observed_address: str | None = None
    socket_addresses: tuple[str, str] | None = None
    server: str = ""  # the id of the member that answered; "another" if `socket_addresses` are those of another member

    def __init__(
        self,
        cluster: Endpoints,
        *,
        tls: ssl.SSLContext | None = None,
        renew: Callable[[], ssl.SSLContext | None] | None = None,
        user: str | None = None,
        password: str | Callable[[], str | None] | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        connect_timeout: float | None = None,
        timeout_name: str = "the timeout",
        receipts: str = RECEIPTS,
        rng: random.Random | None = None,
        shared_as: Hashable | None = None,
    ) -> None:
        self.name: str = str(cluster)
        self.timeout = timeout
        self._connect_timeout = timeout if connect_timeout is None else connect_timeout
        self._ended_by = timeout_name
        self.hidden = receipts
        probe = range_of(receipts, count_only=True)
        make = partial(Members, cluster, probe=probe, tls=tls, renew=renew, user=user, password=password, rng=rng)
        self.members: Members = _get_shared_members(shared_as, make)
        self._receipts = WriteReceipts(self.members, receipts)
        self._reads = ReadOperations(self.members, receipts)
        self._scopes: set[anyio.CancelScope] = set()  # of the calls under way
        self._made_in = process_identity()

    async def __aenter__(self) -> Self:
        await self.open()
        within = self._connect_timeout
        try:
            with warn_if_silent(self.name, lambda: self.members.choice.problem, within=within, ended_by=self._ended_by):
                deadline = self.time() + within
                await self.run_while_usable(lambda: self.members.start(deadline))
            way = await find_route(self.members.hosts, self.members.identity.member_id)
            if way is not None:
                self.socket_addresses, self.server = way
                self.observed_address = self.socket_addresses[0]
        except StoreTimeoutError as error:
            await self.aclose()
            raise ConnectionLost(str(error), maybe_applied=False) from None
        except BaseException:
            await self.aclose()
            raise
        return self

    async def open(self) -> None:
        """Prepare for calls; the first call connects."""
        self._loop = require_loop()
        self.members.clients.append(self)
        await self.members.start()

    async def aclose(self) -> None:
        """Close the client; pending calls raise `ConnectionLost`."""
        if self._made_in is not process_identity():
            return  # a forked child leaves the connection to its parent
        useful = not isinstance(self._failed, StoreReplaced)
        self.fail(ConnectionLost(f"the client of {self.name} is closed", maybe_applied=False))
        with anyio.CancelScope(shield=True):
            if useful:
                with anyio.move_on_after(HANG_UP_WITHIN), contextlib.suppress(StoreError, Failure):
                    await self._receipts.delete_all()
            if self in self.members.clients:
                self.members.clients.remove(self)
                if not self.members.clients:
                    await self.members.aclose()

    def fail(self, error: StoreError) -> None:
        """See `Store.fail`; a second call has no effect."""
        if self._failed is None:
            self._failed = error
            for scope in tuple(self._scopes):
                scope.cancel()
            self.notify_connection_change(False)

    @property
    def connected(self) -> bool:
        """True unless the client has failed, or all members fail."""
        return self._failed is None and self.members.is_connected

    @property
    def store_id(self) -> str | None:
        """The cluster's id, after its first answer."""
        return self.members.identity.cluster_id

    def time(self) -> float:
        """Return seconds on the event loop's clock."""
        return asyncio.get_running_loop().time()

    async def run_while_usable(self, work: Callable[[], Awaitable[T]], doubt: DoubtFlag | None = None) -> T:
        """Await `work`. If the client fails meanwhile, raise its error, `maybe_applied` as in `doubt`."""
        self.check_usable()
        with anyio.CancelScope() as scope:
            self._scopes.add(scope)
            try:
                return await work()
            except UnicodeEncodeError as error:
                raise StoreUsageError(f"a key cannot be sent: {error}") from None
            finally:
                self._scopes.discard(scope)
        assert self._failed is not None, "only a failure cancels the scope"
        if isinstance(self._failed, ConnectionLost) and doubt is not None:
            raise type(self._failed)(str(self._failed), maybe_applied=doubt.any)
        raise unsent_error(self._failed)

    async def call(self, request: messages.Request[R], *, timeout: float | None = None) -> R:
        """See `Calls.call`."""
        limit = checked_timeout(timeout, None if messages.waits(request) else self.timeout)
        deadline = math.inf if limit is None else self.time() + limit
        guard: tuple[messages.Condition, ...] = ()
        asked = messages.validate_request(request)
        if isinstance(asked, messages.Guarded):
            guard, asked = asked.when, asked.request
        if isinstance(asked, messages.KeepAlive | messages.Revoke | messages.TimeToLive):
            leases.check_lease_id(asked.lease)
        doubt = DoubtFlag()
        try:
            response = await self.run_while_usable(lambda: self._dispatch(asked, guard, deadline, doubt), doubt)
        except Failure as failure:
            raise StoreError(f"{type(asked).__name__} at {self.name}: {failure}") from failure
        return cast("R", response)

    async def _dispatch(
        self, request: messages.Request[Any], guard: tuple[messages.Condition, ...], deadline: float, doubt: DoubtFlag
    ) -> messages.Response:
        match request:
            case messages.Get(key=key):
                replies, _ = await self._reads.read(guard, [range_of(key)], deadline)
                return messages.Found(entry=one_entry(replies[0]))
            case messages.GetMany(keys=keys):
                return await self._reads.get_many(keys, guard, deadline)
            case messages.List():
                return await self._reads.list(request, guard, deadline)
            case messages.Count():
                return await self._reads.count(request, guard, deadline)
            case messages.Wait(keys=keys):
                return await self._wait_for_keys(keys, guard, deadline)
            case messages.Ping():
                return messages.Pong(revision=await self.members.current_revision(deadline))
            case messages.Stats():
                return await self._reads.stats(deadline)
            case messages.ListGroups():
                raise Unsupported(f"{self.name} keeps no account of what each group of keys takes; ask etcdctl")
            case messages.ListNotes():
                return await leases.list_lease_notes(self.members, self._reads, request, deadline)
            case messages.Grant(ttl=ttl, disconnect_ttl=disconnect_ttl, gone_ttl=gone_ttl):
                leases.check_ttls(disconnect_ttl=disconnect_ttl, gone_ttl=gone_ttl)
                return await leases.grant_lease(self.members, ttl, deadline)
            case messages.KeepAlive():
                return await leases.keep_alive(self.members, request, deadline, hidden=self.hidden)
            case messages.Revoke(lease=lease):
                return await leases.revoke_lease(self.members, lease, deadline)
            case messages.TimeToLive(lease=lease):
                return await leases.time_to_live(self.members, lease, deadline)
            case _:
                return await WriteAttempts(self._reads, self._receipts, request, guard, deadline, doubt).run()

    async def _wait_for_keys(
        self, keys: Sequence[str], guard: tuple[messages.Condition, ...], deadline: float
    ) -> messages.Listing:
        if not all(keys):
            raise StoreUsageError("a key has at least one character")
        while True:
            listing = await self._reads.get_many(keys, guard, deadline)
            missing = {key for key, entry in zip(keys, listing.entries, strict=True) if entry is None}
            if not missing:
                return listing
            watched = set(sorted(missing)[:WATCHES_MOST])
            others = {condition.key for condition in guard} - watched
            left = deadline - self.time()
            if left <= 0:
                raise self.members.timeout_error("Wait", None)
            with anyio.move_on_after(left):
                await self._wait_for_change(watched, others, listing.revision + 1)

    async def _wait_for_change(self, missing: set[str], others: set[str], start_revision: int) -> None:
        """Wait until all missing keys exist, one of the others changes, or the stream fails."""
        requests = watch_requests([*missing, *others], start_revision=start_revision)
        try:
            stream = await self.members.watch(requests, what="Wait")
        except Failure:  # the revision was compacted: the caller reads the keys again
            return
        try:
            while missing:
                told = await stream.read()
                batches = [batch for message in told for batch in events_by_revision(message, self.hidden)]
                for event in itertools.chain.from_iterable(batches):
                    if event.key in others:
                        return
                    if event.kind == "put":
                        missing.discard(event.key)
        except Failure as failure:
            await self.members.handle_stream_failure(stream, failure)
        finally:
            stream.close()

    def watch(self, prefix: str, *, start_revision: int | None = None, snapshot: bool = False) -> Watch:
        """See `Store.watch`."""
        cursor = WatchCursor(prefix, start_revision=start_revision, snapshot=snapshot)
        return Watch(self._reads, prefix, cursor, timeout=self.timeout, run_while_usable=self.run_while_usable)

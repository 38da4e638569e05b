"""Reads from an etcd cluster: several requests read at one revision, and the client checks conditions in the answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeAlias

from store.etcd.codec import (
    Failure,
    FailureKind,
    condition_error,
    entry_of,
    key_spans,
    one_entry,
    range_of,
    read_for_condition,
)
from store.messages import Condition, Count, Counted, Entry, Figures, List, Listing

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from store.etcd.codec import Fields
    from store.etcd.members import Members
    from store.etcd.rpc import etcd_pb2 as pb

GETS_MOST: Final = 100  # keys read in one request; etcd takes 128 operations per request
PAGE: Final = 1_000  # keys listed in one request

Asked: TypeAlias = "list[Fields]"  # a string, as `list` is a method inside `ReadOperations`
Ranges: TypeAlias = "list[pb.RangeResponse]"
Entries: TypeAlias = "list[Entry]"


class ReadOperations:
    """The reads of one client; keys that start with `hidden`, such as receipts, are not shown."""

    def __init__(self, members: Members, hidden: str) -> None:
        self.members = members
        self.hidden = hidden

    async def read(
        self, guard: Sequence[Condition], asked: Asked, deadline: float, *, revision: int = 0
    ) -> tuple[Ranges, int]:
        """Return ranges at `revision`, without checking `guard` again; if 0, check it, and return present ranges."""
        if revision:
            guard, asked = (), [{**each, "revision": revision} for each in asked]
        if not guard and len(asked) == 1:
            reply = await self.members.ask("KV/Range", asked[0], deadline=deadline, what="reading")
            return [reply], reply.header.revision
        requests = [{"request_range": each} for each in (*map(read_for_condition, guard), *asked)]
        reply = await self.members.ask("KV/Txn", {"success": requests}, deadline=deadline, what="reading")
        ranges = [response.response_range for response in reply.responses]
        if not all(one.holds(one_entry(found)) for one, found in zip(guard, ranges, strict=False)):
            raise condition_error(guard)
        return ranges[len(guard) :], reply.header.revision

    async def read_many(self, guard: Sequence[Condition], asked: Asked, deadline: float) -> tuple[Ranges, int]:
        """Read any number of ranges; see `read`."""
        while True:
            ranges, revision = await self.read(guard, asked[:GETS_MOST], deadline)
            try:
                for at in range(GETS_MOST, len(asked), GETS_MOST):
                    more, _ = await self.read((), asked[at : at + GETS_MOST], deadline, revision=revision)
                    ranges += more
            except Failure as failure:
                if failure.trouble is not FailureKind.COMPACTED:
                    raise
            else:
                return ranges, revision

    async def get_many(self, keys: Sequence[str], guard: tuple[Condition, ...], deadline: float) -> Listing:
        """Read several keys at one revision."""
        ranges, revision = await self.read_many(guard, [range_of(key) for key in keys], deadline)
        return Listing(entries=tuple(map(one_entry, ranges)), revision=revision)

    async def list(self, request: List, guard: tuple[Condition, ...], deadline: float) -> Listing:
        """Return all entries under a prefix, at one revision."""
        while True:
            try:
                pages = [
                    page async for page in self.pages(request.prefix, guard, deadline, keys_only=request.keys_only)
                ]
            except Failure as failure:
                if failure.trouble is not FailureKind.COMPACTED:
                    raise
            else:
                return Listing(entries=tuple(entry for page, _ in pages for entry in page), revision=pages[-1][1])

    async def pages(
        self, prefix: str, guard: tuple[Condition, ...], deadline: float, *, keys_only: bool = False
    ) -> AsyncIterator[tuple[Entries, int]]:
        """Yield all entries under a prefix, sorted, at one revision, as pages with that revision."""
        revision = 0
        for first, last in key_spans(prefix, self.hidden):
            after: bytes | None = first
            while after is not None:
                asked = range_of((after, last), limit=PAGE, keys_only=keys_only)
                (found,), now = await self.read(guard, [asked], deadline, revision=revision)
                revision = revision or now
                yield [entry_of(kv) for kv in found.kvs], revision
                after = found.kvs[-1].key + b"\0" if found.more and found.kvs else None

    async def stats(self, deadline: float) -> Figures:
        """Return the few figures that etcd has."""
        revision = await self.members.current_revision(deadline)
        status = await self.members.ask("Maintenance/Status", {}, deadline=deadline, what="stats")
        return Figures(
            figures={
                "store_id": self.members.identity.cluster_id,
                "revision": revision,
                "version": status.version,
                "stored_bytes": status.dbSize,
                "leader": f"{status.leader:x}",
                "member": f"{status.header.member_id:x}",
            }
        )

    async def count(self, request: Count, guard: tuple[Condition, ...], deadline: float) -> Counted:
        """Count the keys that start with a prefix."""
        asked = [range_of(span, count_only=True) for span in key_spans(request.prefix, self.hidden)]
        replies, revision = await self.read(guard, asked, deadline)
        return Counted(count=sum(reply.count for reply in replies), revision=revision)

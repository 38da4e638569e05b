"""Shell: reads at an etcd cluster, each at one revision, however many requests it takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeAlias

from store.etcd.codec import Failure, FailureKind, broken, entry_in, entry_of, range_of, spans
from store.etcd.transactions import nested, unnested
from store.messages import Condition, Count, Counted, Entry, Figures, List, Listing

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from store.etcd.codec import Fields
    from store.etcd.members import Members
    from store.etcd.rpc import etcd_pb2 as pb

__all__ = ["Reads"]

GETS_MOST: Final = 100
"""Keys read in one request; etcd takes 128 operations."""

PAGE: Final = 1_000
"""Keys listed in one request."""

Asked: TypeAlias = "list[Fields]"  # inside the class below, `list` is a method
Ranges: TypeAlias = "list[pb.RangeResponse]"
Entries: TypeAlias = "list[Entry]"
MaybeEntries: TypeAlias = "list[Entry | None]"


class Reads:
    """What one client reads.

    Args:
        members: Whom to ask.
        hidden: What the keys start with that are not shown: those of receipts.
    """

    def __init__(self, members: Members, hidden: str) -> None:
        self.members = members
        self.hidden = hidden

    async def read(self, guard: Sequence[Condition], asked: Asked, deadline: float) -> tuple[Ranges, int]:
        """Read several ranges at one revision; return what each found, and the revision."""
        if not guard and len(asked) == 1:
            reply = await self.members.ask("KV/Range", asked[0], deadline=deadline, what="reading")
            return [reply], reply.header.revision
        requests: Asked = [{"request_range": each} for each in asked]
        body = {"success": nested(guard, requests, []) if guard else requests}
        reply = await self.members.ask("KV/Txn", body, deadline=deadline, what="reading")
        responses: Sequence[pb.ResponseOp] = reply.responses
        if guard:
            held, responses = unnested(guard, responses)
            if not held:
                raise broken(guard)
        return [response.response_range for response in responses], reply.header.revision

    async def get_many(self, keys: Sequence[str], guard: tuple[Condition, ...], deadline: float) -> Listing:
        """Read several keys at one revision: that of the first request, if it takes several."""
        while True:
            entries: MaybeEntries = []
            revision = 0
            try:
                for at in range(0, max(len(keys), 1), GETS_MOST):
                    pinned = {"revision": revision} if revision else {}
                    asked = [range_of(key, **pinned) for key in keys[at : at + GETS_MOST]]
                    replies, now = await self.read(() if revision else guard, asked, deadline)
                    revision = revision or now
                    entries.extend(map(entry_in, replies))
            except Failure as failure:
                if failure.trouble is not FailureKind.COMPACTED:
                    raise
            else:
                return Listing(entries=tuple(entries), revision=revision)

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
                entries = tuple(entry for page, _ in pages for entry in page)
                return Listing(entries=entries, revision=pages[-1][1])

    async def pages(
        self, prefix: str, guard: tuple[Condition, ...], deadline: float, *, keys_only: bool = False
    ) -> AsyncIterator[tuple[Entries, int]]:
        """Yield all entries under a prefix, sorted, in pieces of one revision, each with that revision."""
        revision = 0
        for first, last in spans(prefix, self.hidden):
            after: bytes | None = first
            while after is not None:
                pinned = {"revision": revision} if revision else {}
                asked = range_of((after, last), limit=PAGE, keys_only=keys_only, **pinned)
                replies, now = await self.read(() if revision else guard, [asked], deadline)
                revision = revision or now
                entries = [entry_of(kv) for kv in replies[0].kvs]
                yield entries, revision
                more = replies[0].more and entries
                after = entries[-1].key.encode(errors="surrogateescape") + b"\0" if more else None

    async def stats(self, deadline: float) -> Figures:
        """Return the few figures that etcd gives."""
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
        asked = [range_of(span, count_only=True) for span in spans(request.prefix, self.hidden)]
        replies, revision = await self.read(guard, asked, deadline)
        return Counted(count=sum(reply.count for reply in replies), revision=revision)

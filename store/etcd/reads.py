"""Shell: reads at an etcd cluster, each at one revision, however many requests it takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeAlias

from store.etcd.codec import FailureKind, broken, entry_in, entry_of, range_of, spans
from store.etcd.gateway import Failure
from store.etcd.transactions import Write, transaction
from store.messages import Condition, Count, Counted, Entry, Figures, List, Listing

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from store.etcd.codec import Json
    from store.etcd.gateway import Gateway

__all__ = ["Reads"]

GETS_MOST: Final = 100
"""Keys read in one request; etcd takes 128 operations."""

PAGE: Final = 1_000
"""Keys listed in one request."""

Jsons: TypeAlias = "list[Json]"  # inside the class below, `list` is a method
Entries: TypeAlias = "list[Entry]"
MaybeEntries: TypeAlias = "list[Entry | None]"


class Reads:
    """What one client reads.

    Args:
        gateway: Where to ask.
        hidden: What the keys start with that are not shown: those of receipts.
    """

    def __init__(self, gateway: Gateway, hidden: str) -> None:
        self.gateway = gateway
        self.hidden = hidden

    async def read(self, guard: Sequence[Condition], asked: Jsons, deadline: float) -> tuple[Jsons, int]:
        """Read several ranges at one revision; return what each found, and the revision."""
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

    async def get_many(self, keys: Sequence[str], guard: tuple[Condition, ...], deadline: float) -> Listing:
        """Read several keys at one revision: that of the first request, if it takes several."""
        while True:
            entries: MaybeEntries = []
            revision = 0
            try:
                for at in range(0, max(len(keys), 1), GETS_MOST):
                    pinned = {"revision": str(revision)} if revision else {}
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
                pinned = {"revision": str(revision)} if revision else {}
                asked = range_of((after, last), limit=str(PAGE), keys_only=keys_only, **pinned)
                replies, now = await self.read(() if revision else guard, [asked], deadline)
                revision = revision or now
                kvs = replies[0].get("kvs", [])
                entries = [entry_of(kv) for kv in kvs]
                yield entries, revision
                more = replies[0].get("more") and entries
                after = entries[-1].key.encode(errors="surrogateescape") + b"\0" if more else None

    async def stats(self, deadline: float) -> Figures:
        """Return the few figures that etcd gives."""
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

    async def count(self, request: Count, guard: tuple[Condition, ...], deadline: float) -> Counted:
        """Count the keys that start with a prefix."""
        asked = [range_of(span, count_only=True) for span in spans(request.prefix, self.hidden)]
        replies, revision = await self.read(guard, asked, deadline)
        return Counted(count=sum(int(reply.get("count", 0)) for reply in replies), revision=revision)

"""Shell: writes to an etcd cluster: sent again until they are answered, and done once.

Each write leaves a receipt, as `transactions` explains. When an answer was lost, the receipt says what came of the
write (`_recovered`). If the receipts' lease has lapsed before an answer could be had, nobody can know any more, and the
caller is told so.

**Leases that a transaction grants** are granted just before it; but for those on which it creates a key unless that is
there. The guess is that it is, as for all but the first who come, and with it the lease: then nothing need be granted.
If it is not, etcd does nothing, and says that a lease is missing.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import anyio

from store.errors import ConnectionLost, LeaseNotFound, StoreError, StoreTimeoutError
from store.etcd import leases as leases_of
from store.etcd.codec import Failure, NoSpace, broken
from store.etcd.receipts import HANG_UP_WITHIN
from store.etcd.rpc.extra import etcd_pb2 as pb
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
from store.messages import Create, Put, Revoke, Transact

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from store.etcd.codec import Fields
    from store.etcd.members import Members, RetryState
    from store.etcd.reads import Reads
    from store.etcd.receipts import Receipts
    from store.etcd.transactions import Outcome
    from store.messages import Condition, Entry, Request, Response

__all__ = ["Writes"]


class Writes:
    """What one client writes.

    Args:
        reads: The same client's.
        receipts: On which its writes rest.
    """

    def __init__(self, reads: Reads, receipts: Receipts) -> None:
        self._reads = reads
        self._members = reads.members
        self._receipts = receipts

    async def write(
        self, request: Request[Any], guard: tuple[Condition, ...], deadline: float, doubt: RetryState
    ) -> Response:
        """Carry out a write once, and give its response."""
        write = normal(request, guard)
        leases: list[int] = []
        grants = _Grants(self._members, request, deadline)
        own = next(filter(lambda it: it in grants or self._receipts.is_writers(it), _leases(write, Put)), None)
        try:
            write, leases = await self._on_leases(write, deadline)
            done = await self._until_done(write, grants, own, deadline, doubt)
        except BaseException:
            await self._revoke(leases)
            raise
        if done.refused:
            await self._revoke(leases)
            raise broken(guard)
        branch = write.then if done.succeeded else write.otherwise
        used = {operation.lease for operation in branch.operations if isinstance(operation, Put)}
        await self._revoke([lease for lease in leases if lease not in used])
        return answer(request, done)

    async def _on_leases(self, write: Write, deadline: float) -> tuple[Write, list[int]]:
        """Return the write with a new lease for each put that has a TTL; and these leases."""
        leases = []
        branches = []
        for branch in (write.then, write.otherwise):
            operations = list(branch.operations)
            for place, operation in enumerate(operations):
                if isinstance(operation, Put) and operation.ttl is not None:
                    lease = (await leases_of.grant(self._members, operation.ttl, deadline)).lease
                    leases.append(lease)
                    operations[place] = Put(operation.key, operation.value, lease=lease)
            branches.append(replace(branch, operations=tuple(operations)))
        return replace(write, then=branches[0], otherwise=branches[1]), leases

    async def _revoke(self, leases: Sequence[int]) -> None:
        """Revoke what turned out not to be needed; what cannot be revoked lapses."""
        with anyio.move_on_after(HANG_UP_WITHIN, shield=True):
            for lease in leases:
                with contextlib.suppress(StoreError, Failure):
                    await leases_of.call(self._members, Revoke(lease=lease), anyio.current_time() + HANG_UP_WITHIN)

    async def _until_done(
        self, write: Write, grants: _Grants, own: int | None, deadline: float, doubt: RetryState
    ) -> Outcome:
        """Carry out a write; again and again if what it adds to changes meanwhile."""
        await grants.make(_leases(write, Put).keys() - _leases(write, Create).keys())
        keys = list(dict.fromkeys((*rests_on(write.then), *rests_on(write.otherwise))))
        entries: dict[str, Entry | None] = {}
        if keys:
            listing = await self._reads.get_many(keys, (), deadline)
            entries.update(zip(keys, listing.entries, strict=True))
        while True:
            now = write
            if keys:
                now = replace(write, then=resolved(write.then, entries), otherwise=resolved(write.otherwise, entries))
            done = await self._once(now, grants, own, deadline, doubt)
            if not done.stale:
                return done
            doubt.any = False  # that it was found stale is an answer: nothing was done
            if done.reread:
                entries.update(done.reread)
            else:
                listing = await self._reads.get_many(keys, (), deadline)
                entries.update(zip(keys, listing.entries, strict=True))

    async def _once(
        self, write: Write, grants: _Grants, own: int | None, deadline: float, doubt: RetryState
    ) -> Outcome:
        """Send a write until it is answered, so that it is done once."""
        taken: Receipt | None = None
        while True:
            receipt = taken = taken or await self._receipts.take(deadline, on=own)
            fenced = False

            def body(receipt: Receipt = receipt) -> Fields:
                nonlocal fenced
                fenced = doubt.any
                return transaction(write, receipt, hidden=self._reads.hidden, fence=fenced)

            try:
                reply = await self._members.ask("KV/Txn", body, deadline=deadline, what="writing", doubt=doubt)
            except NoSpace:
                if not write.only_deletes or doubt.any:
                    raise
                return await self._delete_without_receipt(write, deadline, doubt)
            except LeaseNotFound:
                if await grants.make(_leases(write, Create)):
                    continue  # with the same receipt: an earlier copy may still be on its way
                if doubt.any:
                    raise _nobody_knows(self._members.name) from None
                if await self._receipts.stand(receipt, deadline):
                    raise
                taken = None  # it was the receipts' lease that has lapsed
                continue
            except StoreError as error:
                if not doubt.any or isinstance(error, ConnectionLost | StoreTimeoutError):
                    raise
                raise ConnectionLost(str(error), maybe_applied=True) from error
            done = outcome(write, receipt, reply, hidden=self._reads.hidden, fence=fenced)
            if done.mark is None and not doubt.any:
                # Its lease has lapsed while we slept, and nothing was done.
                await self._receipts.stand(receipt, deadline)
                taken = None
                continue
            if done.mark is None:
                done = await self._recovered(write, receipt, done.found, deadline)
            self._receipts.give_back(replace(receipt, revision=done.receipt))
            return done

    async def _recovered(self, write: Write, receipt: Receipt, found: Entry | None, deadline: float) -> Outcome:
        """Return what came of an attempt whose answer was lost: its receipt says which way it went."""
        if found is None or found.mod_revision <= receipt.revision:
            raise _nobody_knows(self._members.name)
        body = recovery(write, found, hidden=self._reads.hidden)
        try:
            reply = await self._members.ask("KV/Txn", body, deadline=deadline, what="reading", doubt=None)
        except Failure:  # it was compacted meanwhile: what was done is known, and what it found is not
            raise _nobody_knows(self._members.name) from None
        return recovered(write, found, reply, hidden=self._reads.hidden)

    async def _delete_without_receipt(self, write: Write, deadline: float, doubt: RetryState) -> Outcome:
        """Delete where there is no space for as much as a receipt; sent once, since twice might delete more.

        Until 3.4.20 and 3.5.7 a full etcd took no transaction at all, not even one that only deletes, and a plain
        deletion always (etcd-io/etcd#13429): so what is no more than that is sent as that.
        """
        body = transaction(write, None, hidden=self._reads.hidden)
        plain = body["success"][0].get("request_delete_range") if len(body["success"]) == 1 else None
        method, fields = ("KV/Txn", body) if plain is None else ("KV/DeleteRange", plain)
        reply = await self._members.ask(method, fields, deadline=deadline, what="deleting", doubt=doubt, once=True)
        if plain is not None:
            deleted = pb.ResponseOp(response_delete_range=reply)
            reply = pb.TxnResponse(header=reply.header, succeeded=True, responses=[deleted])
        return outcome(write, None, reply, hidden=self._reads.hidden)


class _Grants:
    """The leases that a transaction grants, each once it is known to be needed; one that was not is not there."""

    def __init__(self, members: Members, request: Request[Any], deadline: float) -> None:
        self._members, self._deadline = members, deadline
        self._to_make = {grant.id: grant.ttl for grant in request.grants} if isinstance(request, Transact) else {}

    def __contains__(self, lease: int) -> bool:
        return lease in self._to_make

    async def make(self, leases: Collection[int]) -> bool:
        """Grant these, as far as they were not; return whether there were any."""
        needed = self._to_make.keys() & set(leases)
        for lease in needed:
            await leases_of.grant(self._members, self._to_make[lease], self._deadline, id=lease)
            del self._to_make[lease]  # from now on others may put keys on it: if it is not needed after all, it lapses
        return bool(needed)


def _leases(write: Write, kind: type[Put | Create]) -> dict[int, None]:
    """Return the leases on which a write puts keys, or creates them; a set that keeps its order."""
    operations = (*write.then.operations, *write.otherwise.operations)
    return dict.fromkeys(one.lease for one in operations if isinstance(one, kind) and one.lease)


def _nobody_knows(name: str) -> ConnectionLost:
    return ConnectionLost(
        f"an answer by {name} was lost, and the receipt that would tell what it was is gone", maybe_applied=True
    )

"""A write to an etcd cluster: repeated until it is answered, and done once.

**Leases of a transaction** are granted just before it, except those of its `Create` operations: usually such a key
exists already, with its lease. If the key or lease is missing, etcd changes nothing, and the next attempt grants
the lease.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import anyio

from store.errors import ConnectionLost, LeaseNotFound, StoreError, StoreTimeoutError
from store.etcd import leases
from store.etcd.codec import Failure, NoSpace, one_entry
from store.etcd.receipts import HANG_UP_WITHIN
from store.etcd.rpc.grpc_import import etcd_pb2 as pb
from store.etcd.transactions import FENCED, answer, as_write, fence_op, plan_write, result_of, result_reads, transaction
from store.messages import Get, Put, Transact, TransactionResult

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from store.etcd.codec import Fields
    from store.etcd.members import DoubtFlag
    from store.etcd.reads import ReadOperations
    from store.etcd.receipts import WriteReceipts
    from store.etcd.transactions import Known, Operations, Plan, Receipt
    from store.messages import Condition, Request, Response


class WriteAttempts:
    """One write on condition of `guard`; `doubt` records if an unanswered attempt may have done it."""

    def __init__(
        self,
        reads: ReadOperations,
        receipts: WriteReceipts,
        request: Request[Any],
        guard: tuple[Condition, ...],
        deadline: float,
        doubt: DoubtFlag,
    ) -> None:
        self._reads, self._receipts = reads, receipts
        self._members, self._hidden = reads.members, reads.hidden
        self._request, self._deadline, self._doubt = request, deadline, doubt
        chosen = request.grants if isinstance(request, Transact) else ()
        self._to_grant = {grant.id: grant.ttl for grant in chosen if grant.id}
        self._passing: set[int] = set()  # ids of the leases made here, one per put with a `ttl`
        write = as_write(request, guard)
        puts = [each.lease for each in (*write.then, *write.otherwise) if isinstance(each, Put) and each.lease]
        own = (lease for lease in puts if lease in self._to_grant or lease == receipts.writers_lease)
        self._own_lease = next(own, None)
        self._write = replace(
            write, then=self._assign_ttl_leases(write.then), otherwise=self._assign_ttl_leases(write.otherwise)
        )
        self._looks = self._write.needed_reads()
        self._known: Known | None = None  # the results of `needed_reads` at `_revision`; None before these reads
        self._revision = 0
        self._must_look = not self._write.can_skip_reads
        self._receipt: Receipt | None = None  # the receipt of a write that may be under way
        self._renewed = False

    def _assign_ttl_leases(self, operations: Operations) -> Operations:
        """Put each key with a TTL on a lease of its own, to be granted later."""
        placed: list[Any] = list(operations)
        for place, operation in enumerate(operations):
            if isinstance(operation, Put) and operation.ttl is not None:
                lease = leases.new_lease_id()
                self._to_grant[lease] = operation.ttl
                self._passing.add(lease)
                placed[place] = Put(operation.key, operation.value, lease=lease)
        return tuple(placed)

    async def run(self) -> Response:
        """Carry out the write once, and return its response."""
        used: frozenset[int] = frozenset()
        try:
            plan, result = await self._plan_and_send()
            used = plan.leases
        finally:
            await self._revoke_unused(self._passing - self._to_grant.keys() - used)
        return answer(self._request, result)

    async def _plan_and_send(self) -> tuple[Plan, TransactionResult]:
        while True:
            if self._must_look and self._known is None:
                ranges, self._revision = await self._reads.read_many((), list(self._looks.values()), self._deadline)
                self._known = dict(zip(self._looks, map(one_entry, ranges), strict=True))
            plan = plan_write(self._write, self._known)
            if self._known is not None and not plan.changes_keys:
                found = tuple(self._known[each.key] for each in plan.operations if isinstance(each, Get))
                return plan, TransactionResult(plan.succeeded, found, self._revision)
            try:
                result = await self._send_plan(plan)
            except StoreError as error:
                if not self._doubt.any or isinstance(error, ConnectionLost | StoreTimeoutError):
                    raise
                raise ConnectionLost(str(error), maybe_applied=True) from error
            if result is not None:
                return plan, result

    async def _send_plan(self, plan: Plan) -> TransactionResult | None:
        """Send a plan until it is answered; return None if the write needs a new plan."""
        receipt = self._receipt = self._receipt or await self._receipts.acquire(self._deadline, on=self._own_lease)
        doubt, reads, fenced = self._doubt, self._looks.values(), False

        def body() -> Fields:
            nonlocal fenced
            fenced = doubt.any
            return fence_op(receipt, reads) if fenced else transaction(plan, receipt, reads, hidden=self._hidden)

        needed = plan.leases | {receipt.lease}
        try:
            await self._grant_leases(needed - plan.assumed)
            reply = await self._send_to_members("KV/Txn", body)
        except NoSpace:
            if doubt.any or not plan.only_deletes:
                raise
            return await self._delete_when_full(plan)
        except LeaseNotFound:
            if await self._grant_leases(needed):
                return None  # keep `_receipt`, as an earlier copy of the write may be under way
            if doubt.any:
                raise self._unknown_outcome_error() from None
            if self._renewed or receipt.lease != self._receipts.lease:
                raise
            self._renewed = True
            self._drop_lapsed_receipt(receipt)
            return None
        if reply.succeeded:
            self._release_receipt(receipt, reply.header.revision)
            if not fenced:
                return result_of(plan, reply.responses[1:], reply.header.revision, hidden=self._hidden)
        else:
            found = one_entry(reply.responses[0].response_range)
            if found is None and receipt.revision:
                if doubt.any:
                    raise self._unknown_outcome_error()
                self._drop_lapsed_receipt(receipt)  # the receipt's lease expired during a pause, and nothing was done
                return None
            revision = found.mod_revision if found is not None else 0
            self._release_receipt(receipt, revision)
            if found is not None and revision != receipt.revision and found.value != FENCED:
                return await self._recover_result(plan, revision)
        doubt.any = False  # certainly nothing was done
        self._note_entries(reply.responses[1:], reply.header.revision)
        return None

    async def _send_to_members(self, method: str, fields: Fields | Callable[[], Fields]) -> Any:
        return await self._members.ask(method, fields, deadline=self._deadline, what="writing", doubt=self._doubt)

    def _note_entries(self, responses: Sequence[pb.ResponseOp], revision: int) -> None:
        self._must_look = len(responses) < len(self._looks)
        if self._must_look:
            self._known = None
            return
        self._known = {key: one_entry(each.response_range) for key, each in zip(self._looks, responses, strict=True)}
        self._revision = revision

    def _release_receipt(self, receipt: Receipt, revision: int) -> None:
        self._receipts.release_for_reuse(replace(receipt, revision=revision))
        self._receipt = None

    def _drop_lapsed_receipt(self, receipt: Receipt) -> None:
        self._receipts.forget_lapsed_lease(receipt)
        self._receipt = None

    async def _recover_result(self, plan: Plan, revision: int) -> TransactionResult:
        try:
            reply = await self._send_to_members("KV/Txn", result_reads(plan, revision, hidden=self._hidden))
        except Failure:  # the revision is compacted: the write was done, but its result is unknown
            raise self._unknown_outcome_error() from None
        return result_of(plan, reply.responses, revision, hidden=self._hidden)

    async def _delete_when_full(self, plan: Plan) -> TransactionResult | None:
        """Delete without a receipt in a full cluster; only once, as a repetition might delete newer keys.

        Before 3.4.20 and 3.5.7, a full etcd accepted only deletions outside of transactions (etcd-io/etcd#13429).
        """
        body = transaction(plan, None, self._looks.values(), hidden=self._hidden)
        plain = body["success"][0].get("request_delete_range") if len(body["success"]) == 1 else None
        method, fields = ("KV/DeleteRange", plain) if plain and not plan.rests_on else ("KV/Txn", body)

        def fields_unless_in_doubt() -> Fields:
            if self._doubt.any:
                raise ConnectionLost(f"an answer by {self._members.name} was lost", maybe_applied=True)
            return fields

        reply = await self._send_to_members(method, fields_unless_in_doubt)
        if method == "KV/DeleteRange":
            responses = [pb.ResponseOp(response_delete_range=reply)]
        elif reply.succeeded:
            responses = reply.responses
        else:
            self._note_entries(reply.responses, reply.header.revision)
            return None
        return result_of(plan, responses, reply.header.revision, hidden=self._hidden)

    async def _grant_leases(self, needed: Iterable[int]) -> bool:
        to_grant = [lease for lease in needed if lease in self._to_grant]
        for lease in to_grant:
            await leases.grant_lease(self._members, self._to_grant[lease], self._deadline, id=lease)
            del self._to_grant[lease]  # the lease exists now; `run` revokes it if it is in `_passing` and unused
        return bool(to_grant)

    async def _revoke_unused(self, unused: Iterable[int]) -> None:
        """Revoke leases that were granted for puts that were not made; leases that are not revoked expire."""
        with anyio.move_on_after(HANG_UP_WITHIN, shield=True):
            for lease in unused:
                with contextlib.suppress(StoreError, Failure):
                    await leases.revoke_lease(self._members, lease, anyio.current_time() + HANG_UP_WITHIN)

    def _unknown_outcome_error(self) -> ConnectionLost:
        return ConnectionLost(
            f"an answer by {self._members.name} was lost, and the receipt that would tell what it was is gone",
            maybe_applied=True,
        )

"""The verbs of a node: the calls that its callers may make.

A verb is a coroutine function that runs in the node's loop, or a plain function that returns at once, in any thread.
Both handlers make methods of the verbs: by `awaited_method` in `handler`, and `blocking_method` in `blocking_handler`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from typing import TYPE_CHECKING, Any, Concatenate, Final, ParamSpec, TypeVar

import anyio

from rdzv.core.state import NodesLeft, NodesLost
from rdzv.core.stored import checked_text
from rdzv.errors import (
    RendezvousError,
    RendezvousSettingsError,
    RendezvousStateError,
    RoundSupersededError,
    SharedStoreTimeoutError,
    make_valid_exit_status,
    mark_run,
)
from rdzv.membership import round_exceeds_max_nodes
from rdzv.node.front.queries import Changes
from rdzv.node.front.sharing import shared_store
from rdzv.node.run.run import Run
from rdzv.node.run.status import read_round_members
from store import ConnectionLost, Put, StoreError, when
from store.net.tasks import cancel_and_wait

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from rdzv.core.round import Participant
    from rdzv.membership import Membership
    from rdzv.node.node import Node
    from store import Store

P = ParamSpec("P")
T = TypeVar("T")
Verb = TypeVar("Verb", bound="Callable[..., Any]")

WHY_BYTES_MOST = 200
CAME: Final = "rdzv/counting/came"
ANSWER: Final = "rdzv/counting/answer"
GO_ON: Final = b"go on"
MEET_AGAIN: Final = b"meet again"

_MUST_END: set[object] = set()


def shielded(verb: Verb) -> Verb:
    """Mark a verb that must complete even if its caller is cancelled or interrupted."""
    _MUST_END.add(verb)
    return verb


def is_shielded_verb(verb: object) -> bool:
    """Return True if a verb is marked by `shielded`."""
    return verb in _MUST_END


@shielded
async def leave(node: Node) -> None:
    """Leave this round; the node may join again. If the node is in no round, do nothing.

    Raises:
        RendezvousStateError: A call of `next_rendezvous` is under way; cancel that instead.
    """
    await node.leave()


async def num_nodes_waiting(node: Node) -> int:
    """Return how many waiting nodes the next round would admit now, by the coordinator's last report."""
    head, membership = (await node.get_session()).follower.head, node.membership
    if head.progress is None or (membership is not None and head.progress.round != membership.round.number):
        return 0
    return head.progress.waiting


def num_nodes_changed(node: Node, *, on_loss: bool = True) -> int:
    """Return how many nodes wait to join, or have gone. If the number is above 0, the members should meet again.

    The call asks no store, so a loop in any thread may repeat it many times a second. Members that have died or left
    since the round completed, and this node itself if it was dropped or its store is lost, count unless `on_loss` is
    False. Waiting nodes count if a next round would admit them now. A resize below the round's size, or an ending
    store, or both, count as one node.

    Returns:
        0 if this node has left its round or had none, or if the run is closed: then the members cannot meet again.
    """
    membership, has_lost_store = node.membership, node.has_lost_store
    if membership is None or node.head.closed is not None:
        return 0
    if membership.over is not None or has_lost_store:
        return int((membership.dropped or has_lost_store) and on_loss)
    head, progress = membership.head, membership.coordinator_report
    announced = int(head.moves or round_exceeds_max_nodes(membership.round, head.resized))
    if progress is None:
        return announced
    return announced + progress.waiting + (progress.lost + progress.departed if on_loss else 0)


def leaves_because(node: Node, why: str) -> None:
    """Set this node's reason for leaving, which `rdzv status` and the history will show."""
    node.part.leaves_because = checked_text("why", why, most=WHY_BYTES_MOST)


async def roster(node: Node, membership: Membership) -> list[Participant]:
    """Return all members of a round, by rank, with address, payload and attributes."""
    return await node.call_store(lambda store: read_round_members(store, node.keys, membership.round))


@shielded
async def keep(node: Node, key: str, data: bytes, *, in_round: int | None = None) -> None:
    """Keep `data`, a small state such as a sampler's position, in the run as `key`, from round to round.

    `in_round` is the number of the caller's round; by default the present one.

    Raises:
        RoundSupersededError: This node is in no round, or `in_round` is not its present round.
    """
    checked_text("key", key)
    link, membership, keys = await node.get_session(), node.membership, node.keys
    over = f"node {node.node_id} is no longer in that round of run {node.run_id}; nothing was kept"
    if membership is None or in_round not in {None, membership.round.number}:
        raise mark_run(node.run_id, RoundSupersededError(over))
    unchanged = membership.fence(keys)

    async def write_kept_data(store: Store) -> bool:
        put = Put(keys.kept_item(key), data, lease=(await link.run_lease()).id)
        return (await store.transact(when=unchanged, then=(put,))).succeeded

    if not await node.call_store(write_kept_data):
        raise mark_run(node.run_id, RoundSupersededError(over))


@shielded
async def accuse(node: Node, rank: int, why: str, *, in_round: int | None = None) -> None:
    """Accuse the member with this rank of not answering, for example after a failed collective.

    `rdzv status` shows the accusation. A member with two accusers, or one if the store has lost contact with it, counts
    as lost, although its lease is valid. `in_round` is the round in which it has that rank; by default the present one.

    Raises:
        RoundSupersededError: This node is in no round, or `in_round` is not its present round.
        RendezvousStateError: The round has no such rank, or it is this node's own.
    """
    why = checked_text("why", why)
    if not hasattr(rank, "__index__"):
        raise RendezvousSettingsError(f"rank={rank!r:.80} must be a whole number")
    await node.get_session()
    membership = node.membership
    over = f"node {node.node_id} is no longer in that round of run {node.run_id}, and cannot accuse"
    if membership is None or membership.over is not None or in_round not in {None, membership.round.number}:
        raise mark_run(node.run_id, RoundSupersededError(over))
    if not 0 <= rank < membership.round.size or rank == membership.rank:
        raise RendezvousStateError(
            f"rank {rank} cannot be accused by rank {membership.rank}: name another one from 0 to "
            f"{membership.round.size - 1}"
        )
    accused = (await roster(node, membership))[rank].node_id
    if not await node.call_store(lambda store: _make_run(node, store).accuse(membership, accused, why)):
        raise mark_run(node.run_id, RoundSupersededError(over))


async def all_here(node: Node, *, timeout: float) -> bool:
    """Wait until every member of this round has called `all_here`; return False if a member leaves or dies first.

    PyTorch's agents call this before they block on each other, as a member can die before it learns of its round.
    All callers get the same answer: True once the last member has called, False if a member notices a loss or
    departure first. If a live member does not call in time, return True: the caller's next step will time out.

    Raises:
        RendezvousConnectionError: The store cannot be reached.
    """
    link, membership = await node.get_session(), node.membership
    if membership is None:
        return True
    shared = shared_store(node, membership, link.store)
    membership.call_when_over(shared.end_calls)
    store = shared.ignoring_losses()  # waits in this store continue when members are lost
    store.set_timeout(timeout)

    async def end_wait_on_member_loss() -> None:
        with contextlib.suppress(RendezvousError, StoreError):  # `all_here` itself fails with the same error
            async with Changes(node, node.get_session) as changes:
                async for change in changes:
                    if isinstance(change, NodesLost | NodesLeft):
                        break
            await store.compare_set(ANSWER, "", MEET_AGAIN)

    answering = asyncio.create_task(end_wait_on_member_loss(), name=f"notice members of {node.run_id} that leave early")
    try:
        # If this call is cancelled and repeated, count the member only once.
        if membership.counting is None or _has_task_failed(membership.counting):
            membership.counting = asyncio.create_task(store.add(CAME, 1), name=f"come to the muster of {node.run_id}")
            membership.counting.add_done_callback(_has_task_failed)
        if await asyncio.shield(membership.counting) >= membership.round.size:
            await store.compare_set(ANSWER, "", GO_ON)
        return await store.get(ANSWER) == GO_ON
    except SharedStoreTimeoutError:
        return True
    except RoundSupersededError:
        return False  # this member was dropped
    finally:
        await cancel_and_wait(answering)


def _has_task_failed(task: asyncio.Task[int]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)


@shielded
async def change_counts(node: Node, change: Callable[[bytes], bytes]) -> bytes:
    """Change the run's shared counters; return them. If another node was faster, `change` runs again."""
    if node.membership is None:
        raise RendezvousStateError(f"node {node.node_id} has been in no round of run {node.run_id}")
    key = node.keys.tally
    link = await node.get_session()

    async def change_shared_counters(store: Store) -> bytes:
        await node.carry_over_run(link)  # if a store was lost, write its counters to the new store
        round = node.head.round
        # The counters end with the round's lease.
        lease = round.lease if round is not None else (await link.run_lease()).id
        while True:
            there = await store.get(key)
            before, at = (b"", 0) if there is None else (there.value, there.mod_revision)
            after = change(before)
            if after == before:
                return after
            # Nodes watch the copy. Earlier releases know only the first key.
            writes = [Put(key, after, lease=lease), Put(node.keys.tally_copy, after, lease=lease)]
            if (await store.transact(when=[when.mod_revision(key) == at], then=writes)).succeeded:
                return after

    return await node.call_store(change_shared_counters)


async def is_closed(node: Node) -> bool:
    """Return True if the run is known to be closed.

    Raises:
        RendezvousConnectionError: No closing is known, and the store is disconnected.
    """
    link = await node.get_session()
    if link.follower.head.closed is not None:
        return True
    if not link.store.connected:
        problem = f"whether the run is closed is not known: {node.settings.endpoint.url} is out of reach"
        raise node.translate_store_error(ConnectionLost(problem, maybe_applied=False))
    return False


async def store_host(node: Node) -> str:
    """Return in words which process serves the store; "" for `rdzv serve`, for etcd, and if unknown."""
    entry = await node.call_store(lambda store: store.get(node.keys.host))
    return entry.value.decode(errors="replace") if entry is not None else ""


@shielded
async def set_closed(node: Node, reason: str = "") -> None:
    """Close the run for every node. The first reason is shown for as long as the store keeps the run."""
    await _close_run(node, reason)


@shielded
async def give_up(node: Node, reason: str, *, status: int = 0) -> None:
    """Close the run because it cannot continue. Every launcher exits with `status`; see `GiveUp`."""
    status, remark = make_valid_exit_status(status)
    reason = reason + remark if remark else reason
    await _close_run(node, reason, given_up=True, status=status)


async def _close_run(node: Node, reason: str, **verdict: Any) -> None:
    try:
        with anyio.fail_after(node.settings.close_timeout):
            link = await node.get_session()
            closed = await _make_run(node, link.store).set_closed(reason, lease=await link.run_lease(), **verdict)
            link.follower.note_run_closed(closed)  # let the caller see the closing before the watch delivers it
    except (StoreError, TimeoutError) as error:
        raise node.translate_store_error(error) from error


def _make_run(node: Node, store: Store) -> Run:
    return Run(store, node.keys, by=node.node_id, keep=node.settings.closed_ttl, head=lambda: node.head)


def run_method_as_verb(
    call: Callable[Concatenate[Run, P], Coroutine[Any, Any, T]], *, is_shielded_verb: bool = False
) -> Callable[Concatenate[Node, P], Coroutine[Any, Any, T]]:
    """Make a verb of a method of `Run`."""

    @functools.wraps(call)
    async def call_run_method(node: Node, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await node.call_store(lambda store: call(_make_run(node, store), *args, **kwargs))

    return shielded(call_run_method) if is_shielded_verb else call_run_method


resize = run_method_as_verb(Run.resize, is_shielded_verb=True)
ban = run_method_as_verb(Run.ban, is_shielded_verb=True)
unban = run_method_as_verb(Run.unban, is_shielded_verb=True)
answer_operator = run_method_as_verb(Run.answer_operator, is_shielded_verb=True)
status = run_method_as_verb(Run.status)
status_and_cost = run_method_as_verb(Run.status_and_cost)
history = run_method_as_verb(Run.history)
ping = run_method_as_verb(Run.ping)


@shielded
async def drain(node: Node, within: float = 120.0, reason: str = "", *, node_id: str | None = None) -> None:
    """Announce that this node, or another one, will leave; first the members of its round stop together.

    Members that use `rounds()` stop at one agreed `check`; for other members `changes()` gives `Draining`. If the node
    is still in the round after `within` seconds, it is removed, which the others see as a loss.

    Raises:
        RendezvousStateError: No such node is in the run, or the run is moving to the next store.
    """
    await run_method_as_verb(Run.drain)(node, node.node_id if node_id is None else node_id, within, reason)


async def restore(node: Node, key: str) -> bytes | None:
    """Return the data that a member last kept as `key`, or None."""
    checked_text("key", key)
    return await run_method_as_verb(Run.read_kept)(node, key)

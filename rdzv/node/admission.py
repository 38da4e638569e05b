"""Shell: who may join: a node's health check and the bans on it (promise R17), the settings all must come with (R18).

A ban is a key under the head, so that every node hears of it; a node's arrival is conditional on there being none for
it. Why a node failed its health check lies beside the run, for `status` to show.

Everything that is written here is on the run's own lease (promise R19), which `take_run_lease` finds or makes.
"""

from __future__ import annotations

import contextlib
import inspect
from typing import TYPE_CHECKING, Any

import anyio

from rdzv.config.config_errors import refuse, shown
from rdzv.config.settings import describe_difference
from rdzv.config.value_types import NAME
from rdzv.core.state import Ban, Round, pack_settings, unpack_settings
from rdzv.errors import RendezvousRefusedError, RendezvousSettingsError, RendezvousStateError
from rdzv.node.status import find_member, read_nodes
from store import ConditionFailed, Delete, Lease, LimitExceeded, Put, StoreError, when

if TYPE_CHECKING:
    from collections.abc import Callable

    from rdzv.config.settings import Settings
    from rdzv.core.keys import Keys
    from rdzv.core.stopping import Drain
    from store import Entry, Store

__all__ = [
    "agree_on_settings",
    "check_node_id",
    "examine",
    "is_too_long",
    "put_ban",
    "put_drain",
    "report_health",
    "take_run_lease",
]

RUN_TTL_LEAST = 60.0  # seconds; a shorter closed_ttl must not end a run between two of its nodes
UNFIT_MOST = 64  # nodes of a run of which it is kept that they failed their health check, the last ones
GIVE_BACK_WITHIN = 2.0  # seconds to revoke a lease that turned out not to be needed


def check_node_id(node_id: str) -> None:
    """Refuse what no node can be called; a ban of it would look as if it did something.

    Raises:
        RendezvousSettingsError: It says what a node may be called.
    """
    try:
        NAME.convert(node_id)
    except (TypeError, ValueError):
        refuse(f"node_id={shown(node_id)} must be {NAME.limit}")


# ------------------------------------------------------------------------------------------------- the run's lease


async def take_run_lease(store: Store, keys: Keys, closed_ttl: float) -> Lease:
    """The run's one lease: the one that its first writer has made, or a new one if nobody has.

    A key that holds nothing but the lease's TTL says which one it is. Of several that come first at once, one writes
    it; the others give theirs back, so that no attempt to join a run leaves a lease behind.

    Raises:
        RendezvousSettingsError: The store takes no lease of `closed_ttl`.
    """
    entry = await store.get(keys.lease)
    while entry is None:
        ttl = max(closed_ttl, RUN_TTL_LEAST)
        try:
            lease = await store.grant(ttl)
        except LimitExceeded as error:
            if not is_too_long(error):
                raise
            raise RendezvousSettingsError(
                f"closed_ttl={closed_ttl:g} s is not to be had: {error}; lower closed_ttl"
            ) from error
        try:
            made = await store.compare_and_set(keys.lease, f"{lease.ttl:g}".encode(), expected_revision=0, lease=lease)
        except BaseException:
            await _give_back(lease)
            raise
        if made.succeeded:
            return lease
        await _give_back(lease)
        entry = made.entry
    assert entry.lease is not None, "the key is written on the lease that it tells of"
    return Lease(store, id=entry.lease, ttl=float(entry.value))


async def _give_back(lease: Lease) -> None:
    with anyio.move_on_after(GIVE_BACK_WITHIN, shield=True), contextlib.suppress(StoreError):
        await lease.revoke()


# ------------------------------------------------------------------------------------------------- the health check


async def examine(check: Callable[[], Any]) -> str | None:
    """Run the user's health check, where it may run: why it failed, or None.

    It fails if it raises, or returns anything but None and True.
    """
    try:
        verdict = check()
        if inspect.isawaitable(verdict):
            verdict = await verdict
    except Exception as error:  # noqa: BLE001  whatever goes wrong in a health check is a failed one
        verdict = f"{type(error).__name__}: {error}"
    if verdict is None or verdict is True:
        return None
    return f"failed its health check: {verdict}" if isinstance(verdict, str) else "failed its health check"


async def report_health(store: Store, keys: Keys, lease: Lease, *, node_id: str, failure: str | None) -> None:
    """Let everybody read why a node stays out, or that it does not.

    Raises:
        RendezvousRefusedError: It failed its health check.
    """
    if failure is None:
        await store.delete(keys.unfit(node_id))  # it may have failed before
        return
    key = keys.unfit(node_id)
    # Whoever is started again and again under new names must not fill the store of all.
    others = [entry for entry in await store.list(keys.unfits, keys_only=True) if entry.key != key]
    others.sort(key=lambda entry: entry.mod_revision, reverse=True)
    forgotten = [Delete(entry.key) for entry in others[UNFIT_MOST - 1 :]]
    await store.transact(then=[Put(key, failure.encode(), lease=lease.id), *forgotten])
    raise RendezvousRefusedError(f"run {keys.run_id}: node {node_id} {failure}")


# ----------------------------------------------------------------------------------------------------- the settings


async def agree_on_settings(
    store: Store, keys: Keys, settings: Settings, lease: Lease, *, incarnation: str, there: Entry | None
) -> bytes:
    """See to it that the run has this node's settings; if nobody else is in it, they are rewritten.

    They are compared field by field, so that another release may know a field more; what the run has is then taken as
    it stands. Every node that arrives writes the settings again, unchanged: so a rewriting, which is conditional on
    their revision, fails if anybody has arrived since it looked.

    Args:
        store: The store.
        keys: The run's keys.
        settings: This node's.
        lease: The run's.
        incarnation: This node's; another process of the same name is somebody else.
        there: Those of the run, as they were a moment ago.

    Returns:
        What to expect in the store from now on.

    Raises:
        RendezvousSettingsError: Others are in it, with other settings.
    """
    ours = pack_settings(settings.shared())
    if there is None:
        await store.compare_and_set(keys.settings, ours, expected_revision=0, lease=lease)
    elif there.value != ours:
        difference = describe_difference(settings.shared(), unpack_settings(there.value))
        if not difference:
            return there.value
        records = (await read_nodes(store, keys)).values()
        if any(record.incarnation != incarnation for record in records):
            raise RendezvousSettingsError(f"run {keys.run_id} was started with other settings: {difference}")
        await store.compare_and_set(keys.settings, ours, expected_revision=there.mod_revision, lease=lease)
    return ours


# ------------------------------------------------------------------------------------------------------------- bans


def is_too_long(error: LimitExceeded) -> bool:
    """Whether a lease was refused for its TTL, and not for want of room: the store's message names the limit."""
    return "lease_ttl_max" in str(error)


async def put_drain(store: Store, keys: Keys, node_id: str, drain: Drain) -> None:
    """Announce that a node is to leave. It stands on the node's own lease, so that it goes with the node.

    Raises:
        RendezvousStateError: No such node is in the run.
    """
    record = await store.get(keys.node(node_id))
    if record is None:
        raise RendezvousStateError(f"no node {node_id} is in run {keys.run_id}; `rdzv status` names those that are")
    await store.put(keys.draining(node_id), drain.pack(), lease=record.lease)


async def put_ban(store: Store, keys: Keys, node_id: str, ban: Ban, *, keep: float) -> None:
    """Ban a node until it is unbanned. If it waits, or the ban says now, its record goes at once.

    Otherwise it finishes its round.

    Args:
        store: The store.
        keys: The run's keys.
        node_id: Who is banned.
        ban: Why, and how.
        keep: Seconds for which the ban outlives the run's last node.
    """
    await store.put(keys.banned(node_id), ban.pack(), lease=await take_run_lease(store, keys, keep))
    key = keys.node(node_id)
    while (there := await store.get(key)) is not None:
        if not ban.now and await _is_live_member(store, keys, node_id, there.mod_revision):
            return
        with contextlib.suppress(ConditionFailed):  # it has just arrived again, or left: look again
            await store.delete(key, when=(when.mod_revision(key) == there.mod_revision,))


async def _is_live_member(store: Store, keys: Keys, node_id: str, arrival: int) -> bool:
    entry = await store.get(keys.round)
    if entry is None:
        return False
    round = Round.unpack(entry.value, revision=entry.mod_revision)
    return await find_member(store, keys, round, node_id=node_id, arrival=arrival) is not None

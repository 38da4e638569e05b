"""Shell: who may join: a node's health check and the bans on it (promise R17), the settings all must come with (R18).

A ban is a key under the head, so that every node hears of it; a node's arrival is conditional on there being none for
it. Why a node failed its health check lies beside the run, for `status` to show.

Everything that is written here is on the run's own lease (promise R19), which `take_run_lease` finds or makes.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import msgpack

from rdzv.config.config_errors import refuse, shown
from rdzv.config.endpoint import SCHEMES
from rdzv.config.resizing import describe_size, resize, sizes_of, was_resized_from
from rdzv.config.settings import describe_difference
from rdzv.config.value_types import ATTRIBUTES_BYTES_MAX, DURATION_MAX, NAME, TEXT
from rdzv.core.decision import Rules
from rdzv.core.ranks import order_named
from rdzv.core.round import Round
from rdzv.core.state import Ban, Closed, Unban, ban_name, pack_settings, unpack_settings
from rdzv.core.stopping import Resized
from rdzv.errors import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousRefusedError,
    RendezvousSettingsError,
    RendezvousStateError,
)
from rdzv.node.status import find_member, read_nodes
from store import ConditionFailed, Create, Delete, Entry, Get, Grant, Lease, LimitExceeded, Put, StoreError, when
from store.net.threads import Call
from store.printable import escaping

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from rdzv.config.settings import Settings
    from rdzv.core.keys import Keys
    from rdzv.core.stopping import Drain
    from store import Store, TransactionResult

__all__ = [
    "Agreed",
    "OverruledError",
    "agree_on_settings",
    "attribute_ban",
    "check_node_id",
    "examine",
    "examine_in",
    "grant_of_run",
    "lift_ban",
    "note_of_run",
    "put_ban",
    "put_ban_where",
    "put_drain",
    "refusal_of",
    "report_health",
    "resize_run",
    "take_run_lease",
    "take_settings",
]

T = TypeVar("T")

log: logging.Logger = escaping(logging.getLogger(__name__))

RUN_TTL_LEAST = 60.0  # seconds; a shorter closed_ttl must not end a run between two of its nodes
UNFIT_MOST = 64  # nodes of a run of which it is kept that they failed their health check, the last ones


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

    A key that holds nothing but the lease's TTL says which one it is. Those that come first at once grant the same one.

    Raises:
        RendezvousSettingsError: The store takes no lease of `closed_ttl`.
    """
    entry = await store.get(keys.lease)
    if entry is None:
        grant = grant_of_run(keys, closed_ttl, most=store.lease_ttl_max)
        try:
            made = await store.transact(then=(note_of_run(keys, grant),), grants=(grant,))
        except LimitExceeded as error:
            raise refusal_of(error, closed_ttl=closed_ttl) from error
        (there,) = made.results
        entry = there if isinstance(there, Entry) else None
        if entry is None:
            return Lease(store, id=grant.id or 0, ttl=grant.ttl)
    assert entry.lease is not None, "the key is written on the lease that it tells of"
    return Lease(store, id=entry.lease, ttl=float(entry.value))


def grant_of_run(keys: Keys, closed_ttl: float, *, most: float) -> Grant:
    """The run's lease, for the first transaction that writes anything of it; `most` is what the store grants."""
    return Grant(ttl=max(closed_ttl, min(RUN_TTL_LEAST, most)), id=keys.lease_id)


def note_of_run(keys: Keys, grant: Grant) -> Create:
    """The key that says which lease is the run's, and what its TTL is, unless it is there already."""
    return Create(keys.lease, f"{grant.ttl:g}".encode(), lease=grant.id)


def is_too_long(error: LimitExceeded) -> bool:
    """Whether a lease was refused for its TTL, and not for want of room: the store's message names the limit."""
    return "lease_ttl_max" in str(error)


def refusal_of(error: LimitExceeded, *, closed_ttl: float, ttl: float | None = None) -> StoreError | RendezvousError:
    """The error to raise if a store refuses leases: the setting that asks too much, or the error itself."""
    if not is_too_long(error):
        return error  # no room, or a disk that is full: that is not what this node was told to ask for
    if ttl is not None and f"ttl is {ttl:g} s" in str(error):
        return RendezvousSettingsError(f"ttl={ttl:g} s is not to be had: {error}; lower ttl")
    return RendezvousSettingsError(f"closed_ttl={closed_ttl:g} s is not to be had: {error}; lower closed_ttl")


# ------------------------------------------------------------------------------------------------- the health check


async def examine_in(there: asyncio.AbstractEventLoop, check: Callable[[], Any]) -> str | None:
    """Run the user's health check in the loop where it may run; one that hangs ends with whoever waits for it."""
    call = Call(examine(check), there)
    try:
        return await call
    finally:
        call.cancel()


async def examine(check: Callable[[], Any]) -> str | None:
    """Run the user's health check: why it failed, or None.

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
    key = keys.unfits + node_id
    if failure is None:
        await store.delete(key)  # it may have failed before
        return
    # Whoever is started again and again under new names must not fill the store of all.
    others = [entry for entry in await store.list(keys.unfits, keys_only=True) if entry.key != key]
    others.sort(key=lambda entry: entry.mod_revision, reverse=True)
    forgotten = [Delete(entry.key) for entry in others[UNFIT_MOST - 1 :]]
    await store.transact(then=[Put(key, failure.encode(), lease=lease.id), *forgotten])
    raise RendezvousRefusedError(f"run {keys.run_id}: node {node_id} {failure}")


# ----------------------------------------------------------------------------------------------------- the settings


class Agreed:
    """What the nodes of a run have agreed on, as far as this node knows, and the rules that follow from it.

    A run may be resized while it lives (`rdzv.config.resizing`); then this takes the run's numbers.

    Args:
        settings: This node's own, by which it may join.

    Attributes:
        value: What is expected in the store.
        rules: What that means to a coordinator.
    """

    def __init__(self, settings: Settings) -> None:
        self._run_id = settings.run_id
        self._ours = settings.shared()
        self._agreed = self._ours
        self.value: bytes = pack_settings(self._ours)
        self.rules: Rules = Rules(
            needed=settings.needed,
            capacity=settings.capacity,
            unit=settings.node_unit,
            last_call=settings.last_call_timeout,
            early_last_call=settings.early_last_call,
            order=order_named(settings.rank_order),
            expected=settings.expected,
            unit_within=settings.unit_within or "",
        )

    def take(self, there: bytes) -> str:
        """Go by what the run has, if this node can; else say in words how it differs from this node's own settings.

        They are compared field by field, so that another release may know a field more; what the run has is then taken
        as it stands.
        """
        theirs = unpack_settings(there)
        difference = describe_difference(self._ours, theirs)
        if difference and not was_resized_from(theirs, self._ours):
            return difference
        sizes = [(agreed["min_nodes"], agreed["max_nodes"]) for agreed in (self._agreed, theirs)]
        if sizes[0] != sizes[1]:
            log.warning(
                "run %s was resized to %s; this node uses these numbers now, instead of %s",
                self._run_id,
                describe_size(*sizes[1]),
                describe_size(*sizes[0]),
            )
        self._agreed, self.value = theirs, there
        needed, capacity = sizes_of(theirs)
        self.rules = replace(self.rules, needed=needed, capacity=capacity)
        return ""

    def forget(self) -> None:
        """Go by this node's own settings again: nobody is left who has agreed on others."""
        assert self.take(pack_settings(self._ours)) == "", "they do not differ from themselves"


async def agree_on_settings(
    store: Store, keys: Keys, agreed: Agreed, lease: Lease, *, incarnation: str, there: Entry | None
) -> None:
    """See to it that the run has this node's settings; if nobody else is in it, they are rewritten.

    A run that was resized keeps its numbers for nodes that were told the former ones, also where none is left in it.
    Every node that arrives writes the settings again, unchanged: so a rewriting, which is conditional on their
    revision, fails if anybody has arrived since it looked. And others may have rewritten them since `there` was read:
    so whoever is in the run then says nothing about `there`, and the next attempt to arrive sees what holds now.

    Raises:
        RendezvousSettingsError: Others are in it, with other settings.
    """
    if there is None:
        await store.compare_and_set(keys.settings, agreed.value, expected_revision=0, lease=lease)
    elif there.value != agreed.value and (difference := agreed.take(there.value)):
        records = (await read_nodes(store, keys)).values()
        if any(record.incarnation != incarnation for record in records):
            now = await store.get(keys.settings)
            if now is None or now.value != there.value:  # by value: each node that arrives writes the same ones again
                return
            raise RendezvousSettingsError(f"run {keys.run_id} was started with other settings: {difference}")
        agreed.forget()
        await store.compare_and_set(keys.settings, agreed.value, expected_revision=there.mod_revision, lease=lease)


async def check_prefix(store: Store, prefix: str) -> None:
    """Refuse to keep runs among the keys of another run: what stands there would be taken for that run's.

    Raises:
        RendezvousSettingsError: There is a run of that name.
    """
    parts = prefix.split("/")
    above = ["/".join(parts[:count]) for count in range(3, len(parts) + 1)]  # from "/rdzv/job-7" on
    if not above or prefix in {scheme.prefix for scheme in SCHEMES.values()}:
        return
    for run, entry in zip(above, await store.get_many([f"{run}/settings" for run in above]), strict=True):
        if entry is not None:
            refuse(f"prefix={shown(prefix)} is among the keys of the run {shown(run)}; choose another")


class OverruledError(Exception):
    """The run has other settings than this node decides by."""

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__("the run has got other settings")
        self.settings = settings


def take_settings(refused: TransactionResult, agreed: Agreed) -> bool:
    """Take the run's settings if a transaction that gives them otherwise was refused for their sake; whether it was.

    Raises:
        OverruledError: This node cannot go by them.
    """
    entry = refused.results[-1]
    if not isinstance(entry, Entry) or entry.value == agreed.value:
        return False
    if agreed.take(entry.value):
        raise OverruledError(unpack_settings(entry.value))
    return True


async def resize_run(
    store: Store, keys: Keys, *, by: str, min_nodes: int | None, max_nodes: int | None, reason: str
) -> Resized:
    """Give a run another minimum and maximum, which are in force from its next round on; everybody is told.

    Raises:
        RendezvousSettingsError: The numbers contradict each other, or the run's unit.
        RendezvousStateError: The run has no settings, as no node has come yet.
        RendezvousClosedError: The run is closed.
    """
    there = await store.get(keys.settings)
    while there is not None:
        assert there.lease is not None, "the settings are on the run's lease"
        new = resize(unpack_settings(there.value), min_nodes=min_nodes, max_nodes=max_nodes)
        resized = Resized(min_nodes=new["min_nodes"], max_nodes=new["max_nodes"], reason=reason, by=by)
        result = await store.transact(
            # By value: each node that arrives writes the same settings again.
            when=(when.value(keys.settings) == there.value, when.missing(keys.closed)),
            then=(
                Put(keys.settings, pack_settings(new), lease=there.lease),
                Put(keys.resized, resized.pack(), lease=there.lease),
            ),
            otherwise=(Get(keys.settings), Get(keys.closed)),
        )
        if result.succeeded:
            return resized.replace(revision=result.revision)
        settings, closing = result.results
        if isinstance(closing, Entry):
            closed = Closed.of(closing.value)
            raise RendezvousClosedError(
                f"run {keys.run_id} is closed{f': {closed.reason}' if closed.reason else ''}; it cannot be resized",
                reason=closed.reason,
            )
        there = settings if isinstance(settings, Entry) else None
    raise RendezvousStateError(f"run {keys.run_id} has no settings that could change: no node has come to it yet")


# ------------------------------------------------------------------------------------------------------------- bans


async def put_drain(store: Store, keys: Keys, node_id: str, drain: Drain) -> None:
    """Announce that a node is to leave. It stands on the node's own lease, so that it goes with the node.

    Raises:
        RendezvousStateError: No such node is in the run.
    """
    while True:
        record = await store.get(keys.node(node_id))
        if record is None:
            raise RendezvousStateError(f"no node {node_id} is in run {keys.run_id}; `rdzv status` names those that are")
        put = Put(keys.drains + node_id, drain.pack(), lease=record.lease)
        # Else it may have gone meanwhile, and another process of its name be told to leave.
        if (await store.transact(when=(when.mod_revision(record.key) == record.mod_revision,), then=(put,))).succeeded:
            return


async def put_ban(store: Store, keys: Keys, node_id: str, ban: Ban, *, keep: float) -> None:
    """Ban a node until it is unbanned, or for as long as the ban lasts: then it is on a lease of its own.

    If the node waits, or the ban says now, its record goes at once. Otherwise it finishes its round. A ban that lasts
    until it is lifted outlives the run's last node by `keep` seconds.

    Raises:
        RendezvousSettingsError: It is to last for longer than the store lets a lease, or for no time at all.
    """
    await _write_ban(store, keys, node_id, ban, keep=keep)
    await _put_out(store, keys, node_id, now=ban.now)


async def _write_ban(store: Store, keys: Keys, name: str, ban: Ban, *, keep: float) -> None:
    ban.pack()  # what nobody could read is refused before anything is written
    if ban.lasts is None:
        lease = await take_run_lease(store, keys, keep)
    else:
        if not 0 < ban.lasts <= DURATION_MAX:  # false for NaN, too
            refuse(f"a ban that lasts {shown(ban.lasts)} s: it must be more than 0 s, and at most {DURATION_MAX:.0f} s")
        try:
            lease = await store.grant(ban.lasts)
        except LimitExceeded as error:
            if not is_too_long(error):
                raise
            refuse(f"a ban that lasts {ban.lasts:g} s is not to be had: {error}; without a time it stays until lifted")
        ban = ban.replace(lasts=lease.ttl)  # as granted: etcd makes small ones larger
    await store.put(keys.banned(name), ban.pack(), lease=lease)


async def _put_out(store: Store, keys: Keys, node_id: str, *, now: bool) -> None:
    """Delete the record of a banned node, unless it is a member that may finish its round."""
    key = keys.node(node_id)
    while (there := await store.get(key)) is not None:
        entry = None if now else await store.get(keys.round)
        if entry is not None:
            round = Round.unpack(entry.value, revision=entry.mod_revision)
            if await find_member(store, keys, round, node_id=node_id, arrival=there.mod_revision) is not None:
                return
        with contextlib.suppress(ConditionFailed):  # it has just arrived again, or left: look again
            await store.delete(key, when=(when.mod_revision(key) == there.mod_revision,))


def attribute_ban(attribute: str, value: str) -> str:
    """Name a ban of all nodes with an attribute: "rack=17".

    Raises:
        RendezvousSettingsError: No node can have such an attribute.
    """
    try:
        name, value = TEXT.convert(attribute), TEXT.convert(value)
    except (TypeError, ValueError):
        refuse(f"the attribute {shown(attribute)}={shown(value)} must be {TEXT.limit}, on both sides")
    if "=" in name:
        refuse(f"the attribute {shown(attribute)} cannot be banned by: there is a '=' in its name")
    if len(msgpack.packb({name: value})) > ATTRIBUTES_BYTES_MAX:
        refuse(f"the attribute {shown(attribute)}={shown(value)} has more than {ATTRIBUTES_BYTES_MAX} bytes")
    return f"{name}={value}"


async def put_ban_where(store: Store, keys: Keys, ban: Ban, *, keep: float) -> tuple[str, ...]:
    """Ban all nodes with an attribute, those that are here and those that come later; see `put_ban`.

    Returns:
        Which of those that are here have it.
    """
    attribute, _, value = ban.where.partition("=")

    async def who_has_it() -> set[str]:
        records = await read_nodes(store, keys)
        return {node_id for node_id, record in records.items() if record.attributes.get(attribute) == value}

    before = await who_has_it()  # those that wait hear of the ban, and may have gone before we look again
    await _write_ban(store, keys, ban_name(ban.where), ban, keep=keep)
    # From now on no other one arrives: each arrival is conditional on there being no such ban.
    here = await who_has_it()
    for node_id in here:
        await _put_out(store, keys, node_id, now=ban.now)
    return tuple(sorted(before | here))


async def lift_ban(store: Store, keys: Keys, name: str, unban: Unban) -> bool:
    """Let who is banned come again, whoever has banned them; the coordinator writes into the history that, and why.

    Returns:
        Whether there was a ban.
    """
    note = unban.pack()
    while (ban := await store.get(keys.banned(name))) is not None:
        done = await store.transact(
            when=(when.mod_revision(ban.key) == ban.mod_revision,),
            then=(Delete(ban.key), Put(keys.unbans + name, note, lease=ban.lease)),
        )
        if done.succeeded:
            return True
    return False

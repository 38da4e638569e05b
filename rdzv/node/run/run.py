"""One run in a store, for a node, or for an operator that does not join.

A ban is a key that every node watches, and the store rejects the arrival of a banned node. A drain is a key on its own
lease: the drain survives the node's lease, and the remaining TTL tells the drain's age.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, Final

import anyio
import msgpack

from rdzv.config.config_errors import brief, refuse
from rdzv.config.parameters import Parameter
from rdzv.config.resizing import with_resize
from rdzv.config.value_types import ATTRIBUTES_BYTES_MAX, DURATION_MAX, NAME, TEXT, duration
from rdzv.core.questions import ANSWER_TTL, compress_answer
from rdzv.core.report import run_cost
from rdzv.core.round import Round
from rdzv.core.state import MOVES, WITH, Ban, Closed, Head, Unban, attribute_ban_name, pack_settings, unpack_settings
from rdzv.core.stopping import Drain, Resized
from rdzv.core.stuck.accusing import UNKNOWN, WHY_MOST, Accusation
from rdzv.errors import RendezvousClosedError, RendezvousStateError
from rdzv.node.run.lease import get_or_grant_run_lease, is_ttl_limit_error
from rdzv.node.run.status import drain_ttl, find_member, read_history, read_nodes, read_run, read_run_time, usage_by_run
from store import ConditionFailed, Delete, Entry, Get, LimitExceeded, Put, when
from store.net.tasks import cancel_and_wait
from store.printable import make_logger, short_names

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from rdzv.core.history import Chapter, History
    from rdzv.core.keys import Keys
    from rdzv.core.report import Account, RunStatus
    from rdzv.membership import Membership
    from store import Lease, Store

log: Final = make_logger(__name__)

WITHIN: Final = Parameter("within", duration())
ENDS_WITHIN: Final = 5.0  # seconds that a cancelled call of `ban` has to complete
RUNS_NAMED_MOST: Final = 10  # the most existing runs that the error for a missing run names


@dataclass(slots=True)
class Run:
    """One run in a store: its reads and writes."""

    store: Store
    keys: Keys
    _: KW_ONLY
    by: str = ""  # the caller's name, which nodes and displays show
    keep: float = 0.0  # seconds; TTL of the run's lease if granted here, at least `RUN_TTL_LEAST`
    head: Callable[[], Head] = Head  # returns the run's present head, for `status`

    @property
    def run_id(self) -> str:
        """The run's id."""
        return self.keys.run_id

    async def drain(self, who: str, within: float = 120.0, reason: str = "") -> None:
        """Announce that a node of the run will leave within `within` seconds; see `Handler.drain`."""
        _check_node_id(who)
        drain = Drain(within=WITHIN.read(within), reason=reason)
        put = Put(self.keys.drains + who, drain.pack(), ttl=drain_ttl(self.store, drain.within))
        while True:
            record = await self.store.get(self.keys.node(who))
            if record is None:
                raise RendezvousStateError(f"no node {who} is in run {self.run_id}; `rdzv status` names those that are")
            # If another process with the node's name has replaced it, do not drain that process.
            conditions = (when.mod_revision(record.key) == record.mod_revision, when.missing(self.keys.moving))
            done = await self.store.transact(when=conditions, then=(put,), otherwise=(Get(self.keys.moving),))
            if done.succeeded:
                return
            if done.results[0] is not None:  # the nodes go to the next store, and may not read a drain here
                raise RendezvousStateError(f"run {self.run_id}: {MOVES}; drain node {who} there, in a moment")

    async def resize(self, min_nodes: int | None = None, max_nodes: int | None = None, *, reason: str = "") -> Resized:
        """Set another minimum or maximum of nodes; None leaves a number unchanged.

        The new numbers are in force from the next round on. If the round has too many members, or there is room for
        waiting nodes, the members leave it at one agreed `check`. Surplus members, by default those with the highest
        ranks, become spares. A round with fewer members than the new minimum continues until enough nodes are present.

        Raises:
            RendezvousSettingsError: The numbers contradict each other, or the run's `node_unit`.
            RendezvousStateError: No node has arrived in the run yet.
            RendezvousClosedError: The run is closed.
        """
        while (there := await self.store.get(self.keys.settings)) is not None:
            new = with_resize(unpack_settings(there.value), min_nodes=min_nodes, max_nodes=max_nodes)
            assert there.lease is not None, "the settings are on the run's lease"
            resized = Resized(min_nodes=new["min_nodes"], max_nodes=new["max_nodes"], reason=reason, by=self.by)
            result = await self.store.transact(
                # Compare the settings by value, as arrivals rewrite them, which changes their revision.
                when=(when.value(self.keys.settings) == there.value, when.missing(self.keys.closed)),
                then=(
                    Put(self.keys.settings, pack_settings(new), lease=there.lease),
                    *[Put(self.keys.resized, resized.pack(), lease=there.lease)] * (pack_settings(new) != there.value),
                ),
                otherwise=(Get(self.keys.closed),),
            )
            if result.succeeded:
                return resized.replace(revision=result.revision)
            if isinstance(closing := result.results[0], Entry):
                closed = Closed.of(closing.value)
                raise RendezvousClosedError(
                    f"run {self.run_id} is closed{f': {closed.reason}' if closed.reason else ''}; it cannot be resized",
                    reason=closed.reason,
                )
        raise RendezvousStateError(f"run {self.run_id} has no settings that could change: no node has come to it yet")

    async def set_closed(self, reason: str = "", *, lease: Lease | None = None, **verdict: Any) -> Closed:
        """Close the run, and return its first closing. `verdict` has the fields `given_up` and `status` of `Closed`."""
        closed = Closed(reason=reason, by=self.by, **verdict)
        lease = lease or await get_or_grant_run_lease(self.store, self.keys, self.keep)
        result = await self.store.compare_and_set(self.keys.closed, closed.pack(), expected_revision=0, lease=lease)
        await lease.keep_alive()  # the run may have no node that renews the lease
        assert result.entry is not None, "the run is closed, by this call or an earlier one"
        return Closed.of(result.entry.value)

    async def reopen(self) -> Closed | None:
        """Open a closed run again; return the deleted closing, or None."""
        entry = await self.store.get(self.keys.closed)
        if entry is None:
            return None
        # Delete only this closing: the caller of a newer one was told that the run is closed.
        await self.store.delete(self.keys.closed, when=(when.mod_revision(self.keys.closed) == entry.mod_revision,))
        return Closed.of(entry.value)

    async def accuse(self, membership: Membership, accused: str, why: str) -> bool:
        """Write this member's accusation of another member. Return False if this member is no longer in the round."""
        record = await self.store.get(self.keys.node(self.by))
        if record is None:
            return False
        said = Accusation(round=membership.round.number, accused=accused, by=self.by, why=why[:WHY_MOST])
        put = Put(self.keys.accusation(accused, self.by), said.pack(), lease=record.lease)
        result = await self.store.transact(when=membership.fence(self.keys), then=(put,))
        if result.succeeded and accused != UNKNOWN:
            log.warning("run %s, round %d: %s accuses %s: %s", self.run_id, said.round, self.by, accused, why)
        return result.succeeded

    async def ban(
        self,
        node_id: str = "",
        reason: str = "",
        *,
        where: tuple[str, str] | None = None,
        now: bool = False,
        lasts: float | None = None,
    ) -> tuple[str, ...]:
        """Keep nodes out of the next rounds, and with `now` out of this round; return the banned nodes in the run.

        Args:
            node_id: The node.
            reason: Shown to the node, and in the status.
            where: An attribute and its value, instead of `node_id`: all nodes that have it, also later ones.
            now: Also remove banned members from their round at once. Waiting nodes are removed in any case.
            lasts: Seconds after which the ban expires; None: only when lifted.
        """
        name, attribute = _parse_ban_target(node_id, where)

        async def find_banned_nodes() -> dict[str, int]:
            if where is None:
                there = await self.store.get(self.keys.node(node_id))
                return {} if there is None else {node_id: there.mod_revision}
            records = (await read_nodes(self.store, self.keys)).values()
            return {each.node_id: each.arrival for each in records if each.attributes.get(where[0]) == where[1]}

        ban = Ban(reason=reason, by=self.by, now=now, lasts=lasts, where=attribute)
        return tuple(sorted(await self._write_ban(name, ban, find_banned_nodes)))

    async def unban(self, node_id: str = "", reason: str = "", *, where: tuple[str, str] | None = None) -> bool:
        """Lift the ban of a node, or of an attribute and its value; the history gets the reason.

        Return True if there was such a ban. If an attribute's ban is lifted, nodes banned by their id stay banned.
        """
        name, attribute = _parse_ban_target(node_id, where)
        note = Unban(who=f"{WITH}{attribute}" if attribute else node_id, reason=reason, by=self.by).pack()
        while (ban := await self.store.get(self.keys.bans + name)) is not None:
            done = await self.store.transact(
                when=(when.mod_revision(ban.key) == ban.mod_revision,),
                then=(Delete(ban.key), Put(self.keys.unbans + name, note, lease=ban.lease)),
            )
            if done.succeeded:
                return True
        return False

    async def _write_ban(self, name: str, ban: Ban, find: Callable[[], Awaitable[dict[str, int]]]) -> set[str]:
        """Write a ban; delete the banned nodes' records, without `ban.now` only of nodes outside the last round.

        Return the ids of all banned nodes in the run.
        The ban is written first, so that the coordinator knows why a record is deleted. A cancelled call still
        completes. `find` returns the ids of banned nodes in the run, with their records' revisions.
        """
        ban.pack()  # if the ban is invalid, this raises

        async def write_ban_and_remove() -> set[str]:
            here = await find()  # list the nodes first: waiting nodes leave once the ban is written
            final, lease = await self._obtain_ban_lease(ban)
            await self.store.put(self.keys.bans + name, final.pack(), lease=lease)
            # No banned node arrives once the ban is written, so this loop ends.
            while found := await find():
                here |= found
                out = found if ban.now else await self._nodes_outside_round(found)
                if not out:
                    break
                for node_id, arrival in out.items():
                    key = self.keys.node(node_id)
                    with contextlib.suppress(ConditionFailed):  # the record has just changed: look again
                        await self.store.delete(key, when=(when.mod_revision(key) == arrival,))
            return set(here)

        writing = asyncio.create_task(write_ban_and_remove(), name=f"ban {name} from run {self.run_id}")
        try:
            return await asyncio.shield(writing)
        except asyncio.CancelledError:
            with anyio.CancelScope(shield=True):
                await asyncio.wait([writing], timeout=ENDS_WITHIN)
            raise
        finally:
            await cancel_and_wait(writing)

    async def _nodes_outside_round(self, nodes: dict[str, int]) -> dict[str, int]:
        """Return the nodes not in the last round: a ban without `now` lets members finish it."""
        entry = await self.store.get(self.keys.round)
        if entry is None:
            return nodes
        round = Round.unpack(entry.value, revision=entry.mod_revision)
        return {
            node_id: arrival
            for node_id, arrival in nodes.items()
            if await find_member(self.store, self.keys, round, node_id=node_id, arrival=arrival) is None
        }

    async def _obtain_ban_lease(self, ban: Ban) -> tuple[Ban, Lease]:
        """Return the ban and its lease: the run's; if the ban expires, a new one, whose TTL becomes `lasts`."""
        if ban.lasts is None:
            return ban, await get_or_grant_run_lease(self.store, self.keys, self.keep)
        if not 0 < ban.lasts <= DURATION_MAX:  # false for NaN, too
            refuse(f"a ban that lasts {brief(ban.lasts)} s: it must be more than 0 s, and at most {DURATION_MAX:.0f} s")
        try:
            lease = await self.store.grant(ban.lasts)
        except LimitExceeded as error:
            if not is_ttl_limit_error(error):
                raise
            refuse(f"a ban that lasts {ban.lasts:g} s was refused: {error}; without a time it stays until lifted")
        return ban.replace(lasts=lease.ttl), lease  # etcd raises short TTLs

    async def status(self) -> RunStatus:
        """Return the status."""
        return (await self.status_and_cost())[0]

    async def status_and_cost(self) -> tuple[RunStatus, History, Account]:
        """Return the status, the history, and the cost until now."""
        time_of_day = await self.time_of_day()
        status, history = await read_run(self.store, self.keys, self.head(), time_of_day=time_of_day)
        return status, history, run_cost(self.run_id, history, now=time_of_day, waited=status.waited)

    async def time_of_day(self) -> float:
        """Return the run's present time of day, as Unix time; see `rdzv.core.history`."""
        return await read_run_time(self.store, self.keys)

    async def check_exists(self) -> None:
        """If the store has no key of this run, raise RendezvousStateError, with the ids of existing runs."""
        if not await self.store.count(self.keys.root):
            runs = sorted(await usage_by_run(self.store, self.keys.prefix))
            there = f"it has {short_names(runs, RUNS_NAMED_MOST)}" if runs else f"it has none under {self.keys.prefix}"
            raise RendezvousStateError(f"the store has no run {self.run_id}; {there}")

    async def read_kept(self, key: str) -> bytes | None:
        """Return the data that a member last kept as `key`, or None."""
        entry = await self.store.get(self.keys.kept_item(key))
        return None if entry is None else entry.value

    async def answer_operator(self, question: str, text: str) -> None:
        """Answer an operator's question, given by its id."""
        await self.store.put(self.keys.operator_answers(question) + self.by, compress_answer(text), ttl=ANSWER_TTL)

    async def history(self) -> list[Chapter]:
        """Return the run's remembered rounds, the oldest first."""
        return list((await read_history(self.store, self.keys)).chapters)

    async def ping(self) -> float:
        """Return the round trip to the store, in seconds."""
        return await self.store.ping()

    async def store_health(self) -> dict[str, Any]:
        """Return `answers_in`, the round trip to the store in seconds, and its `figures`."""
        figures = await self.store.stats()
        return {"answers_in": await self.ping(), "figures": figures}


def _check_node_id(node_id: str) -> None:
    try:
        NAME.convert(node_id)
    except (TypeError, ValueError):
        refuse(f"node_id={brief(node_id)} must be {NAME.limit}")


def _parse_ban_target(node_id: str, where: Any) -> tuple[str, str]:
    """Return a ban's name, and the banned attribute as "rack=17", or "" if the ban is of a node."""
    if (where is None) == (node_id == ""):
        given = "neither" if where is None else "both"
        refuse(f"a ban is of a node_id or of where=(attribute, value), and not of {given}")
    if where is None:
        _check_node_id(node_id)
        return node_id, ""
    if not isinstance(where, tuple | list) or len(where) != 2:
        refuse(f"where={brief(where)} must be an attribute and its value: ('rack', '17')")
    attribute, value = where
    try:
        name, value = TEXT.convert(attribute), TEXT.convert(value)
    except (TypeError, ValueError):
        refuse(f"the attribute {brief(attribute)}={brief(value)} must be {TEXT.limit}, on both sides")
    if "=" in name:
        refuse(f"the attribute {brief(attribute)} cannot be banned by: there is a '=' in its name")
    if len(msgpack.packb({name: value})) > ATTRIBUTES_BYTES_MAX:
        refuse(f"the attribute {brief(attribute)}={brief(value)} has more than {ATTRIBUTES_BYTES_MAX} bytes")
    banned = f"{name}={value}"
    return attribute_ban_name(banned), banned

"""Shell: one run in a store, for whoever steers it: a node, or an operator who joins nothing.

All that is needed is the store and the run's keys. What a node does for itself (arriving, leaving) is its member's.

A ban is a key under the head, so that every node hears of it; a node's arrival is conditional on there being none for
it. A drain stands on the lease of the node that is to leave, so that it goes with the node.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final

from rdzv.config.config_errors import refuse, shown
from rdzv.config.parameters import Parameter
from rdzv.config.resizing import resize
from rdzv.config.value_types import DURATION_MAX, duration
from rdzv.core.asking import ANSWER_TTL, pack_answer
from rdzv.core.round import Round
from rdzv.core.state import WITH, Ban, Closed, Unban, ban_name, pack_settings, unpack_settings
from rdzv.core.stopping import Drain, Resized
from rdzv.errors import RendezvousClosedError, RendezvousStateError
from rdzv.node.run.lease import is_too_long, take_run_lease
from rdzv.node.run.names import attribute_ban, check_node_id
from rdzv.node.run.status import find_member, read_history, read_nodes
from store import ConditionFailed, Delete, Entry, Get, LimitExceeded, Put, when

if TYPE_CHECKING:
    from typing import Any

    from rdzv.core.history import Chapter, History
    from rdzv.core.keys import Keys
    from store import Store

__all__ = ["Run"]

WITHIN: Final = Parameter("within", duration())  # seconds after which a drained node leaves in any case


class Run:
    """One run.

    Args:
        store: The store that it is in.
        keys: Its keys there.
        by: Who steers it, as others are told.
        keep: Seconds for which what is written of it outlives its last node.
    """

    def __init__(self, store: Store, keys: Keys, *, by: str = "", keep: float = 0.0) -> None:
        self.store = store
        self.keys = keys
        self._by = by
        self._keep = keep

    @property
    def run_id(self) -> str:
        """Which run this is."""
        return self.keys.run_id

    async def drain(self, who: str, within: float = 120.0, reason: str = "") -> None:
        """Announce that a node is to leave: the members of its round stop together before it does.

        Raises:
            RendezvousStateError: No such node is in the run.
        """
        check_node_id(who)
        drain = Drain(within=WITHIN.read(within), reason=reason)
        while True:
            record = await self.store.get(self.keys.node(who))
            if record is None:
                raise RendezvousStateError(f"no node {who} is in run {self.run_id}; `rdzv status` names those that are")
            put = Put(self.keys.drains + who, drain.pack(), lease=record.lease)
            # Else it may have gone meanwhile, and another process of its name be told to leave.
            unchanged = when.mod_revision(record.key) == record.mod_revision
            if (await self.store.transact(when=(unchanged,), then=(put,))).succeeded:
                return

    async def resize(self, min_nodes: int | None = None, max_nodes: int | None = None, *, reason: str = "") -> Resized:
        """Give the run another minimum or maximum of nodes while it lives; None leaves a number as it is.

        It is in force from the next round on. A round with more members than that ends at a `check`, the same for all,
        and those with the highest ranks become spares; where there is room for nodes that wait, they come in likewise.
        A round with fewer members than the new minimum goes on until there are enough nodes for the next. Nodes that
        come with the numbers that the run had before take the new ones.

        Raises:
            RendezvousSettingsError: The numbers contradict each other, or the run's `node_unit`.
            RendezvousStateError: No node has come to the run yet.
            RendezvousClosedError: The run is closed.
        """
        there = await self.store.get(self.keys.settings)
        while there is not None:
            assert there.lease is not None, "the settings are on the run's lease"
            new = resize(unpack_settings(there.value), min_nodes=min_nodes, max_nodes=max_nodes)
            resized = Resized(min_nodes=new["min_nodes"], max_nodes=new["max_nodes"], reason=reason, by=self._by)
            result = await self.store.transact(
                # By value: each node that arrives writes the same settings again.
                when=(when.value(self.keys.settings) == there.value, when.missing(self.keys.closed)),
                then=(
                    Put(self.keys.settings, pack_settings(new), lease=there.lease),
                    Put(self.keys.resized, resized.pack(), lease=there.lease),
                ),
                otherwise=(Get(self.keys.settings), Get(self.keys.closed)),
            )
            if result.succeeded:
                return resized.replace(revision=result.revision)
            settings, closing = result.results
            if isinstance(closing, Entry):
                closed = Closed.of(closing.value)
                raise RendezvousClosedError(
                    f"run {self.run_id} is closed{f': {closed.reason}' if closed.reason else ''}; it cannot be resized",
                    reason=closed.reason,
                )
            there = settings if isinstance(settings, Entry) else None
        raise RendezvousStateError(f"run {self.run_id} has no settings that could change: no node has come to it yet")

    async def reopen(self) -> Closed | None:
        """Open it again; how it was closed, or None if it was not."""
        entry = await self.store.get(self.keys.closed)
        if entry is None:
            return None
        # Not one that somebody has written meanwhile: that closing is another's, who was told that it counts.
        await self.store.delete(self.keys.closed, when=(when.mod_revision(self.keys.closed) == entry.mod_revision,))
        return Closed.of(entry.value)

    # ------------------------------------------------------------------------------------------ bans

    async def ban(self, node_id: str, reason: str = "", *, now: bool = False, lasts: float | None = None) -> None:
        """Keep a node out of the next rounds, and with `now` put it out of this one; it is told why.

        Args:
            node_id: Which node.
            reason: Shown to it, and to whoever asks.
            now: Out of this round, too; one that waits is put out at once in either case.
            lasts: Seconds, after which the ban ends by itself; None: it is kept with the run until it is lifted.
        """
        check_node_id(node_id)
        await self._write_ban(node_id, Ban(reason=reason, by=self._by, now=now, lasts=lasts))
        await self._put_out(node_id, now=now)

    async def ban_where(
        self, attribute: str, value: str, reason: str = "", *, now: bool = False, lasts: float | None = None
    ) -> tuple[str, ...]:
        """Keep all nodes out that have this attribute, also those that come later; return which of them are here."""
        where = attribute_ban(attribute, value)

        async def who_has_it() -> set[str]:
            records = await read_nodes(self.store, self.keys)
            return {node_id for node_id, record in records.items() if record.attributes.get(attribute) == value}

        before = await who_has_it()  # those that wait hear of the ban, and may have gone before we look again
        await self._write_ban(ban_name(where), Ban(reason=reason, by=self._by, now=now, lasts=lasts, where=where))
        # From now on no other one arrives: each arrival is conditional on there being no such ban.
        here = await who_has_it()
        for node_id in here:
            await self._put_out(node_id, now=now)
        return tuple(sorted(before | here))

    async def unban(self, node_id: str, reason: str = "") -> bool:
        """Let a banned node come again; the history says why. Return whether it was banned."""
        check_node_id(node_id)
        return await self._lift_ban(node_id, Unban(who=node_id, reason=reason, by=self._by))

    async def unban_where(self, attribute: str, value: str, reason: str = "") -> bool:
        """Let the nodes with this attribute come again, as far as they are not banned by their names."""
        where = attribute_ban(attribute, value)
        return await self._lift_ban(ban_name(where), Unban(who=f"{WITH}{where}", reason=reason, by=self._by))

    async def _write_ban(self, name: str, ban: Ban) -> None:
        """Ban for as long as the ban lasts, then on a lease of its own, or until it is lifted."""
        ban.pack()  # what nobody could read is refused before anything is written
        if ban.lasts is None:
            lease = await take_run_lease(self.store, self.keys, self._keep)
        else:
            if not 0 < ban.lasts <= DURATION_MAX:  # false for NaN, too
                refuse(
                    f"a ban that lasts {shown(ban.lasts)} s: it must be more than 0 s, and at most {DURATION_MAX:.0f} s"
                )
            try:
                lease = await self.store.grant(ban.lasts)
            except LimitExceeded as error:
                if not is_too_long(error):
                    raise
                refuse(
                    f"a ban that lasts {ban.lasts:g} s is not to be had: {error}; without a time it stays until lifted"
                )
            ban = ban.replace(lasts=lease.ttl)  # as granted: etcd makes small ones larger
        await self.store.put(self.keys.banned(name), ban.pack(), lease=lease)

    async def _put_out(self, node_id: str, *, now: bool) -> None:
        """Delete the record of a banned node, unless it is a member that may finish its round."""
        key = self.keys.node(node_id)
        while (there := await self.store.get(key)) is not None:
            entry = None if now else await self.store.get(self.keys.round)
            if entry is not None:
                round = Round.unpack(entry.value, revision=entry.mod_revision)
                if (
                    await find_member(self.store, self.keys, round, node_id=node_id, arrival=there.mod_revision)
                    is not None
                ):
                    return
            with contextlib.suppress(ConditionFailed):  # it has just arrived again, or left: look again
                await self.store.delete(key, when=(when.mod_revision(key) == there.mod_revision,))

    async def _lift_ban(self, name: str, unban: Unban) -> bool:
        """Let who is banned come again, whoever has banned them; the coordinator writes into the history that, and why.

        Returns:
            Whether there was a ban.
        """
        note = unban.pack()
        while (ban := await self.store.get(self.keys.banned(name))) is not None:
            done = await self.store.transact(
                when=(when.mod_revision(ban.key) == ban.mod_revision,),
                then=(Delete(ban.key), Put(self.keys.unbans + name, note, lease=ban.lease)),
            )
            if done.succeeded:
                return True
        return False

    # ------------------------------------------------------------------------------------------ what is known

    async def restore(self, key: str) -> bytes | None:
        """Return what any member has kept last under a name; None if nobody has."""
        entry = await self.store.get(self.keys.kept(key))
        return None if entry is None else entry.value

    async def answer(self, question: str, text: str) -> None:
        """Answer what an operator asks."""
        await self.store.put(self.keys.answers(question) + self._by, pack_answer(text), ttl=ANSWER_TTL)

    async def history(self) -> list[Chapter]:
        """Return what is remembered of the run: its rounds, the oldest first."""
        return list((await self.whole_history()).chapters)

    async def whole_history(self) -> History:
        """Return the same, and the sums of what was before."""
        return await read_history(self.store, self.keys)

    async def ping(self) -> float:
        """Measure how long the store takes to answer, in seconds."""
        return await self.store.ping()

    async def store_health(self) -> dict[str, Any]:
        """Return how the store is: `answers_in` seconds, and its figures."""
        figures = await self.store.stats()
        return {"answers_in": await self.ping(), "figures": figures}

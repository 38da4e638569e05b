"""Shell: both parts in agreeing on a step before which all members of a round leave (`core.stopping`).

The coordinator (`Asking`) asks when somebody wants in or out, gathers the answers of the members that are still in the
round, and writes the decision, once; what is to be written, and when, `core.stopping.Agreement` says. Question and
decision stand in one key below the head, which every node watches, and are written only while the round is still the
one that they are about. A member that lives answers at once, since its node (`Steps`) does so while it computes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING

from rdzv.core.stopping import Agreement, Begun
from rdzv.errors import RendezvousStateError
from store import when
from store.printable import escaping

if TYPE_CHECKING:
    from rdzv.core.stopping import Stop
    from rdzv.node.coordinator.office import Office

__all__ = ["Asking"]

log: logging.Logger = escaping(logging.getLogger(__name__))


class Asking:
    """Writes what `Agreement` says is to be written, and hands it what the members answer."""

    def __init__(self, office: Office) -> None:
        self._office = office
        self._keys = office.keys
        self._view = office.view
        self._agreement = Agreement()
        self._is_asking = asyncio.Event()

    async def attend(self, standing: Stop | None, *, why: str, for_newcomers: bool, closing: bool) -> None:
        """Ask, or decide, if it is time to; the arguments are those of `Agreement.next`."""
        view, round = self._view, self._view.round
        if round is None or not round.in_steps or not view.synced:
            return
        while (
            todo := self._agreement.next(
                round.number,
                standing,
                why=why,
                for_newcomers=for_newcomers,
                closing=closing,
                members=[node_id for node_id in view.live if view.record(node_id).progress is not None],
                some_have_gone=bool(view.departed_count or view.lost_count),
            )
        ) is not None:
            stop, over = todo
            written = await self._office.try_to_write(
                self._office.put(self._keys.stop, stop.pack()),
                also=(
                    when.mod_revision(self._keys.round) == round.revision,
                    when.mod_revision(self._keys.stop) == over,
                ),
            )
            if not written.succeeded:
                return  # the round, or what stands there, is another one by now
            self._agreement.wrote(stop.replace(revision=written.revision))
            if stop.decided:
                where = "at once" if stop.step is None else f"before step {stop.step}"
                log.info("run %s, round %d: all leave %s: %s", self._keys.run_id, stop.round, where, stop.why)
                break
        if self._agreement.listens:
            self._is_asking.set()

    async def gather(self) -> None:
        """Take in what the members answer, from the first question on."""
        await self._is_asking.wait()
        async with self._office.store.watch(self._keys.begun, snapshot=True) as watch:
            async for event in watch:
                if event.kind == "synced":
                    self._agreement.hears = True
                elif event.kind == "put":
                    with contextlib.suppress(RendezvousStateError):  # no answer of ours
                        self._agreement.answered(event.key.removeprefix(self._keys.begun), Begun.unpack(event.value))
                self._office.wakeup.changed()

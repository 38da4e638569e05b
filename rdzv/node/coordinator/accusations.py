"""Shell: asks the store about members that others accuse, where the accusation alone is not believed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from typing import TYPE_CHECKING, Final

import anyio

from rdzv.core.stuck.accusing import SOMEBODY
from rdzv.core.view import Stuck
from store import LeaseNotFound, StoreError
from store.keeping import RENEWALS_PER_TTL
from store.messages import TimeToLive
from store.printable import escaping

if TYPE_CHECKING:
    from rdzv.node.coordinator.office import Office

__all__ = ["AccusationWatch"]

log: logging.Logger = escaping(logging.getLogger(__name__))

DOUBTED_BELOW: Final = 1 / RENEWALS_PER_TTL
"""Of its TTL: who renews its lease has twice as much left, and a connection that closed leaves `disconnect_ttl`."""

ASKED_ABOUT_MOST: Final = 256
"""Members of a round in which the store is asked about all: about more, it takes as long as `gone_ttl`."""

LOOKS_AFTER: Final = (0.0, 0.01, 0.03)
"""Seconds between looks at the lease of whom one member accuses: the store may hear of its end a moment later. After
`gone_ttl`, which is longer than all of them, the lease ends by itself."""


class AccusationWatch:
    """Asks about members that others accuse, for as long as a coordinator is in office.

    Two accusers are believed (`View.to_expel`). One is, if the store doubts the accused, too: it keeps its lease no
    more, since its connections have closed or its keep-alives stay away. That is how a member that was killed is lost
    before its lease ends: whoever was in a collective with it sees its connections close at the same moment as the
    store does. A collective does not say whose: then the store is asked about all, and believed only where it is about
    to end a lease since the process has hung up: within `gone_ttl`.
    """

    def __init__(self, office: Office, *, gone_ttl: float) -> None:
        self._office = office
        self._store = office.store
        self._keys = office.keys
        self._view = office.view
        self._gone_ttl = gone_ttl
        self._asked: set[tuple[int, str, str]] = set()  # the accusations of one, after which the store was asked
        self._news = asyncio.Event()

    def look(self) -> None:
        """Have the store asked about members that others accuse, if there are new ones."""
        if self._new():
            self._news.set()

    def _new(self) -> list[tuple[int, str, str]]:
        view, number = self._view, self._view.number
        said = view.accusations.standing(round=number, live=view.live)
        if len(view.live) <= ASKED_ABOUT_MOST:
            said += view.accusations.of_somebody(round=number, live=view.live)
        return [one for one in ((number, one.accused, one.by) for one in said) if one not in self._asked]

    async def run(self) -> None:
        """Ask the store about members whom one other accuses."""
        while True:
            await self._news.wait()
            self._news.clear()
            new = self._new()
            self._asked = {one for one in self._asked if one[0] == self._view.number} | set(new)
            for pause in LOOKS_AFTER:
                await anyio.sleep(pause)
                for number, accused, by in new:
                    with contextlib.suppress(StoreError):  # then two accusers, or the end of the lease, will do
                        self._office.bring(*await self._doubted(number, accused, by))

    def _why(self, accused: str, by: str) -> str:
        said = self._view.accusations.said(self._keys.accusation(accused, by))
        if accused == SOMEBODY:
            return f"its process ended, as {by} noticed first"
        return f"accused by {by}{f': {said}' if said else ''}; and the store hears nothing of it"

    async def _doubted(self, number: int, accused: str, by: str) -> list[Stuck]:
        """Return the members that may be meant and that the store doubts, too: their nodes renew their leases no more.

        Where nobody is named, only those whose process has ended, as far as the store sees: not one that has a moment
        to come back, as many have whose connections a proxy has dropped.
        """
        view, why = self._view, self._why(accused, by)
        named, at_most = (
            (view.live & {accused}, math.inf) if accused != SOMEBODY else (view.live - {by}, self._gone_ttl)
        )
        meant = [Stuck(number, view.record(one).arrival, one, why) for one in sorted(named)]
        found = await asyncio.gather(*(self._remaining(one.node_id, at_most=at_most) for one in meant))
        return [one for one, remaining in zip(meant, found, strict=True) if remaining < DOUBTED_BELOW]

    async def _remaining(self, node_id: str, *, at_most: float = math.inf) -> float:
        """Which part of its TTL a node's lease has left; 1 if there is none, or if it has more seconds than that."""
        record = await self._store.get(self._keys.node(node_id))
        if record is None or record.lease is None:
            return 1.0
        try:
            lease = await self._store.call(TimeToLive(lease=record.lease))
        except LeaseNotFound:
            return 1.0  # it has just ended, of which we shall hear
        return lease.remaining / lease.ttl if lease.remaining <= at_most else 1.0

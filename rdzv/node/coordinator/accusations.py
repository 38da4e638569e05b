"""Shell: takes a member out of the round whom others accuse, where that is believed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from typing import TYPE_CHECKING, Final

import anyio

from rdzv.core.stuck.accusing import SOMEBODY
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
    """Takes members out of the round whom others accuse, for as long as a coordinator is in office.

    Two accusers are believed. One is, if the store doubts the accused, too: it keeps its lease no more, since its
    connections have closed or its keep-alives stay away. That is how a member that was killed is lost before its lease
    ends: whoever was in a collective with it sees its connections close at the same moment as the store does. A
    collective does not say whose: then the store is asked about all, and believed only where it is about to end a lease
    since the process has hung up: within `gone_ttl`.
    """

    def __init__(self, office: Office, *, gone_ttl: float) -> None:
        self._office = office
        self._store = office.store
        self._keys = office.keys
        self._view = office.view
        self._gone_ttl = gone_ttl
        self._asked: set[tuple[int, str, str]] = set()  # the accusations of one, after which the store was asked
        self._news = asyncio.Event()

    def heed(self) -> None:
        """Have taken out of the round whom enough others accuse, and the store asked about whom only one does."""
        believed = self._view.accusations.believed(round=self._view.number, live=self._view.live)
        if believed is not None:
            self._office.expel(*believed)
        elif self._new():
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
                for _, accused, by in new:
                    with contextlib.suppress(StoreError):  # then two accusers, or the end of the lease, will do
                        for node_id in await self._doubted(accused, by):
                            self._office.expel(node_id, self._why(accused, by))

    def _why(self, accused: str, by: str) -> str:
        said = self._view.accusations.said(self._keys.accusation(accused, by))
        if accused == SOMEBODY:
            return f"its process ended, as {by} noticed first"
        return f"accused by {by}{f': {said}' if said else ''}; and the store hears nothing of it"

    async def _doubted(self, accused: str, by: str) -> list[str]:
        """Whom the store doubts, too: of those who may be meant, the ones whose leases their nodes renew no more.

        Where nobody is named, only whose process has ended, as far as the store sees: not one that has a moment to come
        back, as many have whose connections a proxy has dropped.
        """
        if accused != SOMEBODY:
            return [accused] if accused in self._view.live and await self._remaining(accused) < DOUBTED_BELOW else []
        others = sorted(self._view.live - {by})
        found = await asyncio.gather(*(self._remaining(one, at_most=self._gone_ttl) for one in others))
        return [one for one, remaining in zip(others, found, strict=True) if remaining < DOUBTED_BELOW]

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

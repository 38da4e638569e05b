"""Shell: asks the store about members with one accuser, which is not enough to expel them."""

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
from store.net.tasks import together
from store.printable import escaping

if TYPE_CHECKING:
    from rdzv.node.coordinator.office import Office

log: logging.Logger = escaping(logging.getLogger(__name__))

DOUBTED_BELOW: Final = 1 / RENEWALS_PER_TTL
"""A lease with less than this part of its TTL left is not being renewed: else it would have at least twice as much."""

ASKED_ABOUT_MOST: Final = 256
"""In larger rounds the store is not asked about all members: that would take longer than `gone_ttl`."""

LOOKS_AFTER: Final = (0.0, 0.01, 0.03)
"""Seconds before each look at a lease: the store may notice a closed connection after the accuser does."""


class AccusationWatch:
    """Asks the store about members with one accuser, during a coordinator's term.

    Two accusers expel a member (`View.to_expel`). One is enough if the lease of the accused is not being renewed: its
    connections have closed, or its keep-alives have stopped. So a killed member is lost before its lease ends. If the
    accused is unknown, the leases of all members are read; those that end within `gone_ttl` count, as their processes
    have closed their connections.
    """

    def __init__(self, office: Office, *, gone_ttl: float) -> None:
        self._office = office
        self._store = office.store
        self._keys = office.keys
        self._view = office.view
        self._gone_ttl = gone_ttl
        self._asked: set[tuple[int, str, str]] = set()  # (round, accused, by) that were looked into
        self._news = asyncio.Event()

    def look(self) -> None:
        """Schedule requests about new accusations."""
        if self._new():
            self._news.set()

    def _new(self) -> list[tuple[int, str, str]]:
        view, number = self._view, self._view.number
        said = view.accusations.standing(round=number, live=view.live)
        if len(view.live) <= ASKED_ABOUT_MOST:
            said += view.accusations.of_somebody(round=number, live=view.live)
        return [one for one in ((number, one.accused, one.by) for one in said) if one not in self._asked]

    async def run(self) -> None:
        """Ask the store about the members in new accusations, until cancelled."""
        while True:
            await self._news.wait()
            self._news.clear()
            new = self._new()
            self._asked = {one for one in self._asked if one[0] == self._view.number} | set(new)
            for pause in LOOKS_AFTER:
                await anyio.sleep(pause)
                for number, accused, by in new:
                    with contextlib.suppress(StoreError):  # no answer: a second accuser or the lease's end decides
                        self._office.bring(*await self._doubted(number, accused, by))

    def _why(self, accused: str, by: str) -> str:
        said = self._view.accusations.said(self._keys.accusation(accused, by))
        if accused == SOMEBODY:
            return f"its process ended, as {by} noticed first"
        return f"accused by {by}{f': {said}' if said else ''}; and the store does not hear from it"

    async def _doubted(self, number: int, accused: str, by: str) -> list[Stuck]:
        """Return the accused members whose leases are not being renewed.

        If the accuser could not name a member (`SOMEBODY`), return only those whose process has ended: a proxy may have
        dropped connections of live ones.
        """
        view, why = self._view, self._why(accused, by)
        named, at_most = (
            (view.live & {accused}, math.inf) if accused != SOMEBODY else (view.live - {by}, self._gone_ttl)
        )
        meant = [Stuck(number, view.record(one).arrival, one, why) for one in sorted(named)]
        found = await together(*(self._remaining(one.node_id, at_most=at_most) for one in meant))
        return [one for one, remaining in zip(meant, found, strict=True) if remaining < DOUBTED_BELOW]

    async def _remaining(self, node_id: str, *, at_most: float = math.inf) -> float:
        """Return the share of its TTL that a lease has left; 1 if over `at_most` s are left, or there is none."""
        record = await self._store.get(self._keys.node(node_id))
        if record is None or record.lease is None:
            return 1.0
        try:
            lease = await self._store.call(TimeToLive(lease=record.lease))
        except LeaseNotFound:
            return 1.0  # the watch will report its end
        return lease.remaining / lease.ttl if lease.remaining <= at_most else 1.0

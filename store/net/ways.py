"""Shell: the route to one of several servers, which tells this machine's address."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import anyio

from store.limits import is_loopback

if TYPE_CHECKING:
    from collections.abc import Sequence

FOUND_WITHIN: Final = 3.0  # seconds for all name lookups
ELSEWHERE: Final = "another"  # the `server` of a way to another member


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A route from an address of this machine to one of a member of a cluster."""

    sends_from: str
    leads_to: str
    server: str

    @property
    def leaves_the_machine(self) -> bool:
        """True if the member is on another machine."""
        return self.sends_from != self.leads_to and not is_loopback(self.leads_to)


async def chosen_way(hosts: Sequence[tuple[str, int]], server: str) -> Way | None:
    """Return the way to the first host, the member `server`; if that is on this machine, the way to another."""
    first = None
    with anyio.move_on_after(FOUND_WITHIN):
        for place, (host, port) in enumerate(hosts):
            way = await _way(host, port, server if not place else ELSEWHERE)
            if way is not None and way.leaves_the_machine:
                return way
            if not place:
                first = way
    return first


async def _way(host: str, port: int, server: str) -> Way | None:
    with contextlib.suppress(OSError):
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_DGRAM)
        for family, kind, _, _, target in found:
            with socket.socket(family, kind) as sock, contextlib.suppress(OSError):
                sock.connect(target)  # sends nothing: it only chooses a route
                return Way(sends_from=sock.getsockname()[0], leads_to=str(target[0]), server=server)
    return None

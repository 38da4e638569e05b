"""Shell: finds this machine's address, by the network route to one of several servers."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import TYPE_CHECKING, Final, TypeAlias

import anyio

from store.limits import is_loopback

if TYPE_CHECKING:
    from collections.abc import Sequence

FOUND_WITHIN: Final = 3.0  # seconds for all name lookups
ELSEWHERE: Final = "another"  # the id of a member other than the first


Ends: TypeAlias = tuple[str, str]  # the two ends of a route: the addresses of this machine, and of a cluster's member


async def chosen_way(hosts: Sequence[tuple[str, int]], server: str) -> tuple[Ends, str] | None:
    """Return the route to the first host, and its id `server`; if it is this machine, the route to another host."""
    first = None
    with anyio.move_on_after(FOUND_WITHIN):
        for place, (host, port) in enumerate(hosts):
            ends = await _ends(host, port)
            if ends is not None and ends[0] != ends[1] and not is_loopback(ends[1]):
                return ends, ELSEWHERE if place else server
            if not place:
                first = ends
    return None if first is None else (first, server)


async def _ends(host: str, port: int) -> Ends | None:
    with contextlib.suppress(OSError):
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_DGRAM)
        for family, kind, _, _, target in found:
            with socket.socket(family, kind) as sock, contextlib.suppress(OSError):
                sock.connect(target)  # sends nothing: it only chooses a route
                return str(sock.getsockname()[0]), str(target[0])
    return None

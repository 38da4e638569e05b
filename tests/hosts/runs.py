"""Runs on the hosts of a lab: a store on one of them, members on others, and their output."""

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

from tests.hosts.lab import Host
from tests.support.processes import Child

__all__ = ["PORT", "Member", "members", "serving", "slurm_url"]

PORT = 29400
START_WITHIN = 60.0  # seconds; many interpreters start at once, on a machine that may be busy


def slurm_url(host: str, query: str) -> str:
    """Return the URL of the run that tests use."""
    return f"tcp://{f'[{host}]' if ':' in host else host}:{PORT}/job-7?insecure=1&{query}"


@contextlib.asynccontextmanager
async def serving(host: Host, *arguments: str) -> AsyncIterator[Child]:
    """Run `rdzv serve` on a host."""
    async with host.python("-m", "rdzv", "serve", "--insecure", *arguments) as server:
        await server.says("listens on", timeout=START_WITHIN)
        yield server


class Member:
    """A member on a host (`tests.hosts.member`), and its lines so far."""

    def __init__(self, host: Host, child: Child) -> None:
        self.host = host
        self.child = child

    @property
    def said(self) -> list[dict[str, Any]]:
        """All its lines."""
        return [json.loads(line) for line in list(self.child.stdout)]

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        """Return its lines of these kinds."""
        return [line for line in self.said if line["event"] in kinds]

    async def round(self, *, timeout: float = START_WITHIN) -> dict[str, Any]:
        """Wait for its next round."""
        line: dict[str, Any] = json.loads(await self.child.line('"event": "round"', timeout=timeout))
        return line

    async def hears(self, kind: str, *, timeout: float = 30.0) -> dict[str, Any]:
        """Wait for its next line of a kind."""
        line: dict[str, Any] = json.loads(await self.child.line(f'"event": "{kind}"', timeout=timeout))
        return line


@contextlib.asynccontextmanager
async def members(url: str, *hosts: Host, probe: bool = False) -> AsyncIterator[list[Member]]:
    """Start one member on each host, in this order. Their node ids are the hosts' names."""
    async with contextlib.AsyncExitStack() as stack:
        yield [
            Member(
                host,
                await stack.enter_async_context(
                    host.python("-m", "tests.hosts.member", f"{url}&node_id={host.name}", *["--probe"] * probe)
                ),
            )
            for host in hosts
        ]

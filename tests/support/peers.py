"""A network between the members of an etcd cluster, which can cut one of them off from the others.

    async with PeerNetwork(3) as network:
        ... serve_etcd(3, advertised=network.ports)
        network.find(etcd)
        network.cut_off(member)

The members reach each other through ports of this network. The first request of each connection names the caller
(`X-Server-From`), so both directions of a member can be cut, while its clients still reach it.
"""

import asyncio
import contextlib
import functools
import re
from typing import Self

from tests.support.etcd import Etcd, Member
from tests.support.processes import free_port

FROM = re.compile(rb"^X-Server-From: *([0-9a-f]+)", re.IGNORECASE | re.MULTILINE)


class PeerNetwork:
    """The connections between members.

    Attributes:
        ports: Where the members reach each other.
    """

    def __init__(self, members: int) -> None:
        self.ports = [free_port() for _ in range(members)]
        self._targets: list[int] = []
        self._ids: list[bytes] = []  # by the members' numbers
        self._cut: set[int | bytes] = set()  # numbers and ids
        self._servers: list[asyncio.Server] = []
        self._open: dict[asyncio.Task[None], set[int | bytes]] = {}  # the target and the caller of each connection

    async def __aenter__(self) -> Self:
        for number, port in enumerate(self.ports):
            server = await asyncio.start_server(functools.partial(self._answer, number), "127.0.0.1", port)
            self._servers.append(server)
        return self

    async def __aexit__(self, *_: object) -> None:
        for server in self._servers:
            server.close()
        tasks = list(self._open)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def lead_to(self, targets: list[int]) -> None:
        """Set the ports of the members; until then, no connection passes."""
        self._targets = targets

    def find(self, etcd: Etcd) -> None:
        """Learn the members' ids."""
        statuses = [member.ask("maintenance/status") for member in etcd.members]
        self._ids = [b"%x" % int(status["header"]["member_id"]) for status in statuses]

    def cut_off(self, etcd: Etcd, member: Member) -> None:
        """Let nothing through to a member, or from it, from now on."""
        number = etcd.members.index(member)
        self._cut |= {number, self._ids[number]}
        for task, ends in self._open.items():
            if ends & self._cut:
                task.cancel()

    def heal(self) -> None:
        """Let everything through again."""
        self._cut.clear()

    def _answer(self, to: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._forward(reader, writer, to))
        self._open[task] = {to}
        task.add_done_callback(self._open.pop)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, to: int) -> None:
        task = asyncio.current_task()
        assert task is not None
        target: asyncio.StreamWriter | None = None
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            caller = FROM.search(head)
            if caller is not None:
                self._open[task].add(caller[1])
            if not self._targets or self._open[task] & self._cut:
                return
            answers, target = await asyncio.open_connection("127.0.0.1", self._targets[to])
            target.write(head)
            async with asyncio.TaskGroup() as group:
                group.create_task(_carry(reader, target))
                group.create_task(_carry(answers, writer))
        except* (OSError, EOFError, asyncio.LimitOverrunError):
            pass
        finally:
            for end in (writer, target):
                if end is not None:
                    end.transport.abort()


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(64 * 1024):
        writer.write(data)
        await writer.drain()
    with contextlib.suppress(OSError):
        writer.write_eof()

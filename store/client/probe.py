"""Shell: asks on a second connection whether the server answers at all, while it is silent on the first.

Where the other side's system acknowledges what it is sent, silence has two causes that look alike. The server is busy,
or stopped: then whoever comes back over a fresh connection stands last in its queue again, and keeps it busier still.
Or what acknowledges is not the server's system: a proxy or a tunnel behind which the connection has gone. A server that
greets, and answers a newcomer, has had time for what was asked before: then the first connection is of no more use.

The second connection has a session of its own, which ends with it, and belongs to no process: no lease depends on it.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

import anyio

from store.client.attempts import greeted_link
from store.errors import StoreError
from store.protocol import wire
from store.protocol.connection import ClientConnection
from store.protocol.wire import Welcome

if TYPE_CHECKING:
    from store.client.link import Link
    from store.client.patience import Patience
    from store.net.dialing import Dial

__all__ = ["server_answers"]


def _pass_over(_: str) -> None:
    """Say nothing of an attempt that has failed: there will be another one."""


class _Newcomer:
    """A client that says hello and farewell, and nothing between."""

    met = True  # whoever asks has met the store

    def __init__(self, token: bytes | None, name: str) -> None:
        self._connection = ClientConnection(session_id=secrets.token_bytes(16), token=token, name=name)
        self._connection.connected(nonce=secrets.token_bytes(16))
        self.welcomed = False

    def received(self, link: Link, data: bytes) -> None:
        """Bytes have come; called by the connection."""
        assert link.transport is not None
        try:
            for item in self._connection.receive(data):
                if isinstance(item, bytes):
                    link.write(item)
                elif isinstance(item, Welcome):
                    self.welcomed = True
                    link.write(wire.encode_bye("done"))
                    link.transport.close()
        except StoreError as error:  # it is full, say: nothing is known then
            link.farewell = str(error)
            link.abort()

    def may_write(self, link: Link, *, writable: bool) -> None:
        """Nothing is written that would fill a buffer."""


async def server_answers(dial: Dial, patience: Patience, *, token: bytes | None, name: str) -> None:
    """Return once the server has welcomed a newcomer; until then, try again and again.

    Raises:
        TypeError: Or whatever else a defect in `dial` raises.
    """
    tried = 0
    while True:
        newcomer = _Newcomer(token, name)
        link = await greeted_link(dial, newcomer, patience, _pass_over)
        try:
            link.take_up()
            await link.over
        finally:
            link.abort()
        if newcomer.welcomed:
            return
        await anyio.sleep(patience.pause(tried))
        tried += 1

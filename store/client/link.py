"""Shell: one connection of a client as asyncio sees it: it carries bytes, and decides nothing."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol, cast

from store.net.dialing import HungUp, LeftWithoutAWord, describe
from store.net.sockets import SYSTEM_TELLS, forget, holds_unreadable, let_go_in_children, queued_bytes

if TYPE_CHECKING:
    from typing import Any

__all__ = ["Link", "Owner"]


class Owner(Protocol):
    """What a link tells, and asks, the client that it belongs to."""

    @property
    def met(self) -> bool:
        """Whether the store has been met, on any connection: then it is known what it speaks."""
        ...

    def received(self, link: Link, data: bytes) -> None:
        """Bytes have come on a connection that was taken up."""
        ...

    def may_write(self, link: Link, *, writable: bool) -> None:
        """The transport takes no more, or takes more again."""
        ...


class Link(asyncio.Protocol):
    """One connection. Until its client takes it up, it keeps what comes."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._early: list[bytes] | None = []  # what came before the client took this connection up
        self._heard = False
        self._secure = False
        self._socket: Any = None
        self.transport: asyncio.Transport | None = None
        self.farewell: str = ""  # why it is to end, as far as that was said
        self._error: Exception | None = None  # that it ended with
        self._first_word: asyncio.Future[None] | None = None  # or its end, while somebody waits for it
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # it has ended, or a successor

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection stands."""
        self.transport = cast("asyncio.Transport", transport)
        self._secure = transport.get_extra_info("sslcontext") is not None
        self._socket = transport.get_extra_info("socket")
        if self._socket is not None:
            let_go_in_children(self, self._socket)

    def data_received(self, data: bytes) -> None:
        """Bytes have come."""
        self._heard = True
        if self._early is not None:
            self._early.append(data)
            self._tell_first_word()
        else:
            self._owner.received(self, data)

    def write(self, data: bytes) -> None:
        """Send it, unless the connection is about to end: uvloop raises then, and what is in flight is sent again."""
        assert self.transport is not None, "it was made before anybody has something to say on it"
        if not self.transport.is_closing():
            self.transport.write(data)

    def take_up(self) -> None:
        """The client converses on this connection from now on.

        The server speaks first, and may have done so already: the last packet of a TLS handshake can bring its
        greeting, before whoever awaits the handshake gets to run.
        """
        early, self._early = self._early or [], None
        for data in early:
            self._owner.received(self, data)

    def connection_lost(self, error: Exception | None) -> None:
        """The connection has ended."""
        forget(self)
        self._socket = None
        self._error = error
        self.has_successor()
        self._tell_first_word()

    def has_successor(self) -> None:
        """Another connection has been found that takes its place; whoever converses on it is done."""
        if not self.over.done():
            self.over.set_result(None)

    async def hear(self) -> bool:
        """Wait for the server's first word, or for the end; whether it has said any."""
        if not self._heard and not self.over.done():
            self._first_word = asyncio.get_running_loop().create_future()
            await self._first_word
        return self._heard

    def pause_writing(self) -> None:
        """The transport takes no more for now."""
        self._owner.may_write(self, writable=False)

    def resume_writing(self) -> None:
        """The transport takes more again."""
        self._owner.may_write(self, writable=True)

    @property
    def ends(self) -> tuple[str, str] | None:
        """The addresses of this end and of the other, as this system names them; None where there are none."""
        if self.transport is None:
            return None
        ours, theirs = (self.transport.get_extra_info(which) for which in ("sockname", "peername"))
        return (ours[0], theirs[0]) if ours and theirs else None

    @property
    def heard(self) -> bool:
        """Whether the server has said anything on it."""
        return self._heard

    @property
    def mute(self) -> bool:
        """Whether a server without TLS has not said a word yet."""
        return not self._heard and not self._secure

    def queue(self) -> tuple[int, bool]:
        """How many bytes have not been acknowledged, and whether they only wait for the other side to read on.

        While the former fall, the network works; and while the latter is so.
        """
        held = 0 if self.transport is None else self.transport.get_write_buffer_size()
        under_way, unsent = (0, 0) if self._socket is None else queued_bytes(self._socket)
        return held + under_way + unsent, not under_way and held + unsent > 0

    @property
    def acknowledged(self) -> bool:
        """Whether the other side's system has certainly taken all that was sent, and nothing that came back was lost.

        Not known everywhere.
        """
        if not SYSTEM_TELLS or self._socket is None:
            return False
        return self.queue() == (0, False) and not holds_unreadable(self._socket)

    def abort(self) -> None:
        """Close it at once."""
        if self.transport is not None:
            self.transport.abort()

    def reason(self) -> str:
        """Why it ended."""
        error = self._error or ConnectionResetError()
        if not self._heard and isinstance(error, ConnectionResetError):
            if self._secure:
                error = HungUp()
            elif not self._owner.met:
                error = LeftWithoutAWord()
        return self.farewell or describe(error)

    def _tell_first_word(self) -> None:
        if self._first_word is not None and not self._first_word.done():
            self._first_word.set_result(None)

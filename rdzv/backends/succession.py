"""Makes this process the next host of a store whose URL lists several hosts, by `core.hosts.succession`.

A node whose machine is in the list takes part whenever there is no store: when it first looks for one, and after the
serving process has died. A candidate listens, and tells each client that it is a candidate. Once the candidate may
serve, its server gets the same sockets, so that the port is never free.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hmac
import math
import secrets
from functools import partial
from typing import TYPE_CHECKING, Final

import anyio

from rdzv.backends.bind_address import NoProbeSocketError, NotResolvedError, PortTakenError
from rdzv.backends.host_queries import (
    LostHostClaim,
    MultiHostDial,
    ask_all_hosts,
    raise_first_error,
    read_frame,
    why_no_host_serves,
)
from rdzv.backends.hosting import HostedStore, StoreStarter, address_to_listen_on, serve_store_on
from rdzv.core.hosts.succession import Answer, Candidacy
from rdzv.errors import RendezvousConnectionError, RendezvousError
from store import Client, ProtocolError, StoreError
from store.net.dialing import error_text
from store.net.sockets import close_in_children, forget_sockets, listen_on
from store.net.threads import in_thread
from store.printable import make_logger
from store.protocol.wire import CANDIDATE, Rejection, encode_rejection

if TYPE_CHECKING:
    import random
    import socket
    import ssl
    from collections.abc import AsyncIterator, Callable, Sequence

    from rdzv.backends.bind_address import BindAddress
    from rdzv.backends.credentials import Credentials
    from rdzv.backends.host_queries import Host, HostReply
    from rdzv.backends.hosting import OpenClient
    from rdzv.config.settings import Settings

log: Final = make_logger(__name__)

ASK_EVERY: Final = (0.02, 0.06)  # seconds, at random, of the first pauses between questions; short: all nodes wait
PAUSE_SHARE: Final = 0.05  # pauses grow up to this share of the time without a store, as thousands of nodes ask
PAUSE_MOST: Final = 1.0  # seconds
ANSWERS_WITHIN: Final = 1.0  # seconds for a host to answer; then the host is asked again
LOST_ANSWERS_WITHIN: Final = 0.2  # seconds to answer after `rdzv lost`, which has waited for the host
CONNECTS_WITHIN: Final = 0.3  # seconds for this node to connect once a host serves; then all are asked again
LOOK_FOR_RIVAL_EVERY: Final = (5.0, 10.0)  # random seconds before each look for another store
SAY_AFTER: Final = 3.0  # seconds without a store before a warning; also the time for a report of `rdzv lost` to arrive
RIVAL: Final = "a later store serves at %s, as after rdzv lost for a host at work: the one at %s sends its nodes there"


class HostSuccession(StoreStarter):
    """Decides when this process serves its run's store."""

    def __init__(
        self, settings: Settings, credentials: Credentials, open_client: OpenClient, rng: random.Random
    ) -> None:
        super().__init__(settings, credentials, open_client, rng)
        dial = MultiHostDial(settings, credentials)
        self._hosts, self._first_tls = dial.hosts, dial.tls
        self._lost: set[str] = set()  # hosts reported as lost during the present candidacy
        self._until_word = anyio.CancelScope()  # around a candidate's questions and pause; `rdzv lost` cancels it
        self.may_host: Callable[[float], bool] = lambda _: True  # see `Node.may_host`
        self._since = -math.inf  # since when this process has found no store
        self._said = (-math.inf, "")  # the time of the last warning, and its reason

    async def _start_or_find_store(self) -> HostedStore | None:
        self._since = anyio.current_time()
        try:
            while True:
                found = await ask_all_hosts(self._hosts, self._tls_context(), within=ANSWERS_WITHIN)
                if not self._asked.is_set():
                    raise_first_error(found)
                answers = [asked.answer for asked in found]
                if Answer.SERVES in answers:  # ask again if this node is not connected soon: that host may have died
                    self._asked.set()
                    with anyio.move_on_after(CONNECTS_WITHIN):
                        await self._settled.wait()
                    self._since = anyio.current_time()
                else:
                    self._starts.clear()
                    place = await self._find_own_place(answers) if self._may_host_now() else None
                    self._starts.set()
                    if place is not None and (host := await self._run_as_candidate(*place)) is not None:
                        work = self._give_way_to_later_store(host)
                        self._beside = [asyncio.create_task(work, name="look for a later store")]
                        return host
                    await self._pause_and_warn(self._hosts, found, self._since)
                if self._settled.is_set():
                    return None
        except RendezvousError as error:
            self.problem = str(error)
            raise
        except OSError as error:
            self.problem = f"the store cannot be started at {self._settings.endpoint.url}: {error_text(error)}"
            raise RendezvousConnectionError(self.problem) from error

    async def _give_way_to_later_store(self, host: HostedStore) -> None:
        """End the hosted store if nodes would choose another, as after a wrong `rdzv lost`."""
        dial = MultiHostDial(self._settings, self._credentials)
        name, other = self._settings.endpoint.url, None
        while other in {None, host.server.store_id}:
            await anyio.sleep(self._rng.uniform(*LOOK_FOR_RIVAL_EVERY))
            with contextlib.suppress(StoreError):  # the handshake proves that the store has the token
                async with Client(dial, name=name, token=self._credentials.token, timeout=ANSWERS_WITHIN) as client:
                    other = client.store_id
        log.error(RIVAL, dial.found, host.server.url)
        await host.aclose(self._open_client)

    async def _pause_and_warn(self, hosts: Sequence[Host], found: Sequence[HostReply], since: float) -> None:
        """Pause before the next questions; after `SAY_AFTER` without a store, warn of new reasons, ever more rarely."""
        now, (said_at, said) = anyio.current_time(), self._said
        away = now - since
        if away >= SAY_AFTER:
            self.problem: str = why_no_host_serves(hosts, found)
            is_due = self.problem != said and now - said_at >= said_at - self._since
            if is_due or said_at < self._since:
                self._said = now, self.problem
                log.warning("run %s: no host serves the store: %s", self._settings.run_id, self.problem)
        self._asked.set()
        longer = max(1.0, min(away, PAUSE_MOST / PAUSE_SHARE) * PAUSE_SHARE / ASK_EVERY[1])
        with anyio.move_on_after(self._rng.uniform(*ASK_EVERY) * longer):
            await self._settled.wait()

    def _tls_context(self) -> ssl.SSLContext | None:
        return self._credentials.client_tls() or self._first_tls if self._settings.uses_tls else None

    async def _find_own_place(self, answers: Sequence[Answer]) -> tuple[int, BindAddress] | None:
        """Return index and address of the first host that is this machine and refuses, unless a candidate precedes."""
        for place, answer in enumerate(answers):
            if answer is Answer.CANDIDATE:
                return None
            if answer is Answer.REFUSED and (bound := await in_thread(partial(self._bind_address, place))) is not None:
                return place, bound
        return None

    def _bind_address(self, place: int) -> BindAddress | None:
        """Return the address to listen on for the host at this index; None if this machine cannot serve there."""
        if self._settings.uses_tls and self._credentials.server_tls() is None:
            return None  # the run uses TLS, and this machine has no certificate
        try:
            return address_to_listen_on(self._settings, self._credentials, self._settings.endpoint.hosts[place])
        except (NotResolvedError, PortTakenError, NoProbeSocketError):
            return None
        except OSError as error:
            if error.errno in {errno.EADDRNOTAVAIL, errno.EADDRINUSE}:
                return None
            raise

    async def _run_as_candidate(self, place: int, bound: BindAddress) -> HostedStore | None:
        """Be a candidate; return the store once it serves, None if this process must not serve."""
        port = self._hosts[place].address.port
        try:
            sockets = await in_thread(partial(listen_on, bound.address, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return None
            raise
        close_in_children(self, *sockets)
        with contextlib.ExitStack() as unless_served:
            unless_served.callback(forget_sockets, self)
            for sock in sockets:
                unless_served.enter_context(sock)
            async with self._answer_as_candidate(sockets, name := secrets.token_hex(8)):
                may_serve = await self._confirm_no_host_serves(place, name)
            if may_serve:
                where = (bound, port, sockets, self._gives_up)
                host = await in_thread(partial(serve_store_on, self._settings, self._credentials, *where))
                unless_served.pop_all()
                forget_sockets(self)
                if self._may_host_now():
                    return host
                await host.end()  # this node began to leave meanwhile
        return None

    def _may_host_now(self) -> bool:
        return self.may_host(anyio.current_time() - self._since)

    async def _confirm_no_host_serves(self, place: int, name: str) -> bool:
        """Ask other hosts until each is lost, or proven not to serve; return False if this process must not serve."""
        candidacy, since = Candidacy(place), anyio.current_time()
        self._lost.clear()
        while missing := candidacy.possible_hosts(len(self._hosts)):
            within = LOST_ANSWERS_WITHIN if self._until_word.cancel_called else ANSWERS_WITHIN
            with anyio.CancelScope() as self._until_word:
                asked = [self._hosts[host] for host in missing]
                found = await ask_all_hosts(asked, self._tls_context(), within=within, own=name)
                for host, one in zip(missing, found, strict=True):
                    is_lost = one.answer is Answer.SILENT and str(self._hosts[host]) in self._lost
                    heard = candidacy.after_answer(host, Answer.LOST if is_lost else one.answer)
                    if heard is None or self._settled.is_set() or not self._may_host_now():
                        return False
                    candidacy = heard
                if candidacy.possible_hosts(len(self._hosts)):
                    await self._pause_and_warn(asked, found, since)
        return True

    @contextlib.asynccontextmanager
    async def _answer_as_candidate(self, sockets: Sequence[socket.socket], name: str) -> AsyncIterator[None]:
        """During the context, answer each connection as a candidate, and accept an operator's report of a lost host."""
        said = encode_rejection(Rejection(CANDIDATE, name))

        async def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            # If the connection has closed, uvloop raises RuntimeError at a write.
            with contextlib.suppress(OSError, EOFError, ProtocolError, RuntimeError), contextlib.closing(writer):
                writer.write(said)
                with anyio.fail_after(SAY_AFTER):
                    body = await read_frame(reader)
                for host in map(str, self._hosts):
                    if hmac.compare_digest(body, LostHostClaim(host, self._credentials.token).signed_message_for(name)):
                        log.warning("run %s: an operator says that %s is lost", self._settings.run_id, host)
                        self._lost.add(host)
                        self._until_word.cancel()
                        writer.write(said)
                        await writer.drain()

        async with contextlib.AsyncExitStack() as stack:
            for sock in sockets:
                server = await asyncio.start_server(on_connection, sock=sock.dup(), ssl=self._credentials.server_tls())
                stack.callback(server.close)
            yield

"""Finds which of a URL's several hosts serves the store, and connects to it."""

from __future__ import annotations

import asyncio
import hmac
import os
import ssl
import time
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

import anyio

from rdzv.backends.bind_address import NO_SUCH_ADDRESS
from rdzv.core.hosts.succession import Answer
from rdzv.errors import RendezvousConnectionError, RendezvousSettingsError, RendezvousStateError
from store.errors import ProtocolError
from store.limits import is_loopback
from store.net.address import Address, join_host_port
from store.net.dialing import NEVER_ANSWERED, RefusedByStore, TcpDialer, error_text, exhausted_limit, reload_tls
from store.net.racing import Addresses, connect_async, resolve_async
from store.net.sockets import port_shortage_text
from store.net.tasks import run_to_completion
from store.net.threads import LoopThread
from store.protocol.frames import frame
from store.protocol.wire import CANDIDATE, ENDED, HANDSHAKE_BYTES_MAX, Greeting, Rejection, decode_opening

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from rdzv.backends.credentials import Credentials
    from rdzv.config.settings import Settings
    from store.net.racing import Resolved

ANSWERS_WITHIN: Final = 3.0  # seconds for a host to answer
ASK_AGAIN_AFTER: Final = 0.2  # seconds from a failed search for the serving host to the next
ALSO_WITHIN: Final = 0.05  # seconds, the least limit for further answers once a host serves
ATTEMPT: Final = 0.4  # seconds, the least limit for answers at a reconnect
FRAME_HEAD_BYTES: Final = 4
# Of answers at a host's addresses, the first in this order counts; others come last.
PRECEDENCE: Final = {Answer.SERVES: 0, Answer.CANDIDATE: 1, Answer.SILENT: 2}


class HostReply(NamedTuple):
    """A host's answer; `name` is the random name of a candidate, or the id of a store, else empty."""

    answer: Answer
    name: str = ""
    error: BaseException | None = None  # why the answer is `SILENT`, if known
    generation: int = 1  # of a store that serves; see docs/protocol.md

    def __str__(self) -> str:
        more = (
            f"generation {self.generation}" if self.answer is Answer.SERVES else self.error and error_text(self.error)
        )
        return f"{self.answer.value} ({more})" if more else self.answer.value


class Host:
    """One host of a URL."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self.addresses: Addresses = Addresses(address.host, address.port)

    def __str__(self) -> str:
        return join_host_port(self.address.host, self.address.port)

    async def ask(
        self,
        tls: ssl.SSLContext | None,
        *,
        within: float = ANSWERS_WITHIN,
        own: str = "",
        word: LostHostClaim | None = None,
    ) -> HostReply:
        """Ask each address of the host's name, until one serves; the host refuses only if all addresses refuse.

        An address that leads to this process's own candidate, of the name `own`, counts as refusing. If a candidate
        answers, send it the report `word`.
        """
        replies: list[HostReply] = []
        with anyio.move_on_after(within):
            try:
                found = await resolve_async(self.addresses)
            except (OSError, UnicodeError, RuntimeError) as error:  # a RuntimeError: no more threads
                return HostReply(Answer.SILENT, error=error)
            for *_, address in found:
                dead = f"{address[0]}: no answer; if that address alone is dead, take it off the name"
                no_answer = OSError(dead) if len(found) > 1 else None
                replies.append(HostReply(Answer.SILENT, error=no_answer))
            await _ask_until_one_serves(replies, [partial(self._ask_address, one, tls, own, word) for one in found])
        return min(replies, default=HostReply(Answer.SILENT), key=lambda it: PRECEDENCE.get(it.answer, len(PRECEDENCE)))

    async def _ask_address(
        self, resolved: Resolved, tls: ssl.SSLContext | None, own: str, word: LostHostClaim | None
    ) -> HostReply:
        address, sock, writer = resolved[4], None, None
        try:
            try:
                sock = await connect_async(self.addresses, [resolved])
            except OSError as error:
                raise OSError(error.errno, f"{address[0]}: {os.strerror(error.errno or 0)}") from None
            name = self.address.host if tls is not None else None
            reader, writer = await asyncio.open_connection(sock=sock, ssl=tls, server_hostname=name)
            asked = _parse_reply(decode_opening(await read_frame(reader), Greeting))
            if word is not None and asked.answer is Answer.CANDIDATE:
                writer.write(frame(word.signed_message_for(asked.name)))
                await read_frame(reader)
            return HostReply(Answer.REFUSED) if own and asked.name == own else asked
        except ConnectionRefusedError:
            return HostReply(Answer.REFUSED)
        except (OSError, EOFError, ProtocolError) as error:
            # A missing loopback address (::1 without IPv6) counts as refusing: no process can listen there.
            is_nowhere = getattr(error, "errno", None) in NO_SUCH_ADDRESS and is_loopback(str(address[0]))
            return (
                HostReply(Answer.REFUSED)
                if is_nowhere and not port_shortage_text()
                else HostReply(Answer.SILENT, error=error)
            )
        finally:
            if writer is not None:
                writer.transport.abort()
            elif sock is not None:
                sock.close()


class LostHostClaim(NamedTuple):
    """An operator's report that a host is lost, authenticated by the store's token."""

    host: str
    token: bytes | None

    def signed_message_for(self, candidate: str) -> bytes:
        """Return the message that only the candidate of this name accepts."""
        proof = hmac.digest(self.token or b"", f"lost {candidate} {self.host}".encode(), "sha256")
        return b"lost %s %s" % (self.host.encode(), proof)


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    """Return the body of the next frame; raise EOFError or ProtocolError without one."""
    size = int.from_bytes(await reader.readexactly(FRAME_HEAD_BYTES))
    if size > HANDSHAKE_BYTES_MAX:
        raise ProtocolError(f"a first message of {size} bytes is not one of this protocol")
    return await reader.readexactly(size)


def _parse_reply(said: Greeting | Rejection) -> HostReply:
    if isinstance(said, Greeting):
        return HostReply(Answer.SERVES, said.store_id, generation=said.generation)
    if said.kind == CANDIDATE:
        return HostReply(Answer.CANDIDATE, said.message)
    return HostReply(Answer.ENDED if said.kind == ENDED else Answer.SERVES)  # a full server, too, serves


async def ask_all_hosts(
    hosts: Sequence[Host], tls: ssl.SSLContext | None, *, within: float = ANSWERS_WITHIN, own: str = ""
) -> list[HostReply]:
    """Ask all hosts concurrently; hosts without an answer soon after one serves count as silent."""
    found = [HostReply(Answer.SILENT)] * len(hosts)
    questions = [partial(host.ask, tls, within=within, own=own) for host in hosts]
    await _ask_until_one_serves(found, questions, also_within=ALSO_WITHIN)
    return found


def index_of_latest_store(found: Sequence[HostReply]) -> int | None:
    """Return the index of the host whose store has the highest generation, if any; of equal ones, the first."""
    places = [place for place, asked in enumerate(found) if asked.answer is Answer.SERVES]
    return max(places, key=lambda place: found[place].generation, default=None)


async def _ask_until_one_serves(
    replies: list[HostReply], questions: Sequence[Callable[[], Awaitable[HostReply]]], also_within: float = 0.0
) -> None:
    """Ask concurrently, and set the replies, until one serves.

    Then stop at once if `also_within` is 0; else after `also_within`, or as long as that reply took if longer.
    """
    began = anyio.current_time()

    async def ask(place: int) -> None:
        replies[place] = await questions[place]()
        if replies[place].answer is Answer.SERVES:
            now, scope = anyio.current_time(), asking.cancel_scope
            scope.deadline = min(scope.deadline, now + (also_within and max(also_within, now - began)))

    async with anyio.create_task_group() as asking:
        for place in range(len(questions)):
            asking.start_soon(ask, place)


def raise_first_error(found: Sequence[HostReply], *kinds: type[Exception]) -> None:
    """Raise the first error of these kinds, or due to an exhausted limit of this process, if any."""
    for error in (asked.error for asked in found):
        if error is not None and (isinstance(error, kinds) or exhausted_limit(error)):
            raise error


def why_no_host_serves(hosts: Sequence[Host], found: Sequence[HostReply]) -> str:
    """Describe why no host serves yet."""
    of = list(zip(hosts, found, strict=True))
    silent = [(host, asked.error) for host, asked in of if asked.answer is Answer.SILENT]
    waiting = ", ".join(str(host) for host, asked in of if asked.answer is Answer.CANDIDATE)
    if not silent:
        return f"{waiting or 'the next host'} is about to serve"
    named = ", ".join(f"{host}{f' ({error_text(error)})' if error is not None else ''}" for host, error in silent)
    wait = f", and {waiting} waits for it to refuse" if waiting else ""
    return f"{named} does not answer{wait}; it may be at work. If it is off: rdzv lost URL {silent[0][0]}"


class MultiHostDial(TcpDialer):
    """Connects a client to the one of several hosts that serves the store."""

    def __init__(self, settings: Settings, credentials: Credentials) -> None:
        hosts, secure = settings.endpoint.hosts, settings.uses_tls
        self.hosts: list[Host] = [Host(Address(host=host, port=port, secure=secure)) for host, port in hosts]
        super().__init__(self.hosts[0].address, credentials.client_tls(), renew=credentials.renew)
        self.found: Host | None = None  # the host that served last
        self._within = ANSWERS_WITHIN

    async def choose_addresses(self, context: ssl.SSLContext | None) -> None:
        """Find the host that serves; raise ConnectionRefusedError if all refuse or have ended, or another OSError."""
        began = time.monotonic()
        found = await ask_all_hosts(self.hosts, context, within=self._within)
        if (place := index_of_latest_store(found)) is not None:
            self.found = host = self.hosts[place]
            self.addresses: Addresses = host.addresses
            self._within = max(ATTEMPT, 3 * (time.monotonic() - began))
            return
        if all(asked.answer in {Answer.REFUSED, Answer.ENDED} for asked in found):
            raise ConnectionRefusedError
        raise_first_error(found, ssl.SSLError)  # the client explains TLS errors
        raise RefusedByStore(why_no_host_serves(self.hosts, found))


def wait_for_serving_host(dial: MultiHostDial, *, within: float) -> None:
    """Find the host that serves; raise RendezvousConnectionError if none does within these seconds."""

    async def ask_until_found() -> str:
        problem = NEVER_ANSWERED
        with anyio.move_on_after(within):
            while dial.found is None:
                try:
                    await dial.choose_addresses(await reload_tls(dial.tls, dial.renew))
                except OSError as error:
                    problem = error_text(error)
                    await anyio.sleep(ASK_AGAIN_AFTER)
        return problem

    thread = LoopThread("find the store")
    try:
        problem = thread.start_call(ask_until_found()).wait()
    finally:
        thread.stop()
    if dial.found is None:
        hosts = ", ".join(map(str, dial.hosts))
        raise RendezvousConnectionError(f"none of {hosts} serves a store within {within:g} s: {problem}")


async def ask_hosts_for_answers(settings: Settings, credentials: Credentials) -> dict[str, HostReply]:
    """Return the reply of each host; empty if the URL has only one host."""
    if not settings.endpoint.has_successors:
        return {}
    dial = MultiHostDial(settings, credentials)
    found = await run_to_completion(*(host.ask(dial.tls) for host in dial.hosts))
    return {str(host): asked for host, asked in zip(dial.hosts, found, strict=True)}


async def report_lost_host(settings: Settings, credentials: Credentials, lost: str) -> str:
    """Tell all candidates that a host is lost; return the result in words, or raise a `RendezvousError`."""
    dial = MultiHostDial(settings, credentials)
    hosts, tls = dial.hosts, dial.tls
    meant = [host for host in hosts if lost in {str(host), host.address.host}]
    if len(hosts) == 1:
        raise RendezvousSettingsError(f"{settings.endpoint.url} names one host, and none follows it: start it again")
    if len(meant) != 1:
        raise RendezvousSettingsError(
            f"{lost[:80]!r} is not one of the several hosts of {settings.endpoint.url}; write one as it is there"
        )
    answers = {host: asked.answer for host, asked in (await ask_hosts_for_answers(settings, credentials)).items()}
    serving = [host for host, one in answers.items() if one is Answer.SERVES]
    answer, word = answers[str(meant[0])], LostHostClaim(str(meant[0]), credentials.token)
    if serving and answer is not Answer.SERVES:
        raise RendezvousStateError(f"{serving[0]} serves the store: nothing waits for {lost}")
    if answer is not Answer.SILENT:
        raise RendezvousStateError(f"{lost} {answer.value}, so its machine is not lost")
    waiting = [host for host in hosts if answers[str(host)] is Answer.CANDIDATE]
    told = [str(host) for host in waiting if (await host.ask(tls, word=word)).answer is Answer.CANDIDATE]
    if not told:
        raise RendezvousStateError(
            f"no process on another host of {settings.endpoint.url} waits for {lost}, or it did not take this word: "
            f"is the token the same?"
        )
    return f"{', '.join(told)} was told that {lost} is lost"

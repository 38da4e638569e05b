"""The address where a node may serve the embedded store, or why it must not serve.

Each machine decides alone: if a name stands for several machines, each would start a store, and one job would become
several. So, unless `is_host=1` or `max_nodes=1`, a machine serves only if all addresses of the URL's host are its own:
loopback, or an address that it can bind, or one that leads a connection back to it. If any other address accepts a
connection within `ANSWERS_WITHIN`, this machine uses the store there.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import secrets
import selectors
import socket
import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

from rdzv.errors import RendezvousConnectionError
from store.limits import is_loopback
from store.net.dialing import shortage_text
from store.printable import make_logger, short_names

if TYPE_CHECKING:
    from collections.abc import Sequence

log: Final = make_logger(__name__)

ANSWERS_WITHIN: Final = 3.0  # seconds for an address to accept
NO_SUCH_ADDRESS: Final = frozenset({errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.EPROTONOSUPPORT})
NAMED_MOST: Final = 4  # addresses in a message
TOKEN_BYTES: Final = 16
LET_ONE_HOST: Final = (
    "write a name or an address of one machine in the URL, or is_host=1 on one node and is_host=0 on the others"
)

Target = tuple[int, tuple[Any, ...]]  # a socket family, and the argument of `socket.connect`


class NotResolvedError(RendezvousConnectionError):
    """The URL's host is a name that has no address (yet)."""


class PortTakenError(RendezvousConnectionError):
    """Another process on this machine listens at the port."""


class NoProbeSocketError(RendezvousConnectionError):
    """This machine lacks a port or file descriptor to check which addresses accept, perhaps temporarily."""


class HostedElsewhereError(PortTakenError):
    """Another machine listens at an address of the URL's host, perhaps with this run's store."""


class BindAddress(NamedTuple):
    """The address to serve on for a URL's host."""

    address: str  # an address or a name; "" for all interfaces
    foreign: tuple[Target, ...] = ()  # the host's addresses that belong to other machines
    indirect: bool = False  # the host's addresses are not this machine's: a Service or NAT must forward to it


def choose_bind_address(host: str, port: int, *, may_be_open: bool, insist: bool) -> BindAddress:
    """Return the address to listen on for a URL's host.

    If `host` is a name, not localhost, and the store `may_be_open` to all machines, return all interfaces: on Debian, a
    machine's own name is 127.0.1.1. `insist`: the user has given `is_host=1`. Raise this module's errors or `OSError`:
    EADDRNOTAVAIL if no address is this machine's, unless `insist` and `may_be_open`; EADDRINUSE if a process listens
    there.
    """
    ours, others = split_own_addresses(host, port)
    if not ours and not insist:
        raise OSError(errno.EADDRNOTAVAIL, "it is no address of this machine")
    with contextlib.suppress(NoProbeSocketError):  # the server's own listening then fails, too
        if find_accepting_targets(ours):
            raise OSError(errno.EADDRINUSE, "the port is already in use")
    if not ours and not may_be_open:
        raise OSError(
            errno.EADDRNOTAVAIL,
            "it is no address of this machine. If a Service or NAT forwards it to this machine, the store has to "
            "listen on every address: give the run a token or mutual TLS, or say insecure=1",
        )
    accepting = find_accepting_targets(others)
    if accepting:
        raise HostedElsewhereError(f"{host}:{port} is served at {hosts_text(accepting)} already")
    if not ours:
        return BindAddress("", indirect=True)
    here = find_accepting_targets(others, listen_on=port) if others else ()
    foreign = tuple(target for target in others if target not in here)
    with contextlib.suppress(ValueError):  # ValueError: `host` is a name
        if host != "localhost":
            ipaddress.ip_address(host.partition("%")[0])
        return BindAddress(host, foreign)
    if may_be_open:
        return BindAddress("", foreign)
    if all(is_loopback(str(address[0])) for _, address in ours):
        log.warning(
            "the store listens on %s only, which is all that %s stands for here, and no other machine reaches it: "
            "give the run a token or mutual TLS, or say insecure=1, and it will listen on every address",
            *(ours[0][1][0], host),
        )
    return BindAddress(str(ours[0][1][0]), foreign)


def split_own_addresses(host: str, port: int) -> tuple[list[Target], list[Target]]:
    """Return the host's addresses that this machine can bind, and the host's others except loopback."""
    found = _resolve_host(host, port)
    ours = [target for target in found if _can_be_bound(target)]
    return ours, [target for target in found if target not in ours and not is_loopback(str(target[1][0]))]


def _resolve_host(host: str, port: int) -> list[Target]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError) as error:
        raise NotResolvedError(f"the store cannot be started on {host}:{port}: {host!r} has no address") from error
    return list(dict.fromkeys((int(family), address) for family, _, _, _, address in found))


def _can_be_bound(target: Target) -> bool:
    family, address = target
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address[0], 0, *address[2:]))
    except OSError as error:
        if error.errno in NO_SUCH_ADDRESS:
            return False
        if error.errno != errno.EADDRINUSE:  # EADDRINUSE: this machine has the address, but no free ephemeral port
            raise
    return True


def find_accepting_targets(targets: Sequence[Target], *, listen_on: int | None = None) -> list[Target]:
    """Connect to all targets concurrently, and return those that accept.

    With `listen_on`, listen at that port, and return only the targets whose connections arrive here, with a
    random token. A client of the store that connects during this check is disconnected, and retries. Raise
    `NoProbeSocketError` if this machine lacks resources, as that says nothing about a target.
    """
    word, reached = secrets.token_bytes(TOKEN_BYTES), set[int]()
    with contextlib.ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())

        def watch_socket(sock: socket.socket, event: int, what: object) -> None:
            sock.setblocking(False)
            selector.register(stack.enter_context(sock), event, what)

        for family in {family for family, _ in targets} if listen_on is not None else ():
            listener = socket.create_server(("", listen_on), family=family, backlog=len(targets) + 8)
            watch_socket(listener, selectors.EVENT_READ, "listener")
        dialled = set[int]()
        for number, (family, address) in enumerate(targets):
            try:
                sock = socket.socket(family, socket.SOCK_STREAM)
                watch_socket(sock, selectors.EVENT_WRITE, number)
                with contextlib.suppress(BlockingIOError):
                    sock.connect(address)
                dialled.add(number)
            except OSError as error:  # no route, or an unknown family of addresses
                _raise_if_out_of_resources(error)
        until = time.monotonic() + ANSWERS_WITHIN
        while dialled and (left := until - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                what = key.data
                sock = cast("socket.socket", key.fileobj)
                if what == "listener":
                    try:
                        watch_socket(sock.accept()[0], selectors.EVENT_READ, "caller")
                    except OSError as error:  # the peer has disconnected
                        _raise_if_out_of_resources(error)
                    continue
                selector.unregister(sock)
                if what == "caller":
                    arrived = _read_probe_target(word, sock)
                    reached |= arrived & dialled
                    dialled -= arrived
                elif sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    dialled.discard(what)
                elif listen_on is None:
                    reached.add(what)
                    dialled.discard(what)
                else:
                    with contextlib.suppress(OSError):  # the peer has disconnected
                        sock.send(word + what.to_bytes(2))
    return [targets[number] for number in sorted(reached)]


def _raise_if_out_of_resources(error: OSError) -> None:
    if lack := shortage_text(error):
        raise NoProbeSocketError(f"this machine cannot ask where the store is: {lack}") from error


def _read_probe_target(word: bytes, sock: socket.socket) -> set[int]:
    """Read the random `word` and a target's number; return that number; an empty set from a foreign connection."""
    with contextlib.suppress(OSError):
        got = sock.recv(TOKEN_BYTES + 2)
        if got.startswith(word) and len(got) == TOKEN_BYTES + 2:
            return {int.from_bytes(got[TOKEN_BYTES:])}
    return set()


def hosts_text(targets: Sequence[Target]) -> str:
    """Return the addresses without ports, as one text."""
    return short_names([str(address[0]) for _, address in targets], NAMED_MOST)

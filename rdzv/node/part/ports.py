"""Shell: the port that a node promises, in case it becomes rank 0: one that is free in both families of addresses."""

from __future__ import annotations

import errno
import logging
import socket

__all__ = ["HeldPort"]

log: logging.Logger = logging.getLogger(__name__)

FREE_ATTEMPTS = 8  # ports that are free for IPv4 and asked for IPv6, too, before one does without


class HeldPort:
    """A port of this machine, held until the node that promises it has its round.

    Args:
        among: The port, or the range of ports, to take it from, as `master_port` says; None: any free one.
    """

    def __init__(self, among: str | None = None) -> None:
        self._sockets: tuple[socket.socket, ...] = ()
        first, _, last = (among or "0").partition("-")
        self._ports = range(int(first), int(last or first) + 1)

    def hold(self) -> int:
        """The port; the same for as long as it is held. If all are taken it is the first: they may be free in time."""
        if not self._sockets:
            for port in self._ports:
                self._sockets = _bound_in_both(port)
                if self._sockets:
                    break
            else:
                log.warning(
                    "somebody listens at each port of master_port=%s on this machine; should this node become rank 0, "
                    "the others meet at %d in vain unless it is free by then",
                    f"{self._ports[0]}-{self._ports[-1]}",
                    self._ports[0],
                )
                return self._ports[0]
        return _port_of(self._sockets[0])

    def release(self) -> None:
        """Let whoever was promised it have it."""
        held, self._sockets = self._sockets, ()
        for sock in held:
            sock.close()


def _port_of(sock: socket.socket) -> int:
    port: int = sock.getsockname()[1]
    return port


def _bound_in_both(port: int) -> tuple[socket.socket, ...]:
    """Sockets bound to this port, one of each family that this system has; none if somebody listens on either.

    Rank 0's host may be met by IPv6, so that a port at which somebody listens there is as bad as one of IPv4.
    """
    for _ in range(1 if port else FREE_ATTEMPTS):
        bound: list[socket.socket] = []
        try:
            for family in (socket.AF_INET, socket.AF_INET6):
                sock = _bound(family, _port_of(bound[0]) if bound else port)
                if sock is not None:
                    bound.append(sock)
        except OSError:  # it is taken; of any free port, on the other family only
            for sock in bound:
                sock.close()
        else:
            return tuple(bound)
    return ()


def _bound(family: int, port: int) -> socket.socket | None:
    """A socket bound to this port, which others may bind as well while nobody listens; None without this family.

    Raises:
        OSError: Somebody listens there.
    """
    try:
        sock = socket.socket(family)
    except OSError:
        return None
    try:
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)  # else it would want that of IPv4, too
        if port:  # nodes of one machine may share the port they promise: only one of them becomes rank 0
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("", port))
    except OSError as error:
        sock.close()
        if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
            return None
        raise
    return sock

"""The port where a node will listen if it becomes rank 0: free in both IPv4 and IPv6."""

from __future__ import annotations

import errno
import logging
import socket

from rdzv.errors import RendezvousConnectionError
from store.net.dialing import shortage_text
from store.net.sockets import close_in_children, forget_sockets, port_shortage_text

log: logging.Logger = logging.getLogger(__name__)


class NoFreePortError(RendezvousConnectionError):
    """No port can be bound: none is free, or this process lacks file descriptors."""


class HeldPort:
    """A free port of this machine, from the range `among`, held until the node has its round."""

    def __init__(self, among: str | None = None) -> None:
        self._socket: socket.socket | None = None
        first, _, last = (among or "0").partition("-")
        self._ports = range(int(first), int(last or first) + 1)

    def reserve(self) -> int:
        """Hold and return a free port. If none is free, return the range's first; without a range, raise an error."""
        if self._socket is None:
            self._socket = next(filter(None, map(_bind_to_port, self._ports)), None)
            if self._socket is None:
                if not self._ports[0]:
                    why = port_shortage_text() or "no socket can be bound"
                    raise NoFreePortError(f"this node cannot promise a port for rank 0: {why}")
                log.warning(
                    "each port of master_port=%d-%d is in use on this machine; if this node becomes rank 0, "
                    "port %d must be free by then",
                    self._ports[0],
                    self._ports[-1],
                    self._ports[0],
                )
                return self._ports[0]
            close_in_children(self, self._socket)  # a forked child must not keep the port in use
        return int(self._socket.getsockname()[1])

    def release(self) -> None:
        """Free the port for rank 0's server."""
        held, self._socket = self._socket, None
        if held is not None:
            forget_sockets(self)
            held.close()


def _bind_to_port(port: int) -> socket.socket | None:
    """Return a socket bound to this port, in IPv6 and IPv4 if the system has both; None if the port is in use."""
    for family in (socket.AF_INET6, socket.AF_INET):
        try:
            sock = socket.socket(family)
        except OSError as error:
            if lack := shortage_text(error):
                raise NoFreePortError(f"this node cannot promise a port for rank 0: {lack}") from error
            continue  # the system lacks this address family
        try:
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            if port:  # several nodes of a machine may hold one port, as only one becomes rank 0
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(("", port))
        except OSError as error:
            sock.close()
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                return None
        else:
            return sock
    return None

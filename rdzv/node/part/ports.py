"""Shell: the port that a node promises, in case it becomes rank 0."""

from __future__ import annotations

import logging
import socket

__all__ = ["HeldPort"]

log = logging.getLogger(__name__)


class HeldPort:
    """A port of this machine, held until the node that promises it has its round.

    Args:
        among: The port, or the range of ports, to take it from, as `master_port` says; None: any free one.
    """

    def __init__(self, among: str | None = None) -> None:
        self._socket: socket.socket | None = None
        first, _, last = (among or "0").partition("-")
        self._ports = range(int(first), int(last or first) + 1)

    def hold(self) -> int:
        """The port; the same for as long as it is held. If all are taken it is the first: they may be free in time."""
        if self._socket is None:
            for port in self._ports:
                self._socket = _bound(port)
                if self._socket is not None:
                    break
            else:
                log.warning(
                    "somebody listens at each port of master_port=%s on this machine; should this node become rank 0, "
                    "the others meet at %d in vain unless it is free by then",
                    f"{self._ports[0]}-{self._ports[-1]}",
                    self._ports[0],
                )
                return self._ports[0]
        held: int = self._socket.getsockname()[1]
        return held

    def release(self) -> None:
        """Let whoever was promised it have it."""
        held, self._socket = self._socket, None
        if held is not None:
            held.close()


def _bound(port: int) -> socket.socket | None:
    """A socket bound to this port, which others may bind as well while nobody listens; None if somebody does."""
    sock = socket.socket()
    if port:  # nodes of one machine may share the port they promise: only one of them becomes rank 0
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(("", port))
    except OSError:
        sock.close()
        return None
    return sock

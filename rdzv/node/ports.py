"""Shell: a free port on this machine, for the others to meet at should this node become rank 0."""

from __future__ import annotations

import socket

__all__ = ["HeldPort"]


class HeldPort:
    """A port that is held from a node's arrival until its round has come, so that nobody takes it meanwhile."""

    def __init__(self) -> None:
        self._holder: socket.socket | None = None

    def hold(self) -> int:
        """Which one it is; the same until it is released."""
        if self._holder is None:
            holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            holder.bind(("", 0))
            self._holder = holder
        port: int = self._holder.getsockname()[1]
        return port

    def release(self) -> None:
        """Let it go, for whoever is to listen there."""
        holder, self._holder = self._holder, None
        if holder is not None:
            holder.close()

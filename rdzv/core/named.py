"""Pure: a node as people are told of it: its name, and where it is."""

from __future__ import annotations

__all__ = ["named"]


def named(node_id: str, address: str | None) -> str:
    """Return a node's name, and its address if that is known and says more."""
    return f"{node_id} ({address})" if address and address != node_id else node_id

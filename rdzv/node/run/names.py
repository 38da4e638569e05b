"""Pure: the valid ids of nodes, and names of the attributes that bans use."""

from __future__ import annotations

import msgpack

from rdzv.config.config_errors import refuse, shown
from rdzv.config.value_types import ATTRIBUTES_BYTES_MAX, NAME, TEXT


def check_node_id(node_id: str) -> None:
    """Raise RendezvousSettingsError for an invalid node id: a ban of it would seem to work."""
    try:
        NAME.convert(node_id)
    except (TypeError, ValueError):
        refuse(f"node_id={shown(node_id)} must be {NAME.limit}")


def attribute_ban(attribute: str, value: str) -> str:
    """Name a ban of an attribute: "rack=17"; raise RendezvousSettingsError if no node can have that."""
    try:
        name, value = TEXT.convert(attribute), TEXT.convert(value)
    except (TypeError, ValueError):
        refuse(f"the attribute {shown(attribute)}={shown(value)} must be {TEXT.limit}, on both sides")
    if "=" in name:
        refuse(f"the attribute {shown(attribute)} cannot be banned by: there is a '=' in its name")
    if len(msgpack.packb({name: value})) > ATTRIBUTES_BYTES_MAX:
        refuse(f"the attribute {shown(attribute)}={shown(value)} has more than {ATTRIBUTES_BYTES_MAX} bytes")
    return f"{name}={value}"

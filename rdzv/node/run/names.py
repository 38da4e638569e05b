"""Pure: checks the ids of nodes, and the attributes of bans."""

from __future__ import annotations

import msgpack

from rdzv.config.config_errors import refuse, shown
from rdzv.config.value_types import ATTRIBUTES_BYTES_MAX, NAME, TEXT


def check_node_id(node_id: str) -> None:
    """Raise RendezvousSettingsError for an invalid node id, as a ban of it would have no effect."""
    try:
        NAME.convert(node_id)
    except (TypeError, ValueError):
        refuse(f"node_id={shown(node_id)} must be {NAME.limit}")


def attribute_ban(attribute: str, value: str) -> str:
    """Return "rack=17", as bans name it; raise RendezvousSettingsError if no node can have this attribute."""
    try:
        name, value = TEXT.convert(attribute), TEXT.convert(value)
    except (TypeError, ValueError):
        refuse(f"the attribute {shown(attribute)}={shown(value)} must be {TEXT.limit}, on both sides")
    if "=" in name:
        refuse(f"the attribute {shown(attribute)} cannot be banned by: there is a '=' in its name")
    if len(msgpack.packb({name: value})) > ATTRIBUTES_BYTES_MAX:
        refuse(f"the attribute {shown(attribute)}={shown(value)} has more than {ATTRIBUTES_BYTES_MAX} bytes")
    return f"{name}={value}"

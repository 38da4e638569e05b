"""Pure: checks the ids of nodes, and the attributes of bans."""

from __future__ import annotations

from typing import Any

import msgpack

from rdzv.config.config_errors import refuse, shown
from rdzv.config.value_types import ATTRIBUTES_BYTES_MAX, NAME, TEXT
from rdzv.core.state import ban_name


def check_node_id(node_id: str) -> None:
    """Raise RendezvousSettingsError for an id that no node can have: a ban of it would have no effect."""
    try:
        NAME.convert(node_id)
    except (TypeError, ValueError):
        refuse(f"node_id={shown(node_id)} must be {NAME.limit}")


def name_of_ban(node_id: str, where: Any) -> tuple[str, str]:
    """Return the name of a ban, and the banned attribute as "rack=17", or "" if the ban is of a node.

    Raises:
        RendezvousSettingsError: Both or none are given, or no node can have this id or attribute.
    """
    if (where is None) == (node_id == ""):
        given = "neither" if where is None else "both"
        refuse(f"a ban is of a node_id or of where=(attribute, value), and not of {given}")
    if where is None:
        check_node_id(node_id)
        return node_id, ""
    if not isinstance(where, tuple | list) or len(where) != 2:
        refuse(f"where={shown(where)} must be an attribute and its value: ('rack', '17')")
    attribute, value = where
    try:
        name, value = TEXT.convert(attribute), TEXT.convert(value)
    except (TypeError, ValueError):
        refuse(f"the attribute {shown(attribute)}={shown(value)} must be {TEXT.limit}, on both sides")
    if "=" in name:
        refuse(f"the attribute {shown(attribute)} cannot be banned by: there is a '=' in its name")
    if len(msgpack.packb({name: value})) > ATTRIBUTES_BYTES_MAX:
        refuse(f"the attribute {shown(attribute)}={shown(value)} has more than {ATTRIBUTES_BYTES_MAX} bytes")
    banned = f"{name}={value}"
    return ban_name(banned), banned

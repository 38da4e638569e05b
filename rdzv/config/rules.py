"""Checks that parameters fit each other and the kind of store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rdzv.config.config_errors import brief, refuse

if TYPE_CHECKING:
    from rdzv.config.endpoint import Endpoint
    from rdzv.config.parameters import Parameter


def check_applies_to_store(parameter: Parameter, endpoint: Endpoint) -> None:
    """Raise an error for a parameter that this kind of store ignores."""
    if parameter.family not in ("", endpoint.scheme_info.family):
        refuse(
            f"{parameter.name} is for {parameter.family} and {parameter.family}s, but the scheme is {endpoint.scheme}; "
            f"leave out {parameter.name} (and RDZV_{parameter.name.upper()}), or use a {parameter.family} store"
        )
    if parameter.encrypted_only and not endpoint.scheme_info.is_encrypted:
        refuse(
            f"{parameter.name} is for encrypted connections, but the scheme is {endpoint.scheme}; "
            f"write {endpoint.scheme}s:// or leave out {parameter.name} (and RDZV_{parameter.name.upper()})"
        )


def check_consistent(it: Any) -> None:
    """Raise an error if two values of a `settings.Settings` contradict each other."""
    least, most = it.min_nodes, it.max_nodes
    if least is None and most is not None:
        refuse(f"max_nodes={most} needs min_nodes beside it; give min_nodes from 1 to {most}")
    if least is not None:
        check_sizes(least, most, it.node_unit)
    if it.disconnect_ttl > it.ttl:
        refuse(
            f"disconnect_ttl={it.disconnect_ttl:g} must not be more than ttl={it.ttl:g}, when a node is gone; "
            f"lower disconnect_ttl or raise ttl"
        )
    if it.gone_ttl > it.disconnect_ttl:
        refuse(
            f"gone_ttl={it.gone_ttl:g} must not be more than disconnect_ttl={it.disconnect_ttl:g}, which is for less "
            f"certain signs of an end; lower gone_ttl or raise disconnect_ttl"
        )
    if it.requested_rank is not None and isinstance(it.rank_order, str) and it.rank_order != "requested":
        refuse(
            f"requested_rank={it.requested_rank} has no effect with rank_order={it.rank_order}; "
            f"give all nodes rank_order=requested"
        )
    if it.token is not None and it.token_file is not None:
        refuse(
            f"token and token_file={brief(it.token_file)} are both given, but only one can be the secret; leave one out"
        )
    if it.tls is not None and (files := [name for name in ("ca", "cert", "key") if getattr(it, name)]):
        given = ", ".join(f"{name}={brief(getattr(it, name))}" for name in files)
        refuse(f"tls and {given} are given, but an SSLContext holds it all; leave out the one or the others")
    if it.endpoint.has_successors:
        if it.data_dir is not None:
            refuse(
                f"data_dir={brief(it.data_dir)} is for a store on one host, and {it.endpoint.url} lists "
                f"{len(it.endpoint.hosts)}: a next host would not have the data; leave out data_dir, or list one host"
            )
        if it.is_host:
            refuse(
                f"is_host=1 says that this node's machine is the one host, and {it.endpoint.url} lists "
                f"{len(it.endpoint.hosts)}; leave it out: each node looks for its own machine in the list"
            )
    if it.tls is not None and it.host == "process":
        refuse("tls is an SSLContext, which host=process cannot hand over; give ca, cert and key, or leave out host")
    for one, other in (("cert", "key"), ("key", "cert"), ("user", "password_file"), ("password_file", "user")):
        if getattr(it, one) is not None and getattr(it, other) is None:
            refuse(f"{one}={brief(getattr(it, one))} is of no use without the other half; give {other} as well")


def check_sizes(least: int, most: int, unit: int = 1) -> None:
    """Raise an error if no round can complete with these numbers of nodes."""
    if most < least:
        refuse(f"max_nodes={most} must not be less than min_nodes={least}; raise one or lower the other")
    needed = min_in_whole_units(least, unit)
    if max_in_whole_units(most, unit) < needed:
        refuse(
            f"min_nodes={least} in units of node_unit={unit} is {needed}, and must not be more than "
            f"max_nodes={most}; raise max_nodes to {needed} or choose a smaller node_unit"
        )


def min_in_whole_units(min_nodes: int, unit: int) -> int:
    """Return the minimum, rounded up to a multiple of `unit`."""
    return -(-min_nodes // unit) * unit


def max_in_whole_units(max_nodes: int, unit: int) -> int:
    """Return the maximum, rounded down to a multiple of `unit`."""
    return max_nodes // unit * unit

"""Pure: the address at which the others reach each member, where the store's view of a member is of no use to them.

A node that gives no address of its own is known by the address from which the store sees it come. That is wrong twice:

    on the store's own host       it comes from loopback, or from an interface that the others may not reach. But
                                  whoever comes from another host knows an address of that host which leads there: the
                                  one at which it reaches the store.
    behind a forwarder            all nodes come from the forwarder's address, or from loopback, if the forwarder is on
                                  the store's host. But each of them knows the address from which its own system sends.

So a record also says from where its node sends, and where it reaches the store, and who completes a round puts the
right address in. A store may be several servers (etcd): where a node reaches one of them tells nothing of the hosts of
the others.

Loopback means another host to each host, so it is told only where all are on one. A member of which nothing else is
known is refused as rank 0, with what to set; of another member no address is told.
"""

from __future__ import annotations

import functools
import ipaddress
from collections import defaultdict
from typing import TYPE_CHECKING

from rdzv.errors import RendezvousSettingsError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rdzv.core.state import NodeRecord

__all__ = ["in_zone_of", "is_loopback", "way_of", "with_reachable_addresses"]

WHAT_TO_SET = "give that node address= (torchrun: --local-addr), where the others reach it"


@functools.lru_cache(maxsize=1024)  # each node asks it at each arrival, and a coordinator of all members, of the same
def is_loopback(address: str) -> bool:
    """Return whether an address leads back to the host that uses it."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address == "localhost"
    mapped = getattr(ip, "ipv4_mapped", None)
    return (mapped or ip).is_loopback


def in_zone_of(host: str, address: str) -> str:
    """Return a link-local address with the zone of a URL's host, without which no socket takes it; others as they are.

    A zone is each host's own name for one of its interfaces, so that it is not told to others.
    """
    zone = host.partition("%")[2]
    is_local = zone and address.lower().startswith("fe80:") and "%" not in address
    return f"{address}%{zone}" if is_local else address


def way_of(seen_as: str, sends_from: str, store_at: str) -> tuple[str, str, str]:
    """Return where a node is reached, as far as it can tell itself; and the way to the store, where that tells more.

    Args:
        seen_as: Where the store sees it come from.
        sends_from: From where its system sends to the store.
        store_at: Where it reaches the store.
    """
    if not is_loopback(sends_from):
        if is_loopback(seen_as):  # something on the store's own host stands between them
            return sends_from, sends_from, store_at
        # A store that sees it come from where it has itself connected to is not there: something else forwards, and
        # where that is would mislead whoever looks for the store's host.
        if seen_as == store_at != sends_from:
            return sends_from, "", ""
    return seen_as, sends_from, store_at


def with_reachable_addresses(members: Sequence[NodeRecord]) -> tuple[NodeRecord, ...]:
    """Return the members of a round in the same order, each with an address at which the others reach it.

    Raises:
        RendezvousSettingsError: That of the first one, where all meet, is not known.
    """
    own = _those_behind_one_address(members)
    # Where they reach the store is where the forwarder is, and tells nothing of the store's host.
    found = tuple(one.replace(address=one.sends_from, store_at="") if one.node_id in own else one for one in members)
    remote = [one for one in found if not _is_on_the_stores_host(one) and not is_loopback(one.address)]
    if not remote and len({one.machine for one in found if one.machine}) <= 1:
        return found  # all on one host, as far as anybody can tell
    ways = {one.server: one.store_at for one in remote if one.store_at and one.sends_from == one.address}
    found = tuple(
        one.replace(address=ways[one.server]) if _is_on_the_stores_host(one) and one.server in ways else one
        for one in found
    )
    unknown = {one.node_id for one in found if one.store_at and is_loopback(one.address)}
    first = found[0]
    if first.node_id in unknown:
        raise RendezvousSettingsError(
            f"node {first.node_id} would be rank 0 at {first.address}, where no other host reaches it; {WHAT_TO_SET}"
        )
    return tuple(one.replace(address="") if one.node_id in unknown else one for one in found)


def _is_on_the_stores_host(record: NodeRecord) -> bool:
    """Return whether a node reaches its server without leaving its host; False if its user says where it is."""
    return bool(record.store_at) and (record.sends_from == record.store_at or is_loopback(record.store_at))


def _those_behind_one_address(members: Sequence[NodeRecord]) -> set[str]:
    """Return the members that share their address with one that sends from elsewhere, and can be told apart by that."""
    sharing: defaultdict[str, list[NodeRecord]] = defaultdict(list)
    for one in members:
        if one.sends_from and not is_loopback(one.address):
            sharing[one.address].append(one)
    return {
        one.node_id
        for group in sharing.values()
        if len({other.sends_from for other in group}) > 1
        for one in group
        if not is_loopback(one.sends_from)
    }

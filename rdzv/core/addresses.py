"""Pure: the address at which other members reach each member, if the address seen by the store is of no use.

A node without a configured address is known by the address that the store sees. That address is wrong in two cases:

    on the store's own host       the store sees loopback, or an interface that other nodes may not reach. But each
                                  node of another host knows an address of that host: the one of the store.
    behind a forwarder            the store sees the forwarder's address, or loopback if the forwarder runs on the
                                  store's host. But each node knows the address from which its own system sends.

So a node's record also has the address that it sends from and the address of its store, and the node that completes a
round inserts the right address. A store may be several servers (etcd): the address of one says nothing about the hosts
of the others.

Loopback means another host on each host, so it is published only if all members are on one host. A member with no other
known address is rejected as rank 0, with the remedy; as another rank it gets an empty address.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from rdzv.errors import RendezvousSettingsError
from store.limits import is_loopback

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rdzv.core.state import NodeRecord

__all__ = ["in_zone_of", "way_of", "with_reachable_addresses"]

WHAT_TO_SET = "give that node address= (torchrun: --local-addr), where the others reach it"


def in_zone_of(host: str, address: str) -> str:
    """Return a link-local address with the zone of the URL's host, which only this host knows; others unchanged."""
    zone = host.partition("%")[2]
    is_local = zone and address.lower().startswith("fe80:") and "%" not in address
    return f"{address}%{zone}" if is_local else address


def way_of(seen_as: str, sends_from: str, store_at: str) -> tuple[str, str, str]:
    """Return a node's address and, if they say more, `sends_from` and `store_at`, the store's address for it."""
    if not is_loopback(sends_from):
        if is_loopback(seen_as):  # something on the store's own host forwards
            return sends_from, sends_from, store_at
        # This is a forwarder's address, at which no node must look for the store's host.
        if seen_as == store_at != sends_from:
            return sends_from, "", ""
    return seen_as, sends_from, store_at


def with_reachable_addresses(members: Sequence[NodeRecord]) -> tuple[NodeRecord, ...]:
    """Return the members with addresses at which others reach them; raise an error if the first one's is unknown."""
    own = _those_behind_one_address(members)
    # Their `store_at` is the forwarder's address and says nothing about the store's host.
    found = tuple(one.replace(address=one.sends_from, store_at="") if one.node_id in own else one for one in members)
    remote = [one for one in found if not _is_on_the_stores_host(one) and not is_loopback(one.address)]
    if not remote and len({one.machine for one in found if one.machine}) <= 1:
        return found  # all on one host, as far as is known
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
    """Return True if a node reaches its server without leaving its host; False if its address is configured."""
    return bool(record.store_at) and (record.sends_from == record.store_at or is_loopback(record.store_at))


def _those_behind_one_address(members: Sequence[NodeRecord]) -> set[str]:
    """Return members that share an address with one that sends from elsewhere, if `sends_from` tells them apart."""
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

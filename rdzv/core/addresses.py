"""The address where other members reach each member.

Unless configured, a node's address is the one that the store sees, which is wrong in two cases:

    on the store's own host       The store sees loopback, or an interface that other hosts may not reach. But nodes on
                                  other hosts know the address at which they reach the store's host.
    behind a forwarder            The store sees the forwarder's address (loopback if it runs on the store's host). But
                                  the node knows from which address its own system sends.

So a node's record has the addresses of both ends of its connection to the store, and the coordinator replaces wrong
addresses when it completes a round. With several servers (etcd), a node on a server's host gets that server's address.

A loopback address is published only if all members are on one host.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from rdzv.errors import RendezvousSettingsError
from store.limits import is_loopback

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rdzv.core.state import NodeRecord

WHAT_TO_SET = "give that node address= (torchrun: --local-addr), where the others reach it"


def with_ipv6_zone(host: str, address: str) -> str:
    """Return `address`; if it is a link-local IPv6 address without a zone, add the zone of the store URL's `host`."""
    zone = host.partition("%")[2]
    is_local = zone and address.lower().startswith("fe80:") and "%" not in address
    return f"{address}%{zone}" if is_local else address


def addresses_for_record(observed_address: str, sends_from: str, store_at: str) -> tuple[str, str, str]:
    """Return `address`, `sends_from` and `store_at` for a node's record; the last two are empty if they would mislead.

    `observed_address` is the address from which the store sees the node connect.
    """
    if not is_loopback(sends_from):
        if is_loopback(observed_address):  # a forwarder on the store's host passes on this node's connection
            return sends_from, sends_from, store_at
        # The store sees the very address that the node has connected to: a forwarder's address, not the store's.
        if observed_address == store_at != sends_from:
            return sends_from, "", ""
    return observed_address, sends_from, store_at


def with_reachable_addresses(members: Sequence[NodeRecord]) -> tuple[NodeRecord, ...]:
    """Return the members with reachable addresses, or "" if unknown; RendezvousSettingsError if rank 0 has none."""
    own = _find_proxied_members(members)
    found = tuple(one.replace(address=one.sends_from, store_at="") if one.node_id in own else one for one in members)
    remote = [one for one in found if not _is_on_the_stores_host(one) and not is_loopback(one.address)]
    if not remote and len({one.machine for one in found if one.machine}) <= 1:
        return found  # all members seem to be on one host, where they reach each other by loopback
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
    """Return True if a node is on its store server's host; False also if its address is configured."""
    return bool(record.store_at) and (record.sends_from == record.store_at or is_loopback(record.store_at))


def _find_proxied_members(members: Sequence[NodeRecord]) -> set[str]:
    """Return the ids of members behind a forwarder: the store sees one address, but they send from different ones."""
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

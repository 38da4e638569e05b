"""Where the others reach a member whom the store sees come from loopback, or from a forwarder."""

from __future__ import annotations

from typing import Any

import pytest

from rdzv.core.addresses import is_loopback, way_of, with_reachable_addresses
from rdzv.core.decision import Complete, Wait
from rdzv.core.state import NodeRecord
from rdzv.errors import RendezvousSettingsError
from tests.support.hand_fed import HandFed


def seen(name: str, address: str, sends_from: str = "", store_at: str = "", **more: Any) -> NodeRecord:
    path = {"sends_from": sends_from, "store_at": store_at, **more}
    return NodeRecord(node_id=name, incarnation="1", address=address, **path)


def addresses(*members: NodeRecord) -> list[str]:
    return [member.address for member in with_reachable_addresses(members)]


HERE = seen("head", "127.0.1.1", "127.0.0.1", "127.0.1.1")  # on the store's own host, as Debian names it
OTHER = seen("a", "10.0.0.2", "10.0.0.2", "10.0.0.1")
FORWARDER, STORE = "10.0.0.9", "10.0.0.1"


@pytest.mark.parametrize(
    ("address", "loopback"),
    [
        *[("127.0.1.1", True), ("::1", True), ("::ffff:127.0.0.1", True), ("localhost", True)],
        *[("10.0.0.1", False), ("fe80::1%eth0", False), ("node0", False), ("", False)],
    ],
)
def test_loopback_is_known_in_each_of_its_forms(address: str, loopback: bool) -> None:
    assert is_loopback(address) is loopback


def test_a_member_on_the_stores_host_is_reached_where_the_others_reach_the_store() -> None:
    """`MASTER_ADDR=127.0.0.1` was handed to all, without a word."""
    assert addresses(HERE, OTHER) == ["10.0.0.1", "10.0.0.2"]
    assert addresses(OTHER, HERE) == ["10.0.0.2", "10.0.0.1"]


def test_a_member_on_the_stores_host_may_have_come_over_an_interface_that_is_not_the_others() -> None:
    """Its own name stood for an address of the management network."""
    head = seen("head", "10.78.0.1", "10.78.0.1", "10.78.0.1")
    assert addresses(head, OTHER) == ["10.0.0.1", "10.0.0.2"]
    assert addresses(head, head) == ["10.78.0.1", "10.78.0.1"]


def test_members_of_one_host_stay_at_loopback() -> None:
    assert addresses(HERE, HERE) == ["127.0.1.1", "127.0.1.1"]


def test_an_address_that_the_user_gives_is_nobodys_to_change() -> None:
    assert addresses(seen("head", "127.0.0.1"), OTHER) == ["127.0.0.1", "10.0.0.2"]
    assert addresses(seen("a", FORWARDER), seen("b", FORWARDER)) == [FORWARDER, FORWARDER]


def test_who_is_seen_where_it_reaches_the_store_is_behind_a_forwarder_and_says_where_it_sends_from() -> None:
    """All nodes published the forwarder's address."""
    assert way_of(FORWARDER, "10.0.0.2", FORWARDER) == ("10.0.0.2", "", ""), "not the way to the store"
    assert way_of("192.0.2.1", "10.0.0.2", STORE) == ("192.0.2.1", "10.0.0.2", STORE), "a plain NAT"
    assert way_of(STORE, STORE, STORE) == (STORE, STORE, STORE), "it is on the store's host"
    assert way_of("127.0.0.1", "127.0.0.1", "127.0.0.1") == ("127.0.0.1", "127.0.0.1", "127.0.0.1")


def test_who_is_seen_at_loopback_and_sends_from_elsewhere_is_behind_a_forwarder_on_the_stores_host() -> None:
    """Every node of a run was sent to 127.0.0.1."""
    assert way_of("127.0.0.1", "10.0.0.2", STORE) == ("10.0.0.2", "10.0.0.2", STORE)
    assert way_of("127.0.0.6", STORE, STORE) == (STORE, STORE, STORE)
    there = seen("head", *way_of("127.0.0.1", "127.0.0.1", "127.0.0.1"))
    assert addresses(there, seen("a", *way_of("127.0.0.1", "10.0.0.2", STORE))) == [STORE, "10.0.0.2"]


def test_the_way_to_one_of_several_servers_tells_nothing_of_the_hosts_of_the_others() -> None:
    """On etcd a member on a server's host was told by the address of another server."""
    here = seen("head", "10.0.0.1", "10.0.0.1", "10.0.0.1", server="1")
    other = seen("a", "10.0.0.2", "10.0.0.2", "10.0.0.3", server="3")
    assert addresses(here, other) == ["10.0.0.1", "10.0.0.2"]
    local = seen("head", "127.0.0.1", "127.0.0.1", "127.0.0.1", server="1")
    assert addresses(other, local, seen("b", "10.0.0.4", "10.0.0.4", "10.0.0.1", server="1"))[1] == "10.0.0.1"


def test_loopback_is_told_only_where_all_share_it() -> None:
    """Each node had a forwarder of its own, to which loopback led."""
    one, other = (seen(name, "127.0.0.1", "127.0.0.1", "127.0.0.1", machine=name) for name in "ab")
    assert addresses(one, one) == ["127.0.0.1"] * 2
    with pytest.raises(RendezvousSettingsError):
        addresses(one, other)
    assert addresses(seen("c", "10.0.0.2"), one) == ["10.0.0.2", ""]


def test_members_whom_the_store_sees_at_one_address_are_told_apart_by_where_they_send_from() -> None:
    """As behind a load balancer that has one address for clients and another towards the store."""
    balanced = [seen("a", "10.9.0.1", "10.0.0.2", FORWARDER), seen("b", "10.9.0.1", "10.0.0.3", FORWARDER)]
    assert addresses(*balanced, OTHER) == ["10.0.0.2", "10.0.0.3", "10.0.0.2"]
    twice = seen("a", "10.9.0.1", "10.0.0.2", FORWARDER)
    assert addresses(twice, twice) == ["10.9.0.1", "10.9.0.1"], "two nodes of one host, behind a NAT"


def test_the_forwarders_address_is_not_taken_for_the_stores_host() -> None:
    balanced = [seen("a", "10.9.0.1", "10.0.0.2", FORWARDER), seen("b", "10.9.0.1", "10.0.0.3", FORWARDER)]
    with pytest.raises(RendezvousSettingsError, match=r"rank 0 at 127\.0\.1\.1, where no other host reaches it; give"):
        addresses(HERE, *balanced)
    assert addresses(*balanced, HERE) == ["10.0.0.2", "10.0.0.3", ""], "nobody has to meet there"


def test_a_round_is_not_completed_where_nobody_could_meet_and_all_say_why() -> None:
    run = HandFed(needed=3, capacity=3)
    run.arrive("head", address="127.0.0.1", sends_from="127.0.0.1", store_at="127.0.0.1")
    run.arrive("a", address="10.9.0.1", sends_from="10.0.0.2", store_at=FORWARDER)
    run.arrive("b", address="10.9.0.1", sends_from="10.0.0.3", store_at=FORWARDER)
    decision = run.decide()
    assert isinstance(decision, Wait)
    assert "node head would be rank 0 at 127.0.0.1" in decision.progress.problem
    assert "--local-addr" in decision.progress.problem


def test_the_addresses_of_a_completed_round_are_those_that_reach() -> None:
    run = HandFed(needed=2, capacity=2)
    run.arrive("head", address="127.0.0.1", sends_from="127.0.0.1", store_at="127.0.0.1")
    run.arrive("a", address="10.0.0.2", sends_from="10.0.0.2", store_at="10.0.0.1")
    decision = run.decide()
    assert isinstance(decision, Complete)
    assert [member.address for member in decision.members] == ["10.0.0.1", "10.0.0.2"]

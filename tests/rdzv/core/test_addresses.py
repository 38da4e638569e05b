"""The addresses at which members reach one that the store sees at loopback, or behind a forwarder."""

from typing import Any

import pytest

from rdzv.core.addresses import addresses_for_record, with_ipv6_zone, with_reachable_addresses
from rdzv.core.decision import CommitRound, Idle
from rdzv.core.state import NodeRecord
from rdzv.errors import RendezvousSettingsError
from store.limits import is_loopback
from tests.support.hand_fed import HandFed


def seen(name: str, address: str, sends_from: str = "", store_at: str = "", **more: Any) -> NodeRecord:
    path = {"sends_from": sends_from, "store_at": store_at, **more}
    return NodeRecord(node_id=name, incarnation="1", address=address, **path)


def addresses(*members: NodeRecord) -> list[str]:
    return [member.address for member in with_reachable_addresses(members)]


# on the store's own host; Debian gives a machine's own name this address
HERE = seen("head", "127.0.1.1", "127.0.0.1", "127.0.1.1")
OTHER = seen("a", "10.0.0.2", "10.0.0.2", "10.0.0.1")
FORWARDER, STORE = "10.0.0.9", "10.0.0.1"


@pytest.mark.parametrize(
    ("address", "loopback"),
    [
        *[("127.0.1.1", True), ("::1", True), ("::ffff:127.0.0.1", True), ("localhost", True)],
        *[
            ("LOCALHOST", True),
            ("localhost.", True),
            ("ip6-localhost", True),
            ("localhost.localdomain", True),
            ("127.1", True),
        ],
        *[("10.0.0.1", False), ("fe80::1%eth0", False), ("node0", False), ("", False)],
        *[("127", False), ("localhost.example.org", False), ("127.example.org", False)],
    ],
)
def test_loopback_is_known_in_each_of_its_forms(address: str, loopback: bool) -> None:
    assert is_loopback(address) is loopback


LOCAL = seen("head", "127.0.0.1", "127.0.0.1", "127.0.0.1", server="1")
MANAGED = seen("head", "10.78.0.1", "10.78.0.1", "10.78.0.1")  # it came over another interface than the others
BALANCED = [seen("a", "10.9.0.1", "10.0.0.2", FORWARDER), seen("b", "10.9.0.1", "10.0.0.3", FORWARDER)]
ALONE = [seen(name, "127.0.0.1", "127.0.0.1", "127.0.0.1", machine=name) for name in "ab"]


@pytest.mark.parametrize(
    ("members", "reached_at"),
    [
        # Regression: `MASTER_ADDR=127.0.0.1` was handed to all. A member on the store's host is reached at the store's
        # address, as the others know it. It may use another interface than they do.
        ([HERE, OTHER], ["10.0.0.1", "10.0.0.2"]),
        ([OTHER, HERE], ["10.0.0.2", "10.0.0.1"]),
        ([MANAGED, OTHER], ["10.0.0.1", "10.0.0.2"]),
        ([MANAGED, MANAGED], ["10.78.0.1", "10.78.0.1"]),
        ([HERE, HERE], ["127.0.1.1", "127.0.1.1"]),  # members of one host keep loopback
        # An address that the user gives is not changed.
        ([seen("head", "127.0.0.1"), OTHER], ["127.0.0.1", "10.0.0.2"]),
        ([seen("a", FORWARDER), seen("b", FORWARDER)], [FORWARDER, FORWARDER]),
        # With several servers (etcd), the way to one server tells nothing about the hosts of the others.
        (
            [seen("head", STORE, STORE, STORE, server="1"), seen("a", "10.0.0.2", "10.0.0.2", "10.0.0.3", server="3")],
            ["10.0.0.1", "10.0.0.2"],
        ),
        (
            [OTHER, LOCAL, seen("b", "10.0.0.4", "10.0.0.4", "10.0.0.1", server="1")],
            ["10.0.0.2", "10.0.0.1", "10.0.0.4"],
        ),
        # Loopback is used only if all share it. Regression: each node had a forwarder of its own, and loopback led to
        # that.
        ([ALONE[0], ALONE[0]], ["127.0.0.1", "127.0.0.1"]),
        ([seen("c", "10.0.0.2"), ALONE[0]], ["10.0.0.2", ""]),
        (ALONE, None),
        # If the store sees members at one address, as behind a load balancer, they are told apart by the address they
        # send from. Two nodes of one host behind a NAT are not.
        ([*BALANCED, OTHER], ["10.0.0.2", "10.0.0.3", "10.0.0.2"]),
        ([BALANCED[0], BALANCED[0]], ["10.9.0.1", "10.9.0.1"]),
        # The forwarder's address is not taken for the store's host. Only the first member needs to be reachable.
        ([HERE, *BALANCED], None),
        ([*BALANCED, HERE], ["10.0.0.2", "10.0.0.3", ""]),
    ],
)
def test_the_addresses_of_members(members: list[NodeRecord], reached_at: list[str] | None) -> None:
    if reached_at is None:
        with pytest.raises(RendezvousSettingsError, match="where no other host reaches it; give that node address="):
            addresses(*members)
    else:
        assert addresses(*members) == reached_at


def test_a_node_seen_at_its_store_address_is_behind_a_forwarder() -> None:
    """Regression: all nodes published the forwarder's address."""
    assert addresses_for_record(FORWARDER, "10.0.0.2", FORWARDER) == ("10.0.0.2", "", ""), "not the way to the store"
    assert addresses_for_record("192.0.2.1", "10.0.0.2", STORE) == ("192.0.2.1", "10.0.0.2", STORE), "a plain NAT"
    assert addresses_for_record(STORE, STORE, STORE) == (STORE, STORE, STORE), "it is on the store's host"
    assert addresses_for_record("127.0.0.1", "127.0.0.1", "127.0.0.1") == ("127.0.0.1", "127.0.0.1", "127.0.0.1")


def test_a_node_seen_at_loopback_with_another_source_address_is_behind_a_forwarder() -> None:
    """Regression: every node of a run was sent to 127.0.0.1."""
    assert addresses_for_record("127.0.0.1", "10.0.0.2", STORE) == ("10.0.0.2", "10.0.0.2", STORE)
    assert addresses_for_record("127.0.0.6", STORE, STORE) == (STORE, STORE, STORE)
    there = seen("head", *addresses_for_record("127.0.0.1", "127.0.0.1", "127.0.0.1"))
    assert addresses(there, seen("a", *addresses_for_record("127.0.0.1", "10.0.0.2", STORE))) == [STORE, "10.0.0.2"]


def test_no_round_completes_if_members_could_not_reach_rank_0() -> None:
    run = HandFed(needed=3, capacity=3)
    run.arrive("head", address="127.0.0.1", sends_from="127.0.0.1", store_at="127.0.0.1")
    run.arrive("a", address="10.9.0.1", sends_from="10.0.0.2", store_at=FORWARDER)
    run.arrive("b", address="10.9.0.1", sends_from="10.0.0.3", store_at=FORWARDER)
    decision = run.decide()
    assert isinstance(decision, Idle)
    assert "node head would be rank 0 at 127.0.0.1" in decision.progress.problem
    assert "--local-addr" in decision.progress.problem


def test_a_completed_round_has_reachable_addresses() -> None:
    run = HandFed(needed=2, capacity=2)
    run.arrive("head", address="127.0.0.1", sends_from="127.0.0.1", store_at="127.0.0.1")
    run.arrive("a", address="10.0.0.2", sends_from="10.0.0.2", store_at="10.0.0.1")
    decision = run.decide()
    assert isinstance(decision, CommitRound)
    assert [member.address for member in decision.members] == ["10.0.0.1", "10.0.0.2"]


@pytest.mark.parametrize(
    ("host", "address", "there"),
    [
        ("fe80::1%eth0", "fe80::2", "fe80::2%eth0"),
        ("fe80::1%eth0", "fe80::2%ib0", "fe80::2%ib0"),
        ("fe80::1%eth0", "10.0.0.2", "10.0.0.2"),
        ("fe80::1%eth0", "2001:db8::2", "2001:db8::2"),
        ("head", "fe80::2", "fe80::2"),
    ],
)
def test_a_link_local_address_gets_the_zone_of_the_store(host: str, address: str, there: str) -> None:
    assert with_ipv6_zone(host, address) == there

"""The lease of the role of coordinator."""

from types import SimpleNamespace
from typing import cast

import pytest

from rdzv.config.settings import Settings
from rdzv.node.link.role import ROLE_DISCONNECT_TTL, CoordinatorLease
from rdzv.node.link.store_session import StoreSession


@pytest.mark.parametrize(
    ("reconnect_seconds", "members", "expected"),
    [
        pytest.param(4.1, 0.6, 0.6, id="a store that stood still while this node connected"),
        pytest.param(0.7, 1.0, 0.7, id="a store that is far away"),
        pytest.param(0.01, 1.0, ROLE_DISCONNECT_TTL, id="a store that is near"),
        pytest.param(4.1, 0.1, ROLE_DISCONNECT_TTL, id="members that are gone sooner still"),
    ],
)
def test_the_roles_disconnect_ttl_is_at_most_that_of_members(
    reconnect_seconds: float, members: float, expected: float
) -> None:
    """Regression: a store that stood still for 1.4 s was distant for a whole term: a death was noticed after 4 s."""
    store = SimpleNamespace(time=float, fail_over=0.0, lease_ttl_max=60.0)
    way = {
        "keeping": SimpleNamespace(store=None),
        "new_lease_id": lambda: 7,
        "reconnect_seconds": reconnect_seconds,
        "round_trip": 0.0,
    }
    link = cast("StoreSession", SimpleNamespace(store=store, **way))
    settings = cast("Settings", SimpleNamespace(disconnect_ttl=members, gone_ttl=0.1))
    assert CoordinatorLease(link, settings, nodes=2).grant.disconnect_ttl == expected

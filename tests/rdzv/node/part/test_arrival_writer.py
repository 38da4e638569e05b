"""The record that a node writes when it arrives."""

from __future__ import annotations

import asyncio
import math
import random
from typing import Any, cast

import pytest

from rdzv.core.state import Closed
from rdzv.errors import RendezvousClosedError, RendezvousGracefulExitError, RendezvousSettingsError
from rdzv.node.link.store_session import StoreSession
from rdzv.node.member.arrival_writer import TTL_MOST, new_record, node_lease_ttl
from store import Create, Limits, Put
from store.messages import Request, Transact
from tests.rdzv.node.part.parts import KEYS, part_of
from tests.support.runs import VirtualRun, connected

pytestmark = pytest.mark.virtual_time


class AwayStore:
    """The parts of a client that a link needs; disconnected at first."""

    connected = False
    observed_address: str | None = None
    ends: tuple[str, str] | None = None
    server = ""
    failure = None
    cuts = None

    def __init__(self) -> None:
        self.callbacks: list[Any] = []

    def time(self) -> float:
        return asyncio.get_running_loop().time()

    def on_connection_change(self, callback: Any) -> None:
        self.callbacks.append(callback)

    def cap_retry_pauses(self, remaining: Any) -> None:
        """Do nothing: this store never reconnects."""

    def come_back(self, *, observed_address: str, ends: tuple[str, str] | None = None) -> None:
        self.connected, self.observed_address, self.socket_addresses = True, observed_address, ends
        for callback in self.callbacks:
            callback(True)


async def address_said(store: AwayStore, url: str = "tcp://head/job?min_nodes=2") -> asyncio.Task[Any]:
    link = StoreSession(cast("Any", store), KEYS, node_id="a", closed_ttl=60.0, rng=random.Random(1))
    part = part_of(url)

    async def say() -> Any:
        try:
            return await new_record(part, link)
        finally:
            part.port.release()

    saying = asyncio.create_task(say())
    await asyncio.sleep(60)
    return saying


async def test_a_disconnected_node_waits_until_the_store_tells_its_address() -> None:
    """Regression: it wrote its host's name, which few other hosts can resolve, and the whole job was sent there."""
    store = AwayStore()
    saying = await address_said(store)
    assert not saying.done()
    store.come_back(observed_address="10.0.0.7", ends=("10.0.0.7", "10.0.0.1"))
    record = await saying
    assert (record.address, record.sends_from, record.store_at) == ("10.0.0.7", "10.0.0.7", "10.0.0.1")


@pytest.mark.parametrize(
    ("asked", "round_trip", "lapses", "most", "ttl"),
    [
        (10.0, 0.01, 0, math.inf, 10.0),
        (10.0, 2.0, 0, math.inf, 20.0),  # answers take seconds
        (10.0, 9.0, 0, math.inf, TTL_MOST),
        (10.0, 9.0, 0, 12.0, 12.0),  # the store's limit is below that
        (60.0, 9.0, 0, math.inf, 60.0),
        (60.0, 0.0, 0, 12.0, 60.0),  # the requested ttl is sent as it is, and the store's error names its limit
        (10.0, 0.0, 1, math.inf, 10.0),  # a single expiry may have been an outage
        (10.0, 0.0, 2, math.inf, 20.0),
        (10.0, 0.0, 9, math.inf, TTL_MOST),
    ],
)
def test_a_lease_is_long_enough_to_be_renewed_in_time(
    asked: float, round_trip: float, lapses: int, most: float, ttl: float
) -> None:
    assert node_lease_ttl(asked, round_trip=round_trip, lapses=lapses, most=most) == ttl


async def test_no_lease_grows_beyond_the_stores_limit() -> None:
    """Regression: for a slow store a node asked for a longer ttl than `ttl`, was refused, told to lower `ttl`."""
    settings: dict[str, Any] = {"min_nodes": 2, "ttl": 11, "closed_ttl": 12}
    async with VirtualRun(limits=Limits(lease_ttl_max=12.0), latency=1.0, **settings) as run:
        infos = await run.meet(run.handler("a"), run.handler("b"))
        assert [info.world_size for info in infos] == [2, 2]


async def test_behind_a_forwarder_a_node_publishes_its_source_address_or_a_given_one() -> None:
    store = AwayStore()
    given = await (await address_said(store, "tcp://head/job?min_nodes=2&address=10.0.0.8"))
    assert (given.address, given.store_at) == ("10.0.0.8", "")
    store.come_back(observed_address="10.0.0.9", ends=("10.0.0.7", "10.0.0.9"))
    record = await (await address_said(store))
    assert (record.address, record.sends_from, record.store_at) == ("10.0.0.7", "", "")


async def test_an_arrival_asks_for_a_free_role_unless_its_node_is_a_candidate() -> None:
    """One transaction does both. A node that already stands for election asks when its turn comes, as all others do."""
    asked: list[bool] = []
    async with VirtualRun(min_nodes=3) as run:

        async def note(request: Request[Any], moment: str) -> None:
            if moment == "before" and isinstance(request, Transact) and request.grants:
                keys = [one.key for one in request.then if isinstance(one, Put | Create)]
                if any("/nodes/" in key for key in keys):
                    asked.append(any(key.endswith("/coordinator") for key in keys))

        handlers = [run.handler(name) for name in "abc"]
        links = [await connected(handler) for handler in handlers]
        for name in "abc":
            run.clients[name].hook = note
        links[0].resign = lambda _: asyncio.sleep(0)  # it is a candidate already, for a role that is free
        for handler in handlers:
            await run.join(handler)
    assert asked == [False, True, False]


async def test_a_node_that_was_refused_for_its_settings_may_join_later() -> None:
    async with VirtualRun(min_nodes=2) as run:
        a, b = run.handler("a"), run.handler("b")
        joining = await run.join(a)
        a.node.part.fail_on_new_settings({**a.node.part.settings.shared(), "max_nodes": 3})
        with pytest.raises(RendezvousSettingsError, match="max_nodes"):
            await joining
        assert [info.world_size for info in await run.meet(a, b)] == [2, 2]


@pytest.mark.parametrize(("spare", "given_up"), [(False, False), (False, True), (True, False), (True, True)])
async def test_only_a_spare_of_a_run_whose_work_is_done_ends_with_success(spare: bool, given_up: bool) -> None:
    error = part_of().closed_error(Closed(reason="enough", by="b", given_up=given_up, status=3), spare=spare)
    assert isinstance(error, RendezvousGracefulExitError) is (spare and not given_up)
    assert str(error).startswith("run job is closed by b: enough")
    if isinstance(error, RendezvousClosedError):
        assert (error.reason, error.given_up, error.status) == ("enough", given_up, 3)

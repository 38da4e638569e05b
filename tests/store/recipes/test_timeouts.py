"""The time that a recipe may take, the error when it is over, and arguments that a recipe refuses."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

import store
import store.sync
from rdzv.testing.network import MemoryNetwork
from store import recipes
from store.errors import StoreTimeoutError, StoreUsageError
from tests.support.proxy import Proxy
from tests.support.stores import connect_in_memory, serve_in_memory
from tests.support.virtual_time import now

virtual_time = pytest.mark.virtual_time

LATE = 0.3  # seconds by which a recipe may end late
FREE = "free"

RECIPES: dict[str, Callable[..., Any]] = {
    "lock": lambda made, client, **terms: made.lock(client, "name", **terms),
    "write_lock": lambda made, client, **terms: made.write_lock(client, "name", **terms),
    "read_lock": lambda made, client, **terms: made.read_lock(client, "name", **terms),
    "leadership": lambda made, client, **terms: made.leadership(client, "name", b"me", **terms),
}


@pytest.mark.some_of(20)
@virtual_time
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("timeout", [0.0, 0.5, 3.0])
@pytest.mark.parametrize("silent_after", [0.0, 0.15, 0.25, 0.45, None])
async def test_a_timeout_bounds_the_whole_call_and_says_whether_it_was_taken(
    recipe: Callable[..., Any], timeout: float, silent_after: float | None
) -> None:
    """Regression: the lease's grant and release were not bounded: 30 s instead of 1. With 0 none was acquired."""
    network = MemoryNetwork(latency=0.05)
    async with (
        serve_in_memory(network) as server,
        connect_in_memory(network, source="holder") as holder,
        connect_in_memory(network) as client,
        store.recipes.lock(holder, "name"),
    ):
        began = now()
        if silent_after is not None:
            asyncio.get_running_loop().call_later(silent_after, network.partition, "client")
        with pytest.raises(StoreTimeoutError) as raised:
            async with recipe(recipes, client, timeout=timeout):
                pytest.fail("two hold it")
        text, took = str(raised.value), now() - began
        # after a grant, a place in line and a listing, 0.1 s each
        was_seen = silent_after is None or silent_after > 0.3
        assert ("was not free" in text or "another led" in text) == was_seen
        assert ("did not answer" in text) == (not was_seen)
        if timeout or not was_seen:
            assert took <= (timeout or (silent_after or 0.0) + 1.0) + LATE
        elif silent_after is None:
            assert took <= 0.5, "it is refused at once"
            assert server.figures()["leases"] == 1, "and its place is withdrawn"
        network.heal("client")


@virtual_time
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("latency", [0.0, 0.4])
async def test_a_free_lock_is_acquired_without_a_wait_at_any_round_trip_time(
    recipe: Callable[..., Any], latency: float
) -> None:
    network = MemoryNetwork(latency=latency)
    async with serve_in_memory(network), connect_in_memory(network) as client:
        async with recipe(recipes, client, timeout=0) as held:
            await client.put("inside", b"", when=[held.fence])
        async with recipe(recipes, client, timeout=0):
            pass


@pytest.mark.some_of(3)
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("timeout", [0.0, 1.0])
async def test_a_timeout_bounds_the_blocking_twin_too(recipe: Callable[..., Any], timeout: float) -> None:
    async with store.serve() as server, Proxy("127.0.0.1", server.port) as proxy:

        def attempt(silent: bool) -> tuple[str, float]:
            with store.sync.connect(f"tcp://127.0.0.1:{proxy.port}") as client:
                if silent:
                    loop.call_soon_threadsafe(proxy.black_hole)
                    time.sleep(0.05)  # it may fall silent only for later requests
                began = time.monotonic()
                try:
                    with recipe(store.sync.recipes, client, timeout=timeout):
                        return FREE, time.monotonic() - began
                except StoreTimeoutError as error:
                    return str(error), time.monotonic() - began

        loop = asyncio.get_running_loop()
        assert (await asyncio.to_thread(attempt, False))[0] == FREE
        async with store.connect(server.url) as holder, store.recipes.lock(holder, "name"):
            text, took = await asyncio.to_thread(attempt, False)
            assert "was not free" in text or "another led" in text
            assert took <= timeout + LATE
            assert len(await holder.list("name/line/")) == 1
            text, took = await asyncio.to_thread(attempt, True)
            assert "did not answer" in text
            assert took <= 1.0 + LATE
        proxy.heal()


WRONG: list[tuple[str, dict[str, Any]]] = [
    ("name", {"name": ""}),
    ("name", {"name": b"bytes"}),
    ("name", {"name": 7}),
    ("value", {"value": "text"}),
    ("value", {"value": None}),
    ("ttl", {"ttl": 0}),
    ("ttl", {"ttl": "5"}),
    ("ttl", {"ttl": None}),
    ("ttl", {"ttl": float("nan")}),
    ("disconnect_ttl", {"disconnect_ttl": -1}),
    ("gone_ttl", {"gone_ttl": True}),
    ("timeout", {"timeout": -1}),
    ("timeout", {"timeout": "1"}),
    ("timeout", {"timeout": float("nan")}),
    ("timeout", {"timeout": 10**400}),
]


@pytest.mark.parametrize(("what", "arguments"), WRONG)
def test_a_recipe_refuses_an_argument_by_its_name_in_both_twins(what: str, arguments: dict[str, Any]) -> None:
    """`leadership(client, name, candidate)` with a str said "CompareAndSet cannot have value='a'"."""
    given = {"name": "name", "value": b"", **arguments}
    name, value = given.pop("name"), given.pop("value")
    with store.sync.serve() as server, store.sync.connect(server.url) as client:
        made = store.sync.recipes
        for called, attempt in (
            (what, made.lock(client, name, value=value, **given)),
            (what, made.read_lock(client, name, value=value, **given)),
            ("candidate" if what == "value" else what, made.leadership(client, name, value, **given)),
        ):
            with pytest.raises(StoreUsageError, match=called), attempt:
                pytest.fail("it was taken")
        assert server.figures()["leases"] == 0


async def test_a_str_is_named_as_the_candidate_that_it_was_given_as() -> None:
    async with store.serve() as server, store.connect(server.url) as client:
        with pytest.raises(StoreUsageError, match="the candidate of 'name' is 'a'; give bytes"):
            async with store.recipes.leadership(client, "name", "a"):  # type: ignore[arg-type]
                pytest.fail("it leads")

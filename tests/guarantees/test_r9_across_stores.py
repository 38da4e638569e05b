"""Promise R9 across stores: a fence of one store never holds in another at the same address.

A store in memory begins its revisions at a random number. Before, each store counted from 1, so that the revisions of
two runs with the same node names were equal.
"""

import asyncio
import contextlib
import os
import pickle
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

import rdzv.sync
import store.sync
from rdzv import RoundSupersededError
from rdzv.sync import Handler
from store import Server
from tests.support.processes import require
from tests.support.runs import VirtualRun


def meet(*handlers: Handler) -> list[Any]:
    """Return the info of each of some blocking handlers, which join at once."""
    infos: list[Any] = [None] * len(handlers)

    def join(at: int) -> None:
        infos[at] = handlers[at].next_rendezvous()

    threads = [threading.Thread(target=join, args=[at]) for at in range(len(handlers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return infos


@contextlib.contextmanager
def two_nodes(server: Server) -> Iterator[tuple[Handler, Handler]]:
    limits: dict[str, Any] = {"min_nodes": 2, "max_nodes": 2, "last_call_timeout": 0, "is_host": False}
    url = f"{server.url}/job"
    with rdzv.sync.connect(url, node_id="a", **limits) as a, rdzv.sync.connect(url, node_id="b", **limits) as b:
        yield a, b


def test_r9_a_pickled_store_of_an_earlier_job_writes_into_no_round_of_a_new_one() -> None:
    require("torch")
    import torch.distributed as dist

    from rdzv.torch import TorchStore

    with store.sync.serve() as server, two_nodes(server) as (a, b):
        info, _ = meet(a, b)
        earlier = TorchStore.of_round(info.store, timedelta(seconds=20), a.own_node.settings)
        earlier.set("k", "earlier")
        pickled = pickle.dumps(earlier)
    with store.sync.serve(port=server.port) as again, two_nodes(again) as (a, b):
        info, _ = meet(a, b)
        worker = pickle.loads(pickled)
        with pytest.raises(dist.DistStoreError, match="no longer in the round"):
            worker.set("k", "of the earlier job")
        assert not info.store.check(["k"])
        worker.close()


def test_r9_a_forked_store_of_an_earlier_job_writes_into_no_round_of_a_new_one() -> None:
    """As the worker of a `DataLoader` that outlives its job."""
    require("torch")
    from rdzv.torch import TorchStore

    with store.sync.serve() as server, two_nodes(server) as (a, b):
        info, _ = meet(a, b)
        earlier = TorchStore.of_round(info.store, timedelta(seconds=20), a.own_node.settings)
        ours, theirs = socket.socketpair()
        if (child := os.fork()) == 0:
            with contextlib.suppress(BaseException):
                earlier.set("used", "before")
                theirs.sendall(b"used")
                theirs.recv(1)
                try:
                    earlier.set("k", "of the earlier job")
                except Exception as error:  # noqa: BLE001  the parent looks at it
                    theirs.sendall(str(error).encode())
            os._exit(0)
        theirs.close()
        assert ours.recv(4) == b"used"
    with store.sync.serve(port=server.port) as again, two_nodes(again) as (a, b), ours:
        info, _ = meet(a, b)
        ours.sendall(b"!")
        assert b"no longer in the round" in ours.recv(999)
        os.waitpid(child, 0)
        assert not info.store.check(["k"])


@pytest.mark.parametrize("was_used", [True, False], ids=["used before", "never used"])
def test_r9_the_store_of_a_former_round_ends_at_once_after_a_regroup_in_a_new_store(was_used: bool) -> None:
    """Its `set` wrote into the present round, and its `get` waited for its whole timeout."""
    with contextlib.ExitStack() as stack:
        with store.sync.serve() as server:
            a, b = stack.enter_context(two_nodes(server))
            former, _ = meet(a, b)
            if was_used:
                former.store.set("k", b"former")
        stack.enter_context(store.sync.serve(port=server.port))
        present, _ = meet(a, b)
        began = time.monotonic()
        with pytest.raises(RoundSupersededError):
            former.store.set("k", b"late")
        with pytest.raises(RoundSupersededError):
            former.store.get("missing")
        assert time.monotonic() - began < 5
        assert not present.store.check(["k"])


@pytest.mark.virtual_time
@pytest.mark.parametrize("seed", range(4))
async def test_r9_a_spare_is_no_member_of_a_round_of_the_same_number_in_another_store(seed: int) -> None:
    """Regression: it took itself for a member of that round, so its join timeout ran on, and ended it."""
    async with VirtualRun(min_nodes=2, max_nodes=2, join_timeout=5, last_call_timeout=0.1, seed=seed) as run:
        c, d = await run.met("cd")
        former = c.membership
        run.kill_store()
        run.restart_store()
        await d.aclose()
        a, _ = await run.met("ab")
        assert a.membership is not None
        assert former is not None
        assert a.membership.round.number == former.round.number, "or this test shows nothing"
        waiting = asyncio.create_task(c.next_rendezvous())
        done, _ = await asyncio.wait([waiting], timeout=30)
        assert not done, "a spare waits for as long as the round stands"
        waiting.cancel()

"""A call that would wait for ever gets an error of one sentence that names the cause."""

import sys
from types import SimpleNamespace

import pytest

import store
from store import sync
from store.net.threads import LoopThread


async def test_a_blocking_client_in_the_thread_that_serves_its_store_is_refused() -> None:
    """Regression: it waited until its timeout, and then said that no server answers."""
    async with store.serve() as server:
        with pytest.raises(store.StoreUsageError, match="whose event loop serves its store"):
            sync.connect(server.url).__enter__()
        port = server.port
    with pytest.raises(store.ConnectionLost), sync.connect(f"tcp://127.0.0.1:{port}", timeout=0.2):
        pass


async def test_a_blocking_client_of_a_store_in_another_thread_is_served() -> None:
    with sync.serve() as server, sync.connect(server.url) as client:
        assert client.add("a", 1) == 1


@pytest.mark.parametrize(
    ("module", "function", "name"),
    [("gevent.monkey", "is_module_patched", "gevent"), ("eventlet.patcher", "is_monkey_patched", "eventlet")],
)
def test_green_threads_are_named_as_the_cause(
    monkeypatch: pytest.MonkeyPatch, module: str, function: str, name: str
) -> None:
    monkeypatch.setitem(sys.modules, module, SimpleNamespace(**{function: lambda _: True}))
    with pytest.raises(store.StoreUsageError, match=f"{name} has replaced the threads"):
        LoopThread("a thread")
    monkeypatch.setitem(sys.modules, module, SimpleNamespace(**{function: lambda _: False}))
    LoopThread("a thread").stop()

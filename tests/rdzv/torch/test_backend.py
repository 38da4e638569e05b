"""The state of PyTorch's own rendezvous handler, kept in our store."""

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

import store.sync
from tests.support.processes import require

require("torch")  # the imports below need it

from torch.distributed.elastic.rendezvous import api  # noqa: E402
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler  # noqa: E402

from rdzv.torch import TorchRendezvousBackend, TorchStore  # noqa: E402


def test_the_backend_keeps_a_state_behind_a_fence(url: str, run_id: str) -> None:
    backend = TorchRendezvousBackend(url, run_id)
    other = TorchRendezvousBackend(url, run_id)
    assert (backend.name, backend.get_state()) == ("rdzv", None)
    assert backend.set_state(b"never", token=12345) is None
    created = backend.set_state(b"one")
    assert created is not None
    state, token, written = created
    assert (state, written) == (b"one", True)
    assert other.get_state() == (b"one", token)
    assert other.set_state(b"two") == (b"one", token, False)
    changed = other.set_state(b"two", token)
    assert changed is not None
    assert (changed[0], changed[2]) == (b"two", True)
    assert backend.set_state(b"three", token) == (b"two", changed[1], False)
    assert backend.set_state(b"three", "no token of ours") == (b"two", changed[1], False)
    backend.close()
    with pytest.raises(api.RendezvousConnectionError, match="is closed"):
        backend.get_state()
    other.close()


def test_foreign_bytes_are_no_state(url: str, run_id: str) -> None:
    backend = TorchRendezvousBackend(url, run_id)
    with store.sync.connect(url) as client:
        client.put(backend._key, b"cos\nsystem\n")
    with pytest.raises(api.RendezvousStateError, match="is corrupt: its 11 bytes"):
        backend.get_state()
    with pytest.raises(api.RendezvousStateError, match="is corrupt"):
        backend.set_state(b"mine")
    backend.close()


def test_the_backend_needs_a_name(url: str) -> None:
    with pytest.raises(ValueError, match="run_id is empty"):
        TorchRendezvousBackend(url, "")


def test_torchs_dynamic_handler_runs_on_our_store(url: str, run_id: str) -> None:
    def handler() -> DynamicRendezvousHandler:
        it = TorchStore(f"{url}/{run_id}", timedelta(seconds=20))
        backend = TorchRendezvousBackend(url, run_id)
        return DynamicRendezvousHandler.from_backend(run_id, it, backend, min_nodes=2, max_nodes=2)

    two = handler(), handler()
    with ThreadPoolExecutor(2) as pool:
        infos = list(pool.map(lambda it: it.next_rendezvous(), two))
    assert sorted(info.rank for info in infos) == [0, 1]
    assert infos[0].bootstrap_store_info == infos[1].bootstrap_store_info
    assert all(it.shutdown() for it in two)
    assert threading.active_count() < 50

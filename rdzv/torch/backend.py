"""The state of PyTorch's `DynamicRendezvousHandler` in our store."""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING, Any, Final

from rdzv.config.config_errors import refuse
from rdzv.loop import Keys
from rdzv.torch.pytorch import RendezvousBackend, torch_api
from rdzv.torch.store import open_blocking_client
from store import StoreError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from store import Entry


MARK: Final = b"rdzv-torch-state-1\n"  # begins every state: PyTorch unpickles states, so other bytes are rejected


class TorchRendezvousBackend(RendezvousBackend):
    """Keeps the state of PyTorch's `DynamicRendezvousHandler` in our store; a write requires the last state's revision.

        store, backend = TorchStore(url), TorchRendezvousBackend(url, run_id)
        DynamicRendezvousHandler.from_backend(run_id, store, backend, min_nodes, max_nodes)

    The state is a pickle, which PyTorch loads: restrict write access to the store.

    Args:
        url: The URL of an rdzv run; its run id is ignored.
        run_id: The run of the state.
        overrides: The URL's parameters as keywords.
    """

    def __init__(self, url: str, run_id: str, **overrides: Any) -> None:
        if not run_id:
            refuse("the run_id is empty; give the job a name")
        self._client, settings = open_blocking_client(url, overrides)
        self._key = Keys(settings.prefix, run_id).root + "torch/state"
        weakref.finalize(self, self._client.close).atexit = False  # PyTorch has no call to close it

    @property
    def name(self) -> str:
        """The name of the backend."""
        return "rdzv"

    def get_state(self) -> tuple[bytes, Any] | None:
        """Return the state and its token; raise RendezvousStateError if the value is not of this backend."""
        with self._torch_errors():
            entry = self._client.get(self._key)
        return (self._state_in(entry), entry.mod_revision) if entry is not None else None

    def set_state(self, state: bytes, token: Any | None = None) -> tuple[bytes, Any, bool] | None:
        """Write the state if `token` is current; return the stored state, its token, and True if this call wrote it."""
        if token is not None and type(token) is not int:
            current = self.get_state()  # the token is not of this backend, whose tokens are ints: refuse to write
            return (*current, False) if current is not None else None
        with self._torch_errors():
            result = self._client.compare_and_set(self._key, MARK + state, expected_revision=token or 0)
        if result.entry is None:
            return None
        return self._state_in(result.entry), result.entry.mod_revision, result.succeeded

    def _state_in(self, entry: Entry) -> bytes:
        if not entry.value.startswith(MARK):
            raise torch_api.RendezvousStateError(
                f"the state in {self._key} is corrupt: its {len(entry.value)} bytes were not written by this backend; "
                f"find the other user of this key, and delete it"
            )
        return entry.value.removeprefix(MARK)

    def close(self) -> None:
        """Disconnect."""
        self._client.close()

    @contextlib.contextmanager
    def _torch_errors(self) -> Iterator[None]:
        try:
            yield
        except StoreError as error:
            raise torch_api.RendezvousConnectionError(f"{self._key}: {error}") from error

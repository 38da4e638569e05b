"""Shell: a `torch.distributed.Store` over our store: translates calls, values and errors.

**C++ and Python.** A `torch.distributed.Store` is a C++ object with a Python half. C++ calls the Python half's methods
of certain names, two of them in camel case, and does not keep it alive: see `TorchStore`.
"""

from __future__ import annotations

import functools
import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Concatenate, Final, NoReturn, ParamSpec, TypeVar

from rdzv import errors as ours
from rdzv.backends.registry import RendezvousParameters, rendezvous_handler_registry
from rdzv.config.config_errors import refuse, shown
from rdzv.config.endpoint import split_url
from rdzv.core.state import Keys
from rdzv.node.handler import Handler
from rdzv.shared_store.store import BlockingSharedStore
from rdzv.torch.pytorch import QueueEmptyError, dist
from store import StoreError, StoreUsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from rdzv.config.settings import Settings
    from store import BlockingStore

__all__ = ["DEFAULT_TIMEOUT", "TorchStore", "open_store"]

GLOO_EXTENDED_API: Final = "GLOO_ENABLE_STORE_V2_API"
"""The environment variable by which gloo reads its peers' addresses with one `multi_get` for each group.

Without it gloo asks for each peer with a `wait` and a `get`: at 16 ranks 32 round trips instead of 1. It writes the
same keys in either way, so ranks that differ in it still meet. It is set unless the user has set it; gloo looks at it
when it makes a group.
"""

P = ParamSpec("P")
T = TypeVar("T")

DEFAULT_TIMEOUT: Final = timedelta(seconds=300)
"""PyTorch's own default for a store."""


def open_store(url: str, overrides: Mapping[str, Any]) -> tuple[BlockingStore, Settings]:
    """A blocking client of the store that a URL names, through whichever backend its scheme stands for."""
    head, question_mark, query = url.partition("?")
    if not split_url(url).run_id:
        url = f"{head.rstrip('/')}/default{question_mark}{query}"
    handler = rendezvous_handler_registry.create_handler(RendezvousParameters.from_url(url, overrides))
    if not isinstance(handler, Handler):
        refuse(f"the backend of {shown(head)} is not one of ours, and has no store to open; use tcp or etcd")
    return handler.open_blocking_store(), handler.settings


def _raise_as_torch(error: Exception) -> NoReturn:
    """Raise what TCPStore raises in such a case, with our words."""
    message = str(error)
    match error:
        case ours.SharedStoreTimeoutError():
            named = ", ".join(f"/{key}" for key in error.keys) or "(none)"
            raise dist.DistStoreError(f"wait timeout after {error.timeout * 1000:.0f}ms, keys: {named}") from error
        case ours.QueueEmptyError():
            raise QueueEmptyError(f"queue is empty: {message}") from error
        case ours.RendezvousConnectionError():
            raise dist.DistNetworkError(message) from error
        case StoreUsageError():
            raise ValueError(message) from error
        case _:
            raise dist.DistStoreError(message) from error


def _with_torch_errors(
    method: Callable[Concatenate[TorchStore, P], T],
) -> Callable[Concatenate[TorchStore, P], T]:
    """The method, raising PyTorch's errors instead of ours."""

    @functools.wraps(method)
    def call(self: TorchStore, /, *arguments: P.args, **keywords: P.kwargs) -> T:
        try:
            return method(self, *arguments, **keywords)
        except (ours.RendezvousError, StoreError) as error:
            _raise_as_torch(error)

    return call


_kept: set[TorchStore] = set()  # see `TorchStore`


class TorchStore(dist.Store):
    """A `torch.distributed.Store` over our store; safe to use from several threads.

        TorchStore("tcp://head:29400/job-7?token_file=/run/secrets/rdzv")
        PrefixStore("ckpt", TorchStore(info.store))         # of a round: fenced, gone with the round

    Stores of one URL hold the same keys, apart from those of other runs. It serves nothing: `rdzv serve`, or a node of
    the run, does. Errors are those of TCPStore: `DistStoreError` when a wait runs out, naming the keys that were
    missing; `QueueEmptyError`; `DistNetworkError` when the store cannot be reached. Once a round is over, its store
    says so with `DistStoreError`.

    C++ holds the C++ half of this object only, and calls of a Python half that is gone fail with an internal assertion:
    `PrefixStore("p", TorchStore(url))` would be enough. There is no telling when C++ has let go, so every instance is
    kept until the process ends. That is a few hundred bytes: clones share one client, with a socket for each thread
    that is in a call at the same moment. `close` lets go of the sockets; calls then say that it is closed.

    Not through `PrefixStore`, for the base class does not let Python override them: queues and `list_keys`. In
    `num_keys` and `list_keys` only keys of this URL or round count.

    Args:
        url: One of ours, the run's part of it at will; or a blocking shared store, as `rdzv.sync` gives it.
        timeout: How long a wait may take, and the first connection.
        overrides: The URL's parameters as keywords.

    Raises:
        DistNetworkError: The store cannot be reached.
        RendezvousSettingsError: The URL is wrong; a `ValueError`.
    """

    def __init__(self, url: str | BlockingSharedStore, timeout: timedelta = DEFAULT_TIMEOUT, **overrides: Any) -> None:
        super().__init__()
        os.environ.setdefault(GLOO_EXTENDED_API, "1")
        self._client: BlockingStore | None = None
        if isinstance(url, str):
            self._client, settings = open_store(url, overrides)
            prefix = Keys(settings.prefix, settings.run_id).root + "torch/store/"
            self._shared = BlockingSharedStore(self._client, prefix=prefix, fence=(), timeout=timeout)
            try:
                self._client.ping(timeout=timeout.total_seconds())
            except StoreError as error:
                self._client.close()
                raise dist.DistNetworkError(f"{shown(url.partition('?')[0])}: {error}") from error
        else:
            self._shared = url.clone()
            self._shared.set_timeout(timeout)
        self._last_timeout = timeout
        self.set_timeout(timeout)  # kept by the base class, so that PrefixStore and C++ set and read the same
        _kept.add(self)

    def _timed(self) -> BlockingSharedStore:
        """The shared store, with the timeout that was set last, be it by C++."""
        timeout = self.timeout
        if timeout != self._last_timeout:
            self._shared.set_timeout(timeout)
            self._last_timeout = timeout
        return self._shared

    @_with_torch_errors
    def set(self, key: str, value: str | bytes) -> None:
        """Write a value."""
        self._shared.set(key, value)

    @_with_torch_errors
    def get(self, key: str) -> bytes:
        """Wait for a key, and read it."""
        return self._timed().get(key)

    @_with_torch_errors
    def add(self, key: str, amount: int) -> int:
        """Add to the number that a key holds in decimal, a missing key counting from 0; the sum."""
        return self._shared.add(key, amount)

    @_with_torch_errors
    def append(self, key: str, value: str | bytes) -> None:
        """Append to what a key holds, a missing key counting as empty."""
        self._shared.append(key, value)

    @_with_torch_errors
    def check(self, keys: Iterable[str]) -> bool:
        """Whether all keys exist now."""
        return self._shared.check(keys)

    @_with_torch_errors
    def wait(self, keys: Iterable[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys exist."""
        self._timed().wait(keys, timeout)

    @_with_torch_errors
    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        """Write the desired value if the key holds the expected one, or is missing and nothing is expected."""
        return self._shared.compare_set(key, expected_value, desired_value)

    @_with_torch_errors
    def multi_get(self, keys: Iterable[str]) -> list[bytes]:
        """Wait for all keys, and read them as they are at one moment."""
        return self._timed().multi_get(keys)

    @_with_torch_errors
    def multi_set(self, keys: Iterable[str], values: Iterable[str | bytes]) -> None:
        """Write several values at once."""
        try:
            self._shared.multi_set(keys, values)
        except ValueError as error:
            raise dist.DistStoreError(str(error)) from error  # as TCPStore calls lists of different lengths

    def has_extended_api(self) -> bool:
        """Whether `append`, `multi_get` and `multi_set` are there: they are."""
        return True

    def clone(self) -> TorchStore:
        """Another object for the same keys, on the same client, with a timeout of its own."""
        clone = TorchStore(self._shared, self.timeout)
        clone._client = self._client
        return clone

    @_with_torch_errors
    def delete_key(self, key: str) -> bool:
        """Delete a key; whether it was there."""
        return self._shared.delete_key(key)

    @_with_torch_errors
    def num_keys(self) -> int:
        """How many keys hold values."""
        return self._shared.num_keys()

    # C++ calls these two by the names that it gives them itself.
    deleteKey = delete_key  # noqa: N815
    getNumKeys = num_keys  # noqa: N815

    @_with_torch_errors
    def list_keys(self) -> list[str]:
        """The keys that hold values, sorted."""
        return self._shared.list_keys()

    @_with_torch_errors
    def queue_push(self, key: str, value: str | bytes) -> None:
        """Append an item to a queue."""
        self._shared.queue_push(key, value)

    @_with_torch_errors
    def queue_pop(self, key: str, block: bool = True) -> bytes:
        """Take the first item of a queue; with `block`, wait until there is one."""
        return self._timed().queue_pop(key, block)

    @_with_torch_errors
    def queue_len(self, key: str) -> int:
        """How many items a queue holds."""
        return self._shared.queue_len(key)

    @_with_torch_errors
    def barrier(self, key: str, world_size: int, timeout: timedelta | None = None) -> None:
        """Wait until `world_size` callers have come; each key is good for one barrier."""
        try:
            self._timed().barrier(key, world_size, timeout)
        except ours.SharedStoreTimeoutError as error:
            raise dist.DistStoreError(
                f"barrier timeout after {error.timeout * 1000:.0f}ms, key: {key}; {error}"
            ) from error

    def close(self) -> None:
        """Hang up; clones too. A store made of a round's leaves that to the round."""
        if self._client is not None:
            self._client.close()

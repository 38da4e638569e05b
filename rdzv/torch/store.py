"""A `torch.distributed.Store` over our store, with PyTorch's calls, values and errors."""

from __future__ import annotations

import functools
import itertools
import os
import pickle
import threading
import time
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Concatenate, Final, NoReturn, ParamSpec, TypeAlias, TypeVar, cast
from urllib.parse import quote

import rdzv as ours
from rdzv.config.config_errors import brief
from rdzv.config.endpoint import split_url
from rdzv.loop import BlockingSharedStore, Keys, iterable_as_tuple
from rdzv.loop.rounds import make_handler
from rdzv.torch.pytorch import QueueEmptyError, dist, patch_prefix_store
from store import StoreError, StoreUsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from rdzv.config.settings import Settings
    from store import BlockingStore, Condition

GLOO_EXTENDED_API: Final = "GLOO_ENABLE_STORE_V2_API"
"""The environment variable by which gloo reads its peers' addresses with one `multi_get` per group.

Without the variable gloo calls `wait` and `get` for each peer. The keys are the same, so the variable may differ
between ranks. Gloo reads the variable when it makes a group.
"""

P = ParamSpec("P")
T = TypeVar("T")
Origin: TypeAlias = "tuple[str, Mapping[str, Any]]"
V = TypeVar("V", str, bytes, "str | bytes")

OVERTIME: Final = 0.3  # seconds after its time limit in which a call that is made in parts may go on
DEFAULT_TIMEOUT: Final = timedelta(seconds=300)  # PyTorch's default for a store


def open_blocking_client(url: str, overrides: Mapping[str, Any]) -> tuple[BlockingStore, Settings]:
    """Return a blocking client of a URL's store, and the settings."""
    handler = make_handler(url if split_url(url).run_id else replace(split_url(url), run_id="default").url, overrides)
    return handler.open_blocking_store(), handler.settings


def split_url_after_run_id(url: str) -> tuple[str, str]:
    """Split off the segments after the run's name."""
    parts = split_url(url)
    run_id, _, segments = parts.run_id.partition("/")
    return (replace(parts, run_id=run_id).url if segments else url), segments.strip("/")


def _reopen_arguments(settings: Settings) -> Origin:
    """Return the URL and the parameters by which another process opens a `TorchStore`, without any secret's value."""
    names = ("token_file", "ca", "cert", "key", "user", "password_file", "prefix")
    overrides = {name: getattr(settings, name) for name in names if getattr(settings, name) is not None}
    return f"{settings.endpoint.url}/{quote(settings.run_id, safe='')}", overrides


def raise_as_torch(error: Exception) -> NoReturn:
    """Raise TCPStore's error in place of an error of `rdzv` or `store`."""
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
        case ours.RendezvousSettingsError():
            raise error  # a ValueError, as in PyTorch
        case _:
            raise dist.DistStoreError(message) from error


def _with_torch_errors(method: Callable[Concatenate[TorchStore, P], T]) -> Callable[Concatenate[TorchStore, P], T]:
    @functools.wraps(method)
    def translate_errors(self: TorchStore, /, *arguments: P.args, **keywords: P.kwargs) -> T:
        try:
            return method(self, *arguments, **keywords)
        except (ours.RendezvousError, StoreError) as error:
            raise_as_torch(error)

    return translate_errors


def _shared_method(method: Callable[Concatenate[BlockingSharedStore, P], T]) -> Callable[Concatenate[TorchStore, P], T]:
    @_with_torch_errors
    @functools.wraps(method)
    def call(self: TorchStore, /, *arguments: P.args, **keywords: P.kwargs) -> T:
        done: T = getattr(self._client_for_this_process(), method.__name__)(*arguments, **keywords)
        return done

    return call


class _PrefixProbeKeys(threading.local):
    """Per thread: the keys that a `PrefixStore` asks for while its prefix is read; else None."""

    keys: list[str] | None = None


_recorded_keys: Final = _PrefixProbeKeys()
_instances: set[TorchStore] = set()  # see `TorchStore`


class TorchStore(dist.Store):
    """A `torch.distributed.Store` over our store; safe to use from several threads.

        TorchStore("tcp://head:29400/job-7?token_file=/run/secrets/rdzv")
        PrefixStore("ckpt", TorchStore(info.store))         # of a round: fenced, gone with the round

    Stores of one URL share keys; `num_keys` and `list_keys` cover only the URL's, or the round's. A `TorchStore` is a
    client: `rdzv serve`, or a node of the run, serves the store. Errors are those of TCPStore: `DistStoreError` after a
    timeout, with the missing keys, and after the end of a store's round; `QueueEmptyError`; `DistNetworkError` if the
    store cannot be reached.

    C++ holds only the C++ half of this object. Calls by C++ fail with an internal assertion after the end of the
    Python half. C++ does not report that it releases its half, so every instance is kept until the process ends.
    Clones share one client, with a socket for each thread in a call, until `close`.

    A forked child, such as a `DataLoader`'s worker, uses its own client. A pickled store carries the URL, the prefix,
    the timeout, and the names of files with secrets, but no secret: a token given by value must be in the other
    process's RDZV_TOKEN or RDZV_TOKEN_FILE.

    Args:
        url: A URL of ours, with or without a run (segments after the run separate keys); or a blocking shared store
            of `rdzv.sync`.
        timeout: The limit of a wait, and of the first connection.
        overrides: The URL's parameters as keywords.

    Attributes:
        overheard_by: Called with each written or read value; later clones inherit it.

    Raises:
        DistNetworkError: The store cannot be reached.
        RendezvousSettingsError: The URL is wrong; a `ValueError`.
    """

    def __init__(self, url: str | BlockingSharedStore, timeout: timedelta = DEFAULT_TIMEOUT, **overrides: Any) -> None:
        super().__init__()
        os.environ.setdefault(GLOO_EXTENDED_API, "1")
        patch_prefix_store(TorchStore, _prefix_of_store)
        self.overheard_by: Callable[[str | bytes], object] | None = None
        self._origin: Origin | None = None
        self._owns_client = isinstance(url, str)
        if isinstance(url, str):
            url, segments = split_url_after_run_id(url)
            client, settings = open_blocking_client(url, overrides)
            self._origin = _reopen_arguments(settings)
            root = Keys(settings.prefix, settings.run_id).root
            prefix = f"{root}torch/segments/{segments}/" if segments else f"{root}torch/store/"
            self._shared = _open_shared_store(client, url, prefix=prefix, fence=(), lease=None, timeout=timeout)
        else:
            self._shared = url.clone()
            self._shared.set_timeout(timeout)
        self._pid = os.getpid()
        self._last_timeout = timeout
        self.set_timeout(timeout)  # the base class keeps the timeout for PrefixStore and C++
        _instances.add(self)

    @classmethod
    def of_round(cls, shared: BlockingSharedStore, timeout: timedelta, settings: Settings) -> TorchStore:
        """Return a round's store; the settings make it picklable."""
        store = cls(shared, timeout)
        store._origin = _reopen_arguments(settings)
        return store

    def _client_for_this_process(self) -> BlockingSharedStore:
        """Return this process's shared store, with the latest timeout, which C++ may have set."""
        if self._pid != os.getpid():
            # No lock is needed: if two threads of a forked child both make a client, both clients work.
            self._shared, self._owns_client, self._pid = self._shared.reopened(), True, os.getpid()
        timeout = self.timeout
        if timeout != self._last_timeout:
            self._shared.set_timeout(timeout)
            self._last_timeout = timeout
        return self._shared

    def _show_to_observer(self, value: V) -> V:
        if self.overheard_by is not None:
            self.overheard_by(value)
        return value

    @_with_torch_errors
    def __reduce__(self) -> tuple[Any, ...]:
        shared, origin = self._shared, self._origin
        if origin is None:
            raise pickle.PicklingError(
                "this TorchStore was made of a shared store, which does not say where it is; "
                "make it of a URL, or make another one in the other process"
            )
        return _unpickle_torch_store, (origin, shared.prefix, shared.fence, shared.lease, self.timeout)

    add = _shared_method(BlockingSharedStore.add)
    append = _shared_method(BlockingSharedStore.append)
    compare_set = _shared_method(BlockingSharedStore.compare_set)
    delete_key = deleteKey = _shared_method(BlockingSharedStore.delete_key)  # noqa: N815  C++'s name
    num_keys = getNumKeys = _shared_method(BlockingSharedStore.num_keys)  # noqa: N815  C++'s name
    list_keys = _shared_method(BlockingSharedStore.list_keys)
    queue_push = _shared_method(BlockingSharedStore.queue_push)
    queue_pop = _shared_method(BlockingSharedStore.queue_pop)
    queue_len = _shared_method(BlockingSharedStore.queue_len)

    @_with_torch_errors
    def set(self, key: str, value: str | bytes) -> None:
        """Write a value."""
        self._show_to_observer(value)
        self._client_for_this_process().set(key, value)

    @_with_torch_errors
    def get(self, key: str) -> bytes:
        """Wait for a key and return its value."""
        return self._show_to_observer(self._client_for_this_process().get(key))

    def _batch_keys(self, keys: Iterable[str], within: float) -> Iterator[tuple[BlockingSharedStore, list[str], float]]:
        """Yield the keys in groups that fit in one request, each with the seconds left for all."""
        shared, keys = self._client_for_this_process(), list(iterable_as_tuple(keys, "keys"))
        deadline = time.monotonic() + within
        for first in range(0, max(len(keys), 1), shared.keys_max):
            some, left = keys[first : first + shared.keys_max], deadline - time.monotonic()
            if left < -OVERTIME:
                raise ours.SharedStoreTimeoutError("out of time", keys=tuple(some), timeout=within)
            if first:
                shared = shared.clone()
                shared.set_timeout(max(left, 0.001))
            yield shared, some, max(left, min(within, 0.001))

    @_with_torch_errors
    def wait(self, keys: Iterable[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys exist."""
        timeout = self.timeout if timeout is None else timeout
        for shared, some, left in self._batch_keys(keys, timeout.total_seconds()):
            shared.wait(some, left)

    @_with_torch_errors
    def multi_get(self, keys: Iterable[str]) -> list[bytes]:
        """Wait for all keys and return their values; at one revision, if they fit in one request."""
        parts = self._batch_keys(keys, self.timeout.total_seconds())
        return [self._show_to_observer(value) for shared, some, _ in parts for value in shared.multi_get(some)]

    @_with_torch_errors
    def multi_set(self, keys: Iterable[str], values: Iterable[str | bytes]) -> None:
        """Write several values; at once, if they fit in one request."""
        keys, values = iterable_as_tuple(keys, "keys"), iterable_as_tuple(values, "values")
        values = [self._show_to_observer(value) for value in values]
        try:
            if len(keys) != len(values):
                self._client_for_this_process().multi_set(keys, values)  # raises ValueError: the lengths differ
            rest = iter(values)
            for shared, some, _ in self._batch_keys(keys, self.timeout.total_seconds()):
                shared.multi_set(some, list(itertools.islice(rest, len(some))))
        except ValueError as error:
            raise dist.DistStoreError(str(error)) from error  # as TCPStore does for lists of different lengths

    @_with_torch_errors
    def check(self, keys: Iterable[str]) -> bool:
        """Return True if all keys exist."""
        if _recorded_keys.keys is not None:  # called by `_prefix_of_store`: only record the keys
            _recorded_keys.keys.extend(keys)
            return True
        return self._client_for_this_process().check(keys)

    def has_extended_api(self) -> bool:
        """Return True."""
        return True

    @_with_torch_errors
    def clone(self) -> TorchStore:
        """Return another store for the same keys and client, with its own timeout."""
        clone = TorchStore(self._client_for_this_process(), self.timeout)
        clone._origin, clone._owns_client = self._origin, self._owns_client
        clone.overheard_by = self.overheard_by
        return clone

    @_with_torch_errors
    def barrier(self, key: str, world_size: int, timeout: timedelta | None = None) -> None:
        """Wait for `world_size` callers; each key serves one barrier."""
        try:
            self._client_for_this_process().barrier(key, world_size, timeout)
        except ours.SharedStoreTimeoutError as error:
            raise dist.DistStoreError(
                f"barrier timeout after {error.timeout * 1000:.0f}ms, key: {key}; {error}"
            ) from error

    def end(self, of_what: str) -> None:
        """Let all calls raise that the round is over. Free the shared store, as this object is never freed."""
        self._shared = cast("BlockingSharedStore", _GoneStore(f"{of_what} is over, and so is the store of its members"))

    def close(self) -> None:
        """Disconnect this store and its clones; do nothing if it is a round's, which the round closes."""
        if self._owns_client and self._pid == os.getpid():
            self._shared.close()


class _GoneStore:
    def __init__(self, message: str) -> None:
        self._message = message

    def __getattr__(self, name: str) -> NoReturn:
        raise ours.RoundSupersededError(self._message)


def _open_shared_store(client: BlockingStore, url: str, *, timeout: timedelta, **rest: Any) -> BlockingSharedStore:
    """Return the shared store on a client; raise DistNetworkError if the store does not answer."""
    try:
        client.ping(timeout=timeout.total_seconds())
    except StoreError as error:
        client.close()
        raise dist.DistNetworkError(f"{brief(url.partition('?')[0])}: {error}") from error
    return BlockingSharedStore(client, timeout=timeout, **rest)


def _unpickle_torch_store(
    origin: Origin, prefix: str, fence: tuple[Condition, ...], lease: int | None, timeout: timedelta
) -> TorchStore:
    client, _ = open_blocking_client(*origin)
    shared = _open_shared_store(client, origin[0], prefix=prefix, fence=fence, lease=lease, timeout=timeout)
    store = TorchStore(shared, timeout)
    store._origin, store._owns_client = origin, True
    return store


_PREFIX_PROBE: Final = "rdzv/which-prefix-is-this"


def _prefix_of_store(store: Any) -> str:
    """Return the prefix of a `PrefixStore` over a `TorchStore`, taken from a key that the `PrefixStore` asks for."""
    _recorded_keys.keys = []
    try:
        store.check([_PREFIX_PROBE])
        (seen,) = _recorded_keys.keys
    finally:
        _recorded_keys.keys = None
    return seen.removesuffix(_PREFIX_PROBE)

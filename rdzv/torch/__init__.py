"""Adapters to PyTorch: its rendezvous handler, its store and its rendezvous backend, each over ours.

    torchrun --rdzv-backend=rdzv ...    >  rdzv.torchrun  >  TorchRendezvousHandler  >  rdzv.sync  >  the async handler
    init_process_group("rdzv://...")    >  register()     >  ...................................>  rdzv.sync
    PrefixStore, gloo, the agent        >  TorchStore     >  the blocking shared store  >  one socket per thread
    DynamicRendezvousHandler            >  TorchRendezvousBackend  >  a blocking client

They translate and forward; what a rendezvous is, is decided elsewhere. Nothing of ours is pickled on any wire: only the
state that PyTorch's own `DynamicRendezvousHandler` gives to a backend is a pickle, which PyTorch makes and reads.

PyTorch 2.4, which brought `RendezvousInfo` and the store shared with the agent, is the oldest that this reads. Its
`torchrun` does not look for entry points yet, as that of 2.5 does: with 2.4 write `python -m rdzv.torchrun` instead of
`torchrun`. What came later, queues above all, is looked up with a fallback.

**C++ and Python.** A `torch.distributed.Store` is a C++ object with a Python half. C++ calls the Python half's methods
of certain names, two of them in camel case, and does not keep it alive: see `TorchStore`.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import sys
import threading
import weakref
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Concatenate, Final, NoReturn, ParamSpec, TypeVar

from rdzv import errors as ours
from rdzv import sync
from rdzv.backends.registry import RendezvousParameters, rendezvous_handler_registry
from rdzv.config.config_errors import refuse, shown
from rdzv.config.endpoint import split_url
from rdzv.config.settings import PARAMETERS
from rdzv.core.state import Keys
from rdzv.node.handler import Handler
from rdzv.shared_store.store import BlockingSharedStore
from store import StoreError, StoreUsageError

try:
    import torch.distributed as dist
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.rendezvous import api as torch_api
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend
except ImportError as error:
    raise ImportError(
        f"rdzv.torch needs PyTorch 2.4 or later with torch.distributed ({error}); pip install 'rdzv[torch]', "
        f"or without a GPU first: pip install torch --index-url https://download.pytorch.org/whl/cpu"
    ) from error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from rdzv.config.settings import Settings
    from store import BlockingStore

__all__ = ["TorchRendezvousBackend", "TorchRendezvousHandler", "TorchStore", "register"]

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

DEFAULT_TIMEOUT: Final = timedelta(seconds=300)
"""PyTorch's own default for a store."""

READ_TIMEOUT: Final = 60.0
"""In seconds; PyTorch's default for `read_timeout`, which its agents' store has as its timeout."""

EXIT_CLOSE_TIMEOUT: Final = 5.0
"""In seconds. A script that ends should not seem to hang: it waits this long for those who use the store that it hosts,
unless `close_timeout` in its URL says otherwise."""

QueueEmpty: Final = getattr(dist, "QueueEmptyError", dist.DistStoreError)
"""PyTorch's class for an empty queue; its releases before 2.8 have neither queues nor this."""


# ------------------------------------------------------------------------------------------------ opening a store


def _open(url: str, overrides: Mapping[str, Any]) -> tuple[BlockingStore, Settings]:
    """A blocking client of the store that a URL names, through whichever backend its scheme stands for."""
    head, question_mark, query = url.partition("?")
    if not split_url(url).run_id:
        url = f"{head.rstrip('/')}/default{question_mark}{query}"
    handler = rendezvous_handler_registry.create_handler(RendezvousParameters.from_url(url, overrides))
    if not isinstance(handler, Handler):
        refuse(f"the backend of {shown(head)} is not one of ours, and has no store to open; use tcp or etcd")
    return handler.open_blocking_store(), handler.settings


# ----------------------------------------------------------------------------------------------------- the store


def _raise_as_torch(error: Exception) -> NoReturn:
    """Raise what TCPStore raises in such a case, with our words."""
    message = str(error)
    match error:
        case ours.SharedStoreTimeoutError():
            named = ", ".join(f"/{key}" for key in error.keys) or "(none)"
            raise dist.DistStoreError(f"wait timeout after {error.timeout * 1000:.0f}ms, keys: {named}") from error
        case ours.QueueEmptyError():
            raise QueueEmpty(f"queue is empty: {message}") from error
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
        self._client: BlockingStore | None = None
        if isinstance(url, str):
            self._client, settings = _open(url, overrides)
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


# ------------------------------------------------------------------------------------------------ torchrun's handler


_TORCH_ERRORS: Final[tuple[tuple[type[ours.RendezvousError], type[Exception]], ...]] = (
    (ours.RendezvousClosedError, torch_api.RendezvousClosedError),
    (ours.RendezvousTimeoutError, torch_api.RendezvousTimeoutError),
    (ours.RendezvousConnectionError, torch_api.RendezvousConnectionError),
    (ours.RendezvousStateError, torch_api.RendezvousStateError),
    (ours.RendezvousError, torch_api.RendezvousError),
)


def _as_torch(error: ours.RendezvousError) -> Exception:
    """PyTorch's error for one of ours, with our message, which PyTorch's own mostly lack."""
    return next(theirs(str(error)) for kind, theirs in _TORCH_ERRORS if isinstance(error, kind))


class _Choices:
    """What `torchrun` was told, in our terms.

    Attributes:
        url: Where the run is.
        overrides: Everything else that is ours, as keywords of `rdzv.sync.connect`.
        read_timeout: How long the agent's store waits for a key.
        regroup_on_loss: Whether members meet again when one has gone.
    """

    # PyTorch adds `timeout=900` to what the user says, whatever that is, and its dynamic handler reads `join_timeout`.
    # `heartbeat_timeout` bounds its heartbeat's calls, `use_libuv` and `store_type` choose its store: nothing of ours.
    IGNORED: Final = ("timeout", "heartbeat", "heartbeat_timeout", "use_libuv", "store_type")

    def __init__(self, params: Any) -> None:
        config = {name: value for name, value in params.config.items() if name not in self.IGNORED}
        if str(params.config.get("timeout", "900")) not in ("900", "900.0"):
            log.warning(
                "--rdzv-conf timeout=%s is not read, as PyTorch's dynamic rendezvous does not read it; "
                "give join_timeout, which is 600 seconds by default",
                params.config["timeout"],
            )
        for name in config:
            if name in PARAMETERS and PARAMETERS[name].is_secret:
                refuse(
                    f"{name} was given in --rdzv-conf, which is shown in process lists; put it into a file and give "
                    f"{name}_file={PARAMETERS[f'{name}_file'].example}"
                )
        self.read_timeout = _seconds("read_timeout", config.pop("read_timeout", READ_TIMEOUT))
        self.regroup_on_loss = _truth(params, "regroup_on_loss", default=True)
        config.pop("regroup_on_loss", None)

        endpoint = params.endpoint.strip() or "localhost"  # as PyTorch takes an empty one
        parts = split_url(endpoint if "://" in endpoint else f"tcp://{endpoint}")
        if parts.run_id not in ("", params.run_id):
            refuse(
                f"--rdzv-endpoint={shown(endpoint.partition('?')[0])} names the run {shown(parts.run_id)}, and "
                f"--rdzv-id is {shown(params.run_id)}; leave the run out of the endpoint"
            )
        self.url = f"{parts.scheme}://{parts.authority}/{_quoted(params.run_id)}"
        if parts.parameters:
            self.url += "?" + "&".join(f"{name}={_quoted(value)}" for name, value in parts.parameters.items())
        self.overrides: dict[str, Any] = {
            "min_nodes": params.min_nodes,
            "max_nodes": params.max_nodes,
            "address": params.local_addr,
            **config,
        }


def _quoted(text: str) -> str:
    from urllib.parse import quote

    return quote(text, safe="")


def _seconds(name: str, value: Any) -> timedelta:
    seconds: float = PARAMETERS["join_timeout"].read(value, written=name)
    return timedelta(seconds=seconds)


def _truth(params: Any, name: str, *, default: bool) -> bool:
    return bool(PARAMETERS["insecure"].read(params.config.get(name, default), written=name))


class TorchRendezvousHandler(torch_api.RendezvousHandler):
    """PyTorch's rendezvous handler over ours: what `torchrun --rdzv-backend=rdzv` uses.

    `--rdzv-endpoint` is `host[:port]`, or any URL of ours without the run, such as `etcd://head:2379`. `--rdzv-conf`
    takes our parameters, and PyTorch's own: `join_timeout`, `last_call_timeout`, `close_timeout`, `is_host`,
    `keep_alive_interval` and `keep_alive_max_attempt` (their product is our `ttl`), `read_timeout` (for the agent's
    store), `heartbeat_timeout` (accepted, and of no use here), and:

        regroup_on_loss     members meet again when one has died or left (true); false waits, as PyTorch does, until
                            their workers fail

    **Timeouts.** torchrun gives every handler `timeout=900` without being asked. As with PyTorch's dynamic handler that
    is not read: `join_timeout` is, 600 seconds by default.

    **Restarts.** A worker whose peer was killed fails within milliseconds, long before anybody can know that a node is
    lost; its agent then restarts it out of `--max-restarts`, which is 0 by default, as with any backend.

    **Deaths on the way.** An agent waits for what every other member writes, for `read_timeout`, and fails if that does
    not come. So `next_rendezvous` returns a round only once all its members have come out of it, and meets again if one
    dies before that. A member that dies in the milliseconds after it still costs the others `read_timeout`.

    **Closing.** `shutdown` closes the run, as PyTorch's does; torchrun calls it when an agent ends in whatever way but
    by a signal. After a signal the node only leaves, in an exit handler, and the others are told at once. A node that
    never was in a round, and could not get in, does not close the run of those who are.

    **Spares.** When the run is closed a spare's agent ends with status 0. PyTorch has `RendezvousGracefulExitError` for
    that, but its agent (2.13 and before) stumbles over the missing result of a run that ends so, and exits with 1. So
    `next_rendezvous` raises `SystemExit(0)`, which goes through agent and launcher, and which `torchrun` exits with.

    Args:
        params: PyTorch's `RendezvousParameters`.

    Raises:
        RendezvousSettingsError: One of them is wrong; a `ValueError`. Nothing is connected before it is needed.
    """

    def __init__(self, params: torch_api.RendezvousParameters) -> None:
        self._backend = params.backend
        self._run_id = params.run_id
        self._choices = choices = _Choices(params)
        # Made to be thrown away: it says now, not at the first rendezvous, what is wrong with the settings.
        rendezvous_handler_registry.create_handler(RendezvousParameters.from_url(choices.url, choices.overrides))
        self._stack = contextlib.ExitStack()
        self._handler: sync.Handler | None = None
        self._was_member = False
        self._kept_out = False  # the last attempt to get in failed
        self._over = False
        self._pid = os.getpid()

    def get_backend(self) -> str:
        """What it was asked for as: "rdzv", unless registered under another name."""
        return str(self._backend)

    def get_run_id(self) -> str:
        """Which run this is."""
        return str(self._run_id)

    @property
    def use_agent_store(self) -> bool:
        """False: workers do not use the agent's store, they make their own.

        With True a worker dials MASTER_ADDR:MASTER_PORT as a client of PyTorch's native TCPStore, which speaks a
        protocol of its own. Our store does not, so the agent of rank 0 would have to host a native one beside it: one
        more server, without authentication, and gone with that agent. With False the worker of rank 0 hosts it, on the
        address and the port that came with the round's commit; both are new in every round, so nobody dials a dead one.
        """
        return False

    def next_rendezvous(self) -> torch_api.RendezvousInfo:
        """Leave the current round, if in one, and return once this node is a member of the next.

        Raises:
            SystemExit: This node was a spare and the run is closed: with status 0. See the class.
        """
        try:
            info = self._next_whole_round()
        except ours.RendezvousGracefulExitError as error:
            log.info("%s", error)
            raise SystemExit(0) from error
        except ours.RendezvousError as error:
            self._kept_out = True
            raise self._explained(error) from error
        self._was_member, self._kept_out = True, False
        host, port = info.bootstrap_address
        return torch_api.RendezvousInfo(
            TorchStore(info.store, self._choices.read_timeout),
            info.rank,
            info.world_size,
            torch_api.RendezvousStoreInfo(host, port),
        )

    def _next_whole_round(self) -> sync.RendezvousInfo:
        """The next round of which nobody has gone before all have come: agents wait for one another right after it."""
        handler = self._connected()
        while True:
            info = handler.next_rendezvous()
            if handler.all_here(timeout=self._choices.read_timeout.total_seconds()):
                return info
            log.info("run %s, round %d: a member went before all had come; meeting again", info.run_id, info.round)

    def _connected(self) -> sync.Handler:
        if self._over:
            raise ours.RendezvousStateError(f"the handler of run {self._run_id} was shut down; make another one")
        if self._handler is None:
            self._handler = self._stack.enter_context(sync.connect(self._choices.url, **self._choices.overrides))
            atexit.register(self._leave_at_exit)
        return self._handler

    def _explained(self, error: ours.RendezvousError) -> Exception:
        translated = _as_torch(error)
        if isinstance(error, ours.RendezvousClosedError) and self._run_id == "none":
            return type(translated)(
                f"{error}; give each job a name of its own: --rdzv-id=NAME"
            )  # "none" is the default
        return translated

    def is_closed(self) -> bool:
        """Whether the run is closed."""
        try:
            return self._connected().is_closed()
        except ours.RendezvousError as error:
            raise _as_torch(error) from error

    def set_closed(self) -> None:
        """Close the run for every node, for good."""
        try:
            self._connected().set_closed()
        except ours.RendezvousError as error:
            raise _as_torch(error) from error

    def num_nodes_waiting(self) -> int:
        """How many nodes there are to meet again for: those that wait, and with `regroup_on_loss` those that went.

        Above 0 the agent restarts its workers. It asks ten times a second, and is answered from what was pushed. Once
        the run is closed it is 0: there is no next round.
        """
        if self._handler is None:
            return 0
        return self._handler.num_nodes_changed(on_loss=self._choices.regroup_on_loss)

    def shutdown(self) -> bool:
        """Close the run, and leave; whether that could be done. See the class for who does not close it."""
        if self._over:
            return True
        try:
            if _stopped_by_a_signal():
                self._connected().leave()
            elif self._was_member or not self._kept_out:
                handler = self._connected()
                if not handler.is_closed():
                    handler.set_closed("an agent has ended" if self._was_member else "shut down before it began")
        except ours.RendezvousError as error:
            log.warning("run %s could not be closed: %s", self._run_id, error)
            return False
        finally:
            self._over = True
            atexit.unregister(self._leave_at_exit)
            self._close()
        return True

    def _close(self) -> None:
        try:
            self._stack.close()
        except ours.RendezvousError as error:
            log.warning("run %s was not left in good order: %s", self._run_id, error)

    def _leave_at_exit(self) -> None:
        """Leave, but close nothing, and wait for nobody: the process was told to end."""
        if self._handler is not None and self._pid == os.getpid():
            with contextlib.suppress(ours.RendezvousError):
                self._handler.leave()


def _stopped_by_a_signal() -> bool:
    """Whether the agent that shuts us down does so because it was told to end: that closes nothing for the others.

    PyTorch 2.5 and later then let us alone; the agent of 2.4 shuts us down while it handles what its signal raised.
    """
    return isinstance(sys.exception(), SignalException)


# --------------------------------------------------------------------------------------------- PyTorch's own handler


class TorchRendezvousBackend(RendezvousBackend):
    """Keeps the state of PyTorch's own `DynamicRendezvousHandler` in our store, fenced by the revision of its key.

        store, backend = TorchStore(url), TorchRendezvousBackend(url, run_id)
        DynamicRendezvousHandler.from_backend(run_id, store, backend, min_nodes, max_nodes)

    For comparison, and for those who need that handler's ways. The state is PyTorch's, a pickle that it makes and reads
    itself: let nobody write to this store who should not. Our own handler needs nothing of this.

    Args:
        url: A URL of ours; what it says of the run is not looked at.
        run_id: Which run's state to keep.
        overrides: The URL's parameters as keywords.
    """

    def __init__(self, url: str, run_id: str, **overrides: Any) -> None:
        if not run_id:
            refuse("the run_id is empty; give the job a name")
        self._client, settings = _open(url, overrides)
        self._key = Keys(settings.prefix, run_id).root + "torch/state"
        weakref.finalize(self, self._client.close).atexit = False  # PyTorch has no call that would close it

    @property
    def name(self) -> str:
        """What it is called."""
        return "rdzv"

    def get_state(self) -> tuple[bytes, Any] | None:
        """The state and its token; None if there is none."""
        with self._torch_errors():
            entry = self._client.get(self._key)
        return (entry.value, entry.mod_revision) if entry is not None else None

    def set_state(self, state: bytes, token: Any | None = None) -> tuple[bytes, Any, bool] | None:
        """Write the state if the token is that of the one there, or if there is none and no token was given.

        Returns:
            The state that is there now, its token, and whether it is what was just written; None if there is none.
        """
        if token is not None and type(token) is not int:
            current = self.get_state()  # no token of ours, so it cannot be that of the state
            return (*current, False) if current is not None else None
        with self._torch_errors():
            result = self._client.compare_and_set(self._key, state, expected_revision=token or 0)
        if result.entry is None:
            return None
        return result.entry.value, result.entry.mod_revision, result.succeeded

    def close(self) -> None:
        """Hang up."""
        self._client.close()

    @contextlib.contextmanager
    def _torch_errors(self) -> Iterator[None]:
        try:
            yield
        except StoreError as error:
            raise torch_api.RendezvousConnectionError(f"{self._key}: {error}") from error


# --------------------------------------------------------------------------------------- init_process_group("rdzv://")

_SCHEMES: Final = {"rdzv": "tcp", "rdzv+tcps": "tcps", "rdzv+etcd": "etcd", "rdzv+etcds": "etcds"}

_registered: set[str] = set()


def register() -> None:
    """Let `init_process_group` take URLs of ours; calling it again does nothing.

        rdzv.torch.register()
        torch.distributed.init_process_group(init_method="rdzv://head:29400/job-7?min_nodes=4")

    The schemes are rdzv, rdzv+tcps, rdzv+etcd and rdzv+etcds. `rank` and `world_size` may be given as usual: they stand
    for `requested_rank`, and for as many nodes at least and at most. The timeout of `init_process_group` is that of the
    store, and of joining unless the URL has a `join_timeout`. A process stays in its round until it ends, or calls
    `init_process_group` with the same URL again, having destroyed the group: then it joins the next round.
    """
    for scheme in _SCHEMES.keys() - _registered:
        dist.register_rendezvous_handler(scheme, _rendezvous)
        _registered.add(scheme)


def _rendezvous(url: str, timeout: timedelta = DEFAULT_TIMEOUT, **_: Any) -> Iterator[tuple[TorchStore, int, int]]:
    """What PyTorch iterates over: store, rank and world size, once for each round."""
    scheme, colon, rest = url.partition(":")
    parts = split_url(f"{_SCHEMES[scheme]}{colon}{rest}")
    parameters = dict(parts.parameters)
    rank, size = (
        int(parameters.pop(name, -1)) for name in ("rank", "world_size")
    )  # -1 is PyTorch's word for not given
    address = f"{parts.scheme}://{parts.authority}/{_quoted(parts.run_id)}"
    query = "&".join(f"{name}={_quoted(value)}" for name, value in parameters.items())
    defaults: dict[str, Any] = {"join_timeout": timeout.total_seconds(), "close_timeout": EXIT_CLOSE_TIMEOUT}
    if size >= 0:
        defaults.update(min_nodes=size, max_nodes=size)
    if rank >= 0:
        defaults.update(rank_order="requested", requested_rank=rank)
    overrides = {name: value for name, value in defaults.items() if not _is_given(name, parameters)}
    joined = _Joined.by_url(f"{address}?{query}" if query else address, overrides)
    while True:
        yield joined.next_round(timeout, expected_rank=rank, expected_size=size)


def _is_given(name: str, parameters: Mapping[str, str]) -> bool:
    return any(written in parameters for written in (name, *PARAMETERS[name].aliases))


class _Joined:
    """A run that this process has joined by `init_process_group`, for as long as it lives.

    PyTorch drops the iterator once it has the store, so nothing there can hold the membership. It is given up by a
    thread that waits for the main thread to end: exit handlers run later, when no thread can be started any more.
    """

    _all: Final[dict[tuple[int, str], _Joined]] = {}

    @classmethod
    def by_url(cls, url: str, overrides: Mapping[str, Any]) -> _Joined:
        """The one of this URL in this process, not counting a parent's before `fork()`."""
        key = os.getpid(), url
        joined = cls._all.get(key)
        if joined is None:
            joined = cls._all[key] = cls(url, overrides)
        return joined

    def __init__(self, url: str, overrides: Mapping[str, Any]) -> None:
        self._stack = contextlib.ExitStack()
        try:
            self._handler = self._stack.enter_context(sync.connect(url, **overrides))
        except ours.RendezvousConnectionError as error:
            raise dist.DistNetworkError(str(error)) from error
        threading.Thread(target=self._leave_with_main_thread, name="leave with main thread").start()

    def next_round(self, timeout: timedelta, *, expected_rank: int, expected_size: int) -> tuple[TorchStore, int, int]:
        """Store, rank and world size of the next round.

        Raises:
            DistNetworkError: The store cannot be reached.
            DistStoreError: No round came about; the message says why.
        """
        try:
            info = self._handler.next_rendezvous()
        except ours.RendezvousConnectionError as error:
            raise dist.DistNetworkError(str(error)) from error
        except ours.RendezvousSettingsError:
            raise  # a ValueError, which it is to PyTorch's users, too
        except ours.RendezvousError as error:
            raise dist.DistStoreError(str(error)) from error
        for name, expected, got in (("rank", expected_rank, info.rank), ("world_size", expected_size, info.world_size)):
            if expected not in (-1, got):
                raise dist.DistStoreError(
                    f"run {info.run_id}, round {info.round}: {name}={expected} was asked for, but it is {got}; "
                    f"give each process a rank of its own, and all the same world_size"
                )
        return TorchStore(info.store, timeout), info.rank, info.world_size

    def _leave_with_main_thread(self) -> None:
        threading.main_thread().join()
        with contextlib.suppress(ours.RendezvousError):
            self._stack.close()

"""`init_process_group(init_method="rdzv://...")`: each process group is a round of a run."""

from __future__ import annotations

import contextlib
import os
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import rdzv as ours
from rdzv import sync
from rdzv.config.endpoint import split_url
from rdzv.config.parameters import Parameter
from rdzv.config.settings import PARAMETERS
from rdzv.config.value_types import whole_number
from rdzv.loop.rounds import make_handler
from rdzv.torch.pytorch import dist
from rdzv.torch.store import DEFAULT_TIMEOUT, TorchStore, raise_as_torch, split_url_after_run_id
from rdzv.torch.tcp_store import open_tcp_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from datetime import timedelta

EXIT_CLOSE_TIMEOUT: Final = 5.0  # seconds, the default of `close_timeout` here: the script is ending

_SCHEMES: Final = {"rdzv": "tcp", "rdzv+tcps": "tcps", "rdzv+etcd": "etcd", "rdzv+etcds": "etcds"}

_registered: set[str] = set()


def register_init_method() -> None:
    """Register our URLs for `init_process_group`; repeated calls do nothing.

        rdzv.torch.register_init_method()
        torch.distributed.init_process_group(init_method="rdzv://head:29400/job-7?min_nodes=4")

    Path segments after the run's name separate keys: with them, one process can make several groups in a round.
    `torch.distributed.rpc` accepts these URLs, too.

    The schemes are rdzv, rdzv+tcps, rdzv+etcd and rdzv+etcds. `rank` and `world_size` are optional: they set
    `requested_rank`, and both `min_nodes` and `max_nodes`. The timeout of `init_process_group` limits the store's
    waits and, unless the URL has a `join_timeout`, joining. A process that destroys the group and makes another by the
    same URL joins the next round.
    """
    for scheme in _SCHEMES.keys() - _registered:
        dist.register_rendezvous_handler(scheme, _rendezvous)
        _registered.add(scheme)


register: Callable[[], None] = register_init_method  # the function's former name, for earlier scripts


def _rendezvous(url: str, timeout: timedelta = DEFAULT_TIMEOUT, **_: Any) -> Iterator[tuple[dist.Store, int, int]]:
    scheme, colon, rest = url.partition(":")
    url, segments = split_url_after_run_id(f"{_SCHEMES[scheme]}{colon}{rest}")
    parts = split_url(url)
    parameters = dict(parts.parameters)
    names = ("rank", "world_size")  # PyTorch passes -1 for a missing number
    rank, size = (Parameter(name, whole_number(-1)).read(parameters.pop(name, -1)) for name in names)
    defaults: dict[str, Any] = {"join_timeout": timeout.total_seconds(), "close_timeout": EXIT_CLOSE_TIMEOUT}
    if size >= 0:
        defaults.update(min_nodes=size, max_nodes=size)
    if rank >= 0:
        defaults.update(rank_order="requested", requested_rank=rank)
    given = parameters.keys()
    overrides = {name: value for name, value in defaults.items() if given.isdisjoint((name, *PARAMETERS[name].aliases))}
    run = _InitMethodRun.of_url(replace(parts, parameters=parameters).url, overrides)
    while True:
        yield run.next_round(timeout, segments, expected_rank=rank, expected_size=size)


class _InitMethodRun:
    """A run that this process joins by `init_process_group`; a thread leaves it at the main thread's end."""

    _all: Final[dict[tuple[int, str], _InitMethodRun]] = {}

    @classmethod
    def of_url(cls, url: str, overrides: Mapping[str, Any]) -> _InitMethodRun:
        """Return the run of this URL in this process; a parent's before `fork()` does not count."""
        return cls._all.setdefault((os.getpid(), url), cls(url, overrides))

    def __init__(self, url: str, overrides: Mapping[str, Any]) -> None:
        self._url, self._overrides = url, overrides
        self._settings = make_handler(url, overrides).settings
        self._round: tuple[sync.RendezvousInfo, dist.Store] | None = None
        self._used: set[str] = set()  # the URL segments with which this round was returned
        self._stack = contextlib.ExitStack()
        self._handler: sync.Handler | None = None
        self._joining = threading.Lock()  # per run: a join may wait for other nodes

    def next_round(
        self, timeout: timedelta, segments: str, *, expected_rank: int, expected_size: int
    ) -> tuple[dist.Store, int, int]:
        """Return store, rank and world size of the next round; of the current round if the segments are new in it."""
        with self._joining:
            if self._round is None or segments in self._used:
                self._used.clear()
                self._round = self._join_round(timeout)
            self._used.add(segments)
            info, store = self._round
        for name, expected, got in (("rank", expected_rank, info.rank), ("world_size", expected_size, info.world_size)):
            if expected not in (-1, got):
                raise dist.DistStoreError(
                    f"run {info.run_id}, round {info.round}: {name}={expected} was asked for, but it is {got}; "
                    f"give each process a rank of its own, and all the same world_size"
                )
        return dist.PrefixStore(segments, store) if segments else store, info.rank, info.world_size

    def _join_round(self, timeout: timedelta) -> tuple[sync.RendezvousInfo, dist.Store]:
        try:
            if self._handler is None:
                self._handler = self._stack.enter_context(sync.connect(self._url, **self._overrides))
                threading.Thread(target=self._leave_with_main_thread, name="leave with main thread").start()
            info = self._handler.next_rendezvous()
            if self._round is not None and isinstance(self._round[1], TorchStore):
                self._round[1].end(f"a round before round {info.round} of run {info.run_id}")
            if self._settings.torch_store == "tcp":
                return info, open_tcp_store(info, timeout, port=info.bootstrap_address[1])
            return info, TorchStore.of_round(info.store, timeout, self._handler.store_settings)
        except ours.RendezvousError as error:
            raise_as_torch(error)

    def _leave_with_main_thread(self) -> None:
        threading.main_thread().join()
        with contextlib.suppress(ours.RendezvousError):
            self._stack.close()

"""The process group of one round: it is made, aborted by another thread after a loss, and removed.

`gloo_sockets` ends collectives of gloo. With nccl, PyTorch's abort ends a collective. After a loss each node
aborts its process's group: otherwise the others wait for the timeout. An abort waits for the GPU, so it runs
in a thread, which `close` waits for. docs/pytorch.md says why nccl needs two environment variables. Without
TORCH_NCCL_BLOCKING_WAIT=1 a collective returns before the GPU is done. This has never run on a GPU.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from dataclasses import KW_ONLY, dataclass, field
from datetime import timedelta
from typing import Any, Final

from rdzv import RendezvousSettingsError, RendezvousStateError
from rdzv.torch.gloo_sockets import GlooSocketCloser
from rdzv.torch.pytorch import (
    abort_process_group,
    destroy_process_groups,
    dist,
    reset_group_count,
    set_group_timeout,
    underlying_store,
)
from rdzv.torch.store import TorchStore

CONNECT_WITHIN: Final = 1.0  # seconds to connect, for a small gloo group's first attempt
CONNECT_WITHIN_PER_RANK: Final = 0.05
GLOO_WAITS: Final = 5  # gloo waits for a connection this many times its timeout (`waitUntilConnected`)
ATTEMPTS: Final = 5  # to make a gloo group; each has twice the time of the attempt before
LOOK_AGAIN_AFTER: Final = 0.01  # seconds between searches for new sockets while an aborted group is made
VERDICT: Final = "rdzv.group/verdict"
GO_ON: Final = b"go on"
AGAIN: Final = b"again"
NEEDED_BY_NCCL: Final = (
    ("ASYNC_ERROR_HANDLING", "0", "PyTorch's watchdog ends the process when a member is lost"),
    ("BLOCKING_WAIT", "1", "a collective that is aborted when a member is lost raises nothing, and the step goes on"),
)
"""Environment variables (without `TORCH_NCCL_`, formerly `NCCL_`), their values, and the effect of other values."""


@dataclass(eq=False)
class RoundGroup:
    """The process's default group during a round, over a store for its members only."""

    store: Any
    _: KW_ONLY
    rank: int
    world_size: int
    backend: str
    timeout: timedelta
    _aborting: threading.Thread | None = None
    _sockets: GlooSocketCloser = field(default_factory=GlooSocketCloser)
    _making: threading.Lock = field(default_factory=threading.Lock)
    _aborted: threading.Event = field(default_factory=threading.Event)
    _excepthooks: tuple[Any, Any] | None = None  # `sys.excepthook` before and after `init_process_group`

    def __post_init__(self) -> None:
        self._uses_gloo = "gloo" in self.backend
        self._uses_nccl = "nccl" in self.backend

    def make(self) -> None:
        """Make the default process group.

        Raises:
            RuntimeError: A member is missing or has gone (PyTorch's own error).
            RendezvousSettingsError: A variable that nccl needs is not set.
            RendezvousStateError: This process has a default group already.
        """
        refuse_existing_group()
        for name, value, otherwise in NEEDED_BY_NCCL if self._uses_nccl else ():
            if value not in (os.environ.get(f"TORCH_NCCL_{name}"), os.environ.get(f"NCCL_{name}")):
                raise RendezvousSettingsError(
                    f"backend={self.backend}: set TORCH_NCCL_{name}={value} before this process makes its first "
                    f"group; otherwise {otherwise}"
                )
        if not self._uses_gloo or set_group_timeout is None:
            # One attempt with the full timeout: only gloo needs a short one, which PyTorch before 2.9 cannot lengthen.
            self._try_making(self.store, self.timeout)
            if self._aborted.is_set():
                self.abort()  # `abort` was called while PyTorch was making the group: end the group
            return
        # A gloo group has one timeout for connecting and for collectives. Connecting needs a short timeout: if a member
        # dies before it connects, there are no sockets to shut down. If the time is too short, all members try again.
        within = CONNECT_WITHIN + CONNECT_WITHIN_PER_RANK * self.world_size
        failure: RuntimeError | None = None
        for attempt in range(ATTEMPTS):
            store = dist.PrefixStore(f"attempt{attempt}", self.store) if attempt else self.store
            failure = None
            try:
                self._try_making(store, timedelta(seconds=within * 2**attempt / GLOO_WAITS))
            except RuntimeError as error:
                failure = error
            if failure is not None and self._aborted.is_set():
                raise failure
            if self._agree_on_success(store, made=failure is None):
                set_group_timeout(self.timeout)
                return
            self.close()
        raise failure or RuntimeError(f"another member has failed {ATTEMPTS} times to connect to all of its peers")

    def _try_making(self, store: Any, timeout: timedelta) -> None:
        reset_group_count()
        self._wait_until_all_ready(store)
        bottom = underlying_store(store)
        if isinstance(bottom, TorchStore):
            bottom.overheard_by = self._sockets.note_address
        before = sys.excepthook
        with self._making:
            dist.init_process_group(
                self.backend, store=store, rank=self.rank, world_size=self.world_size, timeout=timeout
            )
        self._excepthooks = before, sys.excepthook
        if self._aborted.is_set():
            self._sockets.shut_down()

    def _wait_until_all_ready(self, store: Any) -> None:
        """Wait in the store until all members are ready: a member's loss ends waits in the store, but not in gloo."""
        if store.add("rdzv.group/came", 1) == self.world_size:
            store.set("rdzv.group/all", "1")
        store.wait(["rdzv.group/all"])

    def _agree_on_success(self, store: Any, *, made: bool) -> bool:
        """Return True if all members have made the group: a member that tried again alone would wait for the others."""
        if not made:
            store.compare_set(VERDICT, "", AGAIN)
        elif store.add("rdzv.group/made", 1) == self.world_size:
            store.compare_set(VERDICT, "", GO_ON)
        return bool(store.get(VERDICT) == GO_ON)

    def abort(self) -> None:
        """End all collectives, also future ones; thread-safe, and may be called repeatedly."""
        self._aborted.set()
        if self._uses_gloo:
            self._sockets.shut_down()
            if self._making.locked():
                # Shut down sockets in a new thread: gloo retries for ten seconds, and this may be the node's thread.
                threading.Thread(target=self._interrupt_group_making, name="rdzv group abort", daemon=True).start()
        aborting = self._aborting
        if self._uses_nccl and abort_process_group is not None and (aborting is None or not aborting.is_alive()):
            self._aborting = threading.Thread(target=_abort_all, name="rdzv group abort", daemon=True)
            self._aborting.start()

    def _interrupt_group_making(self) -> None:
        while not self._making.acquire(timeout=LOOK_AGAIN_AFTER):
            self._sockets.shut_down()
        self._sockets.shut_down()
        self._making.release()

    def close(self) -> None:
        """Destroy all process groups."""
        if self._aborting is not None:
            self._aborting.join()  # the thread of `_abort_all` may be destroying the groups
        if dist.is_initialized():
            destroy_process_groups()
        # For each group PyTorch wraps `sys.excepthook`, and never unwraps it: after a thousand rounds it would fail.
        if self._excepthooks is not None and sys.excepthook is self._excepthooks[1]:
            sys.excepthook = self._excepthooks[0]


def refuse_existing_group() -> None:
    """Raise `RendezvousStateError` if this process has a default group: its collectives would mix with ours."""
    if dist.is_initialized():
        raise RendezvousStateError(
            "this process has a process group already, of another loop of rdzv.torch.rounds or of init_process_group, "
            "and PyTorch has one for each process: leave that loop, or call torch.distributed.destroy_process_group()"
        )


def _abort_all() -> None:
    with contextlib.suppress(ValueError, AssertionError):  # the groups are destroyed already, or were never made
        abort_process_group()

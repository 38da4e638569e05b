"""The names of PyTorch that `rdzv.torch` uses, with the releases that have them.

Importing this module imports PyTorch, or says how to install it. `tests/rdzv/torch/private_names.py` lists the
undocumented names.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

try:
    import torch
    import torch.distributed as dist
    from torch.distributed.elastic import multiprocessing
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import api as torch_api
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend
except ImportError as _error:
    raise ImportError(
        f"rdzv.torch needs PyTorch 2.4 or later with torch.distributed ({_error}); pip install 'rdzv[torch]', "
        f"or without a GPU first: pip install torch --index-url https://download.pytorch.org/whl/cpu"
    ) from _error

from rdzv.loop.process_files import read_exception_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from types import FrameType

__all__ = ["RendezvousBackend", "dist", "torch", "torch_api"]

T = TypeVar("T")

RELEASE: Final = tuple(int(part) for part in torch.__version__.split(".")[:2])

_AGENT: Final = "torch.distributed.elastic.agent.server.api"
_PROCESSES: Final = "torch.distributed.elastic.multiprocessing.api"

LAUNCHER: Final = "torch.distributed.run"  # the module of `torchrun`; `accelerate launch` calls it, too

_NO_CODE: Final = compile("", "", "exec")


class _NeverRaised(BaseException):
    """Replaces an exception class that the installed PyTorch lacks; never raised."""


SignalException: Final[Any] = getattr(multiprocessing, "SignalException", _NeverRaised)

QueueEmptyError: Final = getattr(dist, "QueueEmptyError", dist.DistStoreError)

abort_process_group: Final[Any] = getattr(dist.distributed_c10d, "_abort_process_group", None)
"""Aborts all groups of a backend that can abort (nccl)."""

world_of_groups: Final[Any] = getattr(dist.distributed_c10d, "_world", None)
"""PyTorch's registry of this process's groups."""

set_group_timeout: Final[Any] = (
    getattr(dist, "set_timeout", getattr(dist.distributed_c10d, "_set_pg_timeout", None)) if RELEASE >= (2, 9) else None
)
"""Changes the timeout of a group's collectives; None before 2.9, where gloo ignores it."""

reconfigure_handle: Final[Any] = getattr(dist, "_get_reconfigure_handle", None)
"""Returns the handle by which other members of a group reach this one after a reconfiguration; since 2.14."""

KEYS_BY_RESTARTS: Final[bool] = (
    "TORCHELASTIC_RESTART_COUNT"
    in getattr(
        getattr(sys.modules.get("torch.distributed.rendezvous"), "_create_c10d_store", None), "__code__", _NO_CODE
    ).co_consts
)
"""True if workers that use the agent's store put their restart count before all keys, as in 2.4."""

LISTENING_STORE: Final[dict[str, Any]] = {} if RELEASE >= (2, 5) else {"use_libuv": False}
"""Arguments of a TCPStore with a listening socket: in 2.4 only the server without libuv accepts such a socket."""


LETS_GO_AFTER: Final = 0.05
"""In seconds: the time for the caller to drop a collective's error, which refers to the group.

The last thread to release a group waits for the group's threads. Before 2.8 it holds the interpreter's lock meanwhile
(PyTorch's pull request 154976), which those threads may need to release a tensor: a deadlock.
"""


def overwrite_tensors(into: list[torch.Tensor], of: list[torch.Tensor]) -> None:
    """Copy tensors into others of the same shapes."""
    with torch.no_grad():
        if into and hasattr(torch, "_foreach_copy_"):
            torch._foreach_copy_(into, of)
            return
        for one, other in zip(into, of, strict=True):
            one.copy_(other)


def destroy_process_groups() -> None:
    """Destroy all process groups, also right after a collective: a thread frees them after `LETS_GO_AFTER`."""
    groups = list(world_of_groups.pg_map) if world_of_groups is not None else []
    dist.destroy_process_group()
    threading.Thread(target=_release_groups_later, args=(groups,), name="rdzv group end", daemon=False).start()


def _release_groups_later(groups: list[Any]) -> None:
    time.sleep(LETS_GO_AFTER)
    groups.clear()


def bind_to_current_gpu(work: Callable[..., T]) -> Callable[..., T]:
    """Wrap work so that another thread runs it on this thread's GPU, if any."""
    if not torch.cuda.is_initialized():
        return work
    device = torch.cuda.current_device()

    def call_on_device(*arguments: Any) -> T:
        with torch.cuda.device(device):
            return work(*arguments)

    return call_on_device


def reset_group_count() -> None:
    """Reset the number of the next default group, which is in its keys, after a failed `init_process_group`."""
    if world_of_groups is not None and not dist.is_initialized():
        world_of_groups.group_count = 0


def _frames_above(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def runs_under_torchrun() -> bool:
    """Return True if PyTorch's launcher is on the call stack: then no user code can catch an error."""
    return any(
        frame.f_code.co_name == "run"
        and getattr(frame.f_globals.get("__spec__"), "name", None) == LAUNCHER  # `__name__` may be `__main__`
        for frame in _frames_above(sys._getframe())
    )


@dataclass(frozen=True, slots=True)
class Agent:
    """PyTorch's agent on this thread's call stack, and its workers."""

    problem: str  # the first failure of the workers; empty if none has failed
    group: Any = None  # PyTorch's `WorkerGroup`
    itself: Any = None  # the agent

    @property
    def has_succeeded(self) -> bool:
        """True if the workers have succeeded: the agent only waits for the other agents."""
        return bool(getattr(self.group, "state", "") == "SUCCEEDED")

    def next_pids_reader(self) -> Callable[[], Mapping[int, int]]:
        """Return a function that returns later workers' pids by local rank; {} until all have started."""
        before = self._pids()  # the last round's workers: the next ones have other pids

        def pids() -> Mapping[int, int]:
            now = {rank: pid for rank, pid in self._pids().items() if pid is not None and before.get(rank) != pid}
            return now if len(now) == len(self._pids()) else {}

        return pids

    def read_error_of(self, local_rank: int) -> str:
        """Return the exception in a worker's error file, shortened."""
        files = getattr(getattr(self.itself, "_pcontext", None), "error_files", {})
        return read_exception_line(files[local_rank]) if local_rank in files else ""

    def preserve_round_logs(self, round: int) -> None:
        """Rename a round's log folder if PyTorch is about to empty it; raise OSError on failure."""
        specs = getattr(self.itself, "_logs_specs", None)
        remaining = getattr(self.itself, "_remaining_restarts", None)
        if isinstance(specs, DefaultLogsSpecs) and remaining is not None:
            if not hasattr(specs, "_run_log_dir"):
                raise OSError("this release of PyTorch does not say where they are")
            run = getattr(specs, "_run_log_dir", None)  # None before the first workers, and if logs go to /dev/null
            folder = Path(run or os.devnull, f"attempt_{self.group.spec.max_restarts - remaining}")
            if folder.exists():
                folder.rename(f"{folder}.round_{round}")

    def _pids(self) -> dict[int, int | None]:
        with contextlib.suppress(AttributeError):
            return {worker.local_rank: worker.id for worker in self.group.workers}
        return {}


def find_agent() -> Agent | None:
    """Return the agent on the call stack; None if there is none, or if its code is unknown."""
    for frame in _frames_above(sys._getframe()):
        if frame.f_code.co_name == "_invoke_run" and frame.f_globals.get("__name__") == _AGENT:
            agent, problem = frame.f_locals.get("self"), ""
            with contextlib.suppress(AttributeError, KeyError, ValueError):  # no worker has failed
                failures = frame.f_locals["run_result"].failures.values()
                problem = describe_failure(min(failures, key=lambda failure: failure.timestamp))
            return Agent(problem, getattr(agent, "_worker_group", None), agent)
    return None


def is_stopping_workers(thread: int) -> bool:
    """Return True if an agent in the thread `thread` is stopping its workers."""
    frames = _frames_above(sys._current_frames().get(thread))
    return any(one.f_code.co_name == "close" and one.f_globals.get("__name__") == _PROCESSES for one in frames)


def patch_to_ignore_signals(is_repeated: Callable[[int], bool]) -> None:
    """Let PyTorch's signal handler, which PyTorch installs when it starts workers, ignore repeated signals."""
    functions = vars(sys.modules[_PROCESSES])
    handle = functions.get("_terminate_process_handler")
    if handle is not None:
        functions["_terminate_process_handler"] = lambda *now: None if is_repeated(now[0]) else handle(*now)


def signal_name_of_error(error: BaseException | None) -> str | None:
    """Return the name of the signal that has ended an agent, if any; SIGTERM if PyTorch does not name it."""
    if isinstance(error, KeyboardInterrupt):  # raised by Ctrl-C before PyTorch handles signals
        return signal.SIGINT.name
    if not isinstance(error, SignalException):
        return None
    return signal.Signals(getattr(error, "sigval", signal.SIGTERM)).name


@dataclass(frozen=True, slots=True)
class AgentEnd:
    """The end of an agent that shuts its handler down."""

    signal: str | None  # None if no signal has ended the agent
    why: str  # the reason, for the other nodes
    has_failed: bool
    has_no_result: bool  # the agent raised AttributeError, as for a missing result when a spare ends well


def find_agent_end() -> AgentEnd:
    """Return the end of the agent that shuts its handler down; without an error or failed worker, it has succeeded."""
    error, agent, how = sys.exception(), find_agent(), ""
    if isinstance(error, ChildFailedError):
        first = getattr(error, "get_first_failure", None)
        how = str(error).strip().splitlines()[0] if first is None else describe_failure(first()[1])
    elif error is None and agent is not None:  # PyTorch 2.4 shuts the handler down before raising the workers' failure
        how = agent.problem
    why = f"an agent has failed: {how}" if how else "an agent has ended"
    has_failed = bool(how) or (error is not None and not (isinstance(error, SystemExit) and not error.code))
    return AgentEnd(signal_name_of_error(error), why, has_failed, isinstance(error, AttributeError))


def describe_failure(failure: Any) -> str:
    """Describe a worker's failure, PyTorch's `ProcessFailure`."""
    return describe_worker_end(failure.local_rank, failure.exitcode, read_exception_line(failure.error_file))


def describe_worker_end(local_rank: int, status: int, raised: str) -> str:
    """Describe a worker's end by its exit status (negative for a signal) and its exception."""
    how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
    return f"worker {local_rank} {how}{f': {raised}' * bool(raised)}"


def underlying_store(store: Any) -> Any:
    """Return the store below all `PrefixStore`s; None if PyTorch does not give it."""
    while isinstance(store, dist.PrefixStore):
        store = getattr(store, "underlying_store", None)
    return store


@functools.cache
def patch_prefix_store(kind: type, prefix_of: Callable[[Any], str]) -> None:
    """Let `PrefixStore` call a store's Python methods for queues and `list_keys`, for which C++ raises an error.

    A `PrefixStore` over another kind of store is unchanged. `prefix_of` returns the prefix of a `PrefixStore`'s keys.
    """
    for name in ("queue_push", "queue_pop", "queue_len", "list_keys"):
        original = getattr(dist.PrefixStore, name, None)
        if original is not None:
            setattr(dist.PrefixStore, name, _forwarding_method(original, kind, prefix_of))


def _forwarding_method(original: Callable[..., Any], kind: type, prefix_of: Callable[[Any], str]) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward_call(self: Any, *arguments: Any, **keywords: Any) -> Any:
        bottom = underlying_store(self)
        if not isinstance(bottom, kind):
            return original(self, *arguments, **keywords)
        prefix, below = prefix_of(self), getattr(bottom, original.__name__)
        if not arguments:  # `list_keys`
            return [key.removeprefix(prefix) for key in below() if key.startswith(prefix)]
        key, *rest = arguments
        return below(prefix + key, *rest, **keywords)

    return forward_call

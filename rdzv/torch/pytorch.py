"""The names of PyTorch that these rooms use, all in one place, with the releases that have them.

Importing this room imports PyTorch, and says what to install where there is none. What is not in PyTorch's own
documentation is in `PRIVATE`, and what is not in every release from `OLDEST` on is looked up here with a fallback.
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

from rdzv.loop.error_file import raised_in

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import FrameType

__all__ = [
    "KEYS_BY_RESTARTS",
    "LISTENING_STORE",
    "OLDEST",
    "PRIVATE",
    "RELEASE",
    "Agent",
    "AgentEnd",
    "Private",
    "QueueEmptyError",
    "RendezvousBackend",
    "SignalException",
    "abort_process_group",
    "agent_above",
    "copy_all",
    "count_groups_anew",
    "destroy_process_groups",
    "dist",
    "end_of_agent",
    "how_ended",
    "in_words",
    "reconfigure_handle",
    "runs_under_torchrun",
    "same_device",
    "set_group_timeout",
    "signal_of",
    "stops_workers",
    "teach_prefix_store",
    "torch",
    "torch_api",
    "underlying_store",
]

T = TypeVar("T")

OLDEST: Final = (2, 4)
"""The oldest release that has `RendezvousInfo` and the store shared with the agent."""


RELEASE: Final = tuple(int(part) for part in torch.__version__.split(".")[:2])
"""The one that is installed: `(2, 13)`, say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Private:
    """A name that PyTorch does not document.

    Attributes:
        module: Where it is.
        name: What it is called there; with a dot, an attribute of a class.
        within: The function in whose code it is to be found, where it is a variable, or an attribute of an instance.
        since: The first release that has it, as far as we need to know: from `OLDEST` on.
        used_for: What we need it for, and what happens without it.
    """

    module: str
    name: str
    within: str = ""
    since: tuple[int, int] = OLDEST
    used_for: str


_ELASTIC: Final = "torch.distributed.elastic"
_AGENT: Final = f"{_ELASTIC}.agent.server.api"
_PROCESSES: Final = f"{_ELASTIC}.multiprocessing.api"
_C10D: Final = "torch.distributed.distributed_c10d"

PRIVATE: Final = (
    Private(
        module=f"{_ELASTIC}.rendezvous",
        name="rendezvous_handler_registry",
        used_for="python -m rdzv.torchrun, which registers our handler by hand",
    ),
    Private(
        module=f"{_ELASTIC}.multiprocessing",
        name="SignalException",
        used_for="telling an agent that was told to end from one whose workers are done; without it, such an agent "
        "closes the run",
    ),
    Private(
        module=f"{_ELASTIC}.multiprocessing",
        name="sigval",
        within="SignalException.__init__",
        used_for="which signal it was; without it, SIGTERM is said",
    ),
    Private(
        module=f"{_PROCESSES.rpartition('.')[0]}.errors",
        name="ChildFailedError.get_first_failure",
        used_for="which worker's failure an agent closes the run for; without it the reason is the error's first line",
    ),
    Private(
        module="torch.distributed.run",
        name="run",
        used_for="telling torchrun from a caller of elastic_launch: a function of this name in this module",
    ),
    Private(
        module=_AGENT,
        name="run_result",
        within="SimpleElasticAgent._invoke_run",
        used_for="why an agent meets the others again: a variable; without it, and what follows, others hear that a "
        "worker has failed when it does, and not how",
    ),
    Private(module=_AGENT, name="failures", within="RunResult.__init__", used_for="the same"),
    Private(
        module=_AGENT,
        name="_worker_group",
        within="SimpleElasticAgent.__init__",
        used_for="telling at once how a worker has failed: which processes an agent has started; without it, and what "
        "follows, that is told when the agent meets the others again",
    ),
    Private(module=_AGENT, name="workers", within="WorkerGroup.__init__", used_for="the same"),
    Private(module=_AGENT, name="id", within="Worker.__init__", used_for="the same"),
    Private(
        module=f"{_ELASTIC}.agent.server.local_elastic_agent",
        name="_pcontext",
        within="LocalElasticAgent.__init__",
        used_for="telling what a worker has raised when it fails; without it, and what follows, that is told later",
    ),
    Private(module=_PROCESSES, name="error_files", within="PContext.__init__", used_for="the same"),
    Private(
        module=f"{_ELASTIC}.agent.server.local_elastic_agent",
        name="_logs_specs",
        within="LocalElasticAgent.__init__",
        used_for="keeping the logs of earlier rounds; without it, and what follows, PyTorch empties their folder",
    ),
    Private(module=_PROCESSES, name="_run_log_dir", within="DefaultLogsSpecs.__init__", used_for="the same"),
    Private(module=_AGENT, name="_remaining_restarts", within="SimpleElasticAgent.__init__", used_for="the same"),
    Private(
        module="torch.distributed.rendezvous",
        name="_create_c10d_store",
        used_for="telling whether workers put their restart count before all keys (2.4), which may differ between "
        "nodes; without it they are taken not to",
    ),
    Private(
        module=_PROCESSES,
        name="PContext.close",
        used_for="telling workers that an agent stops from those that fail: a function of this name in this module",
    ),
    Private(
        module="torch.distributed",
        name="PrefixStore.underlying_store",
        used_for="queues and list_keys through PrefixStore over a TorchStore, and knowing gloo's sockets where a group "
        "is made anew; without it they raise, and a collective that hangs ends by its timeout",
    ),
    Private(
        module="torch.distributed",
        name="QueueEmptyError",
        since=(2, 8),
        used_for="an empty queue; without it DistStoreError is raised",
    ),
    Private(
        module=_C10D,
        name="_set_pg_timeout",
        used_for="a group that connects quickly, and whose collectives may take long; else, and before 2.9, one "
        "timeout is for both; later releases document it, as set_timeout",
    ),
    Private(
        module=_C10D,
        name="_world.group_count",
        used_for="counting groups anew where the making of one has failed; see count_groups_anew",
    ),
    Private(
        module=_C10D,
        name="_world.pg_map",
        used_for="letting go of groups in another thread; without it the next round waits 15 ms for their threads",
    ),
    Private(
        module=_C10D,
        name="_abort_process_group",
        since=(2, 6),
        used_for="ending nccl's collectives; without it they end by their timeout",
    ),
    Private(
        module="torch",
        name="_foreach_copy_",
        used_for="copying a model's buffers at each step; without it that takes four times as long",
    ),
    Private(
        module="torch.distributed",
        name="_get_reconfigure_handle",
        since=(2, 14),
        used_for="rendezvous_reconfigure, which cannot be had without it",
    ),
)
"""Every private name that these rooms use."""

LAUNCHER: Final = "torch.distributed.run"
"""The module of `torchrun`, which `accelerate launch` calls, too."""


_NO_CODE: Final = compile("", "", "exec")


class _Never(BaseException):
    """Nobody raises it: it stands for a class that this release does not have."""


SignalException: Final[Any] = getattr(multiprocessing, "SignalException", _Never)

QueueEmptyError: Final = getattr(dist, "QueueEmptyError", dist.DistStoreError)

abort_process_group: Final[Any] = getattr(dist.distributed_c10d, "_abort_process_group", None)
"""Aborts all groups of a backend that can be aborted (nccl)."""

world_of_groups: Final[Any] = getattr(dist.distributed_c10d, "_world", None)
"""All that PyTorch knows of this process's groups."""

set_group_timeout: Final[Any] = (
    getattr(dist, "set_timeout", getattr(dist.distributed_c10d, "_set_pg_timeout", None)) if RELEASE >= (2, 9) else None
)
"""Changes the timeout of a group's collectives, once it has been made. Before 2.9 gloo does not heed it."""

reconfigure_handle: Final[Any] = getattr(dist, "_get_reconfigure_handle", None)
"""What other members of a group need to reach this one when it is given other members; None before 2.14."""

KEYS_BY_RESTARTS: Final[bool] = (
    "TORCHELASTIC_RESTART_COUNT"
    in getattr(
        getattr(sys.modules.get("torch.distributed.rendezvous"), "_create_c10d_store", None), "__code__", _NO_CODE
    ).co_consts
)
"""Whether workers that use the agent's store put their restart count before all keys, as in 2.4."""

LISTENING_STORE: Final[dict[str, Any]] = {} if RELEASE >= (2, 5) else {"use_libuv": False}
"""What else a TCPStore is to be given together with a socket that listens: 2.4 takes one in its older server only."""


LETS_GO_AFTER: Final = 0.05
"""In seconds: how long others may take to let go of a group, and its threads of a collective that has ended.

The error of a collective refers to its group, and leaves the caller's thread a moment after the group is destroyed:
the thread that lets go last waits for the group's. Before 2.8 it keeps the interpreter's lock meanwhile (PyTorch's pull
request 154976). A thread that lets go of a tensor needs that lock, and so neither ever ends: with TCPStore, too.
"""


def copy_all(into: list[torch.Tensor], of: list[torch.Tensor]) -> None:
    """Copy each tensor into another one of its shape."""
    with torch.no_grad():
        if into and hasattr(torch, "_foreach_copy_"):
            torch._foreach_copy_(into, of)
            return
        for one, other in zip(into, of, strict=True):
            one.copy_(other)


def destroy_process_groups() -> None:
    """`torch.distributed.destroy_process_group`, also right after a collective, and without waiting for its threads.

    What is slow is the end of the groups' threads, some 15 ms: a thread of its own waits for that. The interpreter
    waits for this thread before it ends.
    """
    groups = list(world_of_groups.pg_map) if world_of_groups is not None else []
    dist.destroy_process_group()
    threading.Thread(target=_let_go, args=(groups,), name="rdzv group end", daemon=False).start()


def _let_go(groups: list[Any]) -> None:
    """Let what may be the last reference to each group go; nothing tells when its threads have."""
    time.sleep(LETS_GO_AFTER)
    groups.clear()


def same_device(work: Callable[..., T]) -> Callable[..., T]:
    """The same work, for another thread: on the GPU that is this thread's, where this process uses any."""
    if not torch.cuda.is_initialized():
        return work
    device = torch.cuda.current_device()

    def on_it(*arguments: Any) -> T:
        with torch.cuda.device(device):
            return work(*arguments)

    return on_it


def count_groups_anew() -> None:
    """Let the next default group of this process be called as everybody's first.

    PyTorch names a default group by how many groups this process has begun to make since it last destroyed one, and the
    name is in all of its keys. Where a making fails there is nothing to destroy, and the next group of this process
    would wait for keys that those whose making has not failed never write, and they for its.
    """
    if world_of_groups is not None and not dist.is_initialized():
        world_of_groups.group_count = 0


def runs_under_torchrun() -> bool:
    """Whether PyTorch's launcher is above us on the stack: then nobody can take an error, but for the shell."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        spec = frame.f_globals.get("__spec__")  # its name is the module's under `python -m`, too
        if frame.f_code.co_name == "run" and getattr(spec, "name", None) == LAUNCHER:
            return True
        frame = frame.f_back
    return False


@dataclass(frozen=True, slots=True)
class Agent:
    """What PyTorch's agent above us on the stack is about.

    Attributes:
        problem: What has befallen one of them, for which it meets the others again; empty if nothing has.
        group: PyTorch's object for all of them.
        itself: PyTorch's object for the agent.
    """

    problem: str
    group: Any = None
    itself: Any = None

    @property
    def is_done(self) -> bool:
        """Whether they have succeeded: it meets nobody again, and only waits for the other agents to end."""
        return bool(getattr(self.group, "state", "") == "SUCCEEDED")  # of `WorkerState`, which are strings, too

    def next_workers(self) -> Callable[[], Mapping[int, int]]:
        """What gives the process ids of the workers that it starts next, by local rank, once all have been started."""
        before = self._pids()  # each round has new processes

        def pids() -> Mapping[int, int]:
            now = {rank: pid for rank, pid in self._pids().items() if pid is not None and before.get(rank) != pid}
            return now if len(now) == len(self._pids()) else {}

        return pids

    def raised_by(self, local_rank: int) -> str:
        """What a worker has written to its error file."""
        files = getattr(getattr(self.itself, "_pcontext", None), "error_files", {})
        return raised_in(files[local_rank]) if local_rank in files else ""

    def keep_logs(self, round: int) -> None:
        """Rename the folder of a round's logs if PyTorch is about to empty it, since it counts no restart.

        Raises:
            OSError: It could not be renamed, or this release keeps its logs in another way.
        """
        specs = getattr(self.itself, "_logs_specs", None)
        remaining = getattr(self.itself, "_remaining_restarts", None)
        if isinstance(specs, DefaultLogsSpecs) and remaining is not None:
            if not hasattr(specs, "_run_log_dir"):
                raise OSError("this release of PyTorch does not say where they are")
            run = getattr(specs, "_run_log_dir", None)  # none before the first workers, and none in /dev/null
            folder = Path(run or os.devnull, f"attempt_{self.group.spec.max_restarts - remaining}")
            if folder.exists():
                folder.rename(f"{folder}.round_{round}")

    def _pids(self) -> dict[int, int | None]:
        with contextlib.suppress(AttributeError):
            return {worker.local_rank: worker.id for worker in self.group.workers}
        return {}


def agent_above() -> Agent | None:
    """The agent that has called us; None if none has, or if its code is none that we know."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "_invoke_run" and frame.f_globals.get("__name__") == _AGENT:
            problem = ""
            with contextlib.suppress(AttributeError, KeyError, ValueError):  # as before its first workers have ended
                failures = frame.f_locals["run_result"].failures.values()
                problem = in_words(min(failures, key=lambda failure: failure.timestamp))
            agent = frame.f_locals.get("self")
            return Agent(problem, getattr(agent, "_worker_group", None), agent)
        frame = frame.f_back
    return None


def stops_workers(thread: int) -> bool:
    """Whether an agent, in the thread of this number, is about to stop its workers: then they end because of that."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if frame.f_code.co_name == "close" and frame.f_globals.get("__name__") == _PROCESSES:
            return True
        frame = frame.f_back
    return False


def signal_of(error: BaseException | None) -> str | None:
    """The name of the signal that has ended an agent, if this is why; SIGTERM, where PyTorch does not say which.

    PyTorch handles signals from its first workers on; before that, Ctrl-C is Python's.
    """
    if isinstance(error, KeyboardInterrupt):
        return signal.SIGINT.name
    if not isinstance(error, SignalException):
        return None
    return signal.Signals(getattr(error, "sigval", signal.SIGTERM)).name


@dataclass(frozen=True, slots=True)
class AgentEnd:
    """How an agent ends that shuts its handler down; see `end_of_agent`.

    Attributes:
        signal: The name of the signal that ends it; None if none does.
        why: In words, for the others.
        has_failed: It ends by an error.
        has_no_result: It has stumbled over a result that is not there, as after the good end of a spare.
    """

    signal: str | None
    why: str
    has_failed: bool
    has_no_result: bool


def end_of_agent() -> AgentEnd:
    """How the agent ends that is shutting its handler down: it tells that to nobody, but shuts down on its way out.

    So what it raises just then is read; without that, it has ended well.
    """
    error, why = sys.exception(), "an agent has ended"
    if isinstance(error, ChildFailedError):
        first = getattr(error, "get_first_failure", None)
        how = str(error).strip().splitlines()[0] if first is None else in_words(first()[1])
        why = f"an agent has failed: {how}"
    has_failed = error is not None and not (isinstance(error, SystemExit) and not error.code)
    return AgentEnd(signal_of(error), why, has_failed, isinstance(error, AttributeError))


def in_words(failure: Any) -> str:
    """What has befallen a worker, of PyTorch's `ProcessFailure`."""
    return how_ended(failure.local_rank, failure.exitcode, raised_in(failure.error_file))


def how_ended(local_rank: int, status: int, raised: str) -> str:
    """How a worker has ended, by its exit status, which is negative for a signal, and by what it has raised."""
    how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
    return f"worker {local_rank} {how}{f': {raised}' * bool(raised)}"


def underlying_store(store: Any) -> Any:
    """The store at the bottom of any number of `PrefixStore`s; None where PyTorch does not tell."""
    while isinstance(store, dist.PrefixStore):
        store = getattr(store, "underlying_store", None)
    return store


@functools.cache
def teach_prefix_store(kind: type, prefix_of: Callable[[Any], str]) -> None:
    """Let `PrefixStore` have from Python what C++ does not ask the Python half of a store for: queues, and `list_keys`.

    Over any other store its methods do what they did before. Without this they raise `NotImplementedError` over ours.

    Args:
        kind: The Python store that has them.
        prefix_of: Tells what the keys of a `PrefixStore` begin with there.
    """
    for name in ("queue_push", "queue_pop", "queue_len", "list_keys"):
        original = getattr(dist.PrefixStore, name, None)
        if original is not None:
            setattr(dist.PrefixStore, name, _asked_below(original, kind, prefix_of))


def _asked_below(original: Callable[..., Any], kind: type, prefix_of: Callable[[Any], str]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(self: Any, *arguments: Any, **keywords: Any) -> Any:
        bottom = underlying_store(self)
        if not isinstance(bottom, kind):
            return original(self, *arguments, **keywords)
        prefix, below = prefix_of(self), getattr(bottom, original.__name__)
        if not arguments:  # all keys are asked for
            return [key.removeprefix(prefix) for key in below() if key.startswith(prefix)]
        key, *rest = arguments
        return below(prefix + key, *rest, **keywords)

    return call

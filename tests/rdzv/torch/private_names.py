"""The names of PyTorch that `rdzv.torch` uses and that PyTorch does not document."""

from dataclasses import dataclass
from typing import Final

OLDEST: Final = (2, 4)  # the oldest release with `RendezvousInfo` and the store shared with the agent


@dataclass(frozen=True, slots=True, kw_only=True)
class Private:
    """A name that PyTorch does not document."""

    module: str
    name: str  # with a dot, an attribute of a class
    within: str = ""  # the function whose code contains it, for a variable or an attribute of an instance
    since: tuple[int, int] = OLDEST  # the first release with it, from `OLDEST` on
    used_for: str  # and the effect without it


ELASTIC: Final = "torch.distributed.elastic"
AGENT: Final = f"{ELASTIC}.agent.server.api"
PROCESSES: Final = f"{ELASTIC}.multiprocessing.api"
C10D: Final = "torch.distributed.distributed_c10d"

PRIVATE: Final = (
    Private(
        module=f"{ELASTIC}.rendezvous",
        name="rendezvous_handler_registry",
        used_for="python -m rdzv.torchrun, which registers our handler by hand",
    ),
    Private(
        module=f"{ELASTIC}.multiprocessing",
        name="SignalException",
        used_for="telling an agent that was told to end from one whose workers are done; without it, such an agent "
        "closes the run",
    ),
    Private(
        module=f"{ELASTIC}.multiprocessing",
        name="sigval",
        within="SignalException.__init__",
        used_for="which signal it was; without it, SIGTERM is said",
    ),
    Private(
        module=f"{PROCESSES.rpartition('.')[0]}.errors",
        name="ChildFailedError.get_first_failure",
        used_for="which worker's failure an agent closes the run for; without it the reason is the error's first line",
    ),
    Private(
        module="torch.distributed.run",
        name="run",
        used_for="telling torchrun from a caller of elastic_launch: a function of this name in this module",
    ),
    Private(
        module=AGENT,
        name="run_result",
        within="SimpleElasticAgent._invoke_run",
        used_for="why an agent meets the others again: a variable; without it, and what follows, others hear that a "
        "worker has failed when it does, and not how",
    ),
    Private(module=AGENT, name="failures", within="RunResult.__init__", used_for="the same"),
    Private(
        module=AGENT,
        name="_worker_group",
        within="SimpleElasticAgent.__init__",
        used_for="telling at once how a worker has failed: which processes an agent has started; without it, and what "
        "follows, that is told when the agent meets the others again",
    ),
    Private(module=AGENT, name="workers", within="WorkerGroup.__init__", used_for="the same"),
    Private(module=AGENT, name="id", within="Worker.__init__", used_for="the same"),
    Private(
        module=f"{ELASTIC}.agent.server.local_elastic_agent",
        name="_pcontext",
        within="LocalElasticAgent.__init__",
        used_for="telling what a worker has raised when it fails; without it, and what follows, that is told later",
    ),
    Private(module=PROCESSES, name="error_files", within="PContext.__init__", used_for="the same"),
    Private(
        module=f"{ELASTIC}.agent.server.local_elastic_agent",
        name="_logs_specs",
        within="LocalElasticAgent.__init__",
        used_for="keeping the logs of earlier rounds; without it, and what follows, PyTorch empties their folder",
    ),
    Private(module=PROCESSES, name="_run_log_dir", within="DefaultLogsSpecs.__init__", used_for="the same"),
    Private(module=AGENT, name="_remaining_restarts", within="SimpleElasticAgent.__init__", used_for="the same"),
    Private(
        module="torch.distributed.rendezvous",
        name="_create_c10d_store",
        used_for="telling whether workers put their restart count before all keys (2.4), which may differ between "
        "nodes; without it they are taken not to",
    ),
    Private(
        module=PROCESSES,
        name="_terminate_process_handler",
        used_for="ignoring the second signal of a pair while workers run; without it, PyTorch signals them twice",
    ),
    Private(
        module=PROCESSES,
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
        module=C10D,
        name="_set_pg_timeout",
        used_for="a group that connects quickly, and whose collectives may take long; else, and before 2.9, one "
        "timeout is for both; later releases document it, as set_timeout",
    ),
    Private(
        module=C10D,
        name="_world.group_count",
        used_for="counting groups anew where the making of one has failed; see reset_group_count",
    ),
    Private(
        module=C10D,
        name="_world.pg_map",
        used_for="letting go of groups in another thread; without it the next round waits 15 ms for their threads",
    ),
    Private(
        module=C10D,
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
"""All private names that these modules use."""

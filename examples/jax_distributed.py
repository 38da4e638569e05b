"""JAX under `rdzv run`: two processes on the CPU form one `jax.distributed` cluster, and sum over it.

    pip install jax
    python examples/jax_distributed.py

Without a rank, this file starts two nodes, each as a user would:

    rdzv run 'tcp://127.0.0.1:29400/jax?min_nodes=2' -- python examples/jax_distributed.py

JAX needs the address of process 0, the number of processes, and the index of this one. `rdzv run` sets them in the
environment. When the nodes change, the processes are restarted with new values.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import socket
import sys


def train() -> None:
    """Run under `rdzv run`."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax
    from jax.experimental import multihost_utils

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # JAX's preemption service would take SIGTERM, and `rdzv run` would wait for --grace at each change.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        coordinator_address=f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}",
        num_processes=int(os.environ["WORLD_SIZE"]),
        process_id=int(os.environ["RANK"]),
    )
    mine = jax.numpy.array([float(jax.process_index() + 1)])
    total = float(multihost_utils.process_allgather(mine).sum())
    print(f"process {jax.process_index()} of {jax.process_count()}: the sum is {total}", flush=True)
    jax.distributed.shutdown()


async def main() -> None:
    """Start two nodes on this machine."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"tcp://127.0.0.1:{port}/jax?min_nodes=2"
    command = (sys.executable, "-m", "rdzv", "run", url, "--", sys.executable, __file__)
    nodes = [await asyncio.create_subprocess_exec(*command) for _ in range(2)]
    try:
        assert [await node.wait() for node in nodes] == [0, 0]
    finally:  # also after an interrupt
        for node in nodes:
            if node.returncode is None:
                node.terminate()
    print("verified: two processes were one cluster", flush=True)


if __name__ == "__main__":
    if importlib.util.find_spec("jax") is None:
        sys.exit("skipped: jax is not installed; pip install jax")
    if "RANK" in os.environ:
        train()
    else:
        asyncio.run(main())

"""A script without a line of async: processes meet, learn their ranks, and share values.

By itself it starts three processes and a store for them to meet at. With a URL it is one of them; the process on the
URL's host starts the store:

    python examples/blocking_script.py
    python examples/blocking_script.py 'tcp://head:29400/job-7?min_nodes=3'
"""

from __future__ import annotations

import os
import re
import subprocess
import sys

import rdzv
import store

NODES = 3


def main(url: str) -> None:
    """One process of the job."""
    with rdzv.sync.connect(url, payload={"pid": os.getpid()}) as handler:
        info = handler.next_rendezvous()
        shared, rank, world_size = info  # all that most programs need
        host, port = info.bootstrap_address  # for torch.distributed, jax.distributed, or sockets of your own

        if rank == 0:
            shared.set("message", f"greetings from {host}")
        message = shared.get("message").decode()  # waits until it is there

        shared.add("done", 1)
        shared.barrier("everyone has added", world_size)
        done = int(shared.get("done"))

        pids = [member.payload["pid"] for member in info.participants()]
        assert pids[rank] == os.getpid()
        print(f"rank {rank} of {world_size}, {message!r}, {done} are done, meet at {host}:{port}", flush=True)


def start_all() -> None:
    """Start the processes, and verify that they agree."""
    with store.sync.serve() as server:
        url = f"{server.url}/example?min_nodes={NODES}"
        processes = [
            subprocess.Popen([sys.executable, __file__, url], stdout=subprocess.PIPE, text=True) for _ in range(NODES)
        ]
        lines = sorted(process.communicate(timeout=30)[0].strip() for process in processes)
    print("\n".join(lines))
    assert [process.returncode for process in processes] == [0] * NODES
    assert [line.split()[1] for line in lines] == ["0", "1", "2"], "each has a rank of its own"
    assert len({re.sub(r"^rank \d+", "", line) for line in lines}) == 1, "about all else they agree"
    print(f"verified: {NODES} processes have ranks of their own and agree about everything else")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        start_all()

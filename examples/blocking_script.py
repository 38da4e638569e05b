"""A blocking script: processes meet, learn their ranks, share values, and continue when one dies.

Without arguments it starts three processes and a store, and kills one. With a URL it is one of them; the process on the
URL's host starts the store:

    python examples/blocking_script.py
    python examples/blocking_script.py 'tcp://head:29400/job-7?min_nodes=3'
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys

import rdzv
import store

NODES = 3


def main(url: str, *, dies: bool = False) -> None:
    """Take part as one process of the job."""
    for round in rdzv.sync.rounds(url, payload={"pid": os.getpid()}):
        with round:  # waits for a member end as soon as it is lost, and the next round follows
            work(round, dies=dies)
        if round.ending is not None and round.ending.node_ids:
            print(f"meeting again: {round.ending.reason}", flush=True)


def work(round: rdzv.sync.Round, *, dies: bool) -> None:
    """Do the common work of one round."""
    shared, rank, world_size = round.store, round.rank, round.world_size  # enough for most programs
    host, port = round.bootstrap_address  # for torch.distributed, jax.distributed, or your own sockets

    if rank == 0:
        shared.set("message", f"greetings from {host}")
    message = shared.get("message").decode()  # waits for the key
    pids = [member.payload["pid"] for member in round.participants()]
    assert pids[rank] == os.getpid()
    if dies:
        os.kill(os.getpid(), signal.SIGKILL)

    shared.add("done", 1)
    shared.barrier("everyone has added", world_size)
    done = int(shared.get("done"))
    print(f"rank {rank} of {world_size}, {message!r}, {done} are done, meet at {host}:{port}", flush=True)


def start_all() -> None:
    """Start the processes, one of which dies, and verify that the others agree."""
    with store.sync.serve() as server:
        url = f"{server.url}/example?min_nodes={NODES - 1}&max_nodes={NODES}"
        processes = [
            subprocess.Popen(
                [sys.executable, __file__, url, *(["dies"] if node == 0 else [])], stdout=subprocess.PIPE, text=True
            )
            for node in range(NODES)
        ]
        told = [process.communicate(timeout=30)[0].strip().splitlines() for process in processes]
    print("\n".join(line for lines in told for line in lines))
    assert [process.returncode for process in processes] == [-signal.SIGKILL, 0, 0]
    assert all(lines[0].startswith("meeting again: lost: ") for lines in told[1:]), "nobody waited for the dead"
    results = sorted(lines[1] for lines in told[1:])
    assert [line.split()[1] for line in results] == ["0", "1"], "each has a rank of its own"
    assert len({re.sub(r"^rank \d+", "", line) for line in results}) == 1, "about all else they agree"
    print(f"verified: {NODES} processes met, one died, and {NODES - 1} met again and agree about everything")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1], dies="dies" in sys.argv[2:])
    else:
        start_all()

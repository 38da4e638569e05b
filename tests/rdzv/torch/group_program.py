"""A program for `test_group`: forks four ranks that make, lose and remake their process group over one store.

python -m tests.rdzv.torch.group_program URL
"""

import os
import socket
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import rdzv.torch
from rdzv.torch.group import RoundGroup

SIZE = 4
LONG = timedelta(seconds=120)  # no wait here ends by its timeout
ROUNDS = int(os.environ.get("RDZV_GROUPS", "8"))


def say(line: str) -> None:
    """Write a line with a single write: four processes share one pipe."""
    os.write(1, f"{line}\n".encode())


def group_of(store: rdzv.torch.TorchStore, name: str, rank: int, size: int) -> RoundGroup:
    return RoundGroup(dist.PrefixStore(name, store), rank=rank, world_size=size, backend="gloo", timeout=LONG)


def total_of_all() -> float:
    total = torch.ones(1000)
    dist.all_reduce(total)
    return float(total[0])


def aborted_while_blocked(group: RoundGroup, within: dist.ProcessGroup) -> float:
    """Wait in a collective that one rank never joins, and abort it from another thread. Return when it ended."""
    aborting = threading.Timer(0.3, group.abort)
    aborting.start()
    try:
        dist.all_reduce(torch.ones(1000), group=within)
    except RuntimeError:
        aborting.join()
        return time.monotonic()
    raise AssertionError("one rank never came")


def making_fails(store: rdzv.torch.TorchStore) -> None:
    """Fail to make a group whose other member never begins, as if it had been killed."""
    brief = store.clone()
    brief.set_timeout(timedelta(seconds=0.05))
    try:
        dist.init_process_group(
            "gloo", store=dist.PrefixStore("alone", brief), rank=0, world_size=2, timeout=timedelta(seconds=0.05)
        )
    except RuntimeError:
        return
    raise AssertionError("nobody else was there")


def held() -> tuple[int, int]:
    """Return the numbers of open descriptors and of threads of this process."""
    return len(list(Path("/proc/self/fd").iterdir())), len(list(Path("/proc/self/task").iterdir()))


class Foreigner:
    """Another library of the process, which opens connections all the time, also while a group is made."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._connect)
        self._thread.start()

    def _connect(self) -> None:
        while not self._over.wait(0.002) and len(self._pairs) < 200:
            near = socket.create_connection(self._listener.getsockname())
            far, _ = self._listener.accept()
            near.setblocking(True)
            self._pairs.append((near, far))

    def check(self) -> None:
        """Verify that its connections work and that its sockets still block."""
        self._over.set()
        self._thread.join()
        assert self._pairs
        for near, far in self._pairs:
            assert os.get_blocking(near.fileno())
            near.sendall(b"1")
            assert far.recv(1) == b"1"
            near.close()
            far.close()
        self._listener.close()


def play(url: str, rank: int) -> None:
    """Run one rank."""
    socket.setdefaulttimeout(30)  # from now on, making a Python socket from a descriptor changes the descriptor's flags
    foreigner = Foreigner() if rank < SIZE - 1 else None
    store = rdzv.torch.TorchStore(url, timedelta(seconds=30))
    group = group_of(store, "first", rank, SIZE)
    group.make()
    if rank == 1:
        time.sleep(0.5)  # longer than each attempt to connect
    assert total_of_all() == SIZE
    everybody = dist.new_group()  # like a library that knows nothing of the round
    if rank == SIZE - 1:
        sys.stdin.read()  # it stays alive, but takes part in nothing any more
        os._exit(0)
    began = time.monotonic()
    ended = aborted_while_blocked(group, everybody)
    if foreigner is not None:
        foreigner.check()
    group.close()
    if rank == 0:
        making_fails(store)
    group = group_of(store, "second", rank, SIZE - 1)
    group.make()
    assert total_of_all() == SIZE - 1
    say(f"rank {rank}: {ended - began - 0.3:.3f} s from abort to error")
    group.close()
    before: tuple[int, int] | None = None
    for number in range(ROUNDS):
        group = group_of(store, f"round{number}", rank, SIZE - 1)
        group.make()
        half = dist.new_group([0, 1])
        if rank < 2:
            dist.all_reduce(torch.ones(1), group=half)
        dist.barrier()
        group.abort()
        group.close()
        before = held() if number == 2 else before
    assert before is not None
    deadline = time.monotonic() + 20
    while held() > before and time.monotonic() < deadline:
        time.sleep(0.01)  # PyTorch's threads end after the group
    assert held() <= before, (held(), before)
    say(f"rank {rank}: nothing is left of {ROUNDS} groups")


def main() -> None:
    """Fork the ranks. Exit with an error if one of them does."""
    url = sys.argv[1]
    kept_open, stay = os.pipe()
    children = []
    for rank in range(SIZE):
        pid = os.fork()
        if pid == 0:
            os.close(stay)
            os.dup2(kept_open, 0)
            try:
                play(url, rank)
            except BaseException as error:  # noqa: BLE001  a forked child must not continue as its parent
                say(f"rank {rank}: {error!r}")
                os._exit(1)
            os._exit(0)
        children.append(pid)
    statuses = [os.waitpid(pid, 0)[1] for pid in children[:-1]]
    os.close(stay)  # now the last rank may end, too
    statuses.append(os.waitpid(children[-1], 0)[1])
    sys.exit(1 if any(statuses) else 0)


if __name__ == "__main__":
    main()

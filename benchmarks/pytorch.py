"""PyTorch's own rendezvous, over `c10d` and over `etcd-v2`, with any number of nodes: the peers of ours.

Its nodes share one record, which each reads and rewrites until it is in, once a second. A node is a thread with a
connection of its own. Bytes are those of that record per read and write, without the store's protocol. `etcd-v2` needs
the package `python-etcd`, and an etcd with version 2 of its interface (3.4 or 3.5 with `--enable-v2`).
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import pickle
import random
import shutil
import threading
import time
import traceback
from typing import TYPE_CHECKING, Any

from benchmarks import support

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection

KINDS = ("c10d", "etcd-v2")
CAS_BACKOFF = 1.0  # seconds: the largest random wait of a node after a lost write; PyTorch's default is 0
LOOKS = 1.0  # seconds between an agent's polls for waiting nodes
SETTLE = (0.5, 1.5)  # seconds between the last two arrivals; at random, since nodes poll each second

Result = tuple[int, int, float]  # rank, world size, when


def why_not(kind: str) -> str:
    """Return the reason why this peer cannot take part, or ""."""
    if not support.HAS_TORCH:
        return "PyTorch is not installed"
    if kind == "etcd-v2":
        if importlib.util.find_spec("etcd") is None:
            return "the package python-etcd is not installed"
        if shutil.which("etcd") is None:
            return "etcd is not installed"
    return ""


class Counted:
    """A backend of the rendezvous that counts the bytes of the record."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.bytes = 0

    @property
    def name(self) -> str:
        return str(self._backend.name)

    def get_state(self) -> Any:
        """Read the record."""
        found = self._backend.get_state()
        self.bytes += _encoded(found)
        return found

    def set_state(self, state: bytes, token: Any = None) -> Any:
        """Write the record if it is unchanged since it was read."""
        self.bytes += _in_base64(len(state)) + (len(token) if isinstance(token, bytes) else 0)
        found = self._backend.set_state(state, token)
        self.bytes += _encoded(found)
        return found


def _encoded(found: Any) -> int:
    return 0 if found is None else _in_base64(len(found[0]))


def _in_base64(size: int) -> int:
    return (size + 2) // 3 * 4


def backend_of(kind: str, address: Any, run_id: str) -> tuple[Any, Any]:
    """Return a backend and its store."""
    if kind == "c10d":
        from torch.distributed import TCPStore
        from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend

        tcp_store = TCPStore("127.0.0.1", address, is_master=False, wait_for_workers=False)
        return C10dRendezvousBackend(tcp_store, run_id), tcp_store
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.etcd_rendezvous_backend import create_backend

    made = create_backend(
        RendezvousParameters(backend=kind, endpoint=f"127.0.0.1:{address}", run_id=run_id, min_nodes=1, max_nodes=1)
    )
    return made[0], made[1]


def nodes(pipe: Connection, kind: str, address: Any, run_id: str, count: int, size: int) -> None:
    """Run some nodes: connect; at "arrive" let them call and report; at "watch" poll as agents do."""
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

    from_backend: Any = DynamicRendezvousHandler.from_backend
    if "cas_backoff_max_seconds" in inspect.signature(from_backend).parameters:  # from 2.14 on
        from_backend = functools.partial(from_backend, cas_backoff_max_seconds=CAS_BACKOFF)
    results: list[Result] = []
    handlers = []
    backends = []
    for _ in range(count):
        backend, shared = backend_of(kind, address, run_id)
        backends.append(Counted(backend))
        handlers.append(from_backend(run_id, shared, backends[-1], size, size, "127.0.0.1"))

    def node(handler: Any) -> None:
        try:
            info = handler.next_rendezvous()
            results.append((info.rank, info.world_size, time.monotonic()))
        except Exception:  # noqa: BLE001  any error makes the run void
            traceback.print_exc()

    def agent(handler: Any) -> None:
        while True:
            with contextlib.suppress(Exception):
                handler.num_nodes_waiting()
            time.sleep(LOOKS)

    def used() -> int:
        return sum(backend.bytes for backend in backends)

    threads = [threading.Thread(target=node, args=(handler,), daemon=True) for handler in handlers]
    pipe.send("connected")
    while True:
        match pipe.recv():
            case "arrive":
                began = time.monotonic()
                for thread in threads:
                    thread.start()
                support.as_in_a_process_of_its_own()
                pipe.send("parked")
                for thread in threads:
                    thread.join()
                pipe.send((began, results, used()))
            case "watch":
                for handler in handlers:
                    threading.Thread(target=agent, args=(handler,), daemon=True).start()
            case "bytes":
                pipe.send(used())


@contextlib.contextmanager
def serving(kind: str) -> Iterator[tuple[Any, int]]:
    """Serve the nodes' store in a process of its own; yield its address and pid."""
    if kind == "c10d":
        with support.workers((support.torch_server,)) as (server,):
            assert server.process.pid is not None
            yield server.hear(timeout=60), server.process.pid
        return
    from tests.support.etcd import serve_etcd

    with serve_etcd(options=["--enable-v2"]) as etcd:
        yield etcd.members[0].client_port, etcd.members[0].pid


class Round:
    """A rendezvous of some nodes, which holds until the block ends.

    Attributes:
        seconds: From the last node's call, or from the word to all, until each has its rank.
        bytes: Per node, of the record.
        server_cpu: Seconds per node.
        server_pid: The process of the store.
    """

    def __init__(self, kind: str, size: int, processes: int, patience: float, *, parked: bool) -> None:
        self.kind, self.size, self.patience = kind, size, patience
        self._run_id = f"round-{random.getrandbits(32):x}"
        self._stack = contextlib.ExitStack()
        address, self.server_pid = self._stack.enter_context(serving(kind))
        shares = [len(share) for share in support.shares(size - 1, processes)]
        calls = [(nodes, kind, address, self._run_id, count, size) for count in [*shares, 1]]
        try:
            self._backend, _ = backend_of(kind, address, self._run_id)
            self.workers = self._stack.enter_context(support.workers(*calls))
            self._meet(parked=parked)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Round:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all processes."""
        self._stack.close()

    def _meet(self, *, parked: bool) -> None:
        for worker in self.workers:
            assert worker.hear(self.patience) == "connected"
        used, (*others, last) = support.cpu_seconds(self.server_pid), self.workers
        began = time.monotonic()
        for worker in others:
            worker.pipe.send("arrive")
        if parked:
            for worker in others:
                assert worker.hear(self.patience) == "parked"
            self._until(lambda: self.members() >= self.size - 1)
            time.sleep(random.uniform(*SETTLE))
        last.pipe.send("arrive")
        for worker in [last] if parked else self.workers:
            assert worker.hear(self.patience) == "parked"
        answers = support.hear_all(self.workers, self.patience)
        results: list[Result] = [result for _, some, _ in answers for result in some]
        assert sorted(rank for rank, _, _ in results) == list(range(self.size)), "every rank once"
        self.seconds = max(at for *_, at in results) - (float(answers[-1][0]) if parked else began)
        self.bytes = sum(sent for *_, sent in answers) / self.size
        self.server_cpu = (support.cpu_seconds(self.server_pid) - used) / self.size

    def _until(self, condition: Any) -> None:
        deadline = time.monotonic() + self.patience
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.kind}, {self.size} nodes: not within {self.patience:g} s")
            time.sleep(0.2)

    def members(self) -> int:
        """Return the number of nodes in the record."""
        found = self._backend.get_state()
        return 0 if found is None else len(pickle.loads(found[0]).participants)

    def watch(self) -> None:
        """Have all poll once a second for waiting nodes, as agents do."""
        for worker in self.workers:
            worker.pipe.send("watch")

    def count_bytes(self) -> int:
        """Return the bytes that all nodes have read and written."""
        return sum(int(worker.ask("bytes", self.patience)) for worker in self.workers)

    def lose_one(self) -> float:
        """Kill the last node; return the seconds until the record is without it."""
        self.workers[-1].process.kill()
        killed = time.monotonic()
        self._until(lambda: self.members() < self.size)
        return time.monotonic() - killed

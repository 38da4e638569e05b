"""One blocking call from Python: our blocking client and shared store, TCPStore, redis, a bare socket echo.

    python -m benchmarks.calls [--one-core]

Every server has a process of its own, and every client one connection. The contenders take turns, a batch of calls
each, so that busy moments hit all of them; a figure is the median of a contender's batches, in microseconds per call.
The echo is the cost of any blocking round trip in Python. On an idle machine most of that is waking up. `--one-core`
runs all on one core, without wake-ups of another, and gives stable figures. TCPStore's `set` is not comparable: it
returns before the server has the value. Its `get` first waits for the key, as ours does, but by a further round trip.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import socket
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import rdzv
import store
from benchmarks import load, support
from benchmarks.support import ratio, us

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection

    Operations = dict[str, Callable[[], object]]

VALUE = b"x" * 100
OURS = "rdzv.torch.TorchStore"
TORCH = "torch TCPStore"
ECHO = "socket echo"


def echo_server(pipe: Connection) -> None:
    """Echo the bytes of one connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pipe.send(listener.getsockname()[1])
        peer, _ = listener.accept()
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while data := peer.recv(65536):
            peer.sendall(data)


def of_client(client: store.sync.Client) -> Operations:
    """Return the operations of our store's client."""
    client.put("key", VALUE)
    client.put("swapped", b"0")
    turns = itertools.cycle([(b"0", b"1"), (b"1", b"0")])

    def compare_and_set() -> None:
        old, new = next(turns)
        assert client.compare_and_set("swapped", new, expected_value=old).succeeded

    return {
        "get": lambda: client.get("key"),
        "set": lambda: client.put("key", VALUE),
        "add": lambda: client.add("counter", 1),
        "compare_set": compare_and_set,
    }


def of_shared_store(shared: rdzv.sync.SharedStore) -> Operations:
    """Return those of a round's shared store: every call is fenced."""
    shared.set("key", VALUE)
    shared.set("swapped", b"0")
    turns = itertools.cycle([(b"0", b"1"), (b"1", b"0")])
    return {
        "get": lambda: shared.get("key"),
        "set": lambda: shared.set("key", VALUE),
        "add": lambda: shared.add("counter", 1),
        "compare_set": lambda: shared.compare_set("swapped", *next(turns)),
    }


def of_torch(torch_store: Any) -> Operations:
    """Return those of a `torch.distributed.Store`, PyTorch's or ours."""
    torch_store.set("key", VALUE.decode())
    torch_store.set("swapped", "0")
    turns = itertools.cycle([("0", "1"), ("1", "0")])
    return {
        "get": lambda: torch_store.get("key"),
        "set": lambda: torch_store.set("key", VALUE.decode()),
        "add": lambda: torch_store.add("counter", 1),
        "compare_set": lambda: torch_store.compare_set("swapped", *next(turns)),
    }


def torch_stores(url: str, port: int) -> dict[str, Operations]:
    """Return our store and PyTorch's behind one interface."""
    from torch.distributed import TCPStore

    from rdzv.torch import TorchStore

    theirs = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    return {OURS: of_torch(TorchStore(f"{url}/calls-of-torch")), TORCH: of_torch(theirs)}


def of_echo(port: int) -> Operations:
    """Return those of the echo, with the bytes of a small request."""
    sock = socket.create_connection(("127.0.0.1", port))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def echo() -> None:
        sock.sendall(VALUE)
        sock.recv(65536)

    return dict.fromkeys(("get", "set", "add", "compare_set"), echo)


def of_redis(port: int) -> Operations:
    """Return those of Python's usual redis client."""
    import redis  # type: ignore[import-not-found,unused-ignore]

    client = redis.Redis(port=port)
    client.set("key", VALUE)
    client.set("swapped", b"0")
    swap = client.register_script(load.COMPARE_AND_SET)
    turns = itertools.cycle([(b"0", b"1"), (b"1", b"0")])
    return {
        "get": lambda: client.get("key"),
        "set": lambda: client.set("key", VALUE),
        "add": lambda: client.incr("counter"),
        "compare_set": lambda: swap(keys=["swapped"], args=next(turns)),
    }


@contextlib.contextmanager
def contenders() -> Iterator[dict[str, Operations]]:
    """Yield all available contenders, connected."""
    calls = [(echo_server,)] + ([(support.torch_server,)] if support.HAS_TORCH else [])
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(support.serving())
        echo, *torch = stack.enter_context(support.workers(*calls))
        client = stack.enter_context(store.sync.connect(url))
        redis = [stack.enter_context(load.serving("redis"))[0]] if load.HAS_REDIS else []
        handler = stack.enter_context(rdzv.sync.connect(f"{url}/calls?min_nodes=1", is_host=False))
        yield {
            "store.sync.Client": of_client(client),
            "rdzv.sync.SharedStore": of_shared_store(handler.next_rendezvous().store),
            **(torch_stores(url, torch[0].hear(60)) if torch else {}),
            **({"redis-py": of_redis(redis[0])} if redis else {}),
            ECHO: of_echo(echo.hear(60)),
        }


def measure(batches: int, calls: int) -> dict[tuple[str, str], float]:
    """Return the median seconds of one call, by contender and operation."""
    measured: dict[tuple[str, str], list[float]] = defaultdict(list)
    with contenders() as all_contenders:
        operations = list(all_contenders[ECHO])
        for number in range(batches + 1):
            for operation in operations:
                for name, its_calls in all_contenders.items():
                    call = its_calls[operation]
                    began = time.perf_counter()
                    for _ in range(calls):
                        call()
                    if number:  # the first batch warms up
                        measured[name, operation].append((time.perf_counter() - began) / calls)
    return {what: support.median(values) for what, values in measured.items()}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.calls", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--batches", type=int, default=40)
    parser.add_argument("--calls", type=int, default=100, help="in a batch")
    parser.add_argument("--one-core", action="store_true", help="keep everything on one core (Linux)")
    options = parser.parse_args()

    if options.one_core:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    print(support.describe_machine() + (", of which one is used" if options.one_core else ""))
    medians = measure(options.batches, options.calls)
    names = list(dict.fromkeys(name for name, _ in medians))
    operations = list(dict.fromkeys(operation for _, operation in medians))
    if not support.HAS_TORCH:
        print("PyTorch is not installed: ours alone")
    rows = [[name, *(us(medians[name, operation]) for operation in operations)] for name in names]
    support.table("One blocking call, median, us", ["", *operations], rows)
    if support.HAS_TORCH:
        ours = [name for name in names if name not in (TORCH, ECHO, "redis-py")]
        rows = [[name, *(ratio(medians[TORCH, each], medians[name, each]) for each in operations)] for name in ours]
        support.table("How many times longer TCPStore takes", ["", *operations], rows)


if __name__ == "__main__":
    main()

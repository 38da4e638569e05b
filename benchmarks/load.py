"""The server's cost of a request: 64 callers, each waiting for its answer; beside its peers.

    python -m benchmarks.load [--callers 64] [--seconds 2]

Ours, a bare echo on the same event loop (the floor for any server in Python), PyTorch's TCPStore, and redis where
`redis-server` and the package `redis` are installed. The figure is the processor time of the server's process per
request, which, unlike seconds, does not depend on other load of the machine.

Fan-out is measured the same way: one put sent to many watchers, beside one write to as many bare connections.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import math
import shutil
import socket
import subprocess
import threading
import time
from typing import TYPE_CHECKING, Any

import store
from benchmarks import support
from benchmarks.support import us

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection

    Calls = dict[str, Callable[..., object]]

VALUE = b"x" * 100
PATIENCE = 120.0
OPERATIONS = ("get", "set", "add", "compare_set")
MANY = "multi_get"  # of as many keys, for servers that have it
OPEN = contextlib.ExitStack()  # connections of this process
KEYS = [f"key-{number}" for number in range(100)]
HAS_REDIS = importlib.util.find_spec("redis") is not None and shutil.which("redis-server") is not None


class Echo(asyncio.Protocol):
    """An echo, the least cost of a server in Python."""

    peers: set[asyncio.Transport]

    def __init__(self, peers: set[asyncio.Transport]) -> None:
        self._peers = peers
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._peers.add(self._transport)

    def data_received(self, data: bytes) -> None:
        """Echo, or send to all connections on request."""
        if data.startswith(b"tell"):
            for peer in self._peers:
                peer.write(data)
        else:
            self._transport.write(data)


def echo_server(pipe: Connection) -> None:

    async def serve() -> None:
        peers: set[asyncio.Transport] = set()
        server = await asyncio.get_running_loop().create_server(lambda: Echo(peers), "127.0.0.1", 0)
        pipe.send(server.sockets[0].getsockname()[1])
        await asyncio.Event().wait()

    support.run(serve())


def _our_calls(address: Any) -> Calls:
    client = OPEN.enter_context(store.sync.connect(address))
    return {
        "put": lambda key: client.put(key, VALUE),
        "get": lambda: client.get("key"),
        "set": lambda: client.put("key", VALUE),
        "add": lambda: client.add("counter", 1),
        "compare_set": lambda: client.compare_and_set("key", VALUE, expected_value=VALUE),
        MANY: lambda: client.get_many(KEYS),
    }


def _echo_calls(address: Any) -> Calls:
    sock = socket.create_connection(("127.0.0.1", address))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def call() -> None:
        sock.sendall(VALUE)
        sock.recv(65536)

    return {"put": lambda _: None, **dict.fromkeys(OPERATIONS, call)}


def _torch_calls(address: Any) -> Calls:
    from torch.distributed import TCPStore

    client = TCPStore("127.0.0.1", address, is_master=False, wait_for_workers=False)
    text = VALUE.decode()
    return {
        "put": lambda key: client.set(key, text),
        "get": lambda: client.get("key"),
        "set": lambda: (client.set("key", text), client.check(["key"])),  # waits until the server has it
        "add": lambda: client.add("counter", 1),
        "compare_set": lambda: client.compare_set("key", text, text),
        MANY: lambda: client.multi_get(KEYS),
    }


COMPARE_AND_SET = "if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('set', KEYS[1], ARGV[2]) end"


def _redis_calls(address: Any) -> Calls:
    import redis  # type: ignore[import-not-found,unused-ignore]

    client = redis.Redis(port=address)
    swap = client.register_script(COMPARE_AND_SET)
    return {
        "put": lambda key: client.set(key, VALUE),
        "get": lambda: client.get("key"),
        "set": lambda: client.set("key", VALUE),
        "add": lambda: client.incr("counter"),
        "compare_set": lambda: swap(keys=["key"], args=[VALUE, VALUE]),
        MANY: lambda: client.mget(KEYS),
    }


CALLS = {"rdzv": _our_calls, "echo": _echo_calls, "TCPStore": _torch_calls, "redis": _redis_calls}


def callers(pipe: Connection, who: str, address: Any, count: int) -> None:
    """Call in `count` threads, by the words of the parent; report the number of calls per word."""
    calls = [CALLS[who](address) for _ in range(count)]
    for key in ("key", *KEYS):
        calls[0]["put"](key)
    done = [0] * count
    stop = threading.Event()

    def run(number: int, call: Callable[[], object]) -> None:
        while not stop.is_set():
            call()
            done[number] += 1

    threads: list[threading.Thread] = []
    pipe.send("connected")
    while True:
        match pipe.recv():
            case "count":
                pipe.send(sum(done))
            case "stop":
                stop.set()
                for thread in threads:
                    thread.join()
                stop.clear()
                pipe.send("stopped")
            case operation:
                threads = [
                    threading.Thread(target=run, args=(number, calls[number][operation]), daemon=True)
                    for number in range(count)
                ]
                for thread in threads:
                    thread.start()
                pipe.send("calling")


@contextlib.contextmanager
def serving(who: str) -> Iterator[tuple[Any, int]]:
    """Run a server of this kind in a process of its own; yield its address and pid."""
    if who == "rdzv":
        with support.served() as server:
            yield server.url, server.pid
    elif who == "redis":
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        with subprocess.Popen(
            ["redis-server", "--port", str(port), "--save", ""], stdout=subprocess.DEVNULL
        ) as process:
            try:
                _until_it_answers(port)
                yield port, process.pid
            finally:
                process.kill()
    else:
        with support.workers((echo_server if who == "echo" else support.torch_server,)) as (worker,):
            assert worker.process.pid is not None
            yield worker.hear(PATIENCE), worker.process.pid


def _until_it_answers(port: int) -> None:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.05)
    raise TimeoutError(f"redis-server does not listen at port {port}")


def operations_of(who: str) -> tuple[str, ...]:
    """Return the operations of this server; an echo has no keys."""
    return OPERATIONS if who == "echo" else (*OPERATIONS, MANY)


def measure(who: str, *, count: int, processes: int, seconds: float) -> dict[str, tuple[float, float]]:
    """Return, by operation, the server's processor seconds per request, and requests per second."""
    found = {}
    with serving(who) as (address, pid):
        calls = [(callers, who, address, len(share)) for share in support.shares(count, processes)]
        with support.workers(*calls) as workers:
            for worker in workers:
                assert worker.hear(PATIENCE) == "connected"
            for operation in operations_of(who):
                for worker in workers:
                    worker.ask(operation, PATIENCE)
                time.sleep(0.3)  # until all of them are calling
                began, used = time.monotonic(), support.cpu_seconds(pid)
                before = sum(worker.ask("count", PATIENCE) for worker in workers)
                time.sleep(seconds)
                after = sum(worker.ask("count", PATIENCE) for worker in workers)
                used, took = support.cpu_seconds(pid) - used, time.monotonic() - began
                found[operation] = used / (after - before), (after - before) / took
                for worker in workers:
                    worker.ask("stop", PATIENCE)
    return found


# ------------------------------------------------------------------------------------------------------------ fan-out


def our_watchers(pipe: Connection, url: str, count: int) -> None:
    """Watch one key over `count` connections; report when the last has received each change."""

    async def main() -> None:
        async with contextlib.AsyncExitStack() as stack:
            iterators = []
            for _ in range(count):
                client = await stack.enter_async_context(store.connect(url))
                iterators.append((await stack.enter_async_context(client.watch("watched"))).batches())
            pipe.send("listening")
            while True:
                await asyncio.gather(*(anext(iterator) for iterator in iterators))
                pipe.send("heard")

    support.run(main())


def bare_listeners(pipe: Connection, port: int, count: int) -> None:
    """Read one message per word from each of `count` bare connections."""

    async def main() -> None:
        streams = [await asyncio.open_connection("127.0.0.1", port) for _ in range(count)]
        pipe.send("listening")
        while True:
            await asyncio.gather(*(reader.readexactly(4 + len(VALUE)) for reader, _ in streams))
            pipe.send("heard")

    support.run(main())


def measure_fan_out(who: str, count: int, *, times: int) -> float:
    """Return the server's processor seconds for sending one change to `count` receivers."""
    with (
        serving(who) as (address, pid),
        support.workers((our_watchers if who == "rdzv" else bare_listeners, address, count)) as (worker,),
    ):
        assert worker.hear(PATIENCE) == "listening"
        if who == "rdzv":
            client = OPEN.enter_context(store.sync.connect(address))

            def tell() -> object:
                return client.put("watched", VALUE)
        else:
            sock = socket.create_connection(("127.0.0.1", address))

            def tell() -> object:
                sock.sendall(b"tell" + VALUE)
                return None

        used = support.cpu_seconds(pid)
        for _ in range(times):
            tell()
            assert worker.hear(PATIENCE) == "heard"
        return (support.cpu_seconds(pid) - used) / times


def peers() -> list[str]:
    """Return the peers that are available here."""
    return ["rdzv", "echo", *(["TCPStore"] if support.HAS_TORCH else []), *(["redis"] if HAS_REDIS else [])]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.load", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--callers", type=int, default=64)
    parser.add_argument("--processes", type=int, default=2, help="that carry them")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each figure")
    parser.add_argument("--watchers", type=int, nargs="+", default=[100, 1000])
    options = parser.parse_args()
    print(support.describe_machine())
    rows = []
    for who in peers():
        found = measure(who, count=options.callers, processes=options.processes, seconds=options.seconds)
        rows.append([who, *(us(found.get(each, (math.nan, 0.0))[0]) for each in (*OPERATIONS, MANY))])
    header = ["", *OPERATIONS, "100 keys"]
    support.table(f"The server's processor per request, us, {options.callers} callers", header, rows)
    rows = [
        [str(count), *(us(measure_fan_out(who, count, times=30)) for who in ("rdzv", "echo"))]
        for count in options.watchers
    ]
    support.table("The server's processor to tell so many of one change, us", ["watchers", "rdzv", "bare"], rows)


if __name__ == "__main__":
    main()

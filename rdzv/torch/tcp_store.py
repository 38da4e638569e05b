"""TCPStores on a round's rank 0, for PyTorch, and for `torch_store=tcp`.

Members learn of losses and closing from our store in any case. docs/pytorch.md compares both stores. `WorkersStore`
listens at the round's bootstrap port only: workers connect to that port, also if another job's store listens there.
`open_tcp_store` may listen at any port of that host; rank 0 announces the port in the round's store once the TCPStore
listens, so no first attempt is refused.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import socket
import time
import weakref
from datetime import timedelta
from typing import TYPE_CHECKING, Final

import rdzv as ours
from rdzv.loop import is_loopback
from rdzv.torch.pytorch import LISTENING_STORE, dist

if TYPE_CHECKING:
    from rdzv import RendezvousInfo as AwaitedInfo
    from rdzv.sync import RendezvousInfo

log: Final = logging.getLogger(__name__)

PORT: Final = "rdzv/torch/tcp_store/port"  # the key of rank 0's port in the round's store
BACKLOG: Final = 4096  # pending connections: all ranks connect at once
FREE_WITHIN: Final = 3.0  # seconds to wait until the former rank 0 frees the only permitted port
TIMEOUT: Final = timedelta(seconds=60)  # PyTorch's default for an agent's store
PORT_TAKEN: Final = re.compile("EADDRINUSE|address already in use", re.IGNORECASE)
TRY_AGAIN_AFTER: Final = 0.05  # seconds after a failed attempt to bind


class WorkersStore:
    """The TCPStore for a round's workers at rank 0. The constructor waits `within` seconds for its port."""

    def __init__(self, host: str, port: int, timeout: timedelta, *, within: float = 0.0) -> None:
        deadline, listening = time.monotonic() + within, None
        while listening is None:
            try:
                listening = _listen(host, port)
            except OSError as error:
                if error.errno != errno.EADDRINUSE or time.monotonic() >= deadline:
                    raise
                time.sleep(TRY_AGAIN_AFTER)
        self.file: int = listening.fileno()
        self._store: dist.TCPStore | None = _host_store(host, listening, timeout)
        _served.add(self)

    def close(self) -> None:
        """Close the store and release the port."""
        _served.discard(self)
        self._store = None


def serve_workers(info: RendezvousInfo | AwaitedInfo, ports: str | None, taken: set[int]) -> WorkersStore | None:
    """Serve the workers' store of a round at its bootstrap port; call this at rank 0.

    `ports`: the parameter `master_port`. `taken`: this run's bootstrap ports found in use; this call may add one.

    Returns:
        The store; None if the port is taken and another is permitted: leave the round, and meet again.

    Raises:
        RendezvousSettingsError: No permitted port can be used.
    """
    (host, port), where = info.bootstrap_address, f"run {info.run_id}, round {info.round}"
    is_single = ports is not None and len(set(ports.split("-"))) == 1
    try:
        return WorkersStore(host, port, TIMEOUT, within=FREE_WITHIN if is_single else 0.0)
    except OSError as error:
        if is_single or port in taken or error.errno != errno.EADDRINUSE:
            raise ours.RendezvousSettingsError(
                f"{where}: the workers' store cannot be served at port {port} of this machine, which was promised to "
                f"all (master_port={ports or 'any free one'}): {error.strerror}; give another master_port, or a range, "
                f"or agent_store=0 if rank 0's worker is to listen there"
            ) from None
        taken.add(port)
        log.warning("%s: port %d, which was promised to all, was taken meanwhile; meeting again", where, port)
        return None


def add_port_remedy(how: str) -> str:
    """Add the remedy to a worker's failure if the cause is a port in use, as by a `WorkersStore`."""
    if PORT_TAKEN.search(how):
        remedy = "agent_store=0, or no --agent-store, leaves that port to the workers"
        return f"{how} (at MASTER_PORT rank 0's agent listens; {remedy})"
    return how


_served: Final = weakref.WeakSet[WorkersStore]()


def _close_in_child() -> None:
    """Close a forked child's copies of listening sockets, which would keep the ports bound."""
    for store in list(_served):
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, store.file, inheritable=False)
        os.close(null)
    _served.clear()


os.register_at_fork(after_in_child=_close_in_child)


def open_tcp_store(info: RendezvousInfo, timeout: timedelta, *, port: int) -> dist.TCPStore:
    """Host the round's TCPStore on rank 0, connect to it elsewhere; every member calls this once.

    `timeout` limits the wait for rank 0 (DistStoreError), and the TCPStore's waits. Rank 0 uses `port` if it is free,
    else any.
    """
    host, _ = info.bootstrap_address
    if info.rank == 0:
        try:
            listening = _listen(host, port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            listening = _listen(host, 0)  # any free port
        store = _host_store(host, listening, timeout)
        info.store.set(PORT, str(store.port))
        return store
    waiting = info.store.clone()
    waiting.set_timeout(timeout)
    try:
        port = int(waiting.get(PORT))
    except ours.SharedStoreTimeoutError as error:
        raise dist.DistStoreError(
            f"run {info.run_id}, round {info.round}: rank 0 on {host} has not hosted a TCPStore within "
            f"{timeout.total_seconds():g} s"
        ) from error
    return dist.TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)


def _host_store(host: str, listening: socket.socket, timeout: timedelta) -> dist.TCPStore:
    return dist.TCPStore(
        host,
        listening.getsockname()[1],
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
        **LISTENING_STORE,
    )


def _listen(host: str, port: int) -> socket.socket:
    here = ""  # all interfaces
    if is_loopback(host):
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        here = min((str(address[0]) for *_, address in found), key=lambda one: ":" in one)  # workers always try IPv4
    both = (not here or ":" in here) and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both or ":" in here else socket.AF_INET
    return socket.create_server((here, port), family=family, backlog=BACKLOG, dualstack_ipv6=both)

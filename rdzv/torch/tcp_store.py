"""Shell: real TCPStores of a round, which its rank 0 hosts: for PyTorch alone, and for `torch_store=tcp`.

The members have met over our store, and go on using it to hear of losses and closing. A TCPStore is for code that asks
for its class or its host, for queues through `PrefixStore`, and for the speed of C++. It asks no client for a token,
encrypts nothing, and lets a node that was dropped from the round write to it as before. It ends with the process that
hosts it.

`WorkersStore` listens at the round's bootstrap port and at no other: workers dial that port, and at another one two
jobs of one machine would share a store. `open_tcp_store` may listen at any port of that host, which the members are
told through the round's own store. They connect once it listens, so that no first attempt is refused.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import logging
import os
import socket
import time
import weakref
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from rdzv import errors as ours
from rdzv.torch.pytorch import LISTENING_STORE, dist

if TYPE_CHECKING:
    from rdzv.membership import RendezvousInfo as AwaitedInfo
    from rdzv.sync import RendezvousInfo

__all__ = ["WorkersStore", "open_tcp_store", "serve_workers"]

log: Final = logging.getLogger(__name__)

PORT: Final = "rdzv/torch/tcp_store/port"
"""The key of the round's store under which rank 0 tells its port."""

BACKLOG: Final = 4096
"""How many connections may wait to be accepted: as many as Linux allows by default, since all ranks come at once."""


FREE_WITHIN: Final = 3.0  # seconds: the process of the last round's rank 0 may have a single `master_port` until then
TIMEOUT: Final = timedelta(seconds=60)  # PyTorch's default for the store of an agent
TRY_AGAIN_AFTER: Final = 0.05  # seconds, while the process of the last round's rank 0 lets go of the port


class WorkersStore:
    """The TCPStore that the workers of a round share, in the process of their rank 0's launcher.

    Args:
        host: The round's bootstrap address.
        port: The round's bootstrap port.
        timeout: The store's own.
        within: In seconds, how long to wait for the port.

    Raises:
        OSError: The port is taken, or may not be used.
    """

    def __init__(self, host: str, port: int, timeout: timedelta, *, within: float = 0.0) -> None:
        deadline, listening = time.monotonic() + within, None
        while listening is None:
            try:
                listening = _listen(host, port)
            except OSError as error:
                if error.errno != errno.EADDRINUSE or time.monotonic() >= deadline:
                    raise
                time.sleep(TRY_AGAIN_AFTER)
        self._file = listening.fileno()
        self._store: dist.TCPStore | None = _hosted(host, listening, timeout)
        _served.add(self)

    def close(self) -> None:
        """End it: the port is free again."""
        _served.discard(self)
        self._store = None

    def close_in_child(self) -> None:
        """Close the listening socket that a forked worker has inherited, and would keep the port with."""
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, self._file, inheritable=False)
        os.close(null)


def serve_workers(info: RendezvousInfo | AwaitedInfo, ports: str | None, taken: set[int]) -> WorkersStore | None:
    """Serve the workers' store of a round at its bootstrap port; call this at rank 0.

    Args:
        info: The round.
        ports: `master_port`.
        taken: The bootstrap ports of this run that were taken; such a port is noted here.

    Returns:
        The store; None if the port is taken, and another one can be promised: leave the round, and meet again.

    Raises:
        RendezvousSettingsError: The port is taken, and no other may be used.
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


_served: Final = weakref.WeakSet[WorkersStore]()


def _close_in_child() -> None:
    for store in list(_served):
        store.close_in_child()
    _served.clear()


os.register_at_fork(after_in_child=_close_in_child)


def open_tcp_store(info: RendezvousInfo, timeout: timedelta, *, port: int) -> dist.TCPStore:
    """Host the round's TCPStore if this is rank 0, connect to it otherwise; every member calls it, once.

    Args:
        info: The round.
        timeout: How long to wait for rank 0, and the store's own timeout.
        port: Where rank 0 is to listen; 0: at any free port.

    Raises:
        DistStoreError: Rank 0 has not said in time where it listens.
        RendezvousError: This node is no longer in the round, or our store cannot be reached.
    """
    host, _ = info.bootstrap_address
    if info.rank == 0:
        store = _hosted(host, _listener(host, port), timeout)
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


def _hosted(host: str, listening: socket.socket, timeout: timedelta) -> dist.TCPStore:
    """Return a TCPStore that serves at a listening socket, which it closes at its end."""
    return dist.TCPStore(
        host,
        listening.getsockname()[1],
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
        **LISTENING_STORE,
    )


def _listener(host: str, port: int) -> socket.socket:
    """A listening socket at the port, or at another one if that is taken; on loopback only if the host is that."""
    try:
        return _listen(host, port)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        return _listen(host, 0)


def _listen(host: str, port: int) -> socket.socket:
    here = ""  # on all interfaces: a name, and an address behind which another one stands, may be any of them
    with contextlib.suppress(ValueError):
        here = host if ipaddress.ip_address(host).is_loopback else ""
    both = not here and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both or ":" in here else socket.AF_INET
    return socket.create_server((here, port), family=family, backlog=BACKLOG, dualstack_ipv6=both)

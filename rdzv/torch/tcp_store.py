"""Shell: a real TCPStore for a round, which its rank 0 hosts: what `torch_store=tcp` stands for.

The members have met over our store, and go on using it to hear of losses and closing. The TCPStore is for PyTorch
alone: for code that asks for its class or its host, for queues through `PrefixStore`, and for the speed of C++. What is
lost with it: it asks nobody for a token, encrypts nothing, and lets a node that was dropped from the round write to it
as before. It ends with the process of rank 0.

It listens at the round's bootstrap address, or at any port of that host. The bootstrap port was held by rank 0's node
until the round came; should somebody have taken it in the moment since, another one is used. Which one it is, the
members are told through the round's own store. They connect once it listens, so that nobody's first attempt is refused.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket
from typing import TYPE_CHECKING, Final

from rdzv import errors as ours
from rdzv.torch.pytorch import LISTENING_STORE, dist

if TYPE_CHECKING:
    from datetime import timedelta

    from rdzv.sync import RendezvousInfo

__all__ = ["open_tcp_store"]

PORT: Final = "rdzv/torch/tcp_store/port"
"""The key of the round's store under which rank 0 tells its port."""

BACKLOG: Final = 4096
"""How many connections may wait to be accepted: as many as Linux allows by default, since all ranks come at once."""


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
        listening = _listener(host, port)
        port = listening.getsockname()[1]
        store = dist.TCPStore(
            host,
            port,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=listening.detach(),  # which it closes at its end
            **LISTENING_STORE,
        )
        info.store.set(PORT, str(port))
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

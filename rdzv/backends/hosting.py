"""Decides when a node starts the embedded store, and when the node ends it.

With one host in the URL, a node on its machine starts the store when it first looks for a store and no process listens
yet. A node never starts a store on a reconnect: a live run must not get a second, empty store. For several hosts, see
`succession`.

The store dies with its host's process. After the host's own node has left, a single host waits until no client is
connected: for nodes of other runs and newcomers without limit, then for at most `close_timeout`.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
from abc import ABC, abstractmethod
from functools import partial
from ssl import CERT_REQUIRED
from threading import Event
from typing import TYPE_CHECKING, Final

import anyio
import anyio.to_thread

from rdzv.backends.bind_address import (
    LET_ONE_HOST,
    BindAddress,
    HostedElsewhereError,
    NoProbeSocketError,
    NotResolvedError,
    PortTakenError,
    choose_bind_address,
    find_accepting_targets,
    hosts_text,
)
from rdzv.backends.handover import send_nodes_to_next_host
from rdzv.backends.monitoring import serve_embedded
from rdzv.backends.store_process import StoreProcess
from rdzv.config.value_types import UNSPECIFIED
from rdzv.core.keys import Keys
from rdzv.errors import RendezvousConnectionError, RendezvousError, RendezvousSettingsError
from rdzv.node.run.status import read_nodes_of_all_runs
from store import StoreError, StoreUsageError
from store.net.address import join_host_port
from store.net.dialing import error_text, exhausted_limit
from store.net.sockets import listen_on
from store.net.tasks import cancel_and_wait
from store.net.threads import Flag, in_thread
from store.printable import make_logger

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from rdzv.backends.credentials import Credentials
    from rdzv.config.settings import Settings
    from store import Server, Store
    from store.net.sockets import Sockets

    OpenClient = Callable[[float], contextlib.AbstractAsyncContextManager[Store]]  # the argument: seconds to connect

log: Final = make_logger(__name__)

SAY_TAKEN_AFTER: Final = 1.0  # seconds that the port is taken before a warning; a starting store answers sooner
TRY_AGAIN_AFTER: Final = (0.4, 0.6)  # seconds, at random, until a failed start is retried; short: all nodes wait
LOOK_AGAIN_AFTER: Final = 2.0  # seconds between checks for newcomers and other runs
ENDING_TTL: Final = 10.0  # seconds; TTL of keys that reject new nodes, renewed each check
SAID_AGAIN_AFTER: Final = 60.0  # seconds between equal warnings that this process still serves other nodes
WAITS_AT_ONCE: Final = 0.1  # seconds, at most, that a thread waits after a cancellation
CLOSING_WITHIN: Final = 0.3  # seconds for a server to notice the end of a local connection
CALL_TIMEOUT: Final = 30.0  # seconds per call
MEETS_WITHIN: Final = 2.0  # seconds to connect to a store on this machine
FORWARDED_WITHIN: Final = 10.0  # seconds until a Service or NAT forwards to a new store


class HostedStore:
    """An embedded store of this process; closing `serving` ends the store and its HTTP page."""

    def __init__(
        self, server: Server | StoreProcess, serving: contextlib.ExitStack, settings: Settings, bound: BindAddress
    ) -> None:
        self.server = server
        self.bound = bound
        self._serving = serving
        self._keys = Keys(settings.prefix, settings.run_id, settings.endpoint.has_successors)
        self._linger = settings.close_timeout
        self._has_ended = False

    async def aclose(self, open_client: OpenClient) -> None:
        """Wait for the clients to leave (see the module), then end the store; a cancellation skips the wait."""
        try:
            if not await self._wait_until_alone(CLOSING_WITHIN):
                await (self._redirect_nodes if self._keys.has_successors else self._wait_until_others_left)(open_client)
        finally:
            await self.end()

    @property
    def has_died(self) -> bool:
        """True if the store was ended, or has a process of its own which has ended."""
        return self._has_ended or (isinstance(self.server, StoreProcess) and self.server.has_died)

    async def end(self) -> None:
        """End the store at once."""
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self._serving.close)
        self._has_ended = True

    async def _redirect_nodes(self, open_client: OpenClient) -> None:
        """Send all nodes to the next host, which may serve from now on; wait up to `close_timeout` until they left."""
        ttl = self._linger + ENDING_TTL
        try:
            await send_nodes_to_next_host(partial(open_client, MEETS_WITHIN), self.server.store_id, self._keys, ttl)
        except StoreError as error:  # do not hand over: nodes could meet both here and at the next host
            log.warning("the store at %s ends at once, as it cannot say so to its nodes: %s", self.server.url, error)
            return
        self.server.end_when_alone.reject_new_clients()
        await self._wait_until_alone(self._linger)

    async def _wait_until_others_left(self, open_client: OpenClient) -> None:
        """Reject new nodes, and wait until the others have left; the wait for newcomers and other runs has no limit."""
        since, said_of, said_at, until = 0, "", 0.0, None
        while True:
            try:
                async with open_client(MEETS_WITHIN) as client:
                    revision, newcomers = await _reject_unless_in_use(client, self._keys, since)
            except StoreError as error:
                if not await self._wait_until_alone(0.0):  # other clients are still connected
                    log.warning("the store at %s is ending, but cannot reject newcomers: %s", self.server.url, error)
                await self._wait_until_alone(self._linger)
                return
            since, now = since or revision, anyio.current_time()
            if newcomers:
                until = None
                if newcomers != said_of or now - said_at >= SAID_AGAIN_AFTER:
                    said_of, said_at = newcomers, now
                    log.warning(
                        "the node that hosts the store at %s is done, but %s use it: its process stays "
                        "until they have left; if it ends before, they are dropped",
                        self.server.url,
                        newcomers,
                    )
            elif until is None:
                until = now + self._linger
                waits = (self.server.url, self.server.connections, self._linger)
                log.info("the store at %s has %d connections, and waits up to %g s for them to end", *waits)
            elif now >= until:
                return
            if await self._wait_until_alone(LOOK_AGAIN_AFTER if until is None else min(LOOK_AGAIN_AFTER, until - now)):
                return

    async def _wait_until_alone(self, seconds: float) -> bool:
        """Wait for the last client to leave; return False on a timeout."""
        wait, until = self.server.end_when_alone.wait_until_alone, anyio.current_time() + seconds
        while True:
            left = max(until - anyio.current_time(), 0.0)
            if await anyio.to_thread.run_sync(wait, min(left, WAITS_AT_ONCE), abandon_on_cancel=True):
                return True
            if left <= WAITS_AT_ONCE:
                return False


async def _reject_unless_in_use(client: Store, keys: Keys, since: int) -> tuple[int, str]:
    """Reject new nodes of all runs; but accept new nodes again if nodes of other runs, or newcomers, are present.

    Newcomers are nodes of the host's run that joined after revision `since` (if 0, after this rejection). Nodes are
    listed after the keys were written, so none is missed. Return the rejection's revision, and those nodes in words.
    """
    # The key has a TTL: after the death of this host, a durable store must accept nodes under another host.
    revision = await client.put(keys.ending, b"", ttl=ENDING_TTL)
    endings = {keys.ending} | {run.ending for run in await read_nodes_of_all_runs(client)}
    for ending in endings - {keys.ending}:
        await client.put(ending, b"", ttl=ENDING_TTL)
    newcomers = []
    for run, nodes in (await read_nodes_of_all_runs(client)).items():
        there = [node for node in nodes if run != keys or node.create_revision > (since or revision)]
        if there:
            newcomers.append(f"{len(there)} of run {run.run_id}")
    if newcomers:
        for ending in endings:
            await client.delete(ending)
    return revision, ", ".join(newcomers)


class StoreStarter(ABC):
    """The task that decides, while no store is found, whether this process starts its run's store."""

    def __init__(
        self, settings: Settings, credentials: Credentials, open_client: OpenClient, rng: random.Random
    ) -> None:
        self._settings, self._credentials, self._rng = settings, credentials, rng
        self._keys = Keys(settings.prefix, settings.run_id)
        self._open_client = open_client
        self._task: asyncio.Task[HostedStore | None] | None = None
        self._asked = asyncio.Event()  # set after the first attempt
        self._settled = asyncio.Event()
        self._gives_up = Flag()  # set by `aclose`: start no store, and stop a starting store process
        self._starts = Event()  # set before a store starts; else `aclose` cancels the task
        self._beside: list[asyncio.Task[None]] = []  # tasks that run while this process hosts a store
        self.problem: str = ""  # why no store starts here, or no host serves; empty if unknown

    @abstractmethod
    async def _start_or_find_store(self) -> HostedStore | None:
        """Return the store once started; None if another was found, or this process need not start one."""

    async def _attempt_and_log(self) -> HostedStore | None:
        try:
            return await self._start_or_find_store()
        except (RendezvousError, RuntimeError) as error:  # a RuntimeError: no more threads
            if not self._asked.is_set():
                raise
            log.error("%s", error)  # noqa: TRY400  callers keep waiting; the log has the reason
            return None
        finally:
            # Await nothing after this line: `try_to_start` must find this task done.
            asyncio.get_running_loop().call_soon(self._asked.set)

    async def try_to_start(self) -> None:
        """Return after the first attempt; raise an error if this process should start the store and cannot.

        A cancellation does not interrupt the start, which is in a thread; `aclose` ends the started store.
        """
        self.resume_search()
        await self._asked.wait()
        if self._task is not None and self._task.done():
            self._task.result()

    def resume_search(self) -> None:
        """Continue or restart the attempts to find or host a store."""
        self._settled.clear()
        if not self.is_hosting and (self._task is None or self._task.done()):
            self._asked.clear()
            name = f"find or host the store of run {self._settings.run_id}"
            self._task = asyncio.create_task(self._attempt_and_log(), name=name)

    def note_store_found(self) -> None:
        """Record that a store was found, so that this process starts none."""
        self._settled.set()

    @property
    def _store_if_started(self) -> HostedStore | None:
        task = self._task
        if task is None or not task.done() or task.cancelled() or task.exception() is not None:
            return None
        return task.result()

    @property
    def is_hosting(self) -> bool:
        """True if this process serves the store; thread-safe."""
        return self._store_if_started is not None and not self._store_if_started.has_died

    async def aclose(self) -> None:
        """End the attempts to find or start a store, or the hosted store."""
        self.note_store_found()
        self._gives_up.set()
        if self._task is not None:
            if not self._starts.is_set():  # no store is starting: do not wait for a thread that may resolve a name
                self._task.cancel()
            await asyncio.wait([self._task])
            await cancel_and_wait(*self._beside)
            if self._store_if_started is not None and self.is_hosting:
                await self._store_if_started.aclose(self._open_client)


class OneHostStarter(StoreStarter):
    """Decides whether this process starts the store at the URL's one host, when its node first looks for the store."""

    async def try_to_start(self) -> None:
        """Start the store if this process should, at the first call or after `reset`."""
        if self._task is None:
            await super().try_to_start()

    async def reset(self) -> None:
        """Let the next `try_to_start` decide again, as the store found is shutting down and has rejected this node."""
        if self._task is not None and not self.is_hosting:
            self.note_store_found()
            await asyncio.wait([self._task])
            self._task = None

    async def _start_or_find_store(self) -> HostedStore | None:
        say_at = anyio.current_time() + SAY_TAKEN_AFTER
        start_if_needed = partial(host_if_needed, self._settings, self._credentials, self._gives_up, self._starts)
        while True:
            try:
                if (hosted := await in_thread(start_if_needed)) is not None:
                    self._starts.clear()  # `aclose` need not wait for the checks of the started store
                    try:
                        await self._check_url_leads_here(hosted)
                        if self._settings.data_dir is not None:
                            await self._allow_newcomers_again()
                    except BaseException:
                        await hosted.end()
                        raise
                return hosted
            except RendezvousError as error:
                if not await self._is_error_temporary(error):
                    raise
                log.debug("%s; looking again in a moment", error)
                if type(error) is PortTakenError and not self.problem and anyio.current_time() >= say_at:
                    self.problem: str = f"{error}; the process that has that port does not answer as a store"
                    log.warning("%s", self.problem)
            self._asked.set()
            self._starts.clear()
            with anyio.move_on_after(self._rng.uniform(*TRY_AGAIN_AFTER)):
                await self._settled.wait()
            if self._settled.is_set():
                return None

    async def _check_url_leads_here(self, host: HostedStore) -> None:
        """Raise an error if the URL leads to another store than this new one, or nowhere."""
        url, foreign = self._settings.endpoint.url, host.bound.foreign
        if not host.bound.indirect:
            listening = await in_thread(lambda: find_accepting_targets(foreign)) if foreign else []
            if listening:
                raise HostedElsewhereError(f"another node has started a store at {url} at the same moment")
            return
        try:
            async with self._open_client(FORWARDED_WITHIN) as client:
                leads_here = client.store_id == host.server.store_id
        except StoreError as problem:
            raise RendezvousConnectionError(
                f"is_host is set, and the store listens on every address of this machine, but {url} did not lead "
                f"here within {FORWARDED_WITHIN:g} s ({problem}): let the Service or NAT forward that port to this "
                f"machine, also for connections from it (hairpin), or write an address of this machine in the URL"
            ) from None
        if not leads_here:
            raise HostedElsewhereError(f"{url} leads to the store of another node")

    async def _allow_newcomers_again(self) -> None:
        """Delete the last host's rejection of new nodes from a store that continues from disk."""
        try:
            async with self._open_client(CALL_TIMEOUT) as client:
                await client.delete(self._keys.ending)
        except StoreError as error:
            log.warning("the rejection of newcomers by the last host of the store could not be deleted: %s", error)

    async def _is_error_temporary(self, error: RendezvousError) -> bool:
        """Return True if this obstacle to starting the store may pass, or a store may be found meanwhile."""
        if isinstance(error, HostedElsewhereError):
            return True
        # With `is_host=1`, a node waits for the port only if the store that holds it is shutting down.
        if isinstance(error, PortTakenError) and self._settings.is_host is True:
            return await self._is_store_ending() or not await self._is_port_taken()
        return isinstance(error, NotResolvedError | PortTakenError | NoProbeSocketError)

    async def _is_store_ending(self) -> bool:
        with contextlib.suppress(StoreError):
            async with self._open_client(MEETS_WITHIN) as client:
                return await client.get(self._keys.ending) is not None
        return False

    async def _is_port_taken(self) -> bool:
        ((host, port),) = self._settings.endpoint.hosts
        try:
            await in_thread(lambda: choose_bind_address(host, port, may_be_open=True, insist=True))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
        return False


def host_if_needed(settings: Settings, credentials: Credentials, gives_up: Flag, starts: Event) -> HostedStore | None:
    """Start the store if `is_host=1` or this machine is the URL's host; raise PortTakenError for a taken port.

    Set `starts` before the store starts, and start none if `gives_up` is set by then.
    """
    if settings.is_host is False:
        return None
    ((host, port),) = settings.endpoint.hosts
    insist = settings.is_host is True
    if settings.uses_tls and credentials.server_tls() is None:
        if not insist:
            return None
        raise RendezvousSettingsError(
            f"is_host is set, but there is no certificate to serve {settings.endpoint.url} with; give cert and key"
        )
    try:
        bound = address_to_listen_on(settings, credentials, (host, port))
        starts.set()
        if gives_up.is_set():
            return None
        return serve_store_on(settings, credentials, bound, port, None, gives_up)
    except RendezvousError:  # some `RendezvousError`s are `OSError`s, too
        raise
    except OSError as error:
        if not insist and error.errno == errno.EADDRNOTAVAIL:
            return None  # the host is another machine
        what = "is_host is set, but the store" if insist else "the store"
        why = f"{what} cannot be started on {host}:{port}: {exhausted_limit(error) or error_text(error)}"
        raise (PortTakenError if error.errno == errno.EADDRINUSE else RendezvousConnectionError)(why) from error


def address_to_listen_on(settings: Settings, credentials: Credentials, host: tuple[str, int]) -> BindAddress:
    """Return the address to listen on for `host`; without `is_host=1`, reject a name of several machines."""
    insist, tls = settings.is_host is True, credentials.server_tls()
    is_closed_to_strangers = credentials.token is not None or (tls is not None and tls.verify_mode is CERT_REQUIRED)
    bound = choose_bind_address(*host, may_be_open=settings.insecure or is_closed_to_strangers, insist=insist)
    if not insist and (bound.foreign or host[0] in {*UNSPECIFIED, "0"}):
        _refuse_ambiguous_host(settings, host[0], bound)
    return bound


def serve_store_on(
    settings: Settings,
    credentials: Credentials,
    bound: BindAddress,
    port: int,
    listeners: Sockets | None = None,
    gives_up: Flag | None = None,
) -> HostedStore:
    """Start the embedded store at an address, or on bound sockets; raise `OSError` if the address cannot be bound."""
    server: Server | StoreProcess
    try:
        if settings.host == "process":
            listeners = listeners or listen_on(bound.address, port)
            server = StoreProcess(settings, bound.address, port, listeners, gives_up or Flag())
            serving = contextlib.ExitStack()
            serving.callback(server.close)
        else:
            serving, server = serve_embedded(settings, credentials, bound.address, port, listeners)
    except StoreUsageError as error:
        where = join_host_port(bound.address or "*", port)
        raise RendezvousSettingsError(f"the store cannot be started on {where}: {error}") from None
    log.info("this node hosts the store of run %s at %s", settings.run_id, server.url)
    return HostedStore(server, serving, settings, bound)


def _refuse_ambiguous_host(settings: Settings, host: str, bound: BindAddress) -> None:
    """Reject a name of several machines; if `max_nodes=1`, only warn."""
    others = f"also names {hosts_text(bound.foreign)}, of other machines" if bound.foreign else "stands for any machine"
    problem = f"{host} {others}, and each of them would start a store of its own"
    if settings.max_nodes != 1:
        raise RendezvousSettingsError(f"run {settings.run_id}: {problem}; {LET_ONE_HOST}")
    all_the_same = "this node starts one all the same, since max_nodes is 1"
    log.warning("run %s: %s; %s; %s", settings.run_id, problem, all_the_same, LET_ONE_HOST)

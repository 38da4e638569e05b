"""PyTorch's rendezvous handler over ours, for `torchrun --rdzv-backend=rdzv`."""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import shutil
import socket
import sys
import time
import weakref
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NoReturn

import rdzv as ours
from rdzv import Ending, sync
from rdzv.config.config_errors import brief, refuse
from rdzv.config.endpoint import split_url
from rdzv.config.parameters import Source
from rdzv.config.settings import PARAMETERS, parse_all
from rdzv.display.standard_error import unblock_stderr_logging
from rdzv.loop import MOVES, EndKind, in_thread, leaving_in_words
from rdzv.loop.own_folder import make_process_folder
from rdzv.loop.process_files import BEAT_DIR, clear_step_folder, follow_step_files
from rdzv.loop.round_monitor import RoundMonitor
from rdzv.loop.rounds import make_handler
from rdzv.torch.agent.screen import HandlerLogger, configure_logging, print_error_and_exit, signal_reason
from rdzv.torch.agent.signals import EndSignals
from rdzv.torch.agent.unnamed_run import NO_NAME, reopen_closed_run
from rdzv.torch.agent.worker_ends import WorkerEnds
from rdzv.torch.pytorch import KEYS_BY_RESTARTS, Agent, dist, find_agent, find_agent_end, runs_under_torchrun, torch_api
from rdzv.torch.store import TorchStore
from rdzv.torch.tcp_store import WorkersStore, add_port_remedy, open_tcp_store, serve_workers
from store.printable import make_logger

if TYPE_CHECKING:
    from pathlib import Path

log: Final = make_logger(__name__)

_CHECKED: Final = {"bootstrap_check": True}
_BY_NAME: Final = {"rank_order": "survivors_then_name"}
"""The default rank order: PyTorch's own handler sorts nodes by address, so users expect rank 0 on their first host."""

SERVED: Final = "rdzv/torch/agent_store"
"""The key in the round's store that rank 0's agent writes once it serves the workers' store."""

_ANY_PORT: Final = re.compile(r"(tcps?://)?(\[[^\]]*\]|[^][/?#:]*):0+([/?].*)?")
_LOOPBACK: Final = ("127.0.0.1", "localhost", "[::1]")

READ_TIMEOUT: Final = 60.0  # seconds; PyTorch's default, for its agents' store


def _translate_error(error: ours.RendezvousError) -> Exception:
    theirs: type[Exception] = next(
        getattr(torch_api, kind.__name__) for kind in type(error).__mro__ if hasattr(torch_api, kind.__name__)
    )
    return theirs(str(error))


class _ParsedParameters:
    IGNORED: Final = ("heartbeat", "heartbeat_timeout", "use_libuv", "store_type")

    def __init__(self, params: Any) -> None:
        config = {name: value for name, value in params.config.items() if name not in self.IGNORED}
        # Drop `timeout=900`, which PyTorch adds if the user gives no timeout.
        if "join_timeout" in config or str(config.get("timeout")) in ("900", "900.0"):
            config.pop("timeout", None)
        self.read_timeout = timedelta(seconds=_pop_parameter("read_timeout", config, READ_TIMEOUT, like="join_timeout"))
        self.regroup_on_loss: bool = _pop_parameter("regroup_on_loss", config, True, like="insecure")
        # Restore the text of our parameters: `parse_all` turns `is_host=auto` into None, which means "not given".
        config = parse_all(config, Source.RDZV_CONF) | {name: config[name] for name in config if name in PARAMETERS}

        endpoint = params.endpoint.strip()
        if not endpoint and params.run_id == NO_NAME and params.max_nodes == 1:
            endpoint = "localhost:0"  # an unnamed job of one node gets its own store, at any free port
        self.reserved: socket.socket | None = None  # holds the port of this job's own store until the store listens
        if (own := _ANY_PORT.fullmatch(endpoint)) is not None:
            if params.min_nodes > 1:
                refuse(
                    f"--rdzv-endpoint={brief(endpoint)} is a store at any free port, for a job of one node; for "
                    f"{params.min_nodes} nodes give the port at which they find each other, as in head:29400"
                )
            scheme, host, rest = own.groups(default="")
            host = host if host in _LOOPBACK else _LOOPBACK[0]
            self.reserved = _bind_free_port(host.strip("[]"))
            endpoint = f"{scheme}{host}:{self.reserved.getsockname()[1]}{rest}"
            config.setdefault("is_host", True)
        endpoint = endpoint or "localhost"  # PyTorch's meaning of an empty endpoint
        parts = split_url(endpoint if "://" in endpoint else f"tcp://{endpoint}")
        if parts.run_id not in ("", params.run_id):
            refuse(
                f"--rdzv-endpoint={brief(endpoint.partition('?')[0])} names the run {brief(parts.run_id)}, and "
                f"--rdzv-id is {brief(params.run_id)}; leave the run out of the endpoint"
            )
        self.url = replace(parts, run_id=params.run_id).url
        self.overrides: dict[str, Any] = {
            **({} if "rank_order" in parts.parameters or "RDZV_RANK_ORDER" in os.environ else _BY_NAME),
            **({} if "bootstrap_check" in parts.parameters or "RDZV_BOOTSTRAP_CHECK" in os.environ else _CHECKED),
            "min_nodes": params.min_nodes,
            "max_nodes": params.max_nodes,
            "address": params.local_addr,
            **config,
        }


def _bind_free_port(host: str) -> socket.socket:
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind((host, 0))
    return sock


def _pop_parameter(name: str, config: dict[str, Any], default: Any, *, like: str) -> Any:
    """Pop one of PyTorch's parameters from `config`, and read it like our parameter `like`."""
    return replace(PARAMETERS[like], name=name).read(config.pop(name, default))


class TorchRendezvousHandler(torch_api.RendezvousHandler):
    """PyTorch's rendezvous handler over ours.

    `--rdzv-endpoint` is `host[:port]`, or a URL of ours without the run, such as `etcd://head:2379`. `--rdzv-conf`
    takes our parameters, and PyTorch's: `timeout` (our `join_timeout`, unless that is given, too),
    `keep_alive_interval` x `keep_alive_max_attempt` (our `ttl`), `read_timeout` (for the agent's store),
    `heartbeat_timeout` (ignored), and:

        regroup_on_loss     members meet again when one has died or left (true), or, as in PyTorch, when workers fail

    **Deaths at a round's start.** An agent waits up to `read_timeout` for the values of every other member, then fails.
    So `next_rendezvous` returns a round only once all members have received it; if a member dies before, the others
    meet again. If it dies in the milliseconds after the return, they wait for `read_timeout`.

    **Closing.** `shutdown` closes the run, as PyTorch's does; torchrun calls it when an agent ends, except by a
    signal: then the node only leaves. A node that was dropped, or could not join the next round, also only leaves.

    **Spares.** When the run is closed, a spare gets PyTorch's `RendezvousGracefulExitError`. PyTorch's agent (2.13 and
    before) accepts it, but then raises AttributeError for the missing result. So under `torchrun` `next_rendezvous`
    raises `SystemExit(0)`. A caller of `elastic_launch` gets the error from `shutdown`.

    Raises:
        RendezvousSettingsError: A parameter is wrong; a `ValueError`. The handler connects only when needed.
    """

    def __init__(self, params: torch_api.RendezvousParameters) -> None:
        self._backend = params.backend
        self._run_id = params.run_id
        try:
            self._choices = choices = _ParsedParameters(params)
            # Report wrong settings now, not at the first rendezvous.
            self._settings = make_handler(choices.url, choices.overrides).settings
        except ours.RendezvousSettingsError as error:
            if runs_under_torchrun():
                configure_logging()
                print_error_and_exit(error)
            raise
        self._graceful_exit: Exception | None = None
        self._screen = HandlerLogger(self._run_id)
        self._signals = EndSignals(
            self._hosts_store, partial(self._screen.log_signal, serves_for=None), self._announce_leaving
        )
        self._tcp_store: Any = None  # if `torch_store=tcp`, this round's TCPStore; rank 0's may serve until deleted
        self._workers_store: WorkersStore | None = None  # at rank 0 with `use_agent_store`
        self._taken: set[int] = set()  # ports chosen for the workers' store, but in use by other processes
        self._logs_lost = False
        self._logs_of: int | None = None  # the round in which workers were last started; None before
        self._store: TorchStore | None = None
        self._stack = contextlib.ExitStack()
        self._handler: sync.Handler | None = None
        self._was_member = False
        self._beats: Path | None = None
        self._worker_ends: WorkerEnds | None = None
        self._life: RoundMonitor | None = None
        self._kept_out = False  # True if the last `next_rendezvous` failed
        self._over = False
        self._pid = os.getpid()

    def get_backend(self) -> str:
        """Return the backend's registered name, by default "rdzv"."""
        return str(self._backend)

    def get_run_id(self) -> str:
        """Return the run's name."""
        return str(self._run_id)

    @property
    def use_agent_store(self) -> bool:
        """True if rank 0's agent, not rank 0's worker, serves the workers' TCPStore at MASTER_ADDR:MASTER_PORT.

        The agent's store is not used with `agent_store=0`, nor with PyTorch 2.4: its workers prefix all keys with a
        restart count, which may differ between agents of a round.
        """
        return self._settings.agent_store is not False and not KEYS_BY_RESTARTS

    def _begin_monitoring(self, handler: sync.Handler) -> None:
        assert handler.membership is not None, "next_rendezvous has just made it a member"
        agent = find_agent()
        self._life = monitor = RoundMonitor(handler.own_node, handler.membership, partial(self._log_ending, agent))
        monitor.start()
        handler.spawn(monitor.wait_for_end())
        if agent is not None:
            self._worker_ends = WorkerEnds(handler.spawn, lambda how: monitor.claim_end(self._with_port_remedy(how)))
            self._worker_ends.watch_workers(agent.next_pids_reader(), agent.read_error_of)
        if self._beats is None:
            self._beats = make_process_folder("rdzv-beats-")
            # Not a TemporaryDirectory, as forked children would remove it.
            weakref.finalize(self, _remove_unless_forked, os.getpid(), self._beats)
            os.environ[BEAT_DIR] = str(self._beats)
        clear_step_folder(self._beats)
        follow_step_files(handler, self._beats)

    def _log_ending(self, agent: Agent | None, ending: Ending) -> None:
        """Log a round's end, in a thread: standard error may block."""
        handler = self._handler
        if handler is not None:
            done = agent is not None and agent.has_succeeded
            with contextlib.suppress(ours.RendezvousStateError):  # raised while the handler is being closed
                handler.spawn(in_thread(partial(self._screen.log_round_end, ending, handler.run_closing, done=done)))

    def _end_monitoring(self, why: str = "") -> None:
        """Stop watching this round; announce a worker's failure, `why`, unless the round has ended."""
        monitor, handler = self._life, self._handler
        self._stop_watching_workers()
        self._life = None
        if monitor is not None and handler is not None:
            monitor.stop()
            if why and monitor.ending is None:
                handler.spawn(monitor.claim_end(why)).wait()

    def _stop_watching_workers(self) -> None:
        if self._worker_ends is not None:
            self._worker_ends.stop_watching()

    def next_rendezvous(self) -> torch_api.RendezvousInfo:
        """Leave the current round, if any, and return once this node is a member of the next.

        Raises:
            RendezvousGracefulExitError: This node was a spare and the run is closed; see the class.
            RendezvousError: Any other failure. Under torchrun, write one line and raise `SystemExit(1)`.
        """
        try:
            info = self._next_usable_round()
        except ours.RendezvousGracefulExitError as error:
            if self._run_id == NO_NAME and self._settings.max_nodes == 1 and not self._was_member:
                self._kept_out = True  # another job uses the name "none", too: do not close its run
                self._raise_or_exit_agent(ours.RendezvousClosedError(f"{error}, and has run nothing"))
            log.info("%s", error)
            self._was_member, self._kept_out = False, True  # a spare must not close the run in `shutdown`
            if runs_under_torchrun():
                sys.exit(0)
            self._graceful_exit = torch_api.RendezvousGracefulExitError(str(error))
            raise self._graceful_exit from None
        except ours.RendezvousError as error:
            self._kept_out = True
            self._raise_or_exit_agent(error)
        self._was_member, self._kept_out = True, False
        store = self._tcp_store
        if self._store is not None:
            self._store.end(f"a round before round {info.round} of run {info.run_id}")
        self._store = None
        if store is None:
            store = self._store = TorchStore.of_round(
                info.store, self._choices.read_timeout, self._connected_handler().store_settings
            )
        address = torch_api.RendezvousStoreInfo(*info.bootstrap_address)
        return torch_api.RendezvousInfo(store, info.rank, info.world_size, address)

    def _raise_or_exit_agent(self, error: ours.RendezvousError) -> NoReturn:
        explained = self._explain_error(error)
        if runs_under_torchrun():
            print_error_and_exit(explained)
        raise explained from None

    def _next_usable_round(self) -> sync.RendezvousInfo:
        began = time.monotonic()
        handler, agent = self._connected_handler(), find_agent()
        self._end_monitoring(self._with_port_remedy(agent.problem) if agent is not None else "")
        while True:
            self._close_tcp_stores()
            with self._screen.log_waits(handler):
                info = self._next_round(handler)
                if self.use_agent_store and info.rank == 0:
                    self._workers_store = serve_workers(info, self._settings.master_port, self._taken)
                    if self._workers_store is None:  # the port is in use: meet again with another port
                        continue
                if self._settings.torch_store == "tcp":
                    self._tcp_store = self._agents_tcp_store(info)
                all_here = handler.all_here(timeout=self._choices.read_timeout.total_seconds())
            if all_here:
                self._screen.log_round(handler, again=self._was_member, seconds=time.monotonic() - began)
                self._begin_monitoring(handler)
                self._preserve_round_logs(agent, info.round)
                return info
            log.info("run %s, round %d: a member went before all had come; meeting again", info.run_id, info.round)

    def _agents_tcp_store(self, info: sync.RendezvousInfo) -> Any:
        """Return the agents' TCPStore: the workers' TCPStore under a prefix, or a separate one at another port."""
        timeout = self._choices.read_timeout
        if not self.use_agent_store:  # rank 0's worker, not its agent, uses the round's port
            return open_tcp_store(info, timeout, port=0)
        if info.rank == 0:
            info.store.set(SERVED, "1")
        waiting = info.store.clone()
        waiting.set_timeout(timeout)
        waiting.wait([SERVED])
        host, port = info.bootstrap_address
        client = dist.TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)
        return dist.PrefixStore("rdzv/agents", client)

    def _close_tcp_stores(self) -> None:
        self._tcp_store = None
        if self._workers_store is not None:
            self._workers_store.close()
        self._workers_store = None

    def _with_port_remedy(self, how: str) -> str:
        return add_port_remedy(how) if self.use_agent_store else how

    def _preserve_round_logs(self, agent: Agent | None, round: int) -> None:
        """Keep the last round's logs: PyTorch deletes logs unless it counts a restart."""
        if agent is not None and self._logs_of is not None:
            try:
                agent.preserve_round_logs(self._logs_of)
            except OSError as error:
                if not self._logs_lost:
                    log.warning("run %s: PyTorch may delete the logs of earlier rounds: %s", self._run_id, error)
                self._logs_lost = True
        self._logs_of = round

    def _next_round(self, handler: sync.Handler) -> sync.RendezvousInfo:
        """Return the next round; in a run named "none", after the former job of that name has ended."""
        began = time.monotonic()
        while True:
            was_open = not handler.is_closed()
            try:
                return handler.next_rendezvous()
            except ours.RendezvousClosedError:
                # Raise in a named run, or if this node saw the run open: the ended job is its own. Else reopen the run.
                if self._run_id != NO_NAME or self._was_member or was_open:
                    raise
                left = self._settings.join_timeout - (time.monotonic() - began)
                if not reopen_closed_run(self._choices.url, self._choices.overrides, wait=left):
                    raise

    def _connected_handler(self) -> sync.Handler:
        if self._over:
            raise ours.RendezvousStateError(f"the handler of run {self._run_id} was shut down; make another one")
        if self._handler is None:
            configure_logging()
            self._stack.callback(self._screen.cancel_cost_line)
            if runs_under_torchrun():
                unblock_stderr_logging()
                self._signals.install()
                self._screen.hide_signal_traceback(self._end_by_signal)
            connecting = sync.connect(self._choices.url, **self._choices.overrides)
            self._handler = handler = self._stack.enter_context(connecting)
            if self._choices.reserved is not None:
                self._choices.reserved.close()  # release the port: the node's own store listens there now
            host: str | None = ""
            with contextlib.suppress(ours.RendezvousError):  # `next_rendezvous` will raise this error again
                host = None if handler.hosts_store else handler.store_host()
            self._screen.log_start(self._settings, handler.node_id, host=host)
            atexit.register(self._leave_at_exit)
        return self._handler

    def _explain_error(self, error: ours.RendezvousError) -> Exception:
        translated = _translate_error(error)
        if isinstance(error, ours.RendezvousClosedError) and self._run_id == NO_NAME:
            return type(translated)(f"{error}; give each job a name of its own: --rdzv-id=NAME")
        if isinstance(error, ours.RendezvousClosedError) and not self._was_member:
            return type(translated)(f"{error}; rdzv reopen opens it again, or give the job another --rdzv-id")
        return translated

    def is_closed(self) -> bool:
        """Return True if the run is closed."""
        try:
            return self._connected_handler().is_closed()
        except ours.RendezvousError as error:
            raise _translate_error(error) from None

    def set_closed(self) -> None:
        """Close the run for every node."""
        try:
            self._connected_handler().set_closed()
        except ours.RendezvousError as error:
            raise _translate_error(error) from None

    def num_nodes_waiting(self) -> int:
        """Return the number of nodes that require a new round: waiting, leaving, or with `regroup_on_loss` lost.

        Above 0, the agent restarts the workers. A store whose host is to leave, or a resize below the round's size,
        counts as one node; a member whose worker has failed, as lost. In a closed run the number is 0.
        """
        handler, monitor, on_loss = self._handler, self._life, self._choices.regroup_on_loss
        if handler is None or self._over:
            return 0
        draining, membership = handler.draining_members(), handler.membership
        moves = membership is not None and membership.head.moves
        changed = handler.num_nodes_changed(on_loss=on_loss) + len(draining)
        if on_loss and monitor is not None and monitor.ending is not None and monitor.ending.kind is EndKind.FAILED:
            changed += handler.run_closing is None
        if changed:
            self._stop_watching_workers()
        if (draining or moves) and monitor is not None:
            said = leaving_in_words(draining, next(iter(draining.values())).reason) if draining else MOVES
            monitor.note_ending(Ending(kind=EndKind.AGREED, reason=said, node_ids=tuple(draining)))
        return changed

    def shutdown(self) -> bool:
        """Close the run, or only leave it; return True on success."""
        if self._over:
            return True
        try:
            self._close_or_leave()
        except ours.RendezvousError as error:
            log.warning("run %s could not be closed: %s", self._run_id, error)
            return False
        finally:
            self._over = True
            self._end_monitoring()
            self._close_tcp_stores()
            atexit.unregister(self._leave_at_exit)
            self._close_handler()
        if self._graceful_exit is not None and find_agent_end().has_no_result:
            raise self._graceful_exit from None
        return True

    def _close_or_leave(self) -> None:
        # After a signal, only PyTorch 2.4 calls `shutdown`, in its signal handler.
        end = find_agent_end()
        if end.signal is not None:
            if self._handler is not None:  # a node that was still connecting has no handler
                self._announce_leaving(end.signal)
                self._handler.leave()
        elif not self._kept_out:
            handler = self._connected_handler()
            if handler.is_closed():
                return
            if self._life is not None and not handler.spawn(self._life.is_in_round()).wait():
                log.warning("run %s goes on without this node, which was dropped and does not come again", self._run_id)
            elif end.has_failed and self._was_member:
                # The run failed, so spares must not exit with success.
                handler.give_up(self._with_port_remedy(end.why), status=1)
            else:
                handler.set_closed(end.why if self._was_member else "shut down before it began")

    def _close_handler(self) -> None:
        try:
            self._stack.close()
        except ours.RendezvousError as error:
            log.warning("run %s: the node did not leave properly: %s", self._run_id, error)

    def _hosts_store(self) -> bool:
        return self._handler is not None and self._handler.hosts_store

    def _announce_leaving(self, name: str) -> None:
        """Say at once that this node leaves, so that other nodes are preferred to host a next store."""
        if self._handler is not None and not self._over:
            with contextlib.suppress(ours.RendezvousError):  # the handler is closed
                self._handler.leaves_because(signal_reason(name))

    def _end_by_signal(self, name: str) -> None:
        """Leave, and serve the store until the others have left; exit handlers could not start threads for this."""
        self._signals.handle_while_leaving(name)
        self._screen.log_signal(name, serves_for=self._settings.close_timeout if self._hosts_store() else None)
        self._announce_leaving(name)
        if self._handler is not None and not self._over:
            self._leave_at_exit()
            atexit.unregister(self._leave_at_exit)
            self._close_handler()

    def _leave_at_exit(self) -> None:
        if self._handler is not None and self._pid == os.getpid():
            self._end_monitoring()
            with contextlib.suppress(ours.RendezvousError):
                self._handler.leave()


def _remove_unless_forked(pid: int, folder: Path) -> None:
    if os.getpid() == pid:
        shutil.rmtree(folder, ignore_errors=True)

"""Shell: PyTorch's rendezvous handler over ours, which is what `torchrun --rdzv-backend=rdzv` uses."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import shutil
import sys
import time
import weakref
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from rdzv import errors as ours
from rdzv import sync
from rdzv.config.config_errors import refuse, shown
from rdzv.config.endpoint import split_url
from rdzv.config.settings import PARAMETERS
from rdzv.core.round_life import Ending, EndKind
from rdzv.core.state import to_leave
from rdzv.loop.beat_folder import BEAT_DIR, forget_beats, start_to_follow
from rdzv.loop.life import Life
from rdzv.loop.own_folder import make_own_folder
from rdzv.torch.agent.screen import Screen, configure_logging, end_with, told_to_end
from rdzv.torch.agent.unnamed_run import NO_NAME, begin_anew
from rdzv.torch.agent.worker_ends import WorkerEnds
from rdzv.torch.pytorch import (
    Agent,
    agent_above,
    end_of_agent,
    runs_under_torchrun,
    torch_api,
)
from rdzv.torch.store import TorchStore, unconnected_handler
from rdzv.torch.tcp_store import open_tcp_store
from store.net.threads import in_thread
from store.printable import escaping

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["TorchRendezvousHandler"]

log: logging.Logger = escaping(logging.getLogger(__name__))

_CHECKED: Final = {"bootstrap_check": True}
_BY_NAME: Final = {"rank_order": "survivors_then_name"}
"""What PyTorch's users expect: its own handler sorts by address, so that rank 0 is on the first host of the list."""

READ_TIMEOUT: Final = 60.0
"""In seconds; PyTorch's default for `read_timeout`, which its agents' store has as its timeout."""

_TORCH_ERRORS: Final[tuple[tuple[type[ours.RendezvousError], type[Exception]], ...]] = (
    (ours.RendezvousClosedError, torch_api.RendezvousClosedError),
    (ours.RendezvousTimeoutError, torch_api.RendezvousTimeoutError),
    (ours.RendezvousConnectionError, torch_api.RendezvousConnectionError),
    (ours.RendezvousStateError, torch_api.RendezvousStateError),
    (ours.RendezvousError, torch_api.RendezvousError),
)


def _as_torch(error: ours.RendezvousError) -> Exception:
    """PyTorch's error for one of ours, with our message, which PyTorch's own mostly lack."""
    return next(theirs(str(error)) for kind, theirs in _TORCH_ERRORS if isinstance(error, kind))


class _Choices:
    """What `torchrun` was told, in our terms.

    Attributes:
        url: Where the run is.
        overrides: Everything else that is ours, as keywords of `rdzv.sync.connect`.
        read_timeout: How long the agent's store waits for a key.
        regroup_on_loss: Whether members meet again when one has gone.
    """

    # PyTorch adds `timeout=900` to what the user says, whatever that is, and its dynamic handler reads `join_timeout`.
    # `heartbeat_timeout` bounds its heartbeat's calls, `use_libuv` and `store_type` choose its store: nothing of ours.
    IGNORED: Final = ("timeout", "heartbeat", "heartbeat_timeout", "use_libuv", "store_type")

    def __init__(self, params: Any) -> None:
        config = {name: value for name, value in params.config.items() if name not in self.IGNORED}
        if str(params.config.get("timeout", "900")) not in ("900", "900.0"):
            log.warning(
                "--rdzv-conf timeout=%s is not read, as PyTorch's dynamic rendezvous does not read it; "
                "give join_timeout, which is 600 seconds by default",
                params.config["timeout"],
            )
        for name in config:
            if name in PARAMETERS and PARAMETERS[name].is_secret:
                refuse(
                    f"{name} was given in --rdzv-conf, which is shown in process lists; put it into a file and give "
                    f"{name}_file={PARAMETERS[f'{name}_file'].kind.example}"
                )
        self.read_timeout = _seconds("read_timeout", config.pop("read_timeout", READ_TIMEOUT))
        self.regroup_on_loss = _truth(params, "regroup_on_loss", default=True)
        config.pop("regroup_on_loss", None)

        endpoint = params.endpoint.strip() or "localhost"  # as PyTorch takes an empty one
        parts = split_url(endpoint if "://" in endpoint else f"tcp://{endpoint}")
        if parts.run_id not in ("", params.run_id):
            refuse(
                f"--rdzv-endpoint={shown(endpoint.partition('?')[0])} names the run {shown(parts.run_id)}, and "
                f"--rdzv-id is {shown(params.run_id)}; leave the run out of the endpoint"
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


def _seconds(name: str, value: Any) -> timedelta:
    seconds: float = PARAMETERS["join_timeout"].called(name).read(value)
    return timedelta(seconds=seconds)


def _truth(params: Any, name: str, *, default: bool) -> bool:
    return bool(PARAMETERS["insecure"].called(name).read(params.config.get(name, default)))


class TorchRendezvousHandler(torch_api.RendezvousHandler):
    """PyTorch's rendezvous handler over ours: what `torchrun --rdzv-backend=rdzv` uses.

    `--rdzv-endpoint` is `host[:port]`, or any URL of ours without the run, such as `etcd://head:2379`. `--rdzv-conf`
    takes our parameters, and PyTorch's own: `join_timeout`, `last_call_timeout`, `close_timeout`, `is_host`,
    `keep_alive_interval` and `keep_alive_max_attempt` (their product is our `ttl`), `read_timeout` (for the agent's
    store), `heartbeat_timeout` (accepted, and of no use here), and:

        regroup_on_loss     members meet again when one has died or left (true); false waits, as PyTorch does, until
                            their workers fail

    **Deaths on the way.** An agent waits for what every other member writes, for `read_timeout`, and fails if that does
    not come. So `next_rendezvous` returns a round only once all its members have come out of it, and meets again if one
    dies before that. A member that dies in the milliseconds after it still costs the others `read_timeout`.

    **Closing.** `shutdown` closes the run, as PyTorch's does; torchrun calls it when an agent ends in whatever way but
    by a signal. After a signal the node only leaves, in an exit handler, and the others are told at once. A node that
    never was in a round, and could not get in, does not close the run of those who are.

    **Spares.** When the run is closed, a spare gets PyTorch's `RendezvousGracefulExitError`. PyTorch's agent (2.13 and
    before) takes that, and then stumbles over the missing result of such a run, with an AttributeError. So under
    `torchrun`, where nobody could take the error, `next_rendezvous` raises `SystemExit(0)`, which goes through agent
    and launcher. The caller of `elastic_launch` gets the error from `shutdown`, which PyTorch's launcher
    calls on its way out.

    Ranks, drains, restarts and `torch_store=tcp` are for its users to know: docs/pytorch.md. For a run without a name
    see `agent.unnamed_run`.

    Args:
        params: PyTorch's `RendezvousParameters`.

    Raises:
        RendezvousSettingsError: One of them is wrong; a `ValueError`. Nothing is connected before it is needed.
    """

    def __init__(self, params: torch_api.RendezvousParameters) -> None:
        self._backend = params.backend
        self._run_id = params.run_id
        self._choices = choices = _Choices(params)
        # Now, not at the first rendezvous, it is said what is wrong with the settings.
        self._settings = unconnected_handler(choices.url, choices.overrides).settings
        self._graceful_exit: Exception | None = None
        self._screen = Screen(self._run_id)
        self._tcp_store: Any = None  # of this round: rank 0's is served as long as this object lives
        self._store: TorchStore | None = None  # of this round, where that is the agent's
        self._stack = contextlib.ExitStack()
        self._handler: sync.Handler | None = None
        self._was_member = False
        self._beats: Path | None = None  # where workers say how far they are
        self._worker_ends: WorkerEnds | None = None
        self._life: Life | None = None  # of this round
        self._kept_out = False  # the last attempt to get in failed
        self._over = False
        self._pid = os.getpid()

    def get_backend(self) -> str:
        """What it was asked for as: "rdzv", unless registered under another name."""
        return str(self._backend)

    def get_run_id(self) -> str:
        """Which run this is."""
        return str(self._run_id)

    @property
    def use_agent_store(self) -> bool:
        """False: workers do not use the agent's store, they make their own.

        With True a worker dials MASTER_ADDR:MASTER_PORT as a client of PyTorch's native TCPStore, which speaks a
        protocol of its own. Our store does not, so the agent of rank 0 would have to host a native one beside it: one
        more server, without authentication, and gone with that agent. With False the worker of rank 0 hosts it, on the
        address and the port that came with the round's commit; both are new in every round, so nobody dials a dead one.
        """
        return False

    def _begin_life(self, handler: sync.Handler) -> None:
        """Hear of what ends this round, and of how workers fail; take their steps from the files that they write."""
        assert handler.membership is not None, "next_rendezvous has just made it a member"
        agent = agent_above()
        self._life = life = Life(handler.own_node, handler.membership, partial(self._hear_of_ending, agent))
        life.start()
        handler.start(life.hear())
        if agent is not None:
            self._worker_ends = WorkerEnds(handler.start, life.be_first)
            self._worker_ends.follow(agent.next_workers())
        if self._beats is None:
            self._beats = make_own_folder("rdzv-beats-")
            # Not a TemporaryDirectory: it warns when it goes with its handler, and forked children remove it, too.
            weakref.finalize(self, _remove_in, os.getpid(), self._beats)
            os.environ[BEAT_DIR] = str(self._beats)  # which the agent hands on to its workers
        forget_beats(self._beats)
        start_to_follow(handler, self._beats)

    def _hear_of_ending(self, agent: Agent | None, ending: Ending) -> None:
        """Have it said, by a thread that whoever reads the screen may hold up; called in the node's."""
        handler = self._handler
        if handler is not None:
            done = agent is not None and agent.is_done
            with contextlib.suppress(ours.RendezvousStateError):  # it is being closed
                handler.start(in_thread(partial(self._screen.ended, ending, handler.closed, done=done)))

    def _end_life(self, why: str = "") -> None:
        """Hear no more of this round; and say why it ends for the others, if a worker here has failed.

        Args:
            why: How it has failed, where nobody could say so when it did.
        """
        life, handler = self._life, self._handler
        self._forget_workers()
        self._life = None
        if life is not None and handler is not None:
            life.stop()
            if why and life.ending is None:
                handler.start(life.be_first(why)).wait()

    def _forget_workers(self) -> None:
        """The agent stops them: how they end is of no interest."""
        if self._worker_ends is not None:
            self._worker_ends.forget()

    def next_rendezvous(self) -> torch_api.RendezvousInfo:
        """Leave the current round, if in one, and return once this node is a member of the next.

        Raises:
            RendezvousGracefulExitError: This node was a spare and the run is closed. Under torchrun `SystemExit` with
                status 0 is raised instead. See the class.
            RendezvousError: Of PyTorch's classes the one that fits. Under torchrun the error is said in one line, and
                `SystemExit` with status 1 is raised instead: PyTorch would print a hundred lines of its own.
        """
        try:
            info = self._next_whole_round()
        except ours.RendezvousGracefulExitError as error:
            log.info("%s", error)
            self._was_member, self._kept_out = False, True  # the run may go on, and is not ours to close
            if runs_under_torchrun():
                sys.exit(0)
            self._graceful_exit = torch_api.RendezvousGracefulExitError(str(error))
            raise self._graceful_exit from None
        except ours.RendezvousError as error:
            self._kept_out = True
            if self._handler is not None and self._handler.store_gone is not None:
                self._was_member = False  # there is nothing left to close or to leave
            if runs_under_torchrun():
                end_with(self._explained(error))
            raise self._explained(error) from None
        self._was_member, self._kept_out = True, False
        store = self._tcp_store
        if self._store is not None:
            self._store.end(f"a round before round {info.round} of run {info.run_id}")
        self._store = None
        if store is None:
            store = self._store = TorchStore.of_round(info.store, self._choices.read_timeout, self._settings)
        address = torch_api.RendezvousStoreInfo(*info.bootstrap_address)
        return torch_api.RendezvousInfo(store, info.rank, info.world_size, address)

    def _next_whole_round(self) -> sync.RendezvousInfo:
        """The next round of which nobody has gone before all have come: agents wait for one another right after it."""
        began = time.monotonic()
        handler, agent = self._connected(), agent_above()
        self._end_life(agent.problem if agent is not None else "")
        while True:
            with self._screen.meeting(handler):
                info = self._next_round(handler)
                self._tcp_store = None
                if self._settings.torch_store == "tcp":  # at any port: rank 0's worker is to listen at the round's
                    self._tcp_store = open_tcp_store(info, self._choices.read_timeout, port=0)
                all_here = handler.all_here(timeout=self._choices.read_timeout.total_seconds())
            if all_here:
                self._screen.met(handler, again=self._was_member, seconds=time.monotonic() - began)
                self._begin_life(handler)
                return info
            log.info("run %s, round %d: a member went before all had come; meeting again", info.run_id, info.round)

    def _next_round(self, handler: sync.Handler) -> sync.RendezvousInfo:
        """The next round; of a run without a name, once the former job of that name has ended."""
        began = time.monotonic()
        while True:
            try:
                return handler.next_rendezvous()
            except ours.RendezvousClosedError:
                if self._run_id != NO_NAME or self._was_member:
                    raise
                left = self._settings.join_timeout - (time.monotonic() - began)
                if not begin_anew(self._choices.url, self._choices.overrides, wait=left):
                    raise

    def _connected(self) -> sync.Handler:
        if self._over:
            raise ours.RendezvousStateError(f"the handler of run {self._run_id} was shut down; make another one")
        if self._handler is None:
            configure_logging()
            self._stack.callback(self._screen.stop)
            connecting = sync.connect(self._choices.url, **self._choices.overrides)
            self._handler = handler = self._stack.enter_context(connecting)
            self._screen.begins(self._settings, handler.node_id, hosts=handler.hosts_store)
            atexit.register(self._leave_at_exit)
            if runs_under_torchrun():
                self._screen.end_quietly(lambda: handler.hosts_store, handler.leaves_because)
        return self._handler

    def _explained(self, error: ours.RendezvousError) -> Exception:
        translated = _as_torch(error)
        if isinstance(error, ours.RendezvousClosedError) and self._run_id == NO_NAME:
            return type(translated)(
                f"{error}; give each job a name of its own: --rdzv-id=NAME"
            )  # "none" is the default
        if isinstance(error, ours.RendezvousClosedError) and not self._was_member:
            return type(translated)(f"{error}; rdzv reopen opens it again, or give the job another --rdzv-id")
        return translated

    def is_closed(self) -> bool:
        """Whether the run is closed."""
        try:
            return self._connected().is_closed()
        except ours.RendezvousError as error:
            raise _as_torch(error) from None

    def set_closed(self) -> None:
        """Close the run for every node, for good."""
        try:
            self._connected().set_closed()
        except ours.RendezvousError as error:
            raise _as_torch(error) from None

    def num_nodes_waiting(self) -> int:
        """How many nodes there are to meet again for: that wait, are to leave, or with `regroup_on_loss` have gone.

        Above 0 the agent restarts its workers. It asks ten times a second, and is answered from what was pushed. Once
        the run is closed it is 0: there is no next round. A member of which a worker has failed has gone, too, though
        its agent may need 30 s to stop those beside it: workers here may hang in a collective meanwhile.
        """
        handler, life, on_loss = self._handler, self._life, self._choices.regroup_on_loss
        if handler is None:
            return 0
        draining = handler.draining()
        changed = handler.num_nodes_changed(on_loss=on_loss) + len(draining)
        if on_loss and life is not None and life.ending is not None and life.ending.kind is EndKind.FAILED:
            changed += handler.closed is None
        if changed:
            self._forget_workers()
        if draining and life is not None:
            said = to_leave(draining, next(iter(draining.values())).reason)
            life.end(Ending(kind=EndKind.AGREED, reason=said, node_ids=tuple(draining)))
        return changed

    def shutdown(self) -> bool:
        """Close the run, and leave; whether that could be done. See the class for who does not close it."""
        if self._over:
            return True
        try:
            self._close_or_leave()
        except ours.RendezvousError as error:
            log.warning("run %s could not be closed: %s", self._run_id, error)
            return False
        finally:
            self._over = True
            self._end_life()
            self._tcp_store = None
            atexit.unregister(self._leave_at_exit)
            self._close()
        if self._graceful_exit is not None and end_of_agent().has_no_result:
            raise self._graceful_exit from None  # see the class
        return True

    def _close_or_leave(self) -> None:
        # PyTorch 2.5 and later let us alone after a signal; the agent of 2.4 shuts us down while it handles it.
        end = end_of_agent()
        if end.signal is not None:
            if self._handler is not None:  # else it was told to end while it waited for the store
                self._handler.leaves_because(told_to_end(end.signal))
                self._handler.leave()
        elif self._was_member or not self._kept_out:
            handler = self._connected()
            if not handler.is_closed():
                handler.set_closed(end.why if self._was_member else "shut down before it began")

    def _close(self) -> None:
        try:
            self._stack.close()
        except ours.RendezvousError as error:
            log.warning("run %s: the node did not leave properly: %s", self._run_id, error)

    def _leave_at_exit(self) -> None:
        """Leave, but close nothing, and wait for nobody: the process was told to end."""
        if self._handler is not None and self._pid == os.getpid():
            self._end_life()
            with contextlib.suppress(ours.RendezvousError):
                self._handler.leave()


def _remove_in(pid: int, folder: Path) -> None:
    """Remove a folder, if this is the process that made it."""
    if os.getpid() == pid:
        shutil.rmtree(folder, ignore_errors=True)

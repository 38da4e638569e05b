"""Our handler for PyTorch, in threads that stand for agents."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import timedelta
from importlib.machinery import ModuleSpec
from typing import TYPE_CHECKING, Any

import pytest

import rdzv
import store.sync
from rdzv.backends.registry import rendezvous_handler_registry
from rdzv.node.front import verbs
from store.limits import is_loopback
from tests.support.processes import ROOT, free_port, require

require("torch")  # the imports below need it

import torch.distributed as dist  # noqa: E402
from torch.distributed.elastic.multiprocessing import SignalException  # noqa: E402
from torch.distributed.elastic.rendezvous import api  # noqa: E402

from rdzv.torch import TorchRendezvousHandler  # noqa: E402
from rdzv.torch.pytorch import KEYS_BY_RESTARTS  # noqa: E402
from rdzv.torch.tcp_store import WorkersStore, serve_workers  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future

    from rdzv.node.node import Node

SHORT = timedelta(milliseconds=60)

HAS_AGENT_STORE = not KEYS_BY_RESTARTS


TORCHRUNS_ORDER = "rank_order=survivors_then_name"


def make_handler(url: str, run_id: str, nnodes: tuple[int, int] = (1, 2), **config: str) -> TorchRendezvousHandler:
    """Make a handler as torchrun does, which adds `timeout` to the user's configuration."""
    settings: dict[str, Any] = {"last_call_timeout": "0.2", "timeout": 900, **config}
    parameters = api.RendezvousParameters("rdzv", url, run_id, *nnodes, local_addr=None, **settings)
    return TorchRendezvousHandler(parameters)


class Agents:
    """Handlers whose rendezvous runs in threads, as it would in agents."""

    def __init__(self, url: str, run_id: str) -> None:
        self._url, self._run_id = url, run_id
        self._pool = ThreadPoolExecutor(8)
        self._handlers: list[TorchRendezvousHandler] = []

    def add(self, nnodes: tuple[int, int] = (1, 2), **config: str) -> TorchRendezvousHandler:
        handler = make_handler(self._url, self._run_id, nnodes, **config)
        self._handlers.append(handler)
        return handler

    def join(self, *handlers: TorchRendezvousHandler) -> list[Future[api.RendezvousInfo]]:
        return [self._pool.submit(handler.next_rendezvous) for handler in handlers]

    def meet(self, *handlers: TorchRendezvousHandler) -> list[api.RendezvousInfo]:
        return [joined.result(20) for joined in self.join(*handlers)]

    def end(self) -> None:
        for handler in self._handlers:
            handler.shutdown()
        self._pool.shutdown()


@pytest.fixture
def agents(url: str, run_id: str) -> Iterator[Agents]:
    agents = Agents(url, run_id)
    yield agents
    agents.end()


def until(condition: Callable[[], Any], within: float = 10.0) -> Any:
    deadline = time.monotonic() + within
    while not (result := condition()):
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(0.005)
    return result


def test_agents_get_the_data_to_start_workers(agents: Agents, run_id: str) -> None:
    two = agents.add((2, 2)), agents.add((2, 2))
    infos = agents.meet(*two)
    assert sorted(info.rank for info in infos) == [0, 1]
    assert {info.world_size for info in infos} == {2}
    first, second = (info.bootstrap_store_info for info in infos)
    assert first == second
    assert first is not None
    assert first.master_addr == "127.0.0.1"
    infos[0].store.set("key", "value")
    assert infos[1].store.get("key") == b"value"
    assert infos[0].store.timeout == timedelta(seconds=60)
    for handler in two:
        assert (handler.get_backend(), handler.get_run_id()) == ("rdzv", run_id)
        assert not handler.is_closed()
        assert handler.num_nodes_waiting() == 0
    assert {handler.use_agent_store for handler in two} == {HAS_AGENT_STORE}
    workers(first, is_master=not HAS_AGENT_STORE)


def workers(address: Any, *, is_master: bool = False) -> dist.TCPStore:
    """Open the store that workers use with env://."""
    host, port = address.master_addr, address.master_port
    return dist.TCPStore(host, port, is_master=is_master, timeout=timedelta(seconds=5), wait_for_workers=False)


@pytest.mark.skipif(not HAS_AGENT_STORE, reason="workers of this release do not find each other in an agent's store")
def test_rank_0s_agent_serves_each_rounds_workers_store_at_the_promised_port(agents: Agents) -> None:
    two = agents.add((2, 2)), agents.add((2, 2))
    last: Any = None
    for _ in range(2):
        address = agents.meet(*two)[0].bootstrap_store_info
        workers(address).set("key", "1")
        assert workers(address).get("key") == b"1"
        if last is not None:  # the store of the last round has ended, and its port is free
            socket.create_server((last.master_addr, last.master_port)).close()
        last = address


@pytest.mark.skipif(not HAS_AGENT_STORE, reason="workers of this release do not find each other in an agent's store")
def test_no_agent_starts_its_workers_before_their_store_listens(
    agents: Agents, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slowly(*arguments: Any) -> Any:
        time.sleep(0.5)
        return serve_workers(*arguments)

    monkeypatch.setattr("rdzv.torch.handler.serve_workers", slowly)
    for joined in as_completed(agents.join(agents.add((2, 2)), agents.add((2, 2)))):
        address: Any = joined.result().bootstrap_store_info
        socket.create_connection((address.master_addr, address.master_port)).close()


def test_each_agent_decides_for_itself_whether_it_serves_the_workers_store(agents: Agents) -> None:
    """The agents of a run may differ in it: only that of rank 0 counts."""
    infos = agents.meet(agents.add((2, 2), agent_store="0"), agents.add((2, 2)))
    assert sorted(info.rank for info in infos) == [0, 1]


@pytest.mark.skipif(not HAS_AGENT_STORE, reason="workers of this release do not find each other in an agent's store")
@pytest.mark.parametrize("ports", ["single", "range"])
def test_a_promised_port_that_is_in_use_is_never_silently_replaced(url: str, run_id: str, ports: str) -> None:
    """Two jobs with one `master_port` would share a store. The second is refused, or meets again at the next port."""
    first = free_port()
    among = str(first) if ports == "single" else f"{first}-{first + 20}"
    jobs = [Agents(url, f"{run_id}-{job}") for job in "ab"]
    try:
        (one,) = jobs[0].meet(jobs[0].add((1, 1), master_port=among))
        assert one.bootstrap_store_info.master_port == first
        workers(one.bootstrap_store_info).set("key", "a")
        second = jobs[1].add((1, 1), master_port=among, bootstrap_check="0")
        if ports == "single":
            with pytest.raises(api.RendezvousError, match=f"at port {first} of this machine.*agent_store=0"):
                jobs[1].meet(second)
        else:
            (other,) = jobs[1].meet(second)
            assert other.bootstrap_store_info.master_port != first
            assert not workers(other.bootstrap_store_info).check(["key"])
    finally:
        for job in jobs:
            job.end()


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
@pytest.mark.parametrize(("host", "family"), [("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6)])
def test_a_forked_worker_does_not_keep_the_port_of_a_workers_store(host: str, family: socket.AddressFamily) -> None:
    port = free_port()
    store = WorkersStore(host, port, timedelta(seconds=2))  # PyTorch 2.4 counts whole seconds
    dist.TCPStore(host, port, is_master=False, wait_for_workers=False).set("key", "1")
    with pytest.raises(OSError, match="in use"):
        WorkersStore(host, port, SHORT, within=0.1)
    begun, begins = os.pipe()
    forked = os.fork()
    if not forked:
        os.write(begins, b"1")
        time.sleep(60)
        os._exit(0)
    os.read(begun, 1)
    store.close()
    socket.create_server((host, port), family=family).close()
    os.kill(forked, signal.SIGKILL)
    os.waitpid(forked, 0)
    for end in (begun, begins):
        os.close(end)


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.0.1.1", "localhost", "::1", "::ffff:127.0.0.1", "LOCALHOST", "127.1", "0.0.0.0"]
)
def test_a_workers_store_listens_beyond_loopback_only_if_its_host_is_not_loopback(host: str) -> None:
    """Regression: with `--local-addr=localhost` strangers reached it, and it asks for no token."""
    store = WorkersStore(host, free_port(), timedelta(seconds=2))
    with socket.socket(fileno=os.dup(store.file)) as listening:
        address, port = listening.getsockname()[:2]
    assert is_loopback(address) == (host != "0.0.0.0")
    if is_loopback(host):
        dist.TCPStore(host, port, is_master=False, wait_for_workers=False).set("key", "1")
    store.close()


def test_every_round_has_an_address_of_its_own(agents: Agents) -> None:
    one, other = agents.add(), agents.add()
    before = agents.meet(one, other)[0].bootstrap_store_info
    after = [info.bootstrap_store_info for info in agents.meet(one, other)]
    assert after[0] == after[1] != before


def be_told() -> None:
    raise SignalException("got signal: 15", signal.SIGTERM)


def test_an_agent_shut_down_by_a_signal_leaves_and_does_not_close_the_run(agents: Agents) -> None:
    """PyTorch 2.4's agent shuts the handler down while it handles the exception that the signal raised."""
    one, told_to_end = agents.add(), agents.add()
    agents.meet(one, told_to_end)
    try:
        be_told()
    except SignalException:
        assert told_to_end.shutdown()
    until(lambda: one.num_nodes_waiting() == 1)  # it is told at once to meet again
    assert not one.is_closed()


def test_an_agent_that_gets_a_signal_while_it_waits_for_the_store_ends_at_once(run_id: str) -> None:
    """PyTorch 2.4, as above. Regression: the agent ignored the signal for as long as `join_timeout`."""
    handler = make_handler(f"127.0.0.1:{free_port()}", run_id, join_timeout="10", is_host="0")
    try:
        be_told()
    except SignalException:
        assert handler.shutdown(), "there is no store to leave"


def test_an_arrival_is_a_reason_to_meet_again(agents: Agents) -> None:
    one, late = agents.add(), agents.add()
    agents.meet(one)
    assert one.num_nodes_waiting() == 0
    (joining,) = agents.join(late)
    until(lambda: one.num_nodes_waiting() == 1)
    assert agents.meet(one)[0].world_size == 2
    assert joining.result(10).world_size == 2
    assert one.num_nodes_waiting() == 0


@pytest.mark.parametrize("regroup_on_loss", ["true", "false"])
def test_a_departure_is_a_reason_to_meet_again_unless_that_is_switched_off(
    agents: Agents, regroup_on_loss: str
) -> None:
    stays, goes = (agents.add(regroup_on_loss=regroup_on_loss) for _ in range(2))
    agents.meet(stays, goes)
    goes._leave_at_exit()  # this is called when an agent gets SIGTERM
    if regroup_on_loss == "true":
        until(lambda: stays.num_nodes_waiting() == 1)
        assert agents.meet(stays)[0].world_size == 1
    else:
        heard = stays._handler
        assert heard is not None
        until(lambda: heard.num_nodes_changed(on_loss=True) == 1)
    assert not stays.is_closed()
    assert stays.num_nodes_waiting() == 0


def test_a_drained_member_leaves_and_the_others_meet_again_without_it(agents: Agents) -> None:
    stays, goes, spare = (agents.add(node_id=name) for name in ("stays", "goes", "spare"))
    agents.meet(stays, goes)
    (waiting,) = agents.join(spare)
    assert stays._handler is not None
    for name in ("spare", "goes"):
        inner = stays._handler.node
        assert inner is not None

        def drained(name: str = name, inner: Node = inner) -> bool:
            try:
                inner.loop.spawn(verbs.drain(inner, within=600, reason="maintenance", node_id=name)).wait(10)
            except rdzv.RendezvousStateError:
                return False  # it has not arrived yet
            return True

        until(drained)
        if name == "spare":
            with pytest.raises(api.RendezvousGracefulExitError, match="node spare is to leave: maintenance"):
                waiting.result(10)
            assert (stays.num_nodes_waiting(), goes.num_nodes_waiting()) == (0, 0), "no round ends for a spare"
    until(lambda: (stays.num_nodes_waiting(), goes.num_nodes_waiting()) == (1, 1))
    with pytest.raises(api.RendezvousGracefulExitError, match="node goes is to leave: maintenance"):
        goes.next_rendezvous()
    goes.shutdown()
    assert agents.meet(stays)[0].world_size == 1
    assert not stays.is_closed()
    assert stays.num_nodes_waiting() == 0


@pytest.mark.parametrize("regroup_on_loss", ["true", "false"])
def test_a_member_that_leaves_before_all_have_come_does_not_delay_the_others(
    agents: Agents, url: str, run_id: str, regroup_on_loss: str
) -> None:
    """The agent dies after the commit, before it knows. Regression: the others waited for a minute and failed."""
    with rdzv.sync.connect(f"{url}/{run_id}?{TORCHRUNS_ORDER}&min_nodes=1&max_nodes=2&last_call_timeout=0.2") as goes:
        (joining,) = agents.join(agents.add(regroup_on_loss=regroup_on_loss))
        assert goes.next_rendezvous().world_size == 2
        time.sleep(0.1)
        assert not joining.done()
    again = joining.result(10)
    assert (again.rank, again.world_size) == (0, 1)


def test_a_member_that_dies_is_a_reason_to_meet_again(agents: Agents, url: str, run_id: str) -> None:
    stays, dies = agents.add(), agents.add()
    agents.meet(stays, dies)
    assert dies._handler is not None
    with store.sync.connect(url) as client:
        record = next(entry for entry in client.list(f"/rdzv/{run_id}/nodes/") if dies._handler.node_id in entry.key)
        assert record.lease is not None
        client.call(store.messages.Revoke(lease=record.lease))  # as if it had expired
    until(lambda: stays.num_nodes_waiting() == 1)
    until(lambda: dies.num_nodes_waiting() == 1)  # that agent is told, too
    assert agents.meet(stays)[0].world_size == 1
    (again,) = agents.join(dies)
    until(lambda: stays.num_nodes_waiting() == 1)
    assert agents.meet(stays)[0].world_size == again.result(10).world_size == 2


@pytest.mark.parametrize("regroup_on_loss", ["true", "false"])
def test_a_failed_worker_is_a_reason_to_meet_again_before_its_agent_stops(
    agents: Agents, regroup_on_loss: str, caplog: pytest.LogCaptureFixture
) -> None:
    """That agent first stops its other workers, for up to 30 s, while workers here may hang in a collective."""
    caplog.set_level("WARNING", logger="rdzv.torch")
    one, other = (agents.add(regroup_on_loss=regroup_on_loss) for _ in range(2))
    agents.meet(one, other)
    monitor, handler = other._life, other._handler
    assert monitor is not None and handler is not None
    for how in ("worker 1 was killed by signal 9", "worker 0 ended with status 1"):
        handler.spawn(monitor.claim_end(how)).wait(10)
    until(lambda: "killed" in caplog.text)
    assert f"{handler.node_id}: worker 1 was killed by signal 9" in caplog.text
    assert (one.num_nodes_waiting(), other.num_nodes_waiting()) == (int(regroup_on_loss == "true"), 0)
    assert [info.world_size for info in agents.meet(one, other)] == [2, 2]
    assert (one.num_nodes_waiting(), other.num_nodes_waiting()) == (0, 0)


def test_in_a_closed_run_there_is_no_reason_to_meet_again(agents: Agents) -> None:
    one, other = agents.add(), agents.add()
    agents.meet(one, other)
    assert one.shutdown() is True
    until(other.is_closed)
    time.sleep(0.2)  # its departure is announced as well
    assert other.num_nodes_waiting() == 0
    with pytest.raises(api.RendezvousClosedError, match=r"is closed by .*: an agent has ended"):
        other.next_rendezvous()
    assert one.shutdown() is True


def test_set_closed_closes_the_run(agents: Agents) -> None:
    one, other = agents.add(), agents.add()
    agents.meet(one, other)
    one.set_closed()
    until(other.is_closed)


def test_a_spare_ends_with_success_when_the_run_is_closed(agents: Agents) -> None:
    members = agents.add(), agents.add()
    agents.meet(*members)
    (waiting,) = agents.join(agents.add())
    status = members[0]._handler.status  # type: ignore[union-attr]
    until(lambda: status().spares)
    members[0].shutdown()
    with pytest.raises(api.RendezvousGracefulExitError, match="was a spare"):
        waiting.result(10)


def test_the_caller_of_elastic_launch_gets_the_error_that_its_node_was_a_spare(agents: Agents) -> None:
    """PyTorch's agent catches the error, fails on the missing result, and shuts the handler down on the way out."""
    member, spare = agents.add((1, 1)), agents.add((1, 1))
    agents.meet(member)
    (waiting,) = agents.join(spare)
    status = member._handler.status  # type: ignore[union-attr]
    until(lambda: status().spares)
    member.shutdown()
    assert isinstance(waiting.exception(10), api.RendezvousGracefulExitError)
    with pytest.raises(api.RendezvousGracefulExitError, match="was a spare"):
        try:
            raise AttributeError("'NoneType' object has no attribute 'is_failed'")
        finally:
            spare.shutdown()


def test_under_torchrun_a_spare_ends_the_process_with_success(url: str, run_id: str) -> None:
    member = make_handler(url, run_id, (1, 1))
    member.next_rendezvous()
    spare = make_handler(url, run_id, (1, 1))
    launcher: dict[str, Any] = {"__spec__": ModuleSpec("torch.distributed.run", None), "spare": spare}
    exec("def run():\n    spare.next_rendezvous()", launcher)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(launcher["run"])
        until(lambda: member._handler.status().spares)  # type: ignore[union-attr]
        member.shutdown()
        ended = running.exception(10)
    spare.shutdown()
    assert isinstance(ended, SystemExit)
    assert ended.code == 0


def test_ranks_follow_the_natural_order_of_names_survivors_first(agents: Agents) -> None:
    ten, two = (agents.add((2, 3), node_id=name, last_call_timeout="0") for name in ("host10", "host2"))
    first = agents.join(ten)
    until(lambda: ten._handler is not None and ten._handler.status().waiting)
    assert (agents.meet(two)[0].rank, first[0].result(10).rank) == (0, 1)
    one = agents.add((2, 3), node_id="host1", last_call_timeout="0")
    joining = agents.join(one)
    until(two.num_nodes_waiting)
    assert [info.rank for info in agents.meet(two, ten)] == [0, 1]
    assert joining[0].result(10).rank == 2


def test_with_torch_store_tcp_rank_zero_hosts_a_tcp_store_for_the_round(agents: Agents) -> None:
    two = [agents.add((2, 2), torch_store="tcp", agent_store="0") for _ in range(2)]
    for _ in range(2):
        infos = agents.meet(*two)
        stores: list[Any] = [info.store for info in infos]
        assert all(isinstance(store, dist.TCPStore) for store in stores)
        (address,) = {(store.host, store.port) for store in stores}
        stores[0].set("key", "1")
        assert stores[1].get("key") == b"1"
        for_workers = {(info.bootstrap_store_info.master_addr, info.bootstrap_store_info.master_port) for info in infos}
        assert len(for_workers) == 1
        assert address not in for_workers
        dist.TCPStore(*for_workers.pop(), is_master=True, wait_for_workers=False)  # rank 0's worker listens there


@pytest.mark.skipif(not HAS_AGENT_STORE, reason="workers of this release do not find each other in an agent's store")
def test_with_torch_store_tcp_agents_and_workers_share_a_server_but_no_keys(agents: Agents) -> None:
    two = [agents.add((2, 2), torch_store="tcp") for _ in range(2)]
    for _ in range(2):
        infos = agents.meet(*two)
        infos[0].store.set("key", "1")
        assert infos[1].store.get("key") == b"1"
        store = workers(infos[0].bootstrap_store_info)
        assert not store.check(["key"])
        assert store.check(["rdzv/agents/key"])


def test_too_few_nodes_time_out_and_the_error_says_how_many(agents: Agents) -> None:
    alone = agents.add((3, 4), join_timeout="0.3")
    with pytest.raises(api.RendezvousTimeoutError, match=r"join_timeout=0.3 s at tcp://.*: 1 of at least 3 nodes"):
        alone.next_rendezvous()


def be_told_of_failed_workers() -> None:
    raise RuntimeError("worker 0 ended with status 1")


@pytest.mark.parametrize("comes_again", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_an_agent_that_was_put_out_of_its_round_does_not_close_the_run_of_the_others(
    agents: Agents, comes_again: bool, fails: bool
) -> None:
    """Regression: an agent that was paused for longer than its `ttl`, or banned, ended the job as it failed."""
    stays, goes = agents.add(), agents.add()
    agents.meet(stays, goes)
    assert stays._handler is not None
    assert goes._handler is not None
    stays._handler.ban(goes._handler.node_id, now=True)
    assert agents.meet(stays)[0].world_size == 1
    if comes_again:
        with pytest.raises(api.RendezvousError, match="banned"):
            goes.next_rendezvous()
    try:
        if fails:
            be_told_of_failed_workers()
    except RuntimeError:
        assert goes.shutdown()
    else:
        assert goes.shutdown()
    assert not stays.is_closed()


def test_a_refused_agent_does_not_close_the_run_of_the_members(agents: Agents) -> None:
    member = agents.add((1, 1))
    agents.meet(member)
    other_settings = agents.add((2, 3))
    with pytest.raises(api.RendezvousError, match="min_nodes is 2 here and 1 in the run"):
        other_settings.next_rendezvous()
    assert other_settings.shutdown() is True
    assert not member.is_closed()


def test_a_handler_that_was_shut_down_says_so(agents: Agents) -> None:
    handler = agents.add()
    agents.meet(handler)
    handler.shutdown()
    assert handler.num_nodes_waiting() == 0
    with pytest.raises(api.RendezvousStateError, match="was shut down"):
        handler.next_rendezvous()


def test_a_store_out_of_reach_is_a_connection_error(run_id: str) -> None:
    handler = make_handler(f"127.0.0.1:{free_port()}", run_id, join_timeout="0.3", is_host="0")
    with pytest.raises(api.RendezvousConnectionError, match=r"127\.0\.0\.1"):
        handler.next_rendezvous()
    assert handler.num_nodes_waiting() == 0
    assert handler.shutdown() is True


def test_a_memory_store_whose_process_is_gone_is_not_waited_for(run_id: str) -> None:
    """Also inside `next_rendezvous`. Otherwise an agent would wait there for as long as `join_timeout`."""
    with ThreadPoolExecutor(1) as pool, contextlib.ExitStack() as serving:
        server = serving.enter_context(store.sync.serve())
        handler = make_handler(server.url, run_id, store_gone_timeout="0.3")
        handler.next_rendezvous()
        waiting = make_handler(server.url, f"{run_id}-2", (2, 2), store_gone_timeout="0.3")
        meeting = pool.submit(waiting.next_rendezvous)
        node = until(lambda: waiting._handler and waiting._handler.node)
        until(lambda: node.part.wait_reason.startswith("1 of at least 2"))
        serving.close()
        for met in (meeting, pool.submit(handler.next_rendezvous)):
            with pytest.raises(api.RendezvousConnectionError, match=r"memory only.*its process is gone.*--data-dir"):
                met.result(20)
        began = time.monotonic()
        assert handler.shutdown() and waiting.shutdown(), "there is nothing left to close"
        assert time.monotonic() - began < 5


def settings_of(endpoint: str, **config: Any) -> Any:
    """Return the settings that follow from torchrun's arguments."""
    parameters = api.RendezvousParameters("rdzv", endpoint, "job-7", 2, 4, local_addr="10.0.0.7", **config)
    choices = TorchRendezvousHandler(parameters)._choices
    made = rendezvous_handler_registry.create_handler(
        rdzv.RendezvousParameters.from_url(choices.url, choices.overrides)
    )
    return made.settings  # type: ignore[attr-defined]


def test_torchs_own_parameters_are_understood_as_text() -> None:
    settings = settings_of(
        "head",
        timeout=900,
        join_timeout="90",
        last_call_timeout="5",
        close_timeout="7",
        keep_alive_interval="2",
        keep_alive_max_attempt="4",
        heartbeat_timeout="5",
        read_timeout="20",
        is_host="false",
        node_unit="2",
    )
    assert (settings.endpoint.url, settings.run_id) == ("tcp://head:29400", "job-7")
    assert (settings.min_nodes, settings.max_nodes, settings.address) == (2, 4, "10.0.0.7")
    assert (settings.join_timeout, settings.last_call_timeout, settings.close_timeout) == (90, 5, 7)
    assert (settings.ttl, settings.is_host, settings.node_unit) == (8, False, 2)


@pytest.mark.parametrize(
    ("endpoint", "expected"),
    [
        ("", "tcp://localhost:29400"),
        ("head:29401", "tcp://head:29401"),
        ("[::1]:29401", "tcp://[::1]:29401"),
        ("tcps://head", "tcps://head:29400"),
        ("tcp://head/job-7?ttl=5", "tcp://head:29400"),
    ],
)
def test_an_endpoint_is_a_host_or_a_url(endpoint: str, expected: str) -> None:
    assert settings_of(endpoint).endpoint.url == expected


@pytest.mark.parametrize(
    ("endpoint", "run", "host"),
    [
        ("localhost:0", "job-7", "localhost"),
        ("tcp://localhost:0/?ttl=5", "job-7", "localhost"),
        ("127.0.0.1:0", "job-7", "127.0.0.1"),
        (":0", "job-7", "127.0.0.1"),
        ("", "none", "localhost"),  # no endpoint and no id
    ],
)
def test_a_job_of_one_node_has_a_store_of_its_own_at_a_free_port(endpoint: str, run: str, host: str) -> None:
    jobs = [TorchRendezvousHandler(api.RendezvousParameters("rdzv", endpoint, run, 1, 1)) for _ in range(2)]
    try:
        infos = [job.next_rendezvous() for job in jobs]
        assert [(info.rank, info.world_size) for info in infos] == [(0, 1)] * 2
        ports = [job._settings.endpoint.hosts for job in jobs]
        assert [address for ((address, _),) in ports] == [host] * 2
        assert ports[0] != ports[1]
    finally:
        for job in jobs:
            job.shutdown()


def test_an_agent_of_a_job_whose_id_is_used_again_is_told_what_helps(url: str, run_id: str) -> None:
    first = make_handler(url, run_id, (1, 1))
    first.next_rendezvous()
    first.shutdown()
    again = make_handler(url, run_id, (1, 1))
    with pytest.raises(
        api.RendezvousClosedError, match="rdzv reopen opens it again, or give the job another --rdzv-id"
    ):
        again.next_rendezvous()
    again.shutdown()


@pytest.mark.parametrize(
    ("endpoint", "config", "words"),
    [
        ("head", {"token": "s3cret"}, "token was given in --rdzv-conf, .*token_file=/run/secrets/rdzv"),
        ("tcp://head/job-8", {}, "names the run 'job-8', and --rdzv-id is 'job-7'"),
        ("head", {"last_cal_timeout": "3"}, "no parameter 'last_cal_timeout'.*last_call_timeout"),
        (
            "head",
            {"regroup_on_loss": "maybe"},
            "regroup_on_loss='maybe' must be .*write for example regroup_on_loss=true",
        ),
        ("localhost:0", {}, "localhost:0.* is a store at any free port, for a job of one node; for 2 nodes"),
        ("head", {"read_timeout": "soon"}, "read_timeout='soon' must be"),
        ("head:port", {}, "port"),
    ],
)
def test_wrong_settings_are_reported_when_the_handler_is_made(
    endpoint: str, config: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        settings_of(endpoint, **config)


@pytest.mark.parametrize(
    ("config", "seconds"),
    [
        ({"timeout": 900}, 600),  # PyTorch's default, which it always adds
        ({"timeout": "1800"}, 1800),
        ({"timeout": "1800", "join_timeout": "90"}, 90),
    ],
)
def test_a_timeout_of_torchrun_is_the_join_timeout(config: dict[str, Any], seconds: float) -> None:
    """Regression: it was dropped, and a job that asked for 30 minutes had 10."""
    assert settings_of("head", **config).join_timeout == seconds


def test_older_names_in_rdzv_conf_are_understood_and_auto_overrides_the_endpoint() -> None:
    settings = settings_of("etcd://head", etcd_prefix="/mine", min_workers="3", max_workers="5")
    assert (settings.prefix, settings.min_nodes, settings.max_nodes) == ("/mine", 3, 5)
    assert settings_of("tcp://head/job-7?is_host=1", is_host="auto").is_host is None


def test_a_run_without_a_name_ends_with_its_last_node(url: str, caplog: pytest.LogCaptureFixture) -> None:
    """`accelerate` starts runs without a name. Regression: the next job found the run closed, for a day."""
    before, late = agents_of_one_job = [make_handler(url, "none", (2, 2)) for _ in range(2)]
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda it: it.next_rendezvous(), agents_of_one_job))
        before.shutdown()
        impatient = make_handler(url, "none", join_timeout="0.5")
        with pytest.raises(api.RendezvousClosedError, match="--rdzv-id=NAME"):  # because the other agent is still there
            impatient.next_rendezvous()
        impatient.shutdown()
        assert "1 nodes of the job that had it are still there" in caplog.text
        with pytest.raises(api.RendezvousClosedError, match="is closed"):
            late.next_rendezvous()  # for an agent of that job it stays closed
        joining = pool.submit((after := make_handler(url, "none", (1, 1))).next_rendezvous)
        late.shutdown()
        assert joining.result(20).world_size == 1
        assert not after.is_closed()
        after.shutdown()


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
WHOLE = "\n".join(page.read_text(encoding="utf-8") for page in PAGES).replace("\\\n", "")
LINES_OF_TORCHRUN = sorted({line for line in WHOLE.splitlines() if line.startswith("torchrun --")})


@pytest.mark.parametrize("line", LINES_OF_TORCHRUN)
def test_every_torchrun_command_in_the_docs_is_valid(line: str) -> None:
    from torch.distributed import run

    config, _, words = run.config_from_args(run.parse_args(shlex.split(line)[1:]))
    assert words[-1] == "train.py"
    assert config.rdzv_backend == "rdzv"
    nodes = config.min_nodes, config.max_nodes
    settings = dict(config.rdzv_configs)
    parameters = api.RendezvousParameters("rdzv", config.rdzv_endpoint, config.run_id, *nodes, None, **settings)
    handler = TorchRendezvousHandler(parameters)  # connects to nothing before it is needed
    assert handler.get_run_id() == "job-7"


def test_the_readme_has_a_line_of_torchrun() -> None:
    assert LINES_OF_TORCHRUN
